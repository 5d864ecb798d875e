"""Stores a room of an export again: each event through the operation that made it, so that a store tells the same afterwards.

Nothing that is there is changed: rooms and sessions are made as they were where they are missing, before their events.
"""

import tempfile
from typing import Any, Final

import msgspec

from . import conversation
from .client.client import Client
from .conversation.records import JSON, Body, PayloadRef, Provenance, Sender
from .conversation.vocabulary import USER_MESSAGE, body_field
from .exporting import event_line
from .import_session import RECORD_ERRORS, Imported, PatientClient, Report
from .protocol.limits import MIB
from .transcripts import exports
from .transcripts.exports import (
    End,
    EventLine,
    Head,
    Line,
    MessageFields,
    PayloadKey,
    PayloadLine,
    RoomLine,
    SessionLine,
)
from .transcripts.files import UnreadableError
from .transcripts.records import Problem, Transcript

SPOOL_BYTES: Final = 8 * MIB
"""How much of a payload is held in memory until it is written."""

_NO_MESSAGE: Final = Sender()

_CONTENT: Final = ("type", "actor", "attributes", "content_type", "body", "payload", "version", "created_ms")
"""What makes an event without an id the same as a stored one at its place."""


def import_export(client: Client, transcript: Transcript) -> Imported:
    """Store a room of an export, or what of it is not stored yet.

    What is wrong with one line is a problem of that; any other error, such as `StorageFullError`, is the `failure`.
    """
    patient, report = PatientClient(client), Report(transcript)
    return report.run(_ExportImport(patient, report, transcript).run, patient)


class _Payload:
    """A payload whose parts are coming in, into a file that is in memory while it is small."""

    def __init__(self, number: int, first: PayloadLine) -> None:
        self.number = number
        self.first = first
        # Closed where the payload ends, in whatever way that is.
        self.file = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115
        self._bytes = 0

    @property
    def is_whole(self) -> bool:
        """Whether no part is missing any more."""
        return self._bytes >= self.first.size_bytes

    def goes_on_with(self, part: PayloadLine) -> bool:
        """Whether a part is the next one of this payload."""
        return part.offset == self._bytes and _key(part) == _key(self.first)

    def add(self, part: PayloadLine) -> None:
        """Take in the next part."""
        self.file.write(part.data)
        self._bytes += len(part.data)


class _ExportImport:
    """A room of an export on its way into the store."""

    def __init__(self, client: PatientClient, report: Report, transcript: Transcript) -> None:
        self._client = client
        self._report = report
        self._transcript = transcript
        self._rooms: dict[str, RoomLine] = {}
        self._sessions: dict[str, SessionLine] = {}
        self._unnamed_rooms: set[str] = set()
        self._ours: set[str] = set()
        """Sessions that this import has made, or has given their last event."""
        self._known: set[str] = set()
        """Sessions that were there, and have been given nothing."""
        self._open: _Payload | None = None
        self._incomplete: set[PayloadKey] = set()
        self._payloads: dict[PayloadKey, PayloadRef] = {}
        self._numbers: dict[tuple[str, int], int] = {}

    def run(self) -> None:
        """Store all of it, then the statuses that sessions have in the end."""
        try:
            for number, line in exports.lines(self._transcript):
                self._report.found.records += 1
                self._try(number, line)
            self._drop_payload()
            for session in self._sessions.values():
                self._finish(session)
        finally:
            found = self._report.found
            found.sessions, found.known = len(self._sessions), len(self._known)
            if self._open is not None:
                self._open.file.close()

    def _try(self, number: int, line: Line | Problem) -> None:
        try:
            self._store(number, line)
        except UnreadableError as error:
            self._problem(number, str(error))
        except RECORD_ERRORS as error:
            self._problem(number, f"refused: {error}")

    def _problem(self, number: int, reason: str) -> None:
        self._report.problem(Problem(self._transcript.path, number, reason))

    def _store(self, number: int, line: Line | Problem) -> None:
        if not isinstance(line, PayloadLine):
            self._drop_payload()
        match line:
            case Problem():
                self._report.problem(line)
            case RoomLine():
                self._rooms[line.id] = line
                self._restore_room(line)
            case SessionLine():
                self._sessions[line.id] = line
                self._restore_session(line)
            case PayloadLine():
                self._take_part(number, line)
            case EventLine():
                self._store_event(line)
            case Head() | End():
                raise UnreadableError("no line between others")

    def _restore_room(self, line: RoomLine) -> None:
        self._client.ask(
            conversation.restore_room(
                line.id,
                line.title,
                is_default=line.is_default,
                created_ms=line.created_ms,
                archived_ms=line.archived_ms,
            )
        )

    def _need_room(self, room: str) -> None:
        """Have a room whose own line is missing or cannot be read: that was told, and its events are kept."""
        if room not in self._rooms and room not in self._unnamed_rooms:
            self._client.ask(conversation.create_room(room))
            self._unnamed_rooms.add(room)

    def _restore_session(self, line: SessionLine) -> None:
        self._need_room(line.room)
        call = conversation.restore_session(
            line.id,
            line.room,
            parent=line.parent,
            root=line.root,
            status=line.status,
            runtime_binding=line.runtime_binding,
            first_preview=line.first_preview,
            created_ms=line.created_ms,
            activity_ms=line.activity_ms,
        )
        if self._client.ask(call):
            self._ours.add(line.id)
        else:
            self._known.add(line.id)

    def _finish(self, line: SessionLine) -> None:
        """Give a session the status that its events do not tell, unless it was there with all of them."""
        if line.id not in self._ours:
            return
        found = self._client.ask(conversation.session(line.id))
        if found is not None and found.status != line.status:
            self._client.ask(conversation.set_session_status(line.id, line.status, line.activity_ms))

    # Payloads

    def _take_part(self, number: int, part: PayloadLine) -> None:
        """Take in a part of a payload, and put the payload where it was the last one."""
        if self._open is not None and not self._open.goes_on_with(part):
            self._drop_payload()
        if self._open is None:
            if part.offset:
                if _key(part) not in self._incomplete:
                    self._incomplete.add(_key(part))
                    raise UnreadableError(f"a part of the payload {part.sha256} is missing")
                return
            self._open = _Payload(number, part)
        payload = self._open
        payload.add(part)
        if payload.is_whole:
            self._open = None
            with payload.file:
                self._put(payload)

    def _put(self, payload: _Payload) -> None:
        first = payload.first
        ref = self._client.put(payload.file, first.content_type, first.retention_class)
        if ref.sha256 != first.sha256:
            raise UnreadableError(f"the payload {first.sha256} has other bytes than its hash says")
        self._payloads[_key(first)] = ref

    def _drop_payload(self) -> None:
        """Tell of a payload whose next part should have come."""
        if self._open is None:
            return
        payload, self._open = self._open, None
        payload.file.close()
        self._incomplete.add(_key(payload.first))
        self._problem(payload.number, f"a part of the payload {payload.first.sha256} is missing")

    # Events

    def _store_event(self, line: EventLine) -> None:
        ref: PayloadRef | None = None
        if line.payload is not None:
            ref = self._payloads.get((line.payload.sha256, line.content_type, line.retention_class))
            if ref is None:
                raise UnreadableError(f"the payload {line.payload.sha256} does not stand before its event")
        self._need_room(line.room)
        key: str | None = None
        if line.event_id is None and line.client_transaction_id is None:
            # Nothing in the event itself tells it from another one like it: its place does, and while an import is
            # broken off and taken up again, its key.
            if self._stands_at_its_place(line):
                self._count(line, is_new=False)
                return
            key = f"{self._transcript.room} {line.stream_id}"
        said = line.message
        # What a key answers with is the first result, which says that it was stored then.
        is_known = key is not None and self._client.is_committed(key)
        if line.type == USER_MESSAGE and said is not None:
            is_new, number = self._ingest_user(line, said, ref, key)
        elif line.provenance is not None:
            is_new, number = self._ingest_output(line, ref, key)
        else:
            is_new, number = self._append(line, ref, key), None
        self._count(line, is_new=is_new and not is_known)
        if said is not None and number is not None:
            self._numbers[line.room, said.number] = number

    def _count(self, line: EventLine, *, is_new: bool) -> None:
        self._report.event(is_new=is_new)
        (self._ours.add if is_new else self._ours.discard)(line.session)
        if is_new:
            self._known.discard(line.session)

    def _stands_at_its_place(self, line: EventLine) -> bool:
        """Whether the event with this sequence in the stored session says the same, and says it at the same time."""
        call = conversation.history(line.session, line.sequence - 1, page_rows=1)
        for historic in self._client.ask(call).items:
            stored = event_line(historic)
            if stored.sequence != line.sequence or stored.event_id is not None:
                return False
            if any(getattr(stored, name) != getattr(line, name) for name in _CONTENT):
                return False
            if line.message is not None and historic.message is not None:
                self._numbers[line.room, line.message.number] = historic.message.number
            return True
        return False

    def _thread(self, line: EventLine) -> int | None:
        said = line.message
        if said is None or said.thread_root is None:
            return None
        return self._numbers.get((line.room, said.thread_root))

    def _ingest_user(
        self, line: EventLine, said: MessageFields, ref: PayloadRef | None, key: str | None
    ) -> tuple[bool, int | None]:
        call = conversation.ingest_user(
            line.session,
            _body(line, ref) or "",
            event_id=line.event_id,
            room=line.room,
            actor=line.actor,
            client_transaction_id=line.client_transaction_id,
            turn_id=said.turn_id,
            role=said.role,
            sender=Sender(said.sender_label, said.source, said.agent_key),
            thread_root=self._thread(line),
            attributes=line.attributes,
            preview=line.preview,
            retention_class=line.retention_class,
            created_ms=line.created_ms,
        )
        done = self._client.store(call, key)
        return done.created, done.message_number

    def _room_of_output(self, line: EventLine) -> str | None:
        """None where the output named none: it left no session, or was none of its session's activity."""
        session, room = self._sessions.get(line.session), self._rooms.get(line.room)
        if session is None:
            return None if room is not None and room.is_default else line.room
        is_unnamed = line.room == session.room and line.created_ms > session.activity_ms
        return None if is_unnamed else line.room

    def _ingest_output(
        self, line: EventLine, ref: PayloadRef | None, key: str | None
    ) -> tuple[bool, int | None]:
        said = line.message
        event: dict[str, Any] = {**line.attributes, "type": line.type}
        if line.event_id is not None:
            event["event_id"] = line.event_id
        if ref is None and line.body is not None:
            body = msgspec.json.decode(line.body) if line.content_type == JSON else line.body
            event[body_field(line.type)] = body
        call = conversation.ingest_output(
            line.session,
            event,
            ref,
            room=self._room_of_output(line),
            actor=line.actor,
            sender=_NO_MESSAGE if said is None else Sender(said.sender_label, said.source, said.agent_key),
            thread_root=self._thread(line),
            provenance=_provenance(line),
            preview=line.preview,
            retention_class=line.retention_class,
            created_ms=line.created_ms,
        )
        done = self._client.store(call, key)
        return not done.duplicate, done.message_number

    def _append(self, line: EventLine, ref: PayloadRef | None, key: str | None) -> bool:
        call = conversation.append(
            line.session,
            line.type,
            line.attributes,
            _body(line, ref),
            room=line.room,
            actor=line.actor,
            client_transaction_id=line.client_transaction_id,
            event_id=line.event_id,
            aggregate_kind=line.aggregate_kind,
            aggregate_id=None if line.aggregate_id == line.session else line.aggregate_id,
            version=line.version,
            preview=line.preview,
            retention_class=line.retention_class,
            created_ms=line.created_ms,
        )
        return self._client.store(call, key).created


def _key(line: PayloadLine) -> PayloadKey:
    return (line.sha256, line.content_type, line.retention_class)


def _body(line: EventLine, ref: PayloadRef | None) -> Body | None:
    return line.body if ref is None else ref


def _provenance(line: EventLine) -> Provenance:
    try:
        return msgspec.convert(line.provenance, Provenance)
    except msgspec.ValidationError:
        return Provenance()

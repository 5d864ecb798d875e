"""Stores a room of an export again, each event through what first made it, so that a store tells the same afterwards.

Rooms and sessions are made where they are missing, before their events. Behind these a session is brought to stand as it
did, unless it went on here. What is there is not changed otherwise.
"""

import tempfile
from collections.abc import Callable
from typing import Any, Final, NamedTuple, ParamSpec

import msgspec

from . import conversation
from .client.client import Client
from .conversation.canonical import canonical_json
from .conversation.errors import PayloadNotFoundError
from .conversation.event_restores import EventCopy
from .conversation.payload_files import encoding_of
from .conversation.payloads import offer_payload
from .conversation.records import Body, MessagePlace, PayloadRef, Provenance, Sender
from .conversation.session_restores import Made, Shown
from .import_session import RECORD_ERRORS, Imported, PatientClient, Report
from .protocol.errors import StorageCorruptError
from .protocol.limits import MIB
from .transcripts import exports
from .transcripts.exports import (
    End,
    EventLine,
    Head,
    Line,
    MessageRoot,
    MissingLine,
    PayloadKey,
    PayloadLine,
    RoomLine,
    SessionLine,
    SessionStateLine,
)
from .transcripts.files import UnreadableError
from .transcripts.records import Problem, Transcript

P = ParamSpec("P")

SPOOL_BYTES: Final = 8 * MIB
"""How much of a payload is held in memory until it is written."""


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
        return part.offset == self._bytes and _payload_key(part) == _payload_key(self.first)

    def add(self, part: PayloadLine) -> None:
        """Take in the next part."""
        self.file.write(part.data)
        self._bytes += len(part.data)


class _Payloads:
    """The payloads of an export: put when their last part has come, found again when an event names them."""

    def __init__(self, client: PatientClient, report: Report, transcript: Transcript) -> None:
        self._client = client
        self._report = report
        self._path = transcript.path
        self._open: _Payload | None = None
        self._incomplete: set[PayloadKey] = set()
        self._missing: dict[PayloadKey, str] = {}
        self._put: dict[PayloadKey, PayloadRef] = {}

    def take_part(self, number: int, part: PayloadLine) -> None:
        """Take in a part of a payload, and put the payload where it was the last one.

        Raises `UnreadableError` where another part is missing, or the payload is not what its hash says.
        """
        if self._open is not None and not self._open.goes_on_with(part):
            self.end_open()
        if self._open is None:
            if part.offset:
                if _payload_key(part) not in self._incomplete:
                    self._incomplete.add(_payload_key(part))
                    raise UnreadableError(f"a part of the payload {part.sha256} is missing")
                return
            self._open = _Payload(number, part)
        payload = self._open
        payload.add(part)
        if payload.is_whole:
            self._open = None
            with payload.file:
                first = payload.first
                ref = self._client.put(payload.file, first.content_type, first.retention_class)
                if ref.sha256 != first.sha256:
                    raise UnreadableError(f"the payload {first.sha256} has other bytes than its hash says")
                self._put[_payload_key(first)] = ref

    def give_up(self, line: MissingLine) -> None:
        """Take in that a payload, or the rest of it, could not be exported; events that need it will tell."""
        self._missing[_payload_key(line)] = f"it was missing when this was exported: {line.reason}"
        if self._open is not None and _payload_key(self._open.first) == _payload_key(line):
            self.close()
        self.end_open()

    def end_open(self) -> None:
        """Tell of a payload whose next part should have come."""
        if self._open is None:
            return
        payload = self._open
        self.close()
        self._incomplete.add(_payload_key(payload.first))
        reason = f"a part of the payload {payload.first.sha256} is missing"
        self._report.problem(Problem(self._path, payload.number, reason))

    def close(self) -> None:
        """Close the file of a payload that is not whole."""
        if self._open is not None:
            self._open.file.close()
            self._open = None

    def body_of(self, line: EventLine) -> Body | None:
        """The body of an event, also where it is a payload that did not come: the store may have it, or the event."""
        named = line.payload
        if named is None:
            return line.body
        key = _body_key(line)
        found = self._put.get(key)
        if found is None:
            kind = line.content_type or ""
            offer = offer_payload(named.sha256, kind, line.retention_class, named.size_bytes)
            found = self._client.ask(offer).ref
            if found is None:
                size = named.size_bytes
                return PayloadRef(named.sha256, kind, line.retention_class, size, size, encoding_of(size))
            self._put[key] = found
        return found

    def why_missing(self, line: EventLine) -> str | None:
        """Why the payload of an event is not there, or None where it has none or it is."""
        key = _body_key(line)
        if line.payload is None or key in self._put:
            return None
        reason = self._missing.get(key, "nothing of it stands before its event")
        return (
            f"the event was not stored: its payload {line.payload.sha256} is not in the export ({reason}); import one that"
            " has it"
        )


def _body_key(line: EventLine) -> PayloadKey:
    """Which payload the body of an event is."""
    return ("" if line.payload is None else line.payload.sha256, line.content_type, line.retention_class)


def _payload_key(line: PayloadLine | MissingLine) -> PayloadKey:
    return (line.sha256, line.content_type, line.retention_class)


class _OpenThread(NamedTuple):
    """A message that is stored, whose thread begins with one that was not there yet; both numbers are of this store."""

    line: int
    room: str
    stream_id: int
    root_number: int
    root: MessageRoot | None


class _Place(NamedTuple):
    """Where an event stands in its session here, and in the log."""

    sequence: int
    stream_id: int


class _ExportImport:
    """A room of an export on its way into the store."""

    def __init__(self, client: PatientClient, report: Report, transcript: Transcript) -> None:
        self._client = client
        self._report = report
        self._transcript = transcript
        self._rooms: set[str] = set()
        self._sessions: set[str] = set()
        self._changed: set[str] = set()
        """Sessions that this import has made, or has given something."""
        self._before: dict[str, int] = {}
        """The sequence, here, of the event that stood before the next one of a session."""
        self._last: dict[str, _Place] = {}
        """The last events here of those that sessions have in the export."""
        self._payloads = _Payloads(client, report, transcript)
        self._numbers: dict[tuple[str, int], int] = {}
        """Which number the message has here that has a number in a room there."""
        self._open_threads: list[_OpenThread] = []

    def run(self) -> None:
        """Store all of it, then the threads whose beginnings came later than themselves."""
        try:
            for number, line in exports.lines(self._transcript):
                self._report.found.records += 1
                self._try(number, self._store, number, line)
            self._payloads.end_open()
            for thread in self._open_threads:
                self._try(thread.line, self._begin, thread)
        finally:
            found = self._report.found
            found.sessions, found.known = len(self._sessions), len(self._sessions - self._changed)
            self._payloads.close()

    def _try(self, number: int, step: Callable[P, None], *given: P.args, **named: P.kwargs) -> None:
        try:
            step(*given, **named)
        except UnreadableError as error:
            self._problem(number, str(error))
        except RECORD_ERRORS as error:
            self._problem(number, f"refused: {error}")

    def _problem(self, number: int, reason: str) -> None:
        self._report.problem(Problem(self._transcript.path, number, reason))

    def _store(self, number: int, line: Line | Problem) -> None:
        if not isinstance(line, PayloadLine | MissingLine):
            self._payloads.end_open()
        match line:
            case Problem():
                self._report.problem(line)
            case RoomLine():
                self._restore_room(line)
            case SessionLine():
                self._restore_session(line)
            case PayloadLine():
                self._payloads.take_part(number, line)
            case MissingLine():
                self._payloads.give_up(line)
            case EventLine():
                self._restore_event(number, line)
            case SessionStateLine():
                self._restore_session_state(line)
            case Head() | End():
                raise UnreadableError(
                    "a head or an end stands in the middle: were two exports put into one file?"
                )

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
        self._rooms.add(line.id)

    def _need_room(self, room: str) -> None:
        """Have a room whose own line is missing or cannot be read: that was told, and its events are kept."""
        if room not in self._rooms:
            self._client.ask(conversation.create_room(room))
            self._rooms.add(room)

    def _restore_session(self, line: SessionLine) -> None:
        self._need_room(line.room)
        call = conversation.restore_session(
            line.id, line.room, parent=line.parent, root=line.root, created_ms=line.created_ms
        )
        self._count(line.id, is_new=self._client.ask(call))

    def _count(self, session: str, *, is_new: bool) -> None:
        """Count a session that is there, as one that was given something where that is new."""
        self._sessions.add(session)
        if is_new:
            self._changed.add(session)

    def _restore_session_state(self, line: SessionStateLine) -> None:
        self._need_room(line.room)
        last = self._last.get(line.session)
        call = conversation.restore_session_state(
            line.session,
            line.room,
            0 if last is None else last.stream_id,
            Shown(line.shown_status, line.shown_preview, line.shown_activity_ms),
            None if line.made is None else Made(**msgspec.structs.asdict(line.made)),
        )
        self._count(line.session, is_new=self._client.ask(call))

    # Events

    def _restore_event(self, number: int, line: EventLine) -> None:
        self._need_room(line.room)
        call = conversation.restore_event(
            _copy_of(line, self._payloads.body_of(line)),
            self._thread_root(line),
            self._before.get(line.session, 0),
        )
        try:
            done = self._client.store(call)
        except (PayloadNotFoundError, StorageCorruptError) as error:
            # An event that is there needs no payload any more, so that this shows when it is stored.
            reason = self._payloads.why_missing(line)
            if reason is None:
                raise
            raise UnreadableError(reason) from error
        self._report.event(is_new=done.created)
        self._count(line.session, is_new=done.created)
        place = _Place(done.sequence, done.stream_id)
        self._before[line.session] = place.sequence
        self._last[line.session] = max(place, self._last.get(line.session, place))
        said = line.message
        if said is not None and done.message_number is not None:
            self._numbers[line.room, said.number] = done.message_number
            if said.thread_root is not None and done.thread_root is None:
                thread = _OpenThread(number, line.room, done.stream_id, said.thread_root, said.root)
                self._open_threads.append(thread)

    # Threads

    def _thread_root(self, line: EventLine) -> int | None:
        """The number, here, of the message that a message's thread begins with, where that is stored."""
        said = line.message
        if said is None or said.thread_root is None:
            return None
        return self._find_root(line.room, said.thread_root, said.root)

    def _find_root(self, room: str, number: int, root: MessageRoot | None) -> int | None:
        found = self._numbers.get((room, number))
        if found is None and root is not None:
            place = MessagePlace(root.id, root.session, root.sequence, root.created_ms)
            found = self._client.ask(conversation.find_message(room, place))
            if found is not None:
                self._numbers[room, number] = found
        return found

    def _begin(self, thread: _OpenThread) -> None:
        """Have a message begin its thread with one that was stored behind it."""
        number = self._find_root(thread.room, thread.root_number, thread.root)
        if number is None and thread.root is None and not self._is_taken(thread.room, thread.root_number):
            # It was that of no message there, either.
            number = thread.root_number
        if number is None:
            named = "" if thread.root is None else f" ({thread.root.id})"
            raise UnreadableError(
                f"its thread begins with the message {thread.root_number}{named} of the room {thread.room!r}, which is"
                " not stored; the message is, without its thread"
            )
        self._client.ask(conversation.restore_thread(thread.stream_id, number))

    def _is_taken(self, room: str, number: int) -> bool:
        page = self._client.ask(conversation.messages(room=room, after=number - 1, page_rows=1))
        return any(message.number == number for message in page.items)


def _copy_of(line: EventLine, body: Body | None) -> EventCopy:
    own = ("provenance", "attributes_json", "added_json", "body", "sender", "role", "turn_id")
    said = line.message
    is_users = said is not None and line.provenance is None
    return EventCopy(
        **{name: getattr(line, name) for name in EventCopy.__struct_fields__ if name not in own},
        provenance=None if line.provenance is None else _provenance(line.provenance),
        attributes_json=canonical_json(line.attributes, "the attributes"),
        added_json=canonical_json(line.added, "what was added") if line.added else None,
        body=body,
        sender=Sender() if said is None else Sender(said.sender_label, said.source, said.agent_key),
        role=said.role if said is not None and is_users else None,
        turn_id=said.turn_id if said is not None and is_users else None,
    )


def _provenance(told: dict[str, Any]) -> Provenance:
    try:
        return msgspec.convert(told, Provenance)
    except msgspec.ValidationError:
        return Provenance()

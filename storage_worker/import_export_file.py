"""Stores a room of an export again, each event through what first made it, so that a store tells the same afterwards.

Rooms and sessions are made where they are missing, before their events. Behind these a session is brought to stand as it
did, unless it went on here. What is there is not changed otherwise.
"""

import hashlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple, ParamSpec

import msgspec

from . import conversation
from .client.client import Client
from .conversation.canonical import canonical_json
from .conversation.errors import PayloadNotFoundError
from .conversation.event_restores import EventCopy
from .conversation.records import Body, MessagePlace, Provenance, Sender
from .conversation.session_restores import Made, Shown
from .import_payloads import ExportedPayloads
from .import_session import RECORD_ERRORS, Imported, Patience, PatientClient, Report
from .protocol.errors import StorageCorruptError
from .transcripts import exports
from .transcripts.exports import (
    End,
    EventLine,
    Head,
    Line,
    MessageRoot,
    MissingLine,
    PayloadLine,
    RoomLine,
    SessionLine,
    SessionStateLine,
)
from .transcripts.files import UnreadableError
from .transcripts.records import Problem, Transcript

P = ParamSpec("P")

ALIKE_REMEMBERED_COUNT_MAX: Final = 10_000
"""Events without a key that an equal one behind them is told from; it comes in the same millisecond, so soon."""


def import_export(client: Client, transcript: Transcript, patience: Patience | None = None) -> Imported:
    """Store a room of an export, or what of it is not stored yet; `patience` as for `import_transcript`.

    What is wrong with one line is a problem of that; any other error, such as `StorageFullError`, is the `failure`.
    """
    patient, report = PatientClient(client, patience), Report(transcript)
    return report.run(_ExportImport(patient, report, transcript).run, patient)


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
        self._alike: dict[bytes, int] = {}
        """The sequence, here, of the last event without a key that said the same, by its mark."""
        self._last: dict[str, _Place] = {}
        """The last events here of those that sessions have in the export."""
        self._payloads = ExportedPayloads(client, report, transcript)
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
        copied = _copy_of(line, self._payloads.body_of(line))
        mark = _mark_of(copied)
        after = self._alike.get(mark, self._before.get(line.session, 0))
        call = conversation.restore_event(copied, self._thread_root(line), after)
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
        if mark:
            self._remember_alike(mark, place.sequence)
        self._last[line.session] = max(place, self._last.get(line.session, place))
        said = line.message
        if said is not None and done.message_number is not None:
            self._numbers[line.room, said.number] = done.message_number
            if said.thread_root is not None and done.thread_root is None:
                thread = _OpenThread(number, line.room, done.stream_id, said.thread_root, said.root)
                self._open_threads.append(thread)

    def _remember_alike(self, mark: bytes, sequence: int) -> None:
        self._alike.pop(mark, None)
        self._alike[mark] = sequence
        if len(self._alike) > ALIKE_REMEMBERED_COUNT_MAX:
            del self._alike[next(iter(self._alike))]

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


def _mark_of(copied: EventCopy) -> bytes:
    """What events without a key have in common that say the same at the same time; nothing for one with a key."""
    if copied.event_id is not None or copied.client_transaction_id is not None:
        return b""
    # How its room was named, and what the store makes of it, tells no two of them apart.
    said = msgspec.structs.replace(
        copied, room_named=False, added_json=None, preview="", role=None, turn_id=None
    )
    return hashlib.sha256(msgspec.msgpack.encode(said)).digest()


def _provenance(told: dict[str, Any]) -> Provenance:
    try:
        return msgspec.convert(told, Provenance)
    except msgspec.ValidationError:
        return Provenance()

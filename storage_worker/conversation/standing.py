"""Where a session stands before its next event: read at once, moved on in memory, and written back.

Nothing is written before the event itself is: whether it repeats another one shows when it is inserted.
"""

from typing import Final, NamedTuple

import msgspec

from ..transaction import Transaction
from .rooms import default_room, require_room
from .vocabulary import IDLE

_READ: Final = (
    "select id, number, room_id, session_number, last_sequence, last_message, tools_finished, largest_output_tokens,"
    " largest_output_basis, (select max(stream_id) from conversation_events),"
    " (select max(number) from conversation_messages m where m.room_id = s.room_id)"
    " from conversation_sessions s where id = ?"
)
_LAST_EVENT: Final = "select max(stream_id) from conversation_events"
_LAST_IN_ROOM: Final = "select max(number) from conversation_messages where room_id = ?"
# Never less than the greatest `number`, which it is the same as at first.
_LAST_NUMBER: Final = "select max(listed_number) from conversation_sessions"
_LAST_SESSION_NUMBER: Final = "select max(session_number) from conversation_sessions"
_INSERT: Final = (
    "insert into conversation_sessions(last_sequence, last_message, tools_finished, largest_output_tokens,"
    " largest_output_basis, shown_status, shown_preview, shown_activity_ms, number, listed_number, id, room_id)"
    " values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
# A status or a preview that is not told leaves what is there, activity never goes back, and what ingest knows of a
# runtime never takes the place of what is stored.
_SHOW: Final = (
    "update conversation_sessions set last_sequence = ?, last_message = ?, tools_finished = ?,"
    " largest_output_tokens = ?, largest_output_basis = ?, shown_status = coalesce(?, shown_status),"
    " shown_preview = coalesce(?, shown_preview),"
    " shown_activity_ms = case when shown_activity_ms < ? then ? else shown_activity_ms end where number = ?"
)
_CHANGE: Final = (
    "update conversation_sessions set last_sequence = ?, last_message = ?, tools_finished = ?,"
    " largest_output_tokens = ?, largest_output_basis = ?, shown_status = coalesce(?, shown_status),"
    " shown_preview = coalesce(?, shown_preview),"
    " shown_activity_ms = case when shown_activity_ms < ? then ? else shown_activity_ms end,"
    " status = coalesce(?, status), first_preview = coalesce(first_preview, ?),"
    " runtime_binding = coalesce(runtime_binding, ?),"
    " activity_ms = case when activity_ms < ? then ? else activity_ms end where number = ?"
)
_MAKE: Final = (
    "update conversation_sessions set session_number = ?, room_id = ?, root_id = id, status = ?, first_preview = ?,"
    " runtime_binding = ?, activity_ms = ?, created_ms = ? where number = ?"
)
_LIST_ANEW: Final = "update conversation_sessions set listed_number = ? where number = ?"


class Noted(NamedTuple):
    """What an event changes in the session itself, beside its activity; None and "" change nothing."""

    status: str | None = None
    preview: str = ""
    runtime_binding: str | None = None


class Standing(msgspec.Struct):
    """A session's counters, the last stream id of the log and the last message number of the session's room.

    `number` is 0 for a session that was never named; `session_number` is None where only output without a room named
    it.
    """

    session: str
    number: int = 0
    own_room: str = ""
    session_number: int | None = None
    sequence: int = 0
    message: int = 0
    tools_finished: int = 0
    largest_output_tokens: str | None = None
    largest_output_basis: str | None = None
    stream_id: int | None = None
    own_room_message: int | None = None

    def room_of(self, tx: Transaction, room: str | None) -> str:
        """The room of the next event: the one that is named, else the session's own, else the default room.

        Raises `RoomNotFoundError` where the named one does not exist.
        """
        if room is None or room == self.own_room:
            return self.own_room or default_room(tx).id
        return require_room(tx, room).id

    def next_message(self, tx: Transaction, room: str) -> int:
        """Take the next number of a message, in the session and in a room; that in the room is returned."""
        self.message += 1
        last = self.own_room_message if room == self.own_room else tx.scalar(_LAST_IN_ROOM, (room,))
        return int(last or 0) + 1

    def save(
        self,
        tx: Transaction,
        room: str,
        now_ms: int,
        status: str | None,
        preview: str,
        noted: Noted | None,
    ) -> None:
        """Write it back with what the navigation shows of an event, and what is noted in the session itself.

        A session that was never named is added, in `room`; with `noted` one that was not made is made.
        """
        counters = (
            self.sequence,
            self.message,
            self.tools_finished,
            self.largest_output_tokens,
            self.largest_output_basis,
        )
        if not self.number:
            self.number = _next_number(tx)
            shown = (status or IDLE, preview, now_ms)
            tx.execute(_INSERT, (*counters, *shown, self.number, self.number, self.session, room))
        elif noted is None or self.session_number is None:
            tx.execute(_SHOW, (*counters, status, preview or None, now_ms, now_ms, self.number))
        else:
            tx.execute(
                _CHANGE,
                (
                    *counters,
                    status,
                    preview or None,
                    now_ms,
                    now_ms,
                    noted.status,
                    noted.preview or None,
                    noted.runtime_binding,
                    now_ms,
                    now_ms,
                    self.number,
                ),
            )
        if noted is not None and self.session_number is None:
            self._make(tx, room, now_ms, noted)

    def _make(self, tx: Transaction, room: str, now_ms: int, noted: Noted) -> None:
        self.session_number = (tx.scalar(_LAST_SESSION_NUMBER) or 0) + 1
        own = (noted.status or IDLE, noted.preview or None, noted.runtime_binding, now_ms, now_ms)
        tx.execute(_MAKE, (self.session_number, room, *own, self.number))
        if self.own_room not in ("", room):
            tx.execute(_LIST_ANEW, (_next_number(tx), self.number))


def _next_number(tx: Transaction) -> int:
    return int(tx.scalar(_LAST_NUMBER) or 0) + 1


def read_standing(tx: Transaction, session: str) -> Standing:
    """Where a session stands."""
    rows = tx.rows(_READ, (session,))
    return Standing(*rows[0]) if rows else Standing(session, stream_id=tx.scalar(_LAST_EVENT))

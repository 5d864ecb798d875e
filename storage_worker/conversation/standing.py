"""Where a session stands before its next event: read at once, moved on in memory, and written back.

Nothing is written before the event itself is: whether it repeats another one shows when it is inserted.
"""

from typing import Final

import msgspec

from ..transaction import Transaction
from .rooms import default_room, require_room
from .vocabulary import IDLE

_READ: Final = (
    "select id, number, room_id, session_number, status, runtime_binding, first_preview, activity_ms, shown_status,"
    " shown_preview, shown_activity_ms, last_sequence, last_message, tools_finished, largest_output_tokens,"
    " largest_output_basis, (select max(stream_id) from conversation_events),"
    " (select max(number) from conversation_messages m where m.room_id = s.room_id)"
    " from conversation_sessions s where id = ?"
)
_LAST_EVENT: Final = "select max(stream_id) from conversation_events"
_LAST_IN_ROOM: Final = "select max(number) from conversation_messages where room_id = ?"
_LAST_NUMBER: Final = "select max(number) from conversation_sessions"
_LAST_SESSION_NUMBER: Final = "select max(session_number) from conversation_sessions"
_INSERT: Final = (
    "insert into conversation_sessions(shown_status, shown_preview, shown_activity_ms, last_sequence, last_message,"
    " tools_finished, largest_output_tokens, largest_output_basis, status, runtime_binding, first_preview, activity_ms,"
    " number, id, room_id) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_SHOW: Final = (
    "update conversation_sessions set shown_status = ?, shown_preview = ?, shown_activity_ms = ?, last_sequence = ?,"
    " last_message = ?, tools_finished = ?, largest_output_tokens = ?, largest_output_basis = ? where number = ?"
)
_CHANGE: Final = (
    "update conversation_sessions set shown_status = ?, shown_preview = ?, shown_activity_ms = ?, last_sequence = ?,"
    " last_message = ?, tools_finished = ?, largest_output_tokens = ?, largest_output_basis = ?, status = ?,"
    " runtime_binding = ?, first_preview = ?, activity_ms = ? where number = ?"
)
_MAKE: Final = "update conversation_sessions set session_number = ?, room_id = ?, root_id = ?, created_ms = ? where number = ?"


class Standing(msgspec.Struct):
    """A session's row, the last stream id of the log and the last message number of the session's room.

    `number` is 0 for a session that was never named; `session_number` is None where only output without a room named
    it. What is `shown_` is its navigation.
    """

    session: str
    number: int = 0
    own_room: str = ""
    session_number: int | None = None
    status: str | None = None
    runtime_binding: str | None = None
    first_preview: str | None = None
    activity_ms: int | None = None
    shown_status: str = IDLE
    shown_preview: str = ""
    shown_activity_ms: int = 0
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

    def show(self, now_ms: int, status: str | None, preview: str) -> None:
        """Show an event in the navigation; None and an empty preview leave what is shown."""
        self.shown_activity_ms = max(now_ms, self.shown_activity_ms)
        self.shown_status = status or self.shown_status
        self.shown_preview = preview or self.shown_preview

    def note(self, now_ms: int, status: str | None, preview: str, runtime_binding: str | None) -> None:
        """Note an event in the session itself; a runtime binding that is stored stays."""
        self.activity_ms = max(now_ms, self.activity_ms or 0)
        self.status = status or self.status or IDLE
        self.first_preview = self.first_preview or preview or None
        if self.runtime_binding is None:
            self.runtime_binding = runtime_binding

    def save(self, tx: Transaction, room: str, now_ms: int) -> None:
        """Write it back; a session that was not there is made, in `room`."""
        shown = (
            self.shown_status,
            self.shown_preview,
            self.shown_activity_ms,
            self.sequence,
            self.message,
            self.tools_finished,
            self.largest_output_tokens,
            self.largest_output_basis,
        )
        own = (self.status, self.runtime_binding, self.first_preview, self.activity_ms)
        if not self.number:
            self.number = (tx.scalar(_LAST_NUMBER) or 0) + 1
            tx.execute(_INSERT, (*shown, *own, self.number, self.session, room))
        elif self.status is None:
            tx.execute(_SHOW, (*shown, self.number))
        else:
            tx.execute(_CHANGE, (*shown, *own, self.number))
        if self.status is not None and self.session_number is None:
            self.session_number = (tx.scalar(_LAST_SESSION_NUMBER) or 0) + 1
            tx.execute(_MAKE, (self.session_number, room, self.session, now_ms, self.number))


def read_standing(tx: Transaction, session: str) -> Standing:
    """Where a session stands."""
    rows = tx.query(_READ, (session,)).rows
    return Standing(*rows[0]) if rows else Standing(session, stream_id=tx.scalar(_LAST_EVENT))

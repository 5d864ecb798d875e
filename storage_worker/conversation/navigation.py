"""Navigation: one row for each session that was ever named, for listings and for the session's next event."""

import msgspec

from ..transaction import Transaction
from .bounds import PAGE_BYTES_DEFAULT, PAGE_ROWS_DEFAULT
from .counters import next_number
from .pages import Listing
from .records import Cursor, Name, Navigation, Page, PageBytes, PageRows
from .rooms import default_room
from .schema import store
from .vocabulary import IDLE

_COLUMNS = "number, session_id, room_id, status, preview, activity_ms, last_sequence, last_message"
_ADVANCE = (
    "update conversation_navigation set last_sequence = last_sequence + ?, last_message = last_message + ?,"
    " preview = coalesce(?, preview), status = coalesce(?, status),"
    " activity_ms = case when activity_ms < ? then ? else activity_ms end"
    " where session_id = ? returning room_id, last_sequence, last_message"
)
_INSERT = (
    "insert into conversation_navigation"
    "(number, session_id, room_id, status, preview, activity_ms, last_sequence, last_message)"
    " values (?, ?, ?, ?, ?, ?, ?, ?)"
)
_ROOM = "select room_id from conversation_navigation where session_id = ?"
_MOVE = "update conversation_navigation set room_id = ? where session_id = ?"

_TEXTS = "session_id, room_id, status, preview"
_ALL = Listing("conversation_navigation", "number", _COLUMNS, _TEXTS, Navigation)
_OF_ROOM = Listing("conversation_navigation", "number", _COLUMNS, _TEXTS, Navigation, "room_id")


class Place(msgspec.Struct, frozen=True):
    """Where a session stands after a step: its room, the sequences of its last event and of its last message."""

    room: str
    sequence: int
    message: int


def advance(
    tx: Transaction,
    session: str,
    room: str | None,
    activity_ms: int,
    *,
    events: int = 1,
    messages: int = 0,
    preview: str = "",
    status: str | None = None,
) -> Place:
    """Move a session on by so many events and messages, and take the sequences of the last ones.

    An empty `preview` leaves the one that is shown. A session that was never named begins here: in `room`, or in
    the default room where that is None.
    """
    values = (events, messages, preview or None, status, activity_ms, activity_ms, session)
    rows = tx.execute(_ADVANCE, values).rows
    if rows:
        return Place(*rows[0])
    place = Place(room or default_room(tx).id, events, messages)
    number = next_number(tx, "navigation")
    tx.execute(
        _INSERT,
        (number, session, place.room, status or IDLE, preview, activity_ms, events, messages),
    )
    return place


def room_of(tx: Transaction, session: str) -> str | None:
    """The room of a session, or None where it was never named."""
    rows = tx.query(_ROOM, (session,)).rows
    return str(rows[0][0]) if rows else None


def move(tx: Transaction, session: str, room: str) -> None:
    """Show a session in another room."""
    tx.execute(_MOVE, (room, session))


@store.read
def navigation(
    tx: Transaction,
    room: Name | None = None,
    after: Cursor = 0,
    page_rows: PageRows = PAGE_ROWS_DEFAULT,
    page_bytes: PageBytes = PAGE_BYTES_DEFAULT,
    newest_first: bool = False,
) -> Page[Navigation]:
    """A page of what lists show of sessions, of one room or of all, in the order they were first named."""
    if room is None:
        return _ALL.page(tx, after, page_rows, page_bytes, newest_first=newest_first)
    return _OF_ROOM.page(tx, after, page_rows, page_bytes, newest_first=newest_first, scope=(room,))

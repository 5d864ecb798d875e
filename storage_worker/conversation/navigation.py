"""Navigation: what a list of sessions shows of each, also of those that only output without a room named."""

from typing import Annotated, Any, Final

import msgspec

from ..transaction import Transaction
from .bounds import PAGE_BYTES_DEFAULT, PAGE_ROWS_DEFAULT, STATES_COUNT_MAX
from .pages import Listing
from .records import Cursor, Name, Navigation, Page, PageBytes, PageRows, Session
from .schema import store
from .sessions import find_session

SessionNames = Annotated[list[Name], msgspec.Meta(max_length=STATES_COUNT_MAX)]

_COLUMNS: Final = (
    "number, id, room_id, shown_status, shown_preview, shown_activity_ms, last_sequence, last_message"
)
_ONE: Final = f"select {_COLUMNS} from conversation_sessions where id = ?"  # noqa: S608 - of constants
_TEXTS: Final = "id, room_id, shown_status, shown_preview"


def _navigation(row: tuple[Any, ...]) -> Navigation:
    return Navigation(*row)


def find_navigation(tx: Transaction, session: str) -> Navigation | None:
    """What lists show of a session, or None where it was never named."""
    rows = tx.rows(_ONE, (session,))
    return _navigation(rows[0]) if rows else None


_ALL: Final = Listing("conversation_sessions", "number", _COLUMNS, _TEXTS, _navigation)
_OF_ROOM: Final = Listing("conversation_sessions", "listed_number", _COLUMNS, _TEXTS, _navigation, "room_id")


@store.read
def navigation(
    tx: Transaction,
    room: Name | None = None,
    after: Cursor = 0,
    page_rows: PageRows = PAGE_ROWS_DEFAULT,
    page_bytes: PageBytes = PAGE_BYTES_DEFAULT,
    newest_first: bool = False,
) -> Page[Navigation]:
    """A page of what lists show of sessions: of all as they were first named, of one room as they came into it.

    A session that only output without a room named comes into the room that is told at last.
    """
    if room is None:
        return _ALL.page(tx, after, page_rows, page_bytes, newest_first=newest_first)
    return _OF_ROOM.page(tx, after, page_rows, page_bytes, newest_first=newest_first, scope=(room,))


class SessionState(msgspec.Struct, frozen=True, array_like=True):
    """The state of a session: what navigation shows of it, and itself, None where only output without a room named it."""

    shown: Navigation
    session: Session | None


@store.read
def session_states(tx: Transaction, sessions: SessionNames) -> list[SessionState]:
    """The state of each of at most 20 sessions, in the order in which they are named; those that are not there are left out."""
    shown = ((each, find_navigation(tx, each)) for each in sessions)
    return [SessionState(found, find_session(tx, each)) for each, found in shown if found is not None]

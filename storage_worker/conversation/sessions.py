"""Sessions: conversations with an agent, each in a room, some begun by another one."""

from typing import Any, Final

from ..protocol.errors import InvalidRequestError
from ..transaction import Transaction
from .bounds import PAGE_BYTES_DEFAULT, PAGE_ROWS_DEFAULT
from .errors import SessionNotFoundError
from .pages import Listing
from .records import Binding, Cursor, Name, Page, PageBytes, PageRows, Session, Status, Time
from .schema import store
from .standing import Noted, read_standing

_COLUMNS: Final = "session_number, id, room_id, parent_id, root_id, status, runtime_binding, first_preview, activity_ms, created_ms"
_ONE: Final = f"select {_COLUMNS} from conversation_sessions where id = ? and session_number is not null"  # noqa: S608 - of constants
_ADOPT: Final = "update conversation_sessions set parent_id = ?, root_id = ? where number = ?"
_BIND: Final = "update conversation_sessions set runtime_binding = ? where number = ?"
_BEGINNING: Final = "select id from conversation_sessions where id >= ? and id < ? order by id limit ?"
_TEXTS: Final = "id, room_id, parent_id, root_id, status, runtime_binding, first_preview"


def _session(row: tuple[Any, ...]) -> Session:
    return Session(*row)


_ALL: Final = Listing("conversation_sessions", "session_number", _COLUMNS, _TEXTS, _session)
_OF_ROOM: Final = Listing("conversation_sessions", "session_number", _COLUMNS, _TEXTS, _session, "room_id")


def find_session(tx: Transaction, session: str) -> Session | None:
    """The session with this id, or None."""
    rows = tx.query(_ONE, (session,)).rows
    return _session(rows[0]) if rows else None


def require_session(tx: Transaction, session: str) -> Session:
    """The session with this id; `SessionNotFoundError` where there is none."""
    found = find_session(tx, session)
    if found is None:
        raise SessionNotFoundError(f"there is no session {session!r}", details={"session": session})
    return found


def check_parent(session: str, parent: str | None) -> None:
    """Raise `InvalidRequestError` where a session is its own parent."""
    if parent == session:
        raise InvalidRequestError(f"the session {session!r} cannot be its own parent")


@store.write
def upsert_session(
    tx: Transaction,
    session: Name,
    room: Name | None = None,
    parent: Name | None = None,
    status: Status | None = None,
    runtime_binding: Binding | None = None,
    activity_ms: Time | None = None,
) -> Session:
    """Make a session, or change what is given of one; None leaves it as it is.

    A new session is `idle` and stands in the default room unless it is told otherwise. Its root is that of its
    `parent`, or that one itself where it is not stored. `activity_ms` is when this happened, in milliseconds since
    1970 in UTC, now where it is not told; the last activity never goes back. Raises `RoomNotFoundError`, and `InvalidRequestError` where a
    session is its own parent or stands in another room: its messages are numbered there.
    """
    check_parent(session, parent)
    standing = read_standing(tx, session)
    room_id = standing.room_of(tx, room)
    if standing.session_number is not None and room_id != standing.own_room:
        raise InvalidRequestError(
            f"the session {session!r} stands in the room {standing.own_room!r} and cannot leave it"
        )
    now = tx.now_ms() if activity_ms is None else activity_ms
    standing.save(tx, room_id, now, status, "", Noted(status))
    if runtime_binding is not None:
        tx.execute(_BIND, (runtime_binding, standing.number))
    if parent is not None:
        above = find_session(tx, parent)
        tx.execute(_ADOPT, (parent, parent if above is None else above.root, standing.number))
    return require_session(tx, session)


@store.write
def set_session_status(
    tx: Transaction, session: Name, status: Status, activity_ms: Time | None = None
) -> Session:
    """Set the status of a session, in itself and in its navigation; `activity_ms` as for `upsert_session`.

    Raises `SessionNotFoundError`.
    """
    require_session(tx, session)
    return upsert_session.handler(tx, session, status=status, activity_ms=activity_ms)


@store.read
def session(tx: Transaction, session: Name) -> Session | None:
    """One session, or None."""
    return find_session(tx, session)


@store.read
def session_ids(tx: Transaction, beginning: Name, rows: PageRows = PAGE_ROWS_DEFAULT) -> list[str]:
    """The ids that begin with a text, in their order and `rows` of them at the most, of all that navigation shows."""
    # No text that begins so sorts behind the last character that there is.
    return [found for (found,) in tx.query(_BEGINNING, (beginning, f"{beginning}\U0010ffff", rows)).rows]


@store.read
def sessions(
    tx: Transaction,
    room: Name | None = None,
    after: Cursor = 0,
    page_rows: PageRows = PAGE_ROWS_DEFAULT,
    page_bytes: PageBytes = PAGE_BYTES_DEFAULT,
    newest_first: bool = False,
) -> Page[Session]:
    """A page of sessions, of one room or of all, in the order they were first named; `after` is the last cursor."""
    if room is None:
        return _ALL.page(tx, after, page_rows, page_bytes, newest_first=newest_first)
    return _OF_ROOM.page(tx, after, page_rows, page_bytes, newest_first=newest_first, scope=(room,))

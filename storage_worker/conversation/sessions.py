"""Sessions: conversations with an agent, each in a room, some begun by another one."""

from typing import Any, Final

from ..protocol.errors import InvalidRequestError
from ..transaction import Transaction
from .bounds import (
    PAGE_BYTES_DEFAULT,
    PAGE_ROWS_DEFAULT,
    SESSION_DEPTH_MAX,
    SESSIONS_MOVED_COUNT_MAX,
)
from .errors import SessionNotFoundError
from .pages import Listing
from .records import Binding, Cursor, Name, Page, PageBytes, PageRows, Session, Status, Time
from .schema import store
from .standing import Noted, read_standing

_COLUMNS: Final = "session_number, id, room_id, parent_id, root_id, status, runtime_binding, first_preview, activity_ms, created_ms"
_ONE: Final = f"select {_COLUMNS} from conversation_sessions where id = ? and session_number is not null"  # noqa: S608 - of constants
_ADOPT: Final = "update conversation_sessions set parent_id = ?, root_id = ? where number = ?"
_ABOVE: Final = (
    "select parent_id, root_id from conversation_sessions where id = ? and session_number is not null"
)
_OF_ROOT: Final = (
    "select number from conversation_sessions where root_id = :old_root and parent_id is not null"
)
_BELOW: Final = (
    "with recursive below(number, id) as (select number, id from conversation_sessions where parent_id = :session"
    " union select s.number, s.id from below join conversation_sessions s on s.parent_id = below.id)"
    " select number from below"
)
_COUNT: Final = "select count(*) from ({below} limit :count_max)"
_MOVE: Final = (
    "update conversation_sessions set root_id = :root where root_id = :old_root and number in ({below})"
)
_BIND: Final = "update conversation_sessions set runtime_binding = ? where number = ?"
_BEGINNING: Final = "select id from conversation_sessions where id >= ? and id < ? order by id limit ?"
_TEXTS: Final = "id, room_id, parent_id, root_id, status, runtime_binding, first_preview"


def _session(row: tuple[Any, ...]) -> Session:
    return Session(*row)


_ALL: Final = Listing("conversation_sessions", "session_number", _COLUMNS, _TEXTS, _session)
_OF_ROOM: Final = Listing("conversation_sessions", "session_number", _COLUMNS, _TEXTS, _session, "room_id")


def find_session(tx: Transaction, session: str) -> Session | None:
    """The session with this id, or None."""
    rows = tx.rows(_ONE, (session,))
    return _session(rows[0]) if rows else None


def require_session(tx: Transaction, session: str) -> Session:
    """The session with this id; `SessionNotFoundError` where there is none."""
    found = find_session(tx, session)
    if found is None:
        raise SessionNotFoundError(f"there is no session {session!r}", details={"session": session})
    return found


def root_below(tx: Transaction, session: str, parent: str) -> str:
    """The root of a session with this parent: that of the highest session above it that is stored.

    Raises `InvalidRequestError` where the session is its own parent or stands above it, or too many sessions do.
    """
    root, above = parent, parent
    for _ in range(SESSION_DEPTH_MAX):
        if above == session:
            raise InvalidRequestError(
                f"the session {parent!r} cannot be the parent of {session!r}, which is itself or stands above it",
                details={"session": session, "parent": parent},
            )
        rows = tx.rows(_ABOVE, (above,))
        if not rows:
            return root
        higher, root = rows[0][0], str(rows[0][1])
        if higher is None:
            return root
        above = str(higher)
    raise InvalidRequestError(
        f"over {SESSION_DEPTH_MAX} sessions stand above {session!r}, or above one another in a ring; name a parent that is"
        " higher up",
        details={"session": session, "parent": parent, "session_depth_max": SESSION_DEPTH_MAX},
    )


def move_below(tx: Transaction, session: str, old_root: str, root: str) -> None:
    """Give the sessions below one whose root was `old_root` its new root.

    Raises `InvalidRequestError` where they are too many for one request.
    """
    if old_root == root:
        return
    # Below a root stand all that have it, also those whose parent is not stored.
    below, parameters = _OF_ROOT, {"old_root": old_root}
    if old_root != session:
        below, parameters = _BELOW, {"old_root": old_root, "session": session}
    count = tx.scalar(_COUNT.format(below=below), {**parameters, "count_max": SESSIONS_MOVED_COUNT_MAX + 1})
    if count > SESSIONS_MOVED_COUNT_MAX:
        raise InvalidRequestError(
            f"over {SESSIONS_MOVED_COUNT_MAX} sessions stand below {session!r}, so that it keeps its place; name a"
            " session's parent before many stand below it",
            details={"session": session, "sessions_moved_count_max": SESSIONS_MOVED_COUNT_MAX},
        )
    tx.execute(_MOVE.format(below=below), {**parameters, "root": root})


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
    `parent`, or that one itself where it is not stored; sessions below it that are stored get the same root.
    `activity_ms` is when this happened, in milliseconds since 1970 in UTC, now where it is not told; the last activity
    never goes back.

    Raises `RoomNotFoundError`, and `InvalidRequestError` where the session stands in another room (its messages are
    numbered there), where it is its own parent or stands above that one, and where over 1,000 sessions stand above it or
    over 10,000 that would move with it stand below it.
    """
    root = None if parent is None else root_below(tx, session, parent)
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
    if root is not None:
        old_root = require_session(tx, session).root
        tx.execute(_ADOPT, (parent, root, standing.number))
        move_below(tx, session, old_root, root)
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
    return [found for (found,) in tx.rows(_BEGINNING, (beginning, f"{beginning}\U0010ffff", rows))]


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

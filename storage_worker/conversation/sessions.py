"""Sessions: conversations with an agent, each in a room, some begun by another one."""

from typing import Any, Final

from ..protocol.errors import InvalidRequestError
from ..transaction import Transaction
from .bounds import (
    NAME_CHARS_MAX,
    PAGE_BYTES_DEFAULT,
    PAGE_ROWS_DEFAULT,
    SESSION_DEPTH_MAX,
    SESSIONS_MOVED_COUNT_MAX,
)
from .errors import SessionNotFoundError
from .pages import Listing
from .records import Binding, Cursor, Name, Page, PageBytes, PageRows, Session, Status, Time
from .schema import store
from .standing import Noted, Standing, read_standing

_COLUMNS: Final = "session_number, id, room_id, parent_id, root_id, status, runtime_binding, first_preview, activity_ms, created_ms"
_ONE: Final = f"select {_COLUMNS} from conversation_sessions where id = ? and session_number is not null"  # noqa: S608 - of constants
_ADOPT: Final = "update conversation_sessions set parent_id = ?, root_id = ? where number = ?"
_CHILD: Final = "select 1 from conversation_sessions where parent_id = ? limit 1"
# The joins are `cross` to keep their order: with statistics of a store that was small, SQLite would go through all
# sessions once for each one that stands there.
_ABOVE: Final = (
    "with recursive above(id) as (select :parent union select s.parent_id from above cross join conversation_sessions s"
    " on s.id = above.id limit :count) select count(id), max(id = :session) from above"
)
# What has the root already is not gone through: what stands below it has that, too. An export may have told a session
# of its root without its parent, so that a session has others below it than those that name it.
_BELOW: Final = (
    "with recursive below(number, id) as (select number, id from conversation_sessions where parent_id = :session and"
    " root_id <> :root union select number, id from conversation_sessions where root_id = :session and parent_id is not"
    " null and root_id <> :root union select s.number, s.id from below cross join conversation_sessions s on"
    " s.parent_id = below.id where s.root_id <> :root) select number from below"
)
_COUNT: Final = f"select count(*) from ({_BELOW} limit :count_max)"  # noqa: S608 - of constants
_MOVE: Final = f"update conversation_sessions set root_id = :root where number in ({_BELOW})"  # noqa: S608 - of constants
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


def root_under(tx: Transaction, session: str, parent: str, told: str | None = None) -> str:
    """The root of a session with this parent: the parent's own; where that is not stored, what is told, else the parent.

    Raises `InvalidRequestError` where the session is its own parent or stands above it, or where too many sessions
    stand above that to see whether it does.
    """
    if parent == session:
        raise _ring(session, parent)
    found = find_session(tx, parent)
    if found is None:
        # Nothing stands above it.
        return told or parent
    # What has nothing below it closes no ring, nor does what is told again: most sessions never look above them.
    if tx.rows(_CHILD, (session,)):
        own = find_session(tx, session)
        if own is None or own.parent != parent:
            _refuse_ring(tx, session, parent)
    return found.root


def _refuse_ring(tx: Transaction, session: str, parent: str) -> None:
    """Go up from a parent, and raise `InvalidRequestError` where the session stands there, or there is no end."""
    counted = {"count": SESSION_DEPTH_MAX + 1}
    [(count, is_above)] = tx.rows(_ABOVE, {"session": session, "parent": parent, **counted})
    if is_above:
        raise _ring(session, parent)
    if count > SESSION_DEPTH_MAX:
        raise InvalidRequestError(
            f"{SESSION_DEPTH_MAX} or more sessions stand above {parent!r}, too many to see whether {session!r} is one of"
            " them; name a parent that is higher up, or name a session's parent before others stand below it",
            details={"session": session, "parent": parent, "session_depth_max": SESSION_DEPTH_MAX},
        )


def _ring(session: str, parent: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the session {parent!r} cannot be the parent of {session!r}, which is itself or stands above it",
        details={"session": session, "parent": parent},
    )


def move_below(tx: Transaction, session: str, old_root: str, root: str) -> None:
    """Give the sessions below one whose root was `old_root` its new root.

    Raises `InvalidRequestError` where they are too many for one request.
    """
    if old_root == root:
        return
    values = {"session": session, "root": root}
    count = tx.scalar(_COUNT, {**values, "count_max": SESSIONS_MOVED_COUNT_MAX + 1})
    if count > SESSIONS_MOVED_COUNT_MAX:
        raise InvalidRequestError(
            f"over {SESSIONS_MOVED_COUNT_MAX} sessions stand below {session!r}, so that it keeps its place; name a"
            " session's parent before many stand below it",
            details={"session": session, "sessions_moved_count_max": SESSIONS_MOVED_COUNT_MAX},
        )
    tx.execute(_MOVE, values)


def stay_in_room(standing: Standing, room: str) -> None:
    """Raise `InvalidRequestError` where a session was made in another room: its messages are numbered there."""
    if standing.session_number is not None and room != standing.own_room:
        raise InvalidRequestError(
            f"the session {standing.session!r} stands in the room {standing.own_room!r} and cannot leave it",
            details={"session": standing.session, "room": standing.own_room},
        )


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
    numbered there), where it is its own parent or stands above that one, where over 10,000 that would get another root with
    it stand below it, and where some stand below it and 10,000 above its new parent.
    """
    root = None if parent is None else root_under(tx, session, parent)
    standing = read_standing(tx, session)
    room_id = standing.room_of(tx, room)
    stay_in_room(standing, room_id)
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
    # No id that begins so sorts behind as many of the last character that there is as an id can have.
    behind = beginning + "\U0010ffff" * NAME_CHARS_MAX
    return [found for (found,) in tx.rows(_BEGINNING, (beginning, behind, rows))]


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

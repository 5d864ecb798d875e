"""Sessions: conversations with an agent, each in a room, some begun by another one."""

from typing import Final

from ..protocol.errors import InvalidRequestError
from ..transaction import Transaction
from .bounds import PAGE_BYTES_DEFAULT, PAGE_ROWS_DEFAULT
from .counters import next_number
from .errors import SessionNotFoundError
from .navigation import Place, advance, move
from .pages import Listing
from .records import Binding, Cursor, Name, Page, PageBytes, PageRows, Session, Status
from .rooms import require_room
from .schema import store
from .vocabulary import IDLE

_COLUMNS = (
    "number, id, room_id, parent_id, root_id, status, runtime_binding, first_preview, activity_ms, created_ms"
)
_ONE = (
    "select number, id, room_id, parent_id, root_id, status, runtime_binding, first_preview, activity_ms, created_ms"
    " from conversation_sessions where id = ?"
)
_INSERT = (
    "insert into conversation_sessions(number, id, room_id, parent_id, root_id, status, runtime_binding,"
    " first_preview, activity_ms, created_ms) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
# What ingest knows of a runtime never takes the place of what is stored.
_TOUCH = (
    "update conversation_sessions set status = coalesce(?, status),"
    " runtime_binding = coalesce(runtime_binding, ?), first_preview = coalesce(first_preview, ?),"
    " activity_ms = case when activity_ms < ? then ? else activity_ms end where id = ?"
)
_CHANGE = (
    "update conversation_sessions set parent_id = ?, root_id = ?, status = ?, runtime_binding = ?,"
    " activity_ms = case when activity_ms < ? then ? else activity_ms end where id = ?"
)
_TEXTS = "id, room_id, parent_id, root_id, status, runtime_binding, first_preview"
_ALL: Final = Listing("conversation_sessions", "number", _COLUMNS, _TEXTS, Session)
_OF_ROOM: Final = Listing("conversation_sessions", "number", _COLUMNS, _TEXTS, Session, "room_id")


def find_session(tx: Transaction, session: str) -> Session | None:
    """The session with this id, or None."""
    rows = tx.query(_ONE, (session,)).rows
    return Session(*rows[0]) if rows else None


def touch(
    tx: Transaction,
    session: str,
    place: Place,
    room: str,
    activity_ms: int,
    *,
    status: str | None = None,
    first_preview: str = "",
    runtime_binding: str | None = None,
) -> None:
    """Note an event in the row of its session, which is made where there is none, in `room`."""
    values = (status, runtime_binding, first_preview or None, activity_ms, activity_ms, session)
    if tx.execute(_TOUCH, values).rows_changed:
        return
    _insert(
        tx,
        Session(
            next_number(tx, "sessions"),
            session,
            room,
            None,
            session,
            status or IDLE,
            runtime_binding,
            first_preview or None,
            activity_ms,
            tx.now_ms(),
        ),
    )
    if place.room != room:
        move(tx, session, room)


def _insert(tx: Transaction, made: Session) -> None:
    tx.execute(
        _INSERT,
        (
            made.number,
            made.id,
            made.room,
            made.parent,
            made.root,
            made.status,
            made.runtime_binding,
            made.first_preview,
            made.activity_ms,
            made.created_ms,
        ),
    )


@store.write
def upsert_session(
    tx: Transaction,
    session: Name,
    room: Name | None = None,
    parent: Name | None = None,
    status: Status | None = None,
    runtime_binding: Binding | None = None,
) -> Session:
    """Make a session, or change what is given of one; None leaves it as it is.

    A new session is `idle` and stands in the default room unless it is told otherwise. Its root is that of its
    `parent`, or that one itself where it is not stored. Raises `RoomNotFoundError`, and `InvalidRequestError` where a
    session is its own parent or stands in another room: its messages are numbered there.
    """
    if parent == session:
        raise InvalidRequestError(f"the session {session!r} cannot be its own parent")
    if room is not None:
        require_room(tx, room)
    now = tx.now_ms()
    found = find_session(tx, session)
    if found is not None and room not in (None, found.room):
        raise InvalidRequestError(
            f"the session {session!r} stands in the room {found.room!r} and cannot leave it"
        )
    place = advance(tx, session, room, now, events=0, status=status)
    root = session if found is None else found.root
    if parent is not None:
        above = find_session(tx, parent)
        root = parent if above is None else above.root
    if found is None:
        made = Session(
            next_number(tx, "sessions"),
            session,
            room or place.room,
            parent,
            root,
            status or IDLE,
            runtime_binding,
            None,
            now,
            now,
        )
        _insert(tx, made)
    else:
        made = Session(
            found.number,
            session,
            found.room,
            parent or found.parent,
            root,
            status or found.status,
            found.runtime_binding if runtime_binding is None else runtime_binding,
            found.first_preview,
            max(now, found.activity_ms),
            found.created_ms,
        )
        tx.execute(_CHANGE, (made.parent, made.root, made.status, made.runtime_binding, now, now, session))
    if place.room != made.room:
        move(tx, session, made.room)
    return made


@store.write
def set_session_status(tx: Transaction, session: Name, status: Status) -> Session:
    """Set the status of a session, in its row and in its navigation. Raises `SessionNotFoundError`."""
    if find_session(tx, session) is None:
        raise SessionNotFoundError(f"there is no session {session!r}", details={"session": session})
    return upsert_session.handler(tx, session, status=status)


@store.read
def session(tx: Transaction, session: Name) -> Session | None:
    """One session, or None."""
    return find_session(tx, session)


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

"""Rooms: what sessions and messages belong to."""

from typing import Any, Final

from ..transaction import Transaction
from .bounds import PAGE_BYTES_DEFAULT, PAGE_ROWS_DEFAULT
from .errors import RoomNotFoundError
from .pages import Listing
from .records import Cursor, Label, Name, Page, PageBytes, PageRows, Room, Time
from .schema import store

_COLUMNS: Final = (
    "number, id, title, is_default,"
    " coalesce((select max(m.number) from conversation_messages m where m.room_id = conversation_rooms.id), 0),"
    " created_ms, archived_ms"
)
_ONE: Final = f"select {_COLUMNS} from conversation_rooms where id = ?"  # noqa: S608 - of constants
_DEFAULT: Final = f"select {_COLUMNS} from conversation_rooms where is_default = 1"  # noqa: S608 - of constants
_LAST_NUMBER: Final = "select max(number) from conversation_rooms"
_INSERT: Final = (
    "insert into conversation_rooms(number, id, title, is_default, created_ms, archived_ms)"
    " values (?, ?, ?, ?, ?, ?)"
)
_ARCHIVE = "update conversation_rooms set archived_ms = ? where id = ? and archived_ms is null"


def _room(row: tuple[Any, ...]) -> Room:
    number, id_, title, is_default, *rest = row
    return Room(number, id_, title, bool(is_default), *rest)


_ROOMS = Listing("conversation_rooms", "number", _COLUMNS, "id, title", _room)


def find_room(tx: Transaction, room: str) -> Room | None:
    """The room with this id, or None."""
    rows = tx.rows(_ONE, (room,))
    return _room(rows[0]) if rows else None


def require_room(tx: Transaction, room: str) -> Room:
    """The room with this id; `RoomNotFoundError` where there is none."""
    found = find_room(tx, room)
    if found is None:
        raise not_found(room)
    return found


def find_default_room(tx: Transaction) -> Room | None:
    """The default room where there is one already."""
    rows = tx.rows(_DEFAULT)
    return _room(rows[0]) if rows else None


def default_room(tx: Transaction) -> Room:
    """The default room, made now where there is none yet."""
    return find_default_room(tx) or make_room(tx, tx.new_id(), "", is_default=True)


def not_found(room: str) -> RoomNotFoundError:
    """The error of a room that does not exist."""
    return RoomNotFoundError(
        f"there is no room {room!r}; create it, or name none to use the default room", details={"room": room}
    )


def make_room(
    tx: Transaction,
    room: str,
    title: str,
    *,
    is_default: bool,
    created_ms: int | None = None,
    archived_ms: int | None = None,
) -> Room:
    """Add a room that is known not to be there; made now where no time is told."""
    made_ms = tx.now_ms() if created_ms is None else created_ms
    made = Room((tx.scalar(_LAST_NUMBER) or 0) + 1, room, title, is_default, 0, made_ms, archived_ms)
    tx.execute(_INSERT, (made.number, made.id, made.title, int(is_default), made_ms, archived_ms))
    return made


@store.write
def create_room(tx: Transaction, room: Name, title: Label = "") -> Room:
    """Make a room, or return the one that has this id already, its title as it is."""
    return find_room(tx, room) or make_room(tx, room, title, is_default=False)


@store.write
def restore_room(
    tx: Transaction,
    room: Name,
    title: Label = "",
    *,
    is_default: bool = False,
    created_ms: Time | None = None,
    archived_ms: Time | None = None,
) -> Room:
    """Make a room as it was elsewhere, unless one has this id: that one is returned as it is.

    With `is_default` it becomes the default room where there is none yet. Times are in milliseconds since 1970 in UTC;
    `created_ms` is now where it is not told.
    """
    found = find_room(tx, room)
    if found is not None:
        return found
    is_first = is_default and find_default_room(tx) is None
    return make_room(tx, room, title, is_default=is_first, created_ms=created_ms, archived_ms=archived_ms)


@store.write
def resolve_room(tx: Transaction, room: Name | None = None, required: bool = False) -> Room:
    """The room with this id, else the default room, which is made at the first time that it is needed.

    With `required` a room that is not named or does not exist is a `RoomNotFoundError`.
    """
    found = None if room is None else find_room(tx, room)
    if found is not None:
        return found
    if required:
        raise not_found(room or "")
    return default_room(tx)


@store.write
def archive_room(tx: Transaction, room: Name) -> Room:
    """Archive a room: `admit` takes nothing more for it. One that is archived keeps its time.

    Raises `RoomNotFoundError`.
    """
    tx.execute(_ARCHIVE, (tx.now_ms(), room))
    return require_room(tx, room)


@store.read
def room(tx: Transaction, room: Name) -> Room | None:
    """One room, or None."""
    return find_room(tx, room)


@store.read
def rooms(
    tx: Transaction,
    after: Cursor = 0,
    page_rows: PageRows = PAGE_ROWS_DEFAULT,
    page_bytes: PageBytes = PAGE_BYTES_DEFAULT,
    newest_first: bool = False,
) -> Page[Room]:
    """A page of rooms in the order they were made; `after` is the last page's cursor."""
    return _ROOMS.page(tx, after, page_rows, page_bytes, newest_first=newest_first)

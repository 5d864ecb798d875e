"""Rooms and sessions as they stood in another store: made as they were, and left alone where they are there."""

from typing import Final

from ..transaction import Transaction
from .records import Binding, Label, Name, Preview, Room, Status, Time
from .rooms import find_default_room, find_room, make_room, require_room
from .schema import store
from .sessions import check_parent, find_session
from .standing import Noted, read_standing

_COMPLETE: Final = (
    "update conversation_sessions set parent_id = ?, root_id = ?, runtime_binding = ?, created_ms = ?"
    " where number = ?"
)


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
def restore_session(
    tx: Transaction,
    session: Name,
    room: Name,
    *,
    parent: Name | None = None,
    root: Name | None = None,
    status: Status | None = None,
    runtime_binding: Binding | None = None,
    first_preview: Preview | None = None,
    created_ms: Time | None = None,
    activity_ms: Time | None = None,
) -> bool:
    """Make a session as it was elsewhere, unless it is there, and say whether it was made.

    Its events come later and change it as events do. Times are in milliseconds since 1970 in UTC, now where they are
    not told. Raises `RoomNotFoundError`, `InvalidRequestError` where a session is its own parent.
    """
    check_parent(session, parent)
    if find_session(tx, session) is not None:
        return False
    standing = read_standing(tx, session)
    room_id = require_room(tx, room).id
    now = tx.now_ms()
    active_ms = now if activity_ms is None else activity_ms
    standing.save(tx, room_id, active_ms, status, "", Noted(status, first_preview or ""))
    made_ms = active_ms if created_ms is None else created_ms
    tx.execute(_COMPLETE, (parent, root or parent or session, runtime_binding, made_ms, standing.number))
    return True

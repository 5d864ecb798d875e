"""Sessions as they are in another store: made where they are missing, and left alone where they went on here."""

from typing import Final, NamedTuple

import msgspec

from ..transaction import Transaction
from .records import Binding, Cursor, Name, Preview, Status, Time
from .rooms import require_room
from .schema import store
from .sessions import find_session, move_below, root_under, stay_in_room
from .standing import Noted, read_standing

_ADOPT: Final = "update conversation_sessions set parent_id = ?, root_id = ? where number = ?"
_FOUND: Final = (
    "select room_id, parent_id, root_id, status, runtime_binding, first_preview, activity_ms, created_ms, shown_status,"
    " shown_preview, shown_activity_ms, (select stream_id from conversation_events e where e.session_id = s.id and"
    " e.sequence = s.last_sequence) from conversation_sessions s where id = ?"
)
_SET: Final = (
    "update conversation_sessions set parent_id = ?, root_id = ?, status = ?, runtime_binding = ?,"
    " first_preview = ?, activity_ms = ?, created_ms = ?, shown_status = ?, shown_preview = ?, shown_activity_ms = ?"
    " where number = ?"
)
_SHOW: Final = "update conversation_sessions set shown_status = ?, shown_preview = ?, shown_activity_ms = ? where number = ?"


class Shown(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What navigation shows of a session; fields as of `Navigation`."""

    status: Status
    preview: Preview
    activity_ms: Time


class Made(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is stored of a session that was made; fields as of `Session`."""

    parent: Name | None
    root: Name
    status: Status
    runtime_binding: Binding | None
    first_preview: Preview | None
    activity_ms: Time
    created_ms: Time


@store.write
def restore_session(
    tx: Transaction,
    session: Name,
    room: Name,
    *,
    parent: Name | None = None,
    root: Name | None = None,
    created_ms: Time | None = None,
) -> bool:
    """Make a session that was begun elsewhere, unless it is there, and say whether it was made.

    Its events come later and change it as events do; `restore_session_state` tells its state behind them. `created_ms`
    is in milliseconds since 1970 in UTC, now where it is not told. Raises `RoomNotFoundError`, and
    `InvalidRequestError` for a parent that `upsert_session` refuses.
    """
    if find_session(tx, session) is not None:
        return False
    own_root = _root_of(tx, session, parent, root)
    standing = read_standing(tx, session)
    room_id = require_room(tx, room).id
    now = tx.now_ms() if created_ms is None else created_ms
    standing.save(tx, room_id, now, None, "", Noted())
    tx.execute(_ADOPT, (parent, own_root, standing.number))
    move_below(tx, session, session, own_root)
    return True


@store.write
def restore_session_state(
    tx: Transaction, session: Name, room: Name, last: Cursor, shown: Shown, made: Made | None = None
) -> bool:
    """Give a session the state that it has in another store, unless it went on here; whether that changed anything.

    `last` is the stream id, here, of the last event that both have, 0 for none; `room` is the session's. Where
    another event is its last one here, or its activity here is later than told, what happened here is newer and stays.
    `made` is None for a session that only output without a room named. Raises `RoomNotFoundError`, and
    `InvalidRequestError` for a room or a parent that `upsert_session` refuses.
    """
    require_room(tx, room)
    if made is not None:
        made = msgspec.structs.replace(made, root=_root_of(tx, session, made.parent, made.root))
    rows = tx.rows(_FOUND, (session,))
    found = _Found(*rows[0]) if rows else None
    if found is None and last:
        # The event that is named is another session's.
        return False
    if found is not None and (
        (found.last_stream_id or 0) != last
        or found.is_later(shown, made)
        or found.stands_so(room, shown, made)
    ):
        return False
    standing = read_standing(tx, session)
    stay_in_room(standing, room)
    standing.save(tx, room, shown.activity_ms, None, "", None if made is None else Noted())
    show = msgspec.structs.astuple(shown)
    if made is None:
        tx.execute(_SHOW, (*show, standing.number))
        return True
    tx.execute(_SET, (*msgspec.structs.astuple(made), *show, standing.number))
    move_below(tx, session, (found and found.root) or session, made.root)
    return True


class _Found(NamedTuple):
    """A session as it stands here, by the columns of `_FOUND`; `root` and what belongs to it is None where none made it."""

    room: str
    parent: str | None
    root: str | None
    status: str | None
    runtime_binding: str | None
    first_preview: str | None
    activity_ms: int | None
    created_ms: int | None
    shown_status: str
    shown_preview: str
    shown_activity_ms: int
    last_stream_id: int | None

    def is_later(self, shown: Shown, made: Made | None) -> bool:
        """Whether it was active later than is told."""
        if self.activity_ms is not None and (made is None or self.activity_ms > made.activity_ms):
            return True
        return self.shown_activity_ms > shown.activity_ms

    def stands_so(self, room: str, shown: Shown, made: Made | None) -> bool:
        """Whether it stands as is told already."""
        told = msgspec.structs.astuple(shown)
        if made is not None:
            told = (room, *msgspec.structs.astuple(made), *told)
        return self[-1 - len(told) : -1] == told


def _root_of(tx: Transaction, session: str, parent: str | None, told: str | None) -> str:
    """The root of a session: that of its parent where this is stored here, else what is told."""
    return session if parent is None else root_under(tx, session, parent, told)

"""Where a session stands before its next event: read at once, moved on in memory, written back with one statement."""

from typing import Final

import msgspec

from ..transaction import Transaction
from .counters import next_number, set_number
from .rooms import default_room, not_found, set_last_message
from .vocabulary import IDLE

# One row always, whatever is there of it.
_LOOK: Final = (
    "select s.number, s.room_id, s.session_number, s.status, s.runtime_binding, s.first_preview, s.activity_ms,"
    " s.created_ms, s.shown_status, s.shown_preview, s.shown_activity_ms, s.last_sequence, s.last_message,"
    " s.tools_finished, s.largest_output_tokens, s.largest_output_basis, r.id, r.number, r.archived_ms,"
    " r.last_message, c.value, e.stream_id"
    " from conversation_counters c"
    " left join conversation_sessions s on s.id = ?"
    " left join conversation_rooms r on r.id = coalesce(?, s.room_id)"
    " left join conversation_events e on e.idempotency_key = ?"
    " where c.name = 'events'"
)
_INSERT: Final = (
    "insert into conversation_sessions(id, room_id, session_number, root_id, status, runtime_binding, first_preview,"
    " activity_ms, created_ms, shown_status, shown_preview, shown_activity_ms, last_sequence, last_message,"
    " tools_finished, largest_output_tokens, largest_output_basis, number)"
    " values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_UPDATE: Final = (
    "update conversation_sessions set shown_status = ?, shown_preview = ?, shown_activity_ms = ?, last_sequence = ?,"
    " last_message = ?, tools_finished = ?, largest_output_tokens = ?, largest_output_basis = ?, status = ?,"
    " runtime_binding = ?, first_preview = ?, activity_ms = ? where number = ?"
)
_BEGIN: Final = (
    "update conversation_sessions set session_number = ?, room_id = ?, root_id = ?, created_ms = ? where number = ?"
)


class Standing(msgspec.Struct):
    """A session, its room and the log as they stand; the columns of the look, in its order.

    `number` is None for a session that was never named, `session_number` where only output without a room named it.
    `room` and what follows are those of the next event's room; `repeated` is the event that has its key already.
    """

    session: str
    number: int | None
    own_room: str | None
    session_number: int | None
    status: str | None
    runtime_binding: str | None
    first_preview: str | None
    activity_ms: int | None
    created_ms: int | None
    shown_status: str | None
    shown_preview: str | None
    shown_activity_ms: int | None
    last_sequence: int | None
    last_message: int | None
    tools_finished: int | None
    largest_output_tokens: str | None
    largest_output_basis: str | None
    room: str | None
    room_number: int | None
    room_archived_ms: int | None
    room_last_message: int | None
    last_stream_id: int
    repeated: int | None

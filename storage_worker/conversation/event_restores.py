"""Events as they stand in another store: each stored through what first made it, with the thread of its message."""

from typing import Any, Final

import msgspec

from ..protocol.errors import InvalidRequestError
from ..transaction import Transaction
from .arrivals import UserMessage, store_message
from .bounds import LOOK_AHEAD_COUNT_MAX
from .canonical import NO_CONTENT, Content, attributes_json, text_content
from .events import Draft, append_once, arrival_of, find_by_key
from .identity import collision_key, event_key, key_of_message
from .ingest import Output, draft_output, provenance_json, store_output
from .messages import message_of
from .pages import NUMBER_PARAMETER, TEXT_PARAMETER
from .records import (
    JSON,
    Body,
    Cursor,
    Label,
    MessagePlace,
    Name,
    Number,
    PayloadRef,
    Preview,
    Provenance,
    Sender,
    Time,
    decode_object,
)
from .rooms import require_room
from .schema import store
from .standing import Noted, read_standing
from .vocabulary import COLLISION, body_field

_KEYLESS: Final = (
    f"select * from conversation_events where session_id = {TEXT_PARAMETER} and created_ms = {NUMBER_PARAMETER}"  # noqa: S608 - of constants
    f" and sequence > {NUMBER_PARAMETER} and idempotency_key is null and client_transaction_id is null order by sequence"
    f" limit {LOOK_AHEAD_COUNT_MAX}"
)
_ALIKE: Final = (
    f"select stream_id from ({_KEYLESS}) as e where type = ? and room_id = ? and actor = ? and aggregate_kind = ?"  # noqa: S608 - of constants
    " and aggregate_id = ? and version = ? and attributes = ? and retention_class = ? and coalesce(content_type, '') = ?"
    " and coalesce(body, '') = ? and coalesce(payload_sha256, '') = ? and coalesce(provenance, '') = ?"
    " and not exists (select 1 from conversation_messages m where m.stream_id = e.stream_id"
    " and (m.sender_label <> ? or m.source is not ? or m.agent_key is not ?)) order by sequence limit 1"
)
_SEQUENCE: Final = "select sequence from conversation_events where stream_id = ?"
_AT: Final = "select (select stream_id from conversation_events where session_id = ? and sequence = ?)"
_NUMBER: Final = "select number from conversation_messages where stream_id = ? and id = ? and room_id = ? and created_ms = ?"
_BEGIN: Final = "update conversation_messages set thread_root = ? where stream_id = ? and thread_root is null"


class EventCopy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An event of another store; fields as of `Event`.

    Attributes are texts, since a value would be nested deeper here than where it arrived. `provenance` is that of an
    output, `sender` that of a message. `role` and `turn_id` are those of a user's message; without a role it is none.
    """

    session: Name
    room: Name
    room_named: bool
    actor: Label
    type: Name
    event_id: Name | None
    aggregate_kind: Name
    aggregate_id: Name
    version: Cursor
    client_transaction_id: Name | None
    idempotency_key: Name | None
    provenance: Provenance | None
    attributes_json: str
    added_json: str | None
    content_type: Name | None
    body: Body | None
    preview: Preview
    retention_class: Name
    created_ms: Time
    sender: Sender
    role: Name | None
    turn_id: Name | None

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes, decoded; `InvalidRequestError` where they are no JSON object."""
        return _object_of(self.attributes_json)

    @property
    def canonical_added(self) -> str | None:
        """The canonical JSON of what the other store added; errors as of `attributes`."""
        return None if self.added_json is None else attributes_json(_object_of(self.added_json))


class Restored(msgspec.Struct, frozen=True, array_like=True):
    """Where a copied event stands.

    `created` is false where it stood there before. `message_number` is that of its message in the room, None without
    one, and `thread_root` that of the message which its thread begins with.
    """

    stream_id: int
    sequence: int
    created: bool
    message_number: int | None
    thread_root: int | None


@store.write
def restore_event(
    tx: Transaction, copied: EventCopy, thread_root: Number | None = None, after: Cursor = 0
) -> Restored:
    """Store an event of another store as the operation that made it would, once.

    It is known again as that operation knows it. One that has no key is known where it says the same at the same time
    as one behind the sequence `after`, which is that of the event before it, here: one of the first 1,000 without a key
    that the session has in that millisecond behind it, so that it is stored again where it is a later one.
    `thread_root` is the number, here, of the message that the message's thread begins with; one that is there and has
    none gets it.

    Raises `OutputIdentityCollisionError` and `EventConflictError` where another event has its key,
    `RoomNotFoundError`, `PayloadNotFoundError`, and what else the operation raises.
    """
    key = _diagnostic_key(copied)
    # Its key says which collision it is; what else it says, such as where the output came from, may be another.
    told = None if key is None else find_by_key(tx, key)
    if told is not None:
        return _restored(tx, told.stream_id, False, thread_root)
    if copied.event_id is None and copied.client_transaction_id is None and key is None:
        found = _find_alike(tx, copied, after)
        if found is not None:
            return _restored(tx, found, False, thread_root)
    if copied.provenance is not None:
        output = store_output(tx, _output_of(copied, copied.provenance, thread_root))
        return _restored(tx, output.stream_id, not output.duplicate, thread_root)
    if copied.role is not None:
        standing, room = read_standing(tx, copied.session), require_room(tx, copied.room)
        message = store_message(tx, _user_message_of(copied, copied.role, thread_root), standing, room.id)
        return _restored(tx, message.stream_id, message.created, thread_root)
    draft = _draft_of(copied, key)
    # A diagnostic is none of its session's activity.
    noted = Noted() if key is None else None
    appended = append_once(tx, draft, arrival_of(draft, copied.attributes, copied.body), copied.room, noted)
    return _restored(tx, appended.stream_id, appended.created, thread_root)


def _restored(tx: Transaction, stream_id: int, is_new: bool, thread_root: int | None) -> Restored:
    """Where an event stands; its message begins its thread where it did not yet."""
    said = message_of(tx, stream_id)
    root = said and said.thread_root
    if said is not None and root is None and thread_root is not None:
        tx.execute(_BEGIN, (thread_root, stream_id))
        root = thread_root
    return Restored(stream_id, tx.scalar(_SEQUENCE, (stream_id,)), is_new, said and said.number, root)


def _diagnostic_key(event: EventCopy) -> str | None:
    """The key of the diagnostic that an event is, or None where it is none that the store wrote."""
    incoming = event.attributes.get("incoming")
    if event.type != COLLISION or event.idempotency_key is None or not isinstance(incoming, dict):
        return None
    told = (event.attributes.get("output_key"), incoming.get("fingerprint"))
    # Not taken as it is told: a file that was made by others must not take another event's key.
    key = collision_key(event.session, str(told[0]), str(told[1]))
    return key if key == event.idempotency_key else None


def _find_alike(tx: Transaction, event: EventCopy, after: int) -> int | None:
    """The stream id of the first event without a key behind a sequence that says the same at the same time, or None."""
    body = event.body
    values = (
        event.session,
        event.created_ms,
        after,
        event.type,
        event.room,
        event.actor,
        event.aggregate_kind,
        event.aggregate_id,
        event.version,
        attributes_json(event.attributes),
        event.retention_class,
        event.content_type or "",
        body if isinstance(body, str) else "",
        body.sha256 if isinstance(body, PayloadRef) else "",
        "" if event.provenance is None else provenance_json(event.provenance),
        *msgspec.structs.astuple(event.sender),
    )
    rows = tx.rows(_ALIKE, values)
    return int(rows[0][0]) if rows else None


def _output_of(event: EventCopy, provenance: Provenance, thread_root: int | None) -> Output:
    fields: dict[str, Any] = {**event.attributes, "type": event.type}
    if event.event_id is not None:
        fields["event_id"] = event.event_id
    ref = event.body if isinstance(event.body, PayloadRef) else None
    if isinstance(event.body, str):
        fields[body_field(event.type)] = _value_of(event.body, event.content_type)
    draft, arrival = draft_output(
        event.session,
        fields,
        ref,
        actor=event.actor,
        room_named=event.room_named,
        provenance=provenance,
        preview=event.preview,
        retention_class=event.retention_class,
        created_ms=event.created_ms,
        added=event.canonical_added,
    )
    return Output(draft, arrival, event.room, event.sender, thread_root, None)


def _object_of(text: str) -> dict[str, Any]:
    try:
        return decode_object(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequestError(f"the attributes are no JSON object: {error}") from error


def _value_of(body: str, content_type: str | None) -> object:
    """What the field of an output says that its body is."""
    if content_type != JSON:
        return body
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequestError(f"the body is no JSON: {error}") from error


def _user_message_of(event: EventCopy, role: str, thread_root: int | None) -> UserMessage:
    return UserMessage(
        session=event.session,
        text="" if event.body is None else event.body,
        preview=event.preview,
        actor=event.actor,
        event_id=event.event_id,
        turn_id=event.turn_id,
        client_transaction_id=event.client_transaction_id,
        role=role,
        sender=event.sender,
        thread_root=thread_root,
        attributes=event.attributes,
        runtime_binding=None,
        retention_class=event.retention_class,
        created_ms=event.created_ms,
        room_named=event.room_named,
        is_copy=True,
    )


def _draft_of(event: EventCopy, diagnostic_key: str | None) -> Draft:
    own_key = None if event.event_id is None else event_key(event.session, event.event_id)
    content: Content = NO_CONTENT if event.body is None else text_content(event.body, event.preview)
    return Draft(
        session=event.session,
        actor=event.actor,
        type=event.type,
        attributes=attributes_json(event.attributes),
        content=content,
        retention_class=event.retention_class,
        created_ms=event.created_ms,
        room_named=event.room_named,
        event_id=event.event_id,
        key=own_key if diagnostic_key is None else diagnostic_key,
        client_transaction_id=event.client_transaction_id,
        aggregate_kind=event.aggregate_kind,
        aggregate_id=event.aggregate_id,
        version=event.version,
        added=event.canonical_added,
    )


# Threads


@store.read
def find_message(tx: Transaction, room: Name, message: MessagePlace) -> int | None:
    """The number in a room of a message of another store, or None where it is not there."""
    # The id of a message without a key says its place.
    stored = find_by_key(tx, key_of_message(message.id))
    stream_id = stored.stream_id if stored else tx.scalar(_AT, (message.session, message.sequence))
    if stream_id is None:
        return None
    rows = tx.rows(_NUMBER, (stream_id, message.id, room, message.created_ms))
    return int(rows[0][0]) if rows else None


@store.write
def restore_thread(tx: Transaction, stream_id: Number, thread_root: Number) -> bool:
    """Have the message of an event begin its thread with a message of its room, by its number there.

    Says whether it did: a message that has a thread keeps it.
    """
    return bool(tx.execute(_BEGIN, (thread_root, stream_id)).rows_changed)

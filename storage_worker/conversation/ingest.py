"""Output of agents, as it happens and from history: stored once, known again, never overwritten."""

from typing import Any

import msgspec

from ..protocol.errors import InvalidRequestError
from ..transaction import Transaction
from .bounds import NAME_CHARS_MAX, RETENTION_DEFAULT, STATUS_CHARS_MAX
from .canonical import (
    EMPTY_TEXT,
    NO_CONTENT,
    Content,
    attributes_json,
    encode_json,
    json_content,
    text_content,
)
from .compactions import STATISTICS, count_tool, end_compaction
from .diagnostics import refuse_collision
from .events import Draft, find_by_key, read_event, write_event
from .identity import (
    Arrival,
    Comparison,
    Stored,
    compare,
    event_id_of,
    older_keys,
    output_key,
    session_mark,
    take_fingerprint,
)
from .messages import MessageDraft, message_of, write_message
from .navigation import advance
from .observations import observation_of, write_observation
from .records import (
    JSON,
    Attributes,
    Binding,
    Ingested,
    Label,
    Name,
    Number,
    PayloadRef,
    Preview,
    Provenance,
    Sender,
    Time,
)
from .rooms import next_message_number, require_room
from .schema import store
from .sessions import touch
from .vocabulary import COMPLETE, EVENT_TYPES, UNKNOWN, EventType, Fields, execution_phase, text_of

AGENT = Sender(source="agent")
DIRECT = Provenance()


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """An output that came in: what it says, what its type means, and what its caller says about it."""

    session: str
    type: str
    kind: EventType
    arrival: Arrival
    event_id: str | None
    attributes: str
    content: Content
    key: str | None
    room: str | None
    actor: str
    sender: Sender
    thread_root: int | None
    provenance: str
    runtime_binding: str | None
    retention_class: str
    created_ms: int

    @property
    def fields(self) -> Fields:
        """The event's fields as they arrived."""
        return self.arrival.fields

    def record_id(self, letter: str, stream_id: int) -> str:
        """The id of the record that is made of it: the same each time it arrives, as far as it can be known again."""
        return f"{letter}-{self.key or f'{session_mark(self.session)}-{stream_id}'}"


def _type_of(event: Fields) -> str:
    found = event.get("type")
    if type(found) is not str or not 1 <= len(found) <= NAME_CHARS_MAX:
        raise InvalidRequestError(f"an event has a type: a text of 1 to {NAME_CHARS_MAX} characters")
    return found


def _split(
    event: Fields, body_field: str, payload: PayloadRef | None, preview: str
) -> tuple[dict[str, Any], Content]:
    """The attributes of an event, and the content of its body."""
    taken = {"type", body_field}
    if event.get("event_id") is not None:
        taken.add("event_id")
    content = NO_CONTENT
    if payload is not None:
        if body_field in event:
            raise InvalidRequestError(
                f"the event holds its {body_field!r} itself; a payload stands in its place, not beside it"
            )
        content = text_content(payload, preview)
    else:
        body = event.get(body_field)
        if isinstance(body, str):
            content = text_content(body, preview)
        elif isinstance(body, dict | list):
            content = json_content(body, body_field)
        else:
            taken.discard(body_field)
    return {name: value for name, value in event.items() if name not in taken}, content


def _find_again(tx: Transaction, output: Output) -> tuple[Stored, Comparison] | None:
    """The stored event that has the identity of this output, and how they compare."""
    if output.key is None or output.event_id is None:
        return None
    stored = find_by_key(tx, output.key)
    if stored is not None:
        return stored, compare(stored, output.arrival)
    for key in older_keys(output.session, output.type, output.event_id, output.fields):
        stored = find_by_key(tx, key)
        if stored is not None:
            comparison = compare(stored, output.arrival)
            # The older form of the key says nothing of the phase.
            if comparison.is_same or _phase_of(tx, stored) == execution_phase(output.fields):
                return stored, comparison
    return None


def _phase_of(tx: Transaction, stored: Stored) -> str:
    """The phase of a stored execution result."""
    found = read_event(tx, stored.stream_id)
    fields = found.attributes
    if found.content_type == JSON and isinstance(found.body, str):
        fields["result"] = msgspec.json.decode(found.body)
    return execution_phase(fields)


def _write(tx: Transaction, output: Output) -> Ingested:
    """Store an output that was not there before, and what it leaves beside its event."""
    kind, session, now = output.kind, output.session, output.created_ms
    is_message = kind.leaves == "message"
    number = None
    if output.room is not None:
        if is_message:
            number = next_message_number(tx, output.room)
        else:
            require_room(tx, output.room)
    preview = output.content.preview if is_message else ""
    status = kind.session_status
    place = advance(tx, session, output.room, now, messages=int(is_message), preview=preview, status=status)
    room = output.room or place.room
    if is_message and number is None:
        number = next_message_number(tx, room)
    stream_id = write_event(tx, _draft(output, _told(tx, output)), place, room)
    message_id = observation_id = None
    if number is not None:
        message_id = output.record_id("m", stream_id)
        write_message(tx, _message(output), stream_id, message_id, place, room, number)
    elif kind.leaves == "observation":
        observation_id = output.record_id("o", stream_id)
        write_observation(tx, stream_id, observation_id, session, kind, output.fields)
    if output.room is not None:
        binding = output.runtime_binding
        touch(tx, session, place, room, now, status=status, first_preview=preview, runtime_binding=binding)
    return Ingested(
        stream_id,
        False,
        message_id,
        observation_id,
        number,
        now,
        output.event_id or str(stream_id),
        output.type in EVENT_TYPES,
    )


def _told(tx: Transaction, output: Output) -> str:
    """The attributes as they are stored: what the event said, and the statistics of a compaction."""
    if output.type == "tool_execution_finished":
        count_tool(tx, output.session, output.fields)
    elif output.type == "compaction_end":
        statistics = end_compaction(tx, output.session, output.fields)
        if statistics is not None:
            told = msgspec.json.decode(output.attributes, type=dict[str, Any])
            return encode_json({**told, STATISTICS: statistics}).decode()
    return output.attributes


def _draft(output: Output, attributes: str) -> Draft:
    return Draft(
        session=output.session,
        actor=output.actor,
        type=output.type,
        attributes=attributes,
        content=output.content,
        retention_class=output.retention_class,
        created_ms=output.created_ms,
        event_id=output.event_id,
        key=output.key,
        fingerprint=take_fingerprint(output.arrival),
        provenance=output.provenance,
    )


def _message(output: Output) -> MessageDraft:
    content = output.content
    return MessageDraft(
        session=output.session,
        role=text_of(output.fields, "role") or "assistant",
        turn_id=text_of(output.fields, "turn_id"),
        actor=output.actor,
        sender=output.sender,
        thread_root=output.thread_root,
        status=(text_of(output.fields, "status") or COMPLETE)[:STATUS_CHARS_MAX],
        content=EMPTY_TEXT if content is NO_CONTENT else content,
        retention_class=output.retention_class,
        created_ms=output.created_ms,
    )


def _duplicate(tx: Transaction, stored: Stored, type_: str) -> Ingested:
    message_id, number = message_of(tx, stored.stream_id) or (None, None)
    return Ingested(
        stored.stream_id,
        True,
        message_id,
        None if message_id else observation_of(tx, stored.stream_id),
        number,
        stored.created_ms,
        stored.event_id or str(stored.stream_id),
        type_ in EVENT_TYPES,
    )


@store.write
def ingest_output(
    tx: Transaction,
    session: Name,
    event: Attributes,
    payload: PayloadRef | None = None,
    *,
    room: Name | None = None,
    actor: Label = "agent",
    sender: Sender = AGENT,
    thread_root: Number | None = None,
    provenance: Provenance = DIRECT,
    runtime_binding: Binding | None = None,
    preview: Preview = "",
    retention_class: Name = RETENTION_DEFAULT,
    created_ms: Time | None = None,
) -> Ingested:
    """Store one output of an agent, once: its event, its message or observation, statuses and navigation.

    Arguments: `event`, a JSON object with its `type`, its `event_id` (without one it is stored each time) and
    whatever else it says, as it arrived; `payload`, its body (the field `text`, `arguments`, `output`, `result`,
    `error`, `usage`, `summary` or `body`, by its type) where that is over 16 KiB, and the `preview` of that; `room`,
    without which the session's row is left alone; `provenance`, where it comes from; `created_ms`, when it happened,
    in milliseconds since 1970 in UTC, now where it is not told; the rest as for `admit`.

    The same output again changes nothing and returns the first one as a `duplicate`. Raises
    `OutputIdentityCollisionError` where it has other content under the same identity: then a diagnostic event is
    stored. Raises `InvalidRequestError` where the event has no type or its id is no text, `RoomNotFoundError`, and
    `RequestTooLargeError` where body or attributes are over 16 KiB.
    """
    type_ = _type_of(event)
    kind = EVENT_TYPES.get(type_, UNKNOWN)
    arrival = Arrival(event, kind.body, payload)
    rest, content = _split(event, kind.body, payload, preview)
    attributes = attributes_json(rest)
    event_id = event_id_of(event)
    output = Output(
        session=session,
        type=type_,
        kind=kind,
        arrival=arrival,
        event_id=event_id,
        attributes=attributes,
        content=content,
        key=None if event_id is None else output_key(session, type_, event_id, arrival),
        room=room,
        actor=actor,
        sender=sender,
        thread_root=thread_root,
        provenance=encode_json(provenance).decode(),
        runtime_binding=runtime_binding,
        retention_class=retention_class,
        created_ms=tx.now_ms() if created_ms is None else created_ms,
    )
    again = _find_again(tx, output)
    if again is None:
        return _write(tx, output)
    stored, comparison = again
    if not comparison.is_same:
        refuse_collision(tx, stored, comparison, output.type, output.provenance)
    return _duplicate(tx, stored, output.type)

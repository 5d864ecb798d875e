"""Output of agents, as it happens and from history: stored once, known again, never overwritten."""

from typing import Any

import msgspec

from ..protocol.errors import InvalidRequestError
from ..transaction import Transaction
from .bounds import NAME_CHARS_MAX, RETENTION_DEFAULT, STATUS_CHARS_MAX
from .canonical import (
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
    Stored,
    compare,
    event_id_of,
    message_id,
    observation_id,
    older_keys,
    output_key,
    place_key,
    take_fingerprint,
)
from .messages import Voice, message_of, write_message
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
from .schema import store
from .standing import Noted, Standing, read_standing
from .vocabulary import (
    COMPLETE,
    EVENT_TYPES,
    UNKNOWN,
    EventType,
    Fields,
    body_field,
    execution_phase,
    text_of,
)

AGENT = Sender(source="agent")
DIRECT = Provenance()

_COUNTED = ("tool_execution_finished", "compaction_end")


class Output(msgspec.Struct, frozen=True):
    """An output that came in: its event, its content, and what its caller says about it."""

    draft: Draft
    arrival: Arrival
    room: str | None
    sender: Sender
    thread_root: int | None
    runtime_binding: str | None


def draft_output(
    session: str,
    event: Attributes,
    payload: PayloadRef | None,
    *,
    actor: str,
    room_named: bool,
    provenance: Provenance,
    preview: str,
    retention_class: str,
    created_ms: int,
    added: str | None = None,
) -> tuple[Draft, Arrival]:
    """The event of an output, and its content to know it again; `added` are attributes of a copy as of a `Draft`.

    Other arguments and errors are those of `ingest_output`.
    """
    type_ = _type_of(event)
    body = body_field(type_)
    arrival = Arrival(event, body, payload)
    rest, content = _split(event, body, payload, preview)
    event_id = event_id_of(event)
    draft = Draft(
        session=session,
        actor=actor,
        type=type_,
        attributes=attributes_json(rest),
        content=content,
        retention_class=retention_class,
        created_ms=created_ms,
        room_named=room_named,
        event_id=event_id,
        key=None if event_id is None else output_key(session, type_, event_id, arrival),
        fingerprint=take_fingerprint(arrival),
        provenance=provenance_json(provenance),
        added=added,
    )
    return draft, arrival


def provenance_json(provenance: Provenance) -> str:
    """A provenance as it stands in an event."""
    return encode_json(provenance).decode()


def store_output(tx: Transaction, output: Output) -> Ingested:
    """Store an output unless it is there already; results and errors are those of `ingest_output`."""
    draft, arrival = output.draft, output.arrival
    again = _find_older(tx, draft, arrival) if draft.type == "execution_result" else None
    if again is None:
        written = _write(tx, output)
        if written is not None:
            return written
        again = find_by_key(tx, draft.key or "")
        assert again is not None, "an insert found the key taken"
    comparison = compare(again, arrival)
    if not comparison.is_same:
        refuse_collision(tx, again, comparison, draft)
    return _duplicate(tx, again, EVENT_TYPES.get(draft.type, UNKNOWN))


def _type_of(event: Fields) -> str:
    found = event.get("type")
    if type(found) is not str or not 1 <= len(found) <= NAME_CHARS_MAX:
        raise InvalidRequestError(f"an event has a type: a text of 1 to {NAME_CHARS_MAX} characters")
    return found


def _reference_in(body: object) -> PayloadRef | None:
    """The reference that stands in the place of an event's body, of which only its fields cross the pipe."""
    if type(body) is not list or len(body) != len(PayloadRef.__struct_fields__):
        return None
    try:
        return msgspec.convert(body, PayloadRef)
    except msgspec.ValidationError:
        return None


def _split(
    event: Fields, body_name: str, payload: PayloadRef | None, preview: str
) -> tuple[dict[str, Any], Content]:
    """The attributes of an event, and the content of its body."""
    rest = dict(event)
    del rest["type"]
    if rest.get("event_id") is not None:
        del rest["event_id"]
    if payload is not None:
        if body_name in rest:
            raise InvalidRequestError(
                f"the event holds its {body_name!r} itself; a payload stands in its place, not beside it"
            )
        return rest, text_content(payload, preview)
    body = rest.get(body_name)
    if isinstance(body, str):
        content = text_content(body, preview)
    elif isinstance(body, dict | list):
        content = json_content(body, body_name)
    else:
        return rest, NO_CONTENT
    del rest[body_name]
    return rest, content


def _find_older(tx: Transaction, draft: Draft, arrival: Arrival) -> Stored | None:
    """The event that an older form of the key knows as this output, or None.

    That form says nothing of the phase: it is this output where the phase is the same, or the fingerprint.
    """
    if draft.event_id is None:
        return None
    for key in older_keys(draft.session, draft.type, draft.event_id, arrival.fields):
        stored = find_by_key(tx, key)
        if stored is not None and (
            _phase_of(tx, stored) == execution_phase(arrival.fields) or compare(stored, arrival).is_same
        ):
            return stored
    return None


def _phase_of(tx: Transaction, stored: Stored) -> str:
    """The phase of a stored execution result."""
    found = read_event(tx, stored.stream_id)
    fields = found.attributes
    if found.content_type == JSON and isinstance(found.body, str):
        fields["result"] = msgspec.json.decode(found.body)
    return execution_phase(fields)


def _write(tx: Transaction, output: Output) -> Ingested | None:
    """Store an output, and what it leaves beside its event; None where its key is there already."""
    draft, fields = output.draft, output.arrival.fields
    kind = EVENT_TYPES.get(draft.type, UNKNOWN)
    standing = read_standing(tx, draft.session)
    room = standing.room_of(tx, output.room)
    if draft.type in _COUNTED:
        draft = _counted(standing, draft, fields)
    stream_id = write_event(tx, draft, standing, room)
    if stream_id is None:
        return None
    key = draft.key or place_key(draft.session, standing.sequence)
    message = observation = number = None
    preview = ""
    if kind.leaves == "message":
        message, preview = message_id(key), draft.content.preview
        number = write_message(tx, draft, _voice(output, fields), standing, room, message)
    elif kind.leaves == "observation":
        observation = observation_id(key)
        write_observation(tx, stream_id, observation, draft.session, kind, fields)
    noted = None
    if draft.room_named:
        noted = Noted(kind.session_status, preview, output.runtime_binding)
    standing.save(tx, room, draft.created_ms, kind.session_status, preview, noted)
    return Ingested(
        stream_id,
        False,
        message,
        observation,
        number,
        draft.created_ms,
        draft.event_id or str(stream_id),
        kind is not UNKNOWN,
    )


def _counted(standing: Standing, draft: Draft, fields: Fields) -> Draft:
    """Count a tool that finished; give a compaction that ended its statistics, unless a copy brings them along."""
    if draft.type == "tool_execution_finished":
        count_tool(standing, fields)
        return draft
    statistics = end_compaction(standing, fields)
    if statistics is None or draft.added is not None:
        return draft
    return msgspec.structs.replace(draft, added=encode_json({STATISTICS: statistics}).decode())


def _voice(output: Output, fields: Fields) -> Voice:
    return Voice(
        text_of(fields, "role") or "assistant",
        text_of(fields, "turn_id"),
        output.sender,
        output.thread_root,
        (text_of(fields, "status") or COMPLETE)[:STATUS_CHARS_MAX],
    )


def _duplicate(tx: Transaction, stored: Stored, kind: EventType) -> Ingested:
    found = message_of(tx, stored.stream_id)
    return Ingested(
        stored.stream_id,
        True,
        found and found.id,
        None if found else observation_of(tx, stored.stream_id),
        found and found.number,
        stored.created_ms,
        stored.event_id or str(stored.stream_id),
        kind is not UNKNOWN,
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
    `error`, `usage`, `summary` or `body`, by its type) where that is over 16 KiB, and the `preview` of that: the
    reference may also stand in that field itself, as `prepare_text` gives it; `room`, without which the session's row
    is left alone; `provenance`, where it comes from; `created_ms`, when it happened, in milliseconds since 1970 in UTC,
    now where it is not told; the rest as for `admit`. README.md has a table of the types and their fields.

    The same output again changes nothing and returns the first one as a `duplicate`. Raises
    `OutputIdentityCollisionError` where it has other content under the same identity: then a diagnostic event is
    stored. Raises `InvalidRequestError` where the event has no type or its id is no text, `RoomNotFoundError`, and
    `RequestTooLargeError` where body or attributes are over 16 KiB.
    """
    name = body_field(_type_of(event))
    reference = _reference_in(event.get(name))
    if reference is not None:
        if payload is not None:
            raise InvalidRequestError(
                "the event holds a reference itself, and another one is given as its payload"
            )
        payload = reference
        event = {field: value for field, value in event.items() if field != name}
    draft, arrival = draft_output(
        session,
        event,
        payload,
        actor=actor,
        room_named=room is not None,
        provenance=provenance,
        preview=preview,
        retention_class=retention_class,
        created_ms=tx.now_ms() if created_ms is None else created_ms,
    )
    return store_output(tx, Output(draft, arrival, room, sender, thread_root, runtime_binding))

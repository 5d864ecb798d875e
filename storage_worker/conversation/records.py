"""What the store takes and gives: records, the references to bodies in the payload store, pages and results."""

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from .bounds import (
    BINDING_CHARS_MAX,
    NAME_CHARS_MAX,
    PAGE_BYTES_MAX,
    PAGE_ROWS_MAX,
    PREVIEW_BYTES_MAX,
    STATUS_CHARS_MAX,
    TIME_MS_MAX,
)
from .vocabulary import body_field

T = TypeVar("T")

TEXT = "text/plain"
JSON = "application/json"

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]
"""An id, a type, a class: never empty."""

Label = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
"""What may be empty."""

Status = Annotated[str, msgspec.Meta(min_length=1, max_length=STATUS_CHARS_MAX)]
Binding = Annotated[str, msgspec.Meta(max_length=BINDING_CHARS_MAX)]
Preview = Annotated[str, msgspec.Meta(max_length=PREVIEW_BYTES_MAX)]
Time = Annotated[int, msgspec.Meta(ge=0, le=TIME_MS_MAX)]
"""Milliseconds since 1970 in UTC, up to the end of the year 9999."""

Number = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Cursor = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
PageRows = Annotated[int, msgspec.Meta(ge=1, le=PAGE_ROWS_MAX)]
PageBytes = Annotated[int, msgspec.Meta(ge=1, le=PAGE_BYTES_MAX)]

Attributes = dict[str, Any]
"""A JSON object: texts, finite numbers of at most 64 bit, true, false, null, lists and objects with text keys."""

decode_object = msgspec.json.Decoder(dict[str, Any]).decode
"""The JSON object that a text says."""


class PayloadRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A body in the payload store.

    `sha256`, `content_type` and `retention_class` are its identity; `bytes` is the size of the body, `stored_bytes`
    that of its file, `encoding` how the file holds it.
    """

    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    content_type: Name
    retention_class: Name
    bytes: Cursor
    stored_bytes: Cursor
    encoding: Literal["identity", "gzip"]


Body = str | PayloadRef
"""A text of at most 16 KiB, or a reference to the payload store."""


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an output came here: who made it, by which projection of its source, in which phase."""

    producer: Label = "direct-ingest"
    projection: Label = "product-history"
    phase: Label = "direct"


class Sender(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Whose message it is, as shown to people and as known to agents.

    `label` is the sender's text, `source` where the message comes from (`agent`, `browser`, `import`, ...),
    `agent_key` the key of the agent that published it.
    """

    label: Label = ""
    source: Label | None = None
    agent_key: Label | None = None


class Room(msgspec.Struct, frozen=True, array_like=True):
    """A room. `number` counts rooms from 1 in the order they were made; `last_message` is the number of its last message."""

    number: int
    id: str
    title: str
    is_default: bool
    last_message: int
    created_ms: int
    archived_ms: int | None


class Session(msgspec.Struct, frozen=True, array_like=True):
    """A session. `number` grows in the order in which sessions were first named; `root` is its own id without a parent."""

    number: int
    id: str
    room: str
    parent: str | None
    root: str
    status: str
    runtime_binding: str | None
    first_preview: str | None
    activity_ms: int
    created_ms: int


class Navigation(msgspec.Struct, frozen=True, array_like=True):
    """What a list of sessions shows of one.

    `preview` is that of its last message, `last_sequence` the sequence of its last event, `last_message` how many
    messages it has.
    """

    number: int
    session: str
    room: str
    status: str
    preview: str
    activity_ms: int
    last_sequence: int
    last_message: int


class Event(msgspec.Struct, frozen=True, array_like=True):
    """An event of the log.

    `stream_id` orders all events, `sequence` those of one session, from 1 and without gaps. `attributes_json` and a
    `body` of the type `application/json` are canonical JSON text, as they arrived. `content_type` is None where there
    is no body. `provenance` is the JSON text of an output's `Provenance`, as it was stored. `added_json` is a JSON
    object of attributes that the store added, None where it added none. `room_named` says whether the caller named the
    room.
    """

    stream_id: int
    session: str
    sequence: int
    room: str
    actor: str
    type: str
    event_id: str | None
    aggregate_kind: str
    aggregate_id: str
    version: int
    client_transaction_id: str | None
    idempotency_key: str | None
    provenance: str | None
    attributes_json: str
    content_type: str | None
    body: Body | None
    preview: str
    retention_class: str
    created_ms: int
    added_json: str | None
    room_named: bool

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes, decoded, with those that the store added."""
        return {**decode_object(self.attributes_json), **self.added}

    @property
    def added(self) -> dict[str, Any]:
        """The attributes that the store added, decoded: the statistics of a compaction."""
        return decode_object(self.added_json or "{}")

    def output(self) -> dict[str, Any]:
        """What an output said, all its fields as they arrived; a body in the payload store is left out."""
        said = {"type": self.type, **decode_object(self.attributes_json)}
        if self.event_id is not None:
            said["event_id"] = self.event_id
        if isinstance(self.body, str):
            said[body_field(self.type)] = (
                msgspec.json.decode(self.body) if self.content_type == JSON else self.body
            )
        return said


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A message. `number` counts those of its room, `sequence` those of its session, both from 1 without gaps.

    `thread_root` is the number of the message that its thread begins with; `text` is JSON where `content_type` says so.
    """

    stream_id: int
    id: str
    room: str
    number: int
    session: str
    sequence: int
    role: str
    turn_id: str | None
    actor: str
    sender_label: str
    source: str | None
    agent_key: str | None
    thread_root: int | None
    status: str
    content_type: str
    text: Body
    preview: str
    created_ms: int


class Observation(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened inside a turn; what it says beyond that stands in the event's attributes and body.

    A `tool_call_id` is not unique; together with `invocation`, counted from 1, it tells the calls of a session apart.
    `attributes_json` and `added_json` are those of the event.
    """

    stream_id: int
    id: str
    session: str
    kind: str
    turn_id: str | None
    tool_call_id: str | None
    invocation: int | None
    status: str
    attributes_json: str
    content_type: str | None
    body: Body | None
    created_ms: int
    added_json: str | None

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes, decoded, with those that the store added."""
        return {**decode_object(self.attributes_json), **decode_object(self.added_json or "{}")}


class MessagePlace(msgspec.Struct, frozen=True, array_like=True):
    """Which message of its room it is, in any store: its id, and the session, the sequence there and the time of its event."""

    id: Name
    session: Name
    sequence: Number
    created_ms: Time


class Said(msgspec.Struct, frozen=True, array_like=True):
    """What is stored of an event's message beside the event itself; the fields are those of `Message`.

    `root` is the message whose number `thread_root` is, None where no message has it.
    """

    id: str
    number: int
    sequence: int
    role: str
    turn_id: str | None
    sender_label: str
    source: str | None
    agent_key: str | None
    thread_root: int | None
    status: str
    root: MessagePlace | None


class Historic(msgspec.Struct, frozen=True, array_like=True):
    """An event, and its message where it left one."""

    event: Event
    message: Said | None


class Page(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    """Some records in the order of their key.

    `cursor` goes into the next call as `after`, also behind the last page, to see what came meanwhile; `more` says
    whether something stood behind the page when it was read.
    """

    items: list[T]
    cursor: int
    more: bool


class Appended(msgspec.Struct, frozen=True, array_like=True):
    """Where an event stands. `created` is false where it stood there before; `event_id` is its stream id where it has none."""

    stream_id: int
    session: str
    sequence: int
    room: str
    event_id: str
    created_ms: int
    created: bool


class Admitted(msgspec.Struct, frozen=True, array_like=True):
    """Where a user's message stands: its event, its id, its number in the room, and whether this call stored it."""

    stream_id: int
    session: str
    sequence: int
    room: str
    event_id: str
    created_ms: int
    created: bool
    message_id: str
    message_number: int


class Ingested(msgspec.Struct, frozen=True, array_like=True):
    """What became of an output.

    `duplicate`: it was stored before, and this call changed nothing. `message_id` and `observation_id` are None where
    it made none, `event_id` is its stream id where it has none. `known_type` is false where the store does not know
    the event's type and has stored nothing but the event.
    """

    stream_id: int
    duplicate: bool
    message_id: str | None
    observation_id: str | None
    message_number: int | None
    created_ms: int
    event_id: str
    known_type: bool

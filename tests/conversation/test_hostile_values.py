"""Hostile values in every field of every operation: an exact round trip or a typed refusal, and nothing else.

The fields are found by looking at the operations, so that a new one is never forgotten.
"""

import contextlib
import tempfile
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import pytest

import storage_worker as sw
from storage_worker import conversation
from storage_worker.conversation.event_restores import EventCopy
from storage_worker.conversation.records import MessagePlace, PayloadRef, Provenance, Sender
from storage_worker.conversation.session_restores import Made, Shown
from storage_worker.protocol.errors import StorageError
from storage_worker.store import StoreOperation

from .copies import COPY

REFUSALS = (
    sw.InvalidRequestError,
    sw.RequestTooLargeError,
    sw.DeclaredError,
    sw.StorageCorruptError,
    sw.ResultTooLargeError,
)


def nested(depth: int) -> Any:
    """A list in a list, so deep."""
    value: Any = "bottom"
    for _ in range(depth):
        value = [value]
    return value


TEXTS = {
    "empty": "",
    "NUL": "a\0b",
    "only NUL": "\0",
    "surrogate": "a\ud800b",
    "control characters": "\x01\x1b\x7f\r\n\x0b\x0c\x85\u2028",
    "quotes": "'\"`\\;--/*",
    "combining": "e\u0301\u202e\ufeff\U0001f468\u200d\U0001f469",
    "longest": "\N{GRINNING FACE}" * 512,
    "too long": "x" * 513,
    "over a row": "ä" * 10_000,
    "over a request": "x" * 2_000_000,
}
NUMBERS = {
    "zero": 0,
    "negative": -1,
    "63 bit": 2**63 - 1,
    "64 bit": 2**63,
    "unsigned": 2**64 - 1,
    "huge": 2**64,
    "very huge": 10**5000,
    "float": 1.5,
    "NaN": float("nan"),
}
VALUES = {
    **TEXTS,
    **NUMBERS,
    "infinite": float("inf"),
    "minus zero": -0.0,
    "null": None,
    "true": True,
    "bytes": b"\xff\0",
    "nested": nested(50),
    "nested to the bound": nested(62),
    "nested too deep": nested(70),
    "nested far too deep": nested(5_000),
    "empty object": {},
    "keys": {"": 1, "a\0b": 2, "é": 3},
    "surrogate key": {"\udfff": 1},
    "number key": {1: 2},
}
OBJECTS = {
    **{f"value: {name}": {"type": "t", "field": value} for name, value in VALUES.items()},
    **{f"key: {name}": {"type": "t", text: "value"} for name, text in TEXTS.items()},
    **{f"type: {name}": {"type": value} for name, value in VALUES.items()},
    **{f"event_id: {name}": {"type": "t", "event_id": value} for name, value in VALUES.items()},
    "many fields": {"type": "t", **{f"field {n}": n for n in range(500)}},
}
REF = PayloadRef("a" * 64, "text/plain", "conversation", 5, 5, "identity")
PLACE = MessagePlace("m-1", "s", 1, 5)
OUTPUT_COPY = msgspec.structs.replace(COPY, type="assistant_message", provenance=Provenance())
SHOWN = Shown("idle", "", 5)
MADE = Made(None, "s", "idle", None, None, 5, 5)
WHOLE: dict[type, list[Any]] = {
    PayloadRef: [REF],
    Sender: [Sender()],
    Provenance: [Provenance()],
    MessagePlace: [PLACE],
    EventCopy: [COPY, OUTPUT_COPY, msgspec.structs.replace(COPY, type="user_message", role="user")],
    Shown: [SHOWN],
    Made: [MADE],
}
"""Structs that are right, one for each kind of them, of which one field after the other is made hostile."""

OTHERS = {
    "number": 5,
    "text": "x",
    "bytes": b"x",
    "list": [1],
    "null": None,
    "true": True,
    "false": False,
    "object": {"a": 1},
}

DEFAULTS: dict[str, Any] = {
    "session": "s",
    "beginning": "s",
    "text": "a text",
    "event": {"type": "assistant_message"},
    "event_type": "note",
    "status": "idle",
    "room": "room",
    "client_transaction_id": "t",
    "ref": REF,
    "sha256": "a" * 64,
    "content_type": "text/plain",
    "retention_class": "conversation",
    "size": 5,
    "temporary": "t",
    "offset": 0,
    "length": 1,
    "message": PLACE,
    "copied": COPY,
    "last": 0,
    "shown": SHOWN,
    "stream_id": 1,
    "thread_root": 1,
    "sessions": ["s"],
}
"""What a required parameter is given while another one is hostile."""

ALSO: dict[str, dict[str, Any]] = {
    "ingest_output": {"room": "room"},
    "messages": {"session": "s"},
}
"""What an operation is given beside its required parameters, unless one of these is the hostile one."""

READS_BACK = {
    "admit",
    "append",
    "create_room",
    "ingest_output",
    "ingest_user",
    "restore_room",
    "restore_session",
    "set_session_status",
    "upsert_session",
}
"""Operations whose arguments are stored; `preview` counts only beside a reference."""

NOT_STORED = {"activity_ms", "preview", "required", "root"}
"""What stands nowhere as it was given: an activity that is earlier than the last one changes nothing, and a session
without a parent is its own root."""


def hostile(kind: Any) -> dict[str, Any]:
    """Named values for a parameter of this type, and values that are of no such type."""
    if get_origin(kind) is Annotated:
        return hostile(get_args(kind)[0])
    if get_origin(kind) in (typing.Union, types.UnionType):
        found: dict[str, Any] = {}
        for each in get_args(kind):
            found |= hostile(each)
        return found
    if kind is str:
        return {**TEXTS, **OTHERS}
    if kind is int:
        return {**NUMBERS, **OTHERS}
    if kind is bool or kind is type(None) or get_origin(kind) is Literal:
        return OTHERS
    if get_origin(kind) is dict or kind is dict:
        return {**OBJECTS, **OTHERS}
    if get_origin(kind) in (list, tuple):
        return {**OTHERS, **_sequences(kind)}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {**OTHERS, **dict(_structs(kind))}
    raise AssertionError(f"no hostile values for {kind}")


def _sequences(kind: Any) -> dict[str, Any]:
    if get_origin(kind) is list:
        each = {f"item: {what}": [value] for what, value in hostile(get_args(kind)[0]).items()}
        return {**each, "many items": ["s"] * 1_000}
    return {f"each: {what}": (value,) * len(get_args(kind)) for what, value in VALUES.items()}


def _structs(kind: type[msgspec.Struct]) -> Iterator[tuple[str, msgspec.Struct]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    for number, whole in enumerate(WHOLE.get(kind) or [kind()]):
        for name, hint in hints.items():
            for what, value in hostile(hint).items():
                yield f"{number} {name}: {what}", msgspec.structs.replace(whole, **{name: value})


OPERATIONS: list[StoreOperation[..., Any]] = sorted(
    conversation.store.operations.values(), key=lambda operation: operation.name
)
FIELDS = [(operation, each) for operation in OPERATIONS for each in operation.signature.parameters]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sw.StorageWorker]:
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="sw-", dir="/tmp") as runtime,
    ):
        patch.setenv("XDG_RUNTIME_DIR", runtime)
        path = tmp_path_factory.mktemp("hostile") / "app.db"
        with sw.StorageWorker(path, stores=["storage_worker.conversation:store"]) as worker:
            with worker.connect() as client:
                client.call(conversation.create_room("room"))
            yield worker
            with worker.connect(role="admin") as client:
                assert client.check() == []


@pytest.fixture
def client(worker: sw.StorageWorker) -> Iterator[sw.Client]:
    with worker.connect() as connected:
        yield connected


def sent_values(field: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The plain values that a stored argument is made of, each with the name that records have for it."""
    if isinstance(value, Sender | Provenance):
        for name, part in msgspec.structs.asdict(value).items():
            yield CALLED.get(name, name), part
    else:
        yield CALLED.get(field, field), value


CALLED = {
    "label": "sender_label",
    "event_type": "type",
    "event": "output",
    "body": "text",
}
"""What records call what an operation calls otherwise."""


def stored_values(client: sw.Client, session: str) -> dict[str, list[Any]]:
    """Everything that is stored of a session and of its room, by the names that records have for it."""
    found: dict[str, list[Any]] = {}

    def note(**values: Any) -> None:
        for name, value in values.items():
            found.setdefault(CALLED.get(name, name), []).append(value)

    for event in client.call(conversation.events(session), max_result_bytes=4_000_000).items:
        note(**msgspec.structs.asdict(event), attributes=event.attributes, event=event.output())
        if event.provenance is not None:
            note(**msgspec.json.decode(event.provenance))
    for message in client.call(conversation.messages(session)).items:
        note(**msgspec.structs.asdict(message))
    one = client.call(conversation.session(session))
    if one is not None:
        note(session=one.id, **msgspec.structs.asdict(one))
    for room in client.call(conversation.rooms(newest_first=True)).items:
        note(room=room.id, **msgspec.structs.asdict(room))
    return found


def is_among(value: Any, stored: list[Any]) -> bool:
    return any(type(each) is type(value) and repr(each) == repr(value) for each in stored) or (
        # Objects come back with their keys sorted.
        isinstance(value, dict) and any(each == value for each in stored if isinstance(each, dict))
    )


@pytest.mark.parametrize(
    ("operation", "field"), FIELDS, ids=[f"{operation.name}-{field.name}" for operation, field in FIELDS]
)
def test_every_field_of_every_operation(
    client: sw.Client, operation: StoreOperation[..., Any], field: Any
) -> None:
    required = {
        each.name: DEFAULTS[each.name]
        for each in operation.signature.parameters
        if each.default is msgspec.NODEFAULT
    }
    short = operation.name.split(".")[1]
    if not (short == "messages" and field.name == "room"):
        required = {**ALSO.get(short, {}), **required}
    answered = 0
    for number, (what, value) in enumerate(hostile(field.type).items()):
        arguments = {**required, field.name: value}
        if "session" in required and field.name != "session":
            arguments["session"] = f"{operation.name} {field.name} {number}"
        if short in ("create_room", "restore_room") and field.name != "room":
            arguments["room"] = f"{field.name} {number}"
        if short == "set_session_status":
            with contextlib.suppress(*REFUSALS):
                client.call(conversation.upsert_session(arguments["session"]))
        try:
            client.call(operation(**arguments))
        except StorageError as error:
            if not isinstance(error, REFUSALS) or error.outcome != "not_committed" or error.retryable:
                pytest.fail(f"{what}: {type(error).__name__}, {error.outcome}: {error}")
            continue
        answered += 1
        if short in READS_BACK and field.name not in NOT_STORED:
            session = arguments.get("session", "s")
            stored = stored_values(client, session)
            for name, sent in sent_values(field.name, value):
                assert sent is None or is_among(sent, stored.get(name, [])), (what, name, sent)
    # The client still works, and not everything was refused.
    assert client.query("select 1").scalar() == 1
    assert answered or short not in READS_BACK


def test_every_operation_is_looked_at() -> None:
    assert len(OPERATIONS) >= 17
    with_fields = {operation.name for operation, _ in FIELDS}
    without = {operation.name for operation in OPERATIONS} - with_fields
    assert without <= {"conversation.payload_folder"}

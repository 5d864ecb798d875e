"""Operations: arguments are the operation's own or an InvalidRequestError, results its own or a ProtocolError."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_worker.protocol import statements
from storage_worker.protocol.errors import InvalidRequestError, ProtocolError
from storage_worker.protocol.operation import Call, Operation

from .strategies import bomb, damaged, nested_values

DEPTH_MAX = 64
BUILT_IN: list[Operation[Any, Any]] = [
    found for found in vars(statements).values() if isinstance(found, Operation)
]


class AddArguments(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    text: str
    count: int = 1


class KeepArguments(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    value: Any


class Note(msgspec.Struct):
    text: str


ADD = Operation[[str, int], int]("notes.add", "write", AddArguments, int)
KEEP = Operation[[Any], Any]("notes.keep", "write", KeepArguments, Any)
RECENT = Operation[[], list[Note]]("notes.recent", "read", statements.Nothing, list[Note])

operations = st.sampled_from([*BUILT_IN, ADD, KEEP, RECENT])


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


class TestCalls:
    def test_a_call_carries_its_arguments(self) -> None:
        call = ADD("hello", 2)
        assert isinstance(call, Call)
        assert call.operation is ADD
        assert call.arguments == AddArguments("hello", 2)
        assert ADD.decode_arguments(packed(call.arguments), DEPTH_MAX) == call.arguments

    @pytest.mark.parametrize(("args", "kwargs"), [((), {}), (("a", 1, 2), {}), (("a",), {"other": 1})])
    def test_arguments_that_do_not_fit_the_signature(self, args: Any, kwargs: Any) -> None:
        any_operation: Operation[..., int] = ADD
        with pytest.raises(InvalidRequestError, match=r"notes\.add"):
            any_operation(*args, **kwargs)

    def test_name_themselves(self) -> None:
        assert repr(ADD) == "<write operation notes.add>"
        assert repr(ADD("x", 1)) == "<call of notes.add>"


class TestArguments:
    @pytest.mark.parametrize("sent", [[], [1], ["a", "b"], ["a", 1, 2], {"text": "a"}, "a", None, ["a", 1.5]])
    def test_of_other_types_or_number_are_refused(self, sent: object) -> None:
        with pytest.raises(InvalidRequestError, match=r"notes\.add"):
            ADD.decode_arguments(packed(sent), DEPTH_MAX)

    @pytest.mark.parametrize("operation", BUILT_IN, ids=lambda found: found.name)
    def test_surplus_ones_are_refused(self, operation: Operation[Any, Any]) -> None:
        fitting = len(operation.arguments.__struct_fields__)
        with pytest.raises(InvalidRequestError):
            operation.decode_arguments(packed(["a"] * (fitting + 1)), DEPTH_MAX)

    @given(operations, st.binary(max_size=60))
    def test_random_bytes(self, operation: Operation[Any, Any], raw: bytes) -> None:
        self.decodes_or_is_refused(operation, raw)

    @given(operations, nested_values.map(packed))
    def test_random_values(self, operation: Operation[Any, Any], raw: bytes) -> None:
        self.decodes_or_is_refused(operation, raw)

    @given(operations, damaged(nested_values.map(lambda value: packed([value]))))
    def test_damaged_values(self, operation: Operation[Any, Any], raw: bytes) -> None:
        self.decodes_or_is_refused(operation, raw)

    def decodes_or_is_refused(self, operation: Operation[Any, Any], raw: bytes) -> None:
        try:
            found = operation.decode_arguments(raw, DEPTH_MAX)
        except InvalidRequestError:
            return
        assert type(found) is operation.arguments

    @pytest.mark.parametrize("kind", ["arrays", "maps", "array32"])
    @pytest.mark.parametrize("operation", [*BUILT_IN, ADD, KEEP], ids=lambda found: found.name)
    def test_bombs(self, operation: Operation[Any, Any], kind: str) -> None:
        for levels in (5_000, 100_000):
            with pytest.raises(InvalidRequestError):
                operation.decode_arguments(b"\x91" + bomb(levels, kind), DEPTH_MAX)

    def test_open_ones_are_refused_beyond_the_depth(self) -> None:
        # The struct of the arguments is the first level.
        assert KEEP.decode_arguments(b"\x91" + bomb(DEPTH_MAX - 1, "arrays"), DEPTH_MAX)
        with pytest.raises(InvalidRequestError, match=f"more than {DEPTH_MAX} deep"):
            KEEP.decode_arguments(b"\x91" + bomb(DEPTH_MAX, "arrays"), DEPTH_MAX)

    def test_bound_values_are_left_to_their_own_check(self) -> None:
        raw = packed(["select ?", [[[[1]]]]])
        found = statements.QUERY.decode_arguments(raw, 2)
        assert found.parameters == [[[[1]]]]


class TestResults:
    @given(st.integers(-(2**63), 2**63 - 1))
    def test_arrive(self, value: int) -> None:
        assert ADD.decode_result(packed(value)) == value

    def test_arrive_as_structs(self) -> None:
        assert RECENT.decode_result(packed([{"text": "a"}])) == [Note("a")]

    def test_of_another_type_are_a_protocol_error(self) -> None:
        with pytest.raises(ProtocolError, match=r"notes\.add.*worker and client differ"):
            ADD.decode_result(packed("text"))

    @given(operations, st.binary(max_size=60))
    def test_random_bytes(self, operation: Operation[Any, Any], raw: bytes) -> None:
        try:
            operation.decode_result(raw)
        except ProtocolError:
            return

    @pytest.mark.parametrize("kind", ["arrays", "maps", "array32"])
    def test_bombs(self, kind: str) -> None:
        operations: list[Operation[Any, Any]] = [KEEP, ADD, RECENT, *BUILT_IN]
        for operation in operations:
            with pytest.raises(ProtocolError):
                operation.decode_result(bomb(100_000, kind))


def test_names_are_unique_and_begin_with_their_store() -> None:
    names = [operation.name for operation in BUILT_IN]
    assert len(set(names)) == len(names)
    assert {name.split(".")[0] for name in names} == {"sql", "worker"}


def test_a_decoder_is_made_for_every_signature_at_once() -> None:
    class Ambiguous(msgspec.Struct, array_like=True):
        value: str | bytes

    with pytest.raises(TypeError):
        Operation[[Any], None]("notes.bad", "write", Ambiguous, None)

"""Values are stored unchanged, or refused with the parameter's place."""

import decimal
import enum
import math
import sqlite3
from collections import UserDict, UserList
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from storage_worker.protocol.errors import InvalidRequestError
from storage_worker.protocol.statements import Batch, Statement
from storage_worker.protocol.values import (
    INTEGER_MAX,
    INTEGER_MIN,
    check_parameters,
    check_value,
    lone_surrogate_place,
)

COUNT_MAX = 10


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    """A subclass may answer differently from what it stores."""

    __slots__ = ()


refused_values: list[Any] = [
    2**63,
    -(2**63) - 1,
    2**64,
    10**10_000,
    math.nan,
    [1],
    (),
    {"a": 1},
    bytearray(b"x"),
    decimal.Decimal(1),
    object(),
    Number.ONE,
    msgspec.Raw(b"\x01"),
]


@pytest.fixture(scope="module")
def sqlite() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("create table t(a)")
        yield connection


class TestScalars:
    @given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()))
    @example("nul\0inside")
    @example(INTEGER_MAX)
    @example(INTEGER_MIN)
    @example(math.inf)
    def test_are_stored_unchanged_or_refused(self, sqlite: sqlite3.Connection, value: Any) -> None:
        try:
            checked = check_value(value, 1)
        except InvalidRequestError:
            assert (isinstance(value, float) and math.isnan(value)) or not INTEGER_MIN <= value <= INTEGER_MAX
            return
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(checked))
        stored = sqlite.execute("select ?", (sent,)).fetchone()[0]
        assert stored == value
        assert type(stored) is (int if isinstance(value, bool) else type(value))

    @pytest.mark.parametrize("value", [*refused_values, Text("x")], ids=lambda value: type(value).__name__)
    def test_others_are_refused_with_their_place(self, value: Any) -> None:
        with pytest.raises(InvalidRequestError, match=r"^parameter 3: "):
            check_parameters((1, "two", value), COUNT_MAX)
        with pytest.raises(InvalidRequestError, match=r"^parameter 'name': "):
            check_parameters({"first": 1, "name": value}, COUNT_MAX)

    def test_a_huge_integer_is_named_by_its_size(self) -> None:
        with pytest.raises(InvalidRequestError, match="of 33220 bit"):
            check_value(10**10_000, 1)
        with pytest.raises(InvalidRequestError, match=str(2**63)):
            check_value(2**63, 1)


class TestParameters:
    @pytest.mark.parametrize(
        "given_parameters",
        [[1, "a", None], (1, "a", None), UserList([1, "a", None])],
        ids=["list", "tuple", "other"],
    )
    def test_sequences(self, given_parameters: Any) -> None:
        assert check_parameters(given_parameters, COUNT_MAX) == [1, "a", None]

    @pytest.mark.parametrize("kind", [dict, UserDict])
    def test_mappings(self, kind: Any) -> None:
        assert check_parameters(kind({"a": True, "b": b"x"}), COUNT_MAX) == {"a": 1, "b": b"x"}

    def test_bools_become_integers(self) -> None:
        checked = check_parameters((True, False), COUNT_MAX)
        assert [type(value) for value in checked] == [int, int]

    def test_the_callers_own_list_is_not_kept(self) -> None:
        parameters = ["a"]
        assert check_parameters(parameters, COUNT_MAX) is not parameters

    @pytest.mark.parametrize(
        "given_parameters",
        ["text", b"bytes", bytearray(b"bytes"), memoryview(b"bytes"), 5, None, {1, 2}, iter([1])],
        ids=lambda value: type(value).__name__,
    )
    def test_what_is_neither_is_refused(self, given_parameters: Any) -> None:
        with pytest.raises(InvalidRequestError, match="must be a sequence or a mapping"):
            check_parameters(given_parameters, COUNT_MAX)

    def test_names_must_be_text(self) -> None:
        parameters: Any = {1: "a"}
        with pytest.raises(InvalidRequestError, match="name 1 is no str"):
            check_parameters(parameters, COUNT_MAX)

    @pytest.mark.parametrize("parameters", [[0] * (COUNT_MAX + 1), {str(n): n for n in range(COUNT_MAX + 1)}])
    def test_more_than_a_statement_takes(self, parameters: Any) -> None:
        with pytest.raises(InvalidRequestError, match=f"11 bound values; one statement takes {COUNT_MAX}"):
            check_parameters(parameters, COUNT_MAX)
        check_parameters([0] * COUNT_MAX, COUNT_MAX)


class Notes(msgspec.Struct):
    text: str = ""
    tags: tuple[str, ...] = ()
    extra: dict[str, Any] = {}


class TestLoneSurrogates:
    @pytest.mark.parametrize(
        ("arguments", "place"),
        [
            (Statement("select \ud800"), "sql"),
            (Statement("select ?", ["a", 1, "x\udfffy"]), "parameters 3"),
            (Statement("select :a", {"ok": "ü", "a": "\ud83d"}), "parameters 'a'"),
            (Statement("select :a", {"\ud83d": 1}), "parameters name '\\ud83d'"),
            (Batch([Statement("a"), Statement("b", {"n": "\udc00"})]), "statements 2 parameters 'n'"),
            (Notes("\ud800"), "text"),
            (Notes(tags=("a", "\ud800")), "tags 2"),
            (Notes(extra={"deep": [{"er": ["a", "\ud800"]}]}), "extra 'deep' 1 'er' 2"),
        ],
    )
    def test_are_named_by_their_place(self, arguments: msgspec.Struct, place: str) -> None:
        with pytest.raises(UnicodeEncodeError):
            msgspec.msgpack.encode(arguments)
        assert lone_surrogate_place(arguments) == place

    @given(st.text(), st.lists(st.text()))
    def test_are_in_no_other_text(self, sql: str, parameters: list[str]) -> None:
        assert lone_surrogate_place(Statement(sql, parameters)) is None

    def test_are_found_however_deep(self) -> None:
        value: Any = "\ud800"
        for _ in range(3_000):
            value = [value]
        assert str(lone_surrogate_place(Notes(extra={"deep": value}))).startswith("extra 'deep' 1 1 1")

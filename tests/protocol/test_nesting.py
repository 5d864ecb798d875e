"""The depth of open values, found without recursion."""

import dataclasses
import tracemalloc
from typing import Any, NamedTuple, Optional, TypedDict

import msgspec
import pytest
from hypothesis import given

from storage_worker.protocol.errors import InvalidRequestError
from storage_worker.protocol.nesting import check_depth, is_open, may_be_deep

from .strategies import nested_values


class Tree(msgspec.Struct):
    children: list["Tree"] = []


class Chain(msgspec.Struct):
    value: int = 0
    following: Optional["Chain"] = None


@dataclasses.dataclass
class Link:
    following: Optional["Link"] = None


class Pair(NamedTuple):
    first: int
    second: list[Any]


class Fields(TypedDict):
    names: list[str]


class Inner(msgspec.Struct):
    numbers: list[int]


class Outer(msgspec.Struct):
    inner: dict[str, Inner]


class Twice(msgspec.Struct):
    first: Inner
    second: Inner


def depth_of(value: object) -> int:
    """The reference: plain recursion."""
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


def nested(levels: int, wrap: Any) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = wrap(value)
    return value


@given(nested_values)
def test_the_limit_is_exact(value: Any) -> None:
    depth = depth_of(value)
    check_depth(value, max(1, depth))
    if depth:
        with pytest.raises(InvalidRequestError, match=f"more than {depth - 1} deep"):
            check_depth(value, depth - 1)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda below: [below],
        lambda below: (below,),
        lambda below: {"k": below},
        lambda below: {(below,): 1} if not isinstance(below, dict) else {"k": below},
        lambda below: Pair(1, [below]),
        lambda below: [1, "two", below, None],
    ],
)
def test_every_container_counts(wrap: Any) -> None:
    check_depth(nested(10, wrap), 20)
    with pytest.raises(InvalidRequestError):
        check_depth(nested(21, wrap), 20)


def test_a_mappings_keys_count() -> None:
    with pytest.raises(InvalidRequestError):
        check_depth({((((1,),),),): 1}, 4)


@pytest.mark.parametrize("kind", [Chain, Link])
def test_objects_with_fields_count(kind: Any) -> None:
    value = None
    for _ in range(21):
        value = kind(following=value)
    check_depth(value, 21)
    with pytest.raises(InvalidRequestError):
        check_depth(value, 20)


def test_a_hundred_thousand_levels_are_refused_without_recursion() -> None:
    value = nested(100_000, lambda below: [below])
    with pytest.raises(InvalidRequestError):
        check_depth(value, 64)
    check_depth(value, 100_000)


def test_many_plain_items_cost_no_memory() -> None:
    value = list(range(200_000))
    tracemalloc.start()
    try:
        check_depth(value, 64)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "kind",
    [
        Any,
        list[Any],
        dict[str, Any],
        list[dict[str, tuple[int, Any]]],
        Tree,
        Chain,
        Link,
        Pair,
        list,
        dict,
        msgspec.Raw,
        Tree | None,
        dict[str, list[Tree]],
    ],
)
def test_types_that_hold_anything_or_themselves_are_open(kind: Any) -> None:
    assert is_open(kind)


@pytest.mark.parametrize(
    "kind",
    [
        int,
        str,
        bytes,
        None,
        list[int],
        dict[str, list[int | None]],
        tuple[int, str],
        tuple[bytes, ...],
        Inner,
        Outer,
        Fields,
        list[Outer],
        Inner | None,
        set[int],
    ],
)
def test_types_whose_depth_is_fixed_are_not(kind: Any) -> None:
    assert not is_open(kind)


def test_a_class_met_twice_counts_as_open_which_costs_a_walk_and_is_never_wrong() -> None:
    assert is_open(Twice)


def test_a_type_that_no_codec_takes_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        is_open(int | Inner | Outer)


@given(nested_values)
def test_few_containers_prove_that_nothing_is_deep(value: object) -> None:
    encoded = msgspec.msgpack.encode(value)
    depth = depth_of(value)
    for depth_max in {0, max(0, depth - 1), depth, depth + 1}:
        if not may_be_deep(encoded, depth_max):
            assert depth <= depth_max


def test_each_kind_of_container_counts() -> None:
    many = 2**16
    for value in ([], {}, [0] * 16, dict.fromkeys(range(16)), [0] * many, dict.fromkeys(range(many))):
        assert may_be_deep(msgspec.msgpack.encode(value), 0)
    for scalar in (None, True, 1, -1, 2**40, 1.5, "text", "x" * 300, b"x"):
        assert not may_be_deep(msgspec.msgpack.encode(scalar), 0)

"""Limits: the defaults hold together, and each relation refuses what breaks it."""

from typing import Any

import msgspec
import pytest

from storage_worker.protocol.limits import DEFAULT_LIMITS, FRAME_BYTES_MAX, RELATIONS, Limits


def changed(**values: Any) -> Limits:
    return msgspec.structs.replace(DEFAULT_LIMITS, **values)


def refusal(limits: Limits) -> str:
    try:
        limits.check()
    except ValueError as error:
        return str(error)
    return ""


def test_the_defaults_hold() -> None:
    Limits().check()


@pytest.mark.parametrize("name", Limits.__struct_fields__)
class TestEachLimit:
    @pytest.mark.parametrize("value", [0, -1, 2**63, 1.0, "1", None, True])
    def test_is_a_positive_whole_number(self, name: str, value: object) -> None:
        assert refusal(changed(**{name: value})).startswith(f"the limit {name} must be")

    def test_travels_in_a_welcome(self, name: str) -> None:
        # Valid or not against the others: what is set is what arrives.
        limits = changed(**{name: getattr(DEFAULT_LIMITS, name) + 1})
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(limits), type=Limits) == limits


@pytest.mark.parametrize(("small", "large", "reason"), RELATIONS)
def test_each_relation_refuses_what_breaks_it(small: str, large: str, reason: str) -> None:
    values = {name: getattr(DEFAULT_LIMITS, name) for name in (small, large)}
    # One of the two ways breaks this relation alone; the other may break a neighbour first.
    refusals = [
        refusal(changed(**{small: values[large] + 1})),
        refusal(changed(**{large: values[small] - 1})),
    ]
    assert f"the limit {small} must not exceed {large}: {reason}" in refusals


@pytest.mark.parametrize(("small", "large", "reason"), RELATIONS)
def test_each_relation_allows_equality(small: str, large: str, reason: str) -> None:
    values = {name: getattr(DEFAULT_LIMITS, name) for name in (small, large)}
    refusals = [refusal(changed(**{small: values[large]})), refusal(changed(**{large: values[small]}))]
    assert not any(f"the limit {small} must not exceed {large}" in text for text in refusals)


@pytest.mark.parametrize("name", ["request_bytes_max", "result_bytes_max"])
def test_a_body_fits_the_header_of_a_frame(name: str) -> None:
    assert "leave room in a frame" in refusal(changed(**{name: FRAME_BYTES_MAX}))

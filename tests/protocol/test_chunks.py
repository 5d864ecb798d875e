"""Chunks: whatever is cut arrives whole, and whatever breaks order, credit or size is a ProtocolError."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_worker.protocol.chunks import Inflow, Outflow, part_bytes
from storage_worker.protocol.envelope import Chunk
from storage_worker.protocol.errors import ProtocolError
from storage_worker.protocol.limits import DEFAULT_LIMITS, PROTOCOL_ENVELOPE_BYTES, Limits

PART = 10
AHEAD = 4


def limits(ahead: int = AHEAD, total: int = 1_000) -> Limits:
    return msgspec.structs.replace(
        DEFAULT_LIMITS,
        chunk_bytes_max=PROTOCOL_ENVELOPE_BYTES + PART,
        chunks_ahead_max=ahead,
        chunked_bytes_max=total,
    )


def chunk(sequence: int, size: int = PART) -> Chunk:
    return Chunk(1, sequence, b"x" * size)


@given(st.integers(1, 300), st.integers(1, 9), st.booleans(), st.booleans())
def test_any_value_arrives_whole(size: int, ahead: int, announced: bool, waits: bool) -> None:
    """Both ends agree at each step, with or without credit from the beginning, and never beyond the bound."""
    bounds = limits(ahead)
    first = 0 if waits else ahead
    outflow = Outflow(size, bounds, first)
    inflow = Inflow(bounds, size if announced else None, first)
    got = 0
    if waits:
        outflow.grant(inflow.to_grant())
    while not outflow.is_over:
        count = outflow.next_bytes
        assert count, "a sender never waits for ever"
        inflow.take(chunk(outflow.sequence, count))
        outflow.sent(count)
        got += count
        granted = inflow.to_grant()
        if granted:
            outflow.grant(granted)
        assert outflow.credit == inflow.outstanding <= ahead
    assert got == size
    if announced:
        assert inflow.is_over
        assert not (waits and outflow.credit), "nothing is granted beyond what was announced"


def test_nothing_goes_without_credit() -> None:
    outflow = Outflow(25, limits(), 0)
    assert outflow.next_bytes == 0
    outflow.grant(1)
    assert outflow.next_bytes == PART
    outflow.sent(PART)
    assert outflow.next_bytes == 0


def test_a_credit_beyond_what_anybody_may_grant() -> None:
    outflow = Outflow(1_000, limits(), 3)
    outflow.grant(1)
    with pytest.raises(ProtocolError, match="credit of 1 chunks beside 4"):
        outflow.grant(1)
    with pytest.raises(ProtocolError):
        Outflow(1_000, limits(), 0).grant(2**63)


def test_credit_comes_in_halves_of_what_may_be_outstanding() -> None:
    inflow = Inflow(limits(), 1_000, AHEAD)
    inflow.take(chunk(0))
    assert inflow.to_grant() == 0
    inflow.take(chunk(1))
    assert inflow.to_grant() == 2
    assert inflow.to_grant() == 0


@pytest.mark.parametrize("sequence", [1, 2, 2**64 - 1])
def test_a_first_chunk_of_another_number(sequence: int) -> None:
    with pytest.raises(ProtocolError, match="number 0 was to come"):
        Inflow(limits(), 100, AHEAD).take(chunk(sequence))


def test_a_chunk_that_comes_again() -> None:
    inflow = Inflow(limits(), 100, AHEAD)
    inflow.take(chunk(0))
    with pytest.raises(ProtocolError, match="number 1 was to come"):
        inflow.take(chunk(0))


def test_a_chunk_beyond_the_credit() -> None:
    inflow = Inflow(limits(), 100, 1)
    inflow.take(chunk(0))
    with pytest.raises(ProtocolError, match="beyond the credit"):
        inflow.take(chunk(1))


@pytest.mark.parametrize("size", [0, PART - 1, PART + 1])
def test_a_chunk_of_another_size_than_announced_values_have(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"it has {size} bytes where {PART} may come"):
        Inflow(limits(), 100, AHEAD).take(chunk(0, size))


@pytest.mark.parametrize("size", [0, 2, 4, PART])
def test_the_last_chunk_has_what_is_left(size: int) -> None:
    inflow = Inflow(limits(), PART + 3, AHEAD)
    inflow.take(chunk(0))
    with pytest.raises(ProtocolError, match="where 3 may come"):
        inflow.take(chunk(1, size))
    inflow.take(chunk(1, 3))
    assert inflow.is_over
    with pytest.raises(ProtocolError, match="where 0 may come"):
        inflow.take(chunk(2, 1))


def test_a_value_that_was_not_announced_ends_with_a_short_chunk_or_at_the_bound() -> None:
    inflow = Inflow(limits(), None, AHEAD)
    inflow.take(chunk(0))
    inflow.take(chunk(1, 1))
    with pytest.raises(ProtocolError):
        inflow.take(chunk(2))
    inflow = Inflow(limits(total=15), None, AHEAD)
    inflow.take(chunk(0))
    with pytest.raises(ProtocolError):
        inflow.take(chunk(1))


def test_a_part_leaves_room_for_its_envelope() -> None:
    assert part_bytes(DEFAULT_LIMITS) == DEFAULT_LIMITS.chunk_bytes_max - PROTOCOL_ENVELOPE_BYTES
    with pytest.raises(ValueError, match="chunk_bytes_max must leave room"):
        msgspec.structs.replace(DEFAULT_LIMITS, chunk_bytes_max=PROTOCOL_ENVELOPE_BYTES).check()

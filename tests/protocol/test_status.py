"""Histograms keep exact bounds, and a status travels and prints whole."""

import bisect
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_worker.protocol.limits import DEFAULT_LIMITS
from storage_worker.protocol.statements import Health
from storage_worker.protocol.status import (
    BUCKETS,
    Histogram,
    Lane,
    Percentiles,
    ProcessStatus,
    ReaderStatus,
    ReceiptStatus,
    WalStatus,
    WorkerStatus,
    WriterStatus,
    as_builtins,
    bucket_bounds,
    percentile,
    percentiles,
)

values = st.integers(0, 2 ** (BUCKETS + 4))


def histogram_of(found: list[int]) -> Histogram:
    histogram = Histogram()
    for value in found:
        histogram.observe(value)
    return histogram


def test_buckets_meet_without_gap_or_overlap() -> None:
    bounds = [bucket_bounds(bucket) for bucket in range(BUCKETS)]
    assert bounds[:4] == [(0, 0), (1, 1), (2, 3), (4, 7)]
    assert all(least == before + 1 for (_, before), (least, _) in itertools.pairwise(bounds))


@pytest.mark.parametrize("bucket", range(BUCKETS))
def test_a_bucket_counts_its_own_bounds(bucket: int) -> None:
    for value in set(bucket_bounds(bucket)):
        assert histogram_of([value]).counts[bucket] == 1


@given(st.lists(values, min_size=1))
def test_nothing_is_lost(found: list[int]) -> None:
    histogram = histogram_of(found)
    assert (histogram.count, histogram.total, histogram.largest) == (len(found), sum(found), max(found))
    assert len(histogram.counts) == BUCKETS


@given(st.lists(values, min_size=1), st.floats(0, 1))
def test_a_percentile_lies_in_the_bucket_of_the_exact_one(found: list[int], q: float) -> None:
    histogram = histogram_of(found)
    rank = q * len(found)
    exact = sorted(found)[max(0, min(len(found) - 1, int(rank + 0.999999999) - 1))]
    least, greatest = bucket_bounds(min(exact.bit_length(), BUCKETS - 1))
    if greatest == least != 0 and exact.bit_length() >= BUCKETS - 1:
        greatest = histogram.largest
    near = percentile(histogram, q)
    assert 0 <= near <= histogram.largest
    at = bisect.bisect_left(sorted(found), near)
    assert least <= near <= max(greatest, least) or abs(at - rank) <= 1


@given(st.lists(values))
def test_percentiles_are_in_order(found: list[int]) -> None:
    figures = percentiles(histogram_of(found))
    assert figures.p50 <= figures.p90 <= figures.p99 <= figures.p999 <= figures.largest
    assert figures.count == len(found)


def test_nothing_counted_is_nothing() -> None:
    assert percentile(Histogram(), 0.5) == 0.0
    assert percentiles(Histogram()) == Percentiles()


def test_a_copy_stands_still() -> None:
    histogram = histogram_of([3])
    copy = histogram.copy()
    histogram.observe(4)
    assert (copy.count, copy.largest) == (1, 3)


def a_status() -> WorkerStatus:
    return WorkerStatus(
        version="1",
        protocol_version=1,
        worker="w",
        path="/app.db",
        address="unix:///s",
        started_ms=1,
        uptime_ms=2,
        shared=False,
        durability="full",
        sqlite_version="3.54.1",
        journal_mode="wal",
        synchronous="full",
        health=Health("degraded", ["the WAL is large"]),
        stores=["sql"],
        lanes=[Lane(name="foreground", waiting_requests=3)],
        operations=[],
        errors={"storage_busy": 1},
        latency_us=percentiles(histogram_of([10, 20])),
        writer=WriterStatus(commit_us=histogram_of([150])),
        readers=ReaderStatus(),
        wal=WalStatus(),
        receipts=ReceiptStatus(),
        process=ProcessStatus(pid=1),
        background=[],
        clients=[],
        snapshots=[],
        limits=DEFAULT_LIMITS,
    )


def test_a_status_travels_whole() -> None:
    status = a_status()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=WorkerStatus) == status


def test_json_names_every_field() -> None:
    plain = msgspec.json.decode(msgspec.json.encode(as_builtins(a_status())))
    assert plain["health"] == {"state": "degraded", "reasons": ["the WAL is large"]}
    assert plain["limits"]["request_bytes_max"] == DEFAULT_LIMITS.request_bytes_max
    assert set(plain) == set(WorkerStatus.__struct_fields__)

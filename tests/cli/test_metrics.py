"""Every figure of a status as Prometheus reads it."""

from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from storage_worker.metrics import COUNTERS, IDENTITIES, metrics_text
from storage_worker.protocol.status import (
    BackgroundTask,
    ClientStatus,
    Histogram,
    Lane,
    OperationCounts,
    Percentiles,
    SnapshotStatus,
    WorkerStatus,
)
from tests.protocol.test_status import a_status

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def full_status() -> WorkerStatus:
    """A status with an item in each of its lists."""
    status = a_status()
    status.operations = [
        OperationCounts(
            name="sql.execute",
            kind="write",
            succeeded_requests=5,
            latency_us=Percentiles(count=2, mean=1500, p50=1000, p90=1800, p99=1900, p999=1990, largest=2000),
        )
    ]
    status.lanes = [Lane(name="foreground", waiting_requests=3), Lane(name="background")]
    status.background = [BackgroundTask(name="optimize", state="failed", last_error='no "room"\n')]
    status.clients = [
        ClientStatus(name="app", pid=7, role="write", connected_ms=1_000, answered_requests=2),
        ClientStatus(name="app", pid=7, role="write", connected_ms=3_000, answered_requests=3),
        ClientStatus(name='o"dd\\\n', pid=8, role="read"),
    ]
    status.snapshots = [SnapshotStatus(name="app", pid=7, age_ms=10, left_ms=20, overdue_ms=0)]
    status.writer.commit_us = Histogram()
    for value in (0, 1, 3, 150, 150):
        status.writer.commit_us.observe(value)
    return status


def samples_of(status: WorkerStatus) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(metrics_text(status)):
        assert family.documentation
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, "a scrape with two samples of one series is refused"
            found[key] = sample.value
    return found


@pytest.fixture(scope="module")
def samples() -> Samples:
    return samples_of(full_status())


def value_of(samples: Samples, metric: str, **labels: str) -> float:
    return samples[f"storage_worker_{metric}", frozenset(labels.items())]


def test_counters_gauges_and_times_in_seconds(samples: Samples) -> None:
    assert value_of(samples, "uptime_seconds") == 0.002
    assert value_of(samples, "lanes_waiting_requests", name="foreground") == 3
    assert value_of(samples, "operations_succeeded_requests_total", name="sql.execute", kind="write") == 5
    assert value_of(samples, "wal_bytes") == a_status().wal.wal_bytes
    assert value_of(samples, "errors_total", code="storage_busy") == 1
    assert value_of(samples, "limit", name="request_bytes_max") == a_status().limits.request_bytes_max
    assert value_of(samples, "healthy", state="degraded") == 0
    assert value_of(samples, "snapshots") == 1


def test_a_histogram_has_cumulated_buckets(samples: Samples) -> None:
    name = "writer_commit_seconds"
    assert value_of(samples, f"{name}_bucket", le="0.0") == 1
    assert value_of(samples, f"{name}_bucket", le="1e-06") == 2
    assert value_of(samples, f"{name}_bucket", le="3e-06") == 3
    assert value_of(samples, f"{name}_bucket", le="0.000127") == 3
    assert value_of(samples, f"{name}_bucket", le="0.000255") == 5
    assert value_of(samples, f"{name}_bucket", le="+Inf") == 5
    assert value_of(samples, f"{name}_count") == 5
    assert value_of(samples, f"{name}_sum") == pytest.approx(304e-6)
    assert value_of(samples, f"{name}_largest") == pytest.approx(150e-6)


def test_percentiles_are_a_summary(samples: Samples) -> None:
    labels = {"name": "sql.execute", "kind": "write"}
    name = "operations_latency_seconds"
    assert value_of(samples, f"{name}_count", **labels) == 2
    assert value_of(samples, f"{name}_sum", **labels) == pytest.approx(0.003)
    assert value_of(samples, name, quantile="0.5", **labels) == pytest.approx(0.001)
    assert value_of(samples, name, quantile="0.999", **labels) == pytest.approx(0.00199)
    assert value_of(samples, f"{name}_largest", **labels) == pytest.approx(0.002)


def test_connections_that_nothing_tells_apart_are_added_up(samples: Samples) -> None:
    labels = {"name": "app", "pid": "7", "role": "write"}
    assert value_of(samples, "clients") == 3
    assert value_of(samples, "clients_answered_requests_total", **labels) == 5
    assert value_of(samples, "clients_connected_seconds", **labels) == 3
    assert value_of(samples, "clients_answered_requests_total", name='o"dd\\\n', pid="8", role="read") == 0


def test_of_a_free_text_it_only_says_whether_it_is_there(samples: Samples) -> None:
    assert value_of(samples, "background_last_error", name="optimize") == 1
    assert value_of(samples, "background_state", name="optimize", state="failed") == 1
    assert value_of(samples, "writer_lease_owner") == 0
    assert not any("room" in label for _, labels in samples for _, label in labels)


def test_the_worker_is_described_by_labels(samples: Samples) -> None:
    labels = next(dict(labels) for name, labels in samples if name == "storage_worker_info")
    assert labels["worker"] == a_status().worker
    assert labels["durability"] == a_status().durability


def figures(value: Any, place: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """The places of all numbers in a status as builtins, histograms and percentiles taken for one each."""
    if isinstance(value, dict):
        if "p999" in value or "counts" in value:
            return {place}
        return {found for name, item in value.items() for found in figures(item, (*place, name))}
    if isinstance(value, list):
        return {found for item in value for found in figures(item, place)}
    return {place} if isinstance(value, int | float) else set()


def test_no_figure_is_left_out() -> None:
    status = full_status()
    told = {family.documentation for family in text_string_to_metric_families(metrics_text(status))}
    places = {
        ".".join(("status", *place))
        for place in figures(msgspec.to_builtins(status))
        if place[0] not in ("limits", "errors", "health")
    }
    labels = {f"status.{section}.{label}" for section, found in IDENTITIES.items() for label in found}
    assert places - labels <= told


def test_what_grows_is_a_counter() -> None:
    status = msgspec.to_builtins(full_status())
    names = {place[-1] for place in figures(status)}
    assert names >= COUNTERS, "a counter that no status has"

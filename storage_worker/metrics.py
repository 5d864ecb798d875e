"""The status of a worker as Prometheus metrics, in the text that a scrape reads.

Every figure of `WorkerStatus` becomes a metric by its place and its name: `status.wal.wal_bytes` is
`storage_worker_wal_bytes`, `writer.commit_us` the histogram `storage_worker_writer_commit_seconds`. Times
are in seconds, as Prometheus wants them. What tells the items of a list apart becomes their labels, and texts
that describe the worker those of `storage_worker_info`. Of a text that may be any, like an error's, a metric
only says whether it is there: as a label each of them would be a series of its own for ever.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from .protocol.limits import Limits
from .protocol.status import Histogram, Percentiles, WorkerStatus, bucket_bounds

PREFIX: Final = "storage_worker"

COUNTERS: Final = frozenset(
    {
        "admitted_requests",
        "answered_again",
        "answered_requests",
        "busy_retries",
        "checkpoints",
        "committed_requests",
        "conflicts",
        "failed_commits",
        "failed_requests",
        "fenced",
        "fences",
        "groups",
        "holds",
        "pooled_reads",
        "quick_reads",
        "refused_requests",
        "reopened",
        "replays",
        "restarts",
        "slices",
        "solo_runs",
        "succeeded_requests",
        "system_cpu_seconds",
        "trimmed",
        "truncations",
        "user_cpu_seconds",
    }
)
"""The figures that only grow while a worker lives; all others go up and down."""

IDENTITIES: Final = {
    "lanes": ("name",),
    "operations": ("name", "kind"),
    "background": ("name",),
    "clients": ("name", "pid", "role"),
    "snapshots": ("name", "pid"),
}
"""What tells the items of a list apart: the labels of their figures."""

STATES: Final = frozenset({"state"})
"""Texts out of a few words, which become a label."""

_UNITS: Final = {"_ms": 1_000, "_us": 1_000_000}
_QUANTILES: Final = {"p50": "0.5", "p90": "0.9", "p99": "0.99", "p999": "0.999"}


def metrics_text(status: WorkerStatus) -> str:
    """A worker's status in Prometheus' text format (version 0.0.4), one metric for each of its figures."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatusCollector(status))
    return generate_latest(registry).decode()


class _StatusCollector(Collector):
    """Hands one status to the Prometheus client library."""

    def __init__(self, status: WorkerStatus) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """All its metrics."""
        return all_metrics(self._status)


def all_metrics(status: WorkerStatus) -> Iterator[Metric]:
    """All metrics of a status."""
    texts: dict[str, str] = {}
    for name in status.__struct_fields__:
        value = getattr(status, name)
        if isinstance(value, str):
            texts[name] = value
        elif isinstance(value, Limits):
            yield _by_label(
                "limit", "name", {limit: getattr(value, limit) for limit in value.__struct_fields__}
            )
        elif name == "health":
            yield _by_label("healthy", "state", {value.state: int(value.state == "healthy")})
        elif name == "errors":
            yield _by_label("errors", "code", value, counts=True)
        elif name == "stores":
            yield _by_label("store", "name", dict.fromkeys(value, 1))
        elif isinstance(value, list):
            yield from _of_items(name, value)
        elif isinstance(value, msgspec.Struct) and not isinstance(value, Histogram | Percentiles):
            yield from _of_items(name, [value])
        else:
            yield from _of_figure((name,), [((), value)], ())
    yield InfoMetricFamily(f"{PREFIX}", "What a worker is.", texts)


def _by_label(name: str, label: str, values: dict[str, int], *, counts: bool = False) -> Metric:
    family = CounterMetricFamily if counts else GaugeMetricFamily
    metric = family(f"{PREFIX}_{name}", f"status.{name}", labels=(label,))
    for text, value in values.items():
        metric.add_metric((text,), value)
    return metric


def _of_items(section: str, items: list[msgspec.Struct]) -> Iterator[Metric]:
    """The metrics of structs of one kind; what has the same labels is added up, lengths of time are not."""
    labels = IDENTITIES.get(section, ())
    if section in IDENTITIES:
        yield from _of_figure((section,), [((), len(items))], ())
    for field in items[0].__struct_fields__ if items else ():
        if field in labels:
            continue
        found: dict[tuple[str, ...], object] = {}
        for item in items:
            key = tuple(str(getattr(item, label)) for label in labels)
            found[key] = _together(field, found.get(key), getattr(item, field))
        yield from _of_figure((section, field), list(found.items()), labels)


def _together(field: str, before: object, value: object) -> object:
    if not isinstance(before, int | float) or not isinstance(value, int | float):
        return value
    return max(before, value) if field.endswith("_ms") else before + value


def _of_figure(
    place: tuple[str, ...], values: list[tuple[tuple[str, ...], object]], labels: tuple[str, ...]
) -> Iterator[Metric]:
    """The metric of one field, with a sample for each of the values that is there."""
    field = place[-1]
    name, factor = _named(place)
    text = f"status.{'.'.join(place)}"
    family = CounterMetricFamily if field in COUNTERS else GaugeMetricFamily
    metric = family(name, text, labels=(*labels, field) if field in STATES else labels)
    summary = SummaryMetricFamily(name, text, labels=labels)
    largest = GaugeMetricFamily(f"{name}_largest", f"{text}.largest", labels=labels)
    for label, value in values:
        if isinstance(value, int | float):
            metric.add_metric(label, value / factor)
        elif isinstance(value, str):
            metric.add_metric((*label, value) if field in STATES else label, int(value != ""))
        elif isinstance(value, Percentiles):
            _add_percentiles(summary, labels, label, value, factor)
            largest.add_metric(label, value.largest / factor)
        elif isinstance(value, Histogram):
            yield _histogram(name, text, value, factor)
            largest.add_metric(label, value.largest / factor)
    yield from (each for each in (metric, summary, largest) if each.samples)


def _named(place: tuple[str, ...]) -> tuple[str, int]:
    """A metric's name, and by what its values are divided to be in its unit."""
    *sections, field = place
    factor = _UNITS.get(field[-3:], 1)
    if factor > 1:
        field = f"{field[:-3]}_seconds"
    # `wal.wal_bytes` need not say it twice.
    parts = [section for section in sections if not field.startswith(f"{section}_")]
    return "_".join((PREFIX, *parts, field)), factor


def _histogram(name: str, text: str, histogram: Histogram, factor: int) -> Metric:
    """Cumulated buckets: how many values were at most the greatest one of each bucket."""
    below, buckets = 0, []
    for number, count in enumerate(histogram.counts[:-1]):
        below += count
        buckets.append((str(bucket_bounds(number)[1] / factor), below))
    buckets.append(("+Inf", histogram.count))
    return HistogramMetricFamily(name, text, buckets, histogram.total / factor)


def _add_percentiles(
    summary: SummaryMetricFamily,
    labels: tuple[str, ...],
    label: tuple[str, ...],
    value: Percentiles,
    factor: int,
) -> None:
    """Count and sum, with the percentiles as quantiles."""
    summary.add_metric(label, value.count, value.mean * value.count / factor)
    named = dict(zip(labels, label, strict=True))
    for field, quantile in _QUANTILES.items():
        summary.add_sample(summary.name, {**named, "quantile": quantile}, getattr(value, field) / factor)

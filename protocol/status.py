"""What a worker says about itself: the typed result of `worker.status`, and its histograms.

Counters run from the worker's start. Times with `started` in their name are on the wall clock, all others are
lengths of time.
"""

from typing import Any, Literal

import msgspec

from .envelope import Role
from .limits import DEFAULT_LIMITS, Limits
from .statements import Health

BUCKETS = 32
"""Buckets of a histogram. The last one begins at 2**30: 18 minutes in microseconds, beyond every deadline."""

assert DEFAULT_LIMITS.deadline_ms_max * 1_000 < 2 ** (BUCKETS - 2), (
    "every answer in time has a bucket of its own"
)


class Histogram(msgspec.Struct):
    """How often values fell between powers of two; a bounded size for any number of values.

    Bucket 0 counts the value 0, bucket i the values from 2**(i-1) to 2**i - 1, the last bucket everything
    above too. `total` is the sum of all values, `largest` the greatest one. The unit is the last word in the
    name of the field that holds it.
    """

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * BUCKETS)
    total: int = 0
    largest: int = 0

    def observe(self, value: int) -> None:
        """Count one value; it must not be negative."""
        bucket = value.bit_length()
        self.counts[bucket if bucket < BUCKETS else BUCKETS - 1] += 1
        self.total += value
        self.largest = max(self.largest, value)

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def copy(self) -> "Histogram":
        """A histogram with the same counts that later values do not change."""
        return Histogram(self.counts.copy(), self.total, self.largest)


class Percentiles(msgspec.Struct, frozen=True):
    """A histogram in six figures, in the unit that the field's name ends with; all 0 where nothing was counted."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    p999: float = 0.0
    largest: int = 0


def bucket_bounds(bucket: int) -> tuple[int, int]:
    """The least and the greatest value of a bucket; the last bucket has no end and gives its start twice."""
    if bucket == 0:
        return 0, 0
    least = 2 ** (bucket - 1)
    return (least, least) if bucket == BUCKETS - 1 else (least, 2 * least - 1)


def percentile(histogram: Histogram, q: float) -> float:
    """The value below which the share `q` (0 to 1) of the counted values lies, 0.0 where there are none.

    It is exact at the bounds of the buckets and interpolated evenly between them, never above the largest value.
    """
    rank = q * histogram.count
    below = 0
    for bucket, count in enumerate(histogram.counts):
        if count and below + count >= rank:
            least, greatest = bucket_bounds(bucket)
            greatest = histogram.largest if bucket == BUCKETS - 1 else min(greatest, histogram.largest)
            return least + (greatest - least) * max(0.0, rank - below) / count
        below += count
    return float(histogram.largest)


def percentiles(histogram: Histogram) -> Percentiles:
    """The histogram's figures."""
    count = histogram.count
    if not count:
        return Percentiles()
    return Percentiles(
        count=count,
        mean=histogram.total / count,
        p50=percentile(histogram, 0.5),
        p90=percentile(histogram, 0.9),
        p99=percentile(histogram, 0.99),
        p999=percentile(histogram, 0.999),
        largest=histogram.largest,
    )


class Lane(msgspec.Struct, kw_only=True):
    """What waits in one lane now, and what passed through it."""

    name: Literal["control", "foreground", "background"]
    waiting_requests: int = 0
    waiting_bytes: int = 0
    oldest_wait_ms: float = 0.0
    admitted_requests: int = 0
    refused_requests: int = 0


class OperationCounts(msgspec.Struct, kw_only=True):
    """What became of one operation's requests; latency is from admission to the reply."""

    name: str
    kind: Literal["read", "write", "control"]
    succeeded_requests: int = 0
    failed_requests: int = 0
    latency_us: Percentiles = Percentiles()


class ClientStatus(msgspec.Struct, kw_only=True):
    """One connection; `name` and `pid` are as it said in its Hello."""

    name: str
    pid: int
    role: Role
    connected_ms: int = 0
    in_flight_requests: int = 0
    in_flight_bytes: int = 0
    unread_bytes: int = 0
    answered_requests: int = 0
    refused_requests: int = 0


class SnapshotStatus(msgspec.Struct, kw_only=True):
    """One local snapshot and the client that has it.

    It has lasted for `age_ms` and may last for `left_ms` more. `overdue_ms` is how long ago it should have
    ended: its process is stopped or blocked, and may keep the WAL from starting over.
    """

    name: str
    pid: int
    age_ms: int
    left_ms: int
    overdue_ms: int


class WriterStatus(msgspec.Struct, kw_only=True):
    """The writer's groups.

    `replays` are requests that ran again because a mate's end took the transaction with it; `fences` the small
    transactions after a failed COMMIT; `lease_owner` names the client that owns the writer by an interactive
    transaction, "" where none does.
    """

    groups: int = 0
    committed_requests: int = 0
    group_size_requests: Histogram = msgspec.field(default_factory=Histogram)
    commit_us: Histogram = msgspec.field(default_factory=Histogram)
    busy_retries: int = 0
    replays: int = 0
    solo_runs: int = 0
    failed_commits: int = 0
    fences: int = 0
    reopened: int = 0
    lease_owner: str = ""
    lease_left_ms: int = 0


class ReaderStatus(msgspec.Struct, kw_only=True):
    """The readers. A hold keeps new reads back while the WAL is restarted."""

    threads: int = 0
    waiting_requests: int = 0
    running_requests: int = 0
    oldest_running_ms: float = 0.0
    quick_reads: int = 0
    pooled_reads: int = 0
    holds: int = 0
    longest_hold_ms: float = 0.0


class WalStatus(msgspec.Struct, kw_only=True):
    """Database and WAL file. `pinned_by` says who keeps the WAL from being restarted, "" where nobody does."""

    database_bytes: int = 0
    wal_bytes: int = 0
    live_frames: int = 0
    checkpoints: int = 0
    restarts: int = 0
    truncations: int = 0
    last_checkpoint_ago_ms: int | None = None
    longest_checkpoint_ms: float = 0.0
    pinned_by: str = ""


class ReceiptStatus(msgspec.Struct, kw_only=True):
    """Request keys: how many are kept, and what they were good for."""

    kept: int = 0
    answered_again: int = 0
    conflicts: int = 0
    fenced: int = 0
    trimmed: int = 0


class ProcessStatus(msgspec.Struct, kw_only=True):
    """The worker's process and the disk under the database. CPU is that of all its threads since its start."""

    pid: int
    resident_bytes: int = 0
    user_cpu_seconds: float = 0.0
    system_cpu_seconds: float = 0.0
    threads: int = 0
    descriptors: int = 0
    descriptors_max: int = 0
    disk_free_bytes: int = 0
    disk_reserve_bytes: int = 0


class SpoolStatus(msgspec.Struct, kw_only=True):
    """Large values on their way in chunks, which wait in files beside the database.

    `uploads` are requests whose arguments still come, `downloads` results that still go.
    """

    uploads: int = 0
    downloads: int = 0
    spools: int = 0
    spooled_bytes: int = 0
    largest_bytes: int = 0


class BackgroundTask(msgspec.Struct, kw_only=True):
    """One background task. `total_units` is None where the amount of its work is not known beforehand."""

    name: str
    state: Literal["idle", "waiting", "running", "failed"] = "idle"
    done_units: int = 0
    total_units: int | None = None
    slices: int = 0
    longest_slice_ms: float = 0.0
    last_run_ago_ms: int | None = None
    last_error: str = ""


class WorkerStatus(msgspec.Struct, kw_only=True):
    """Everything that a worker says about itself.

    `worker` is a fresh id of each start; `shared` whether it ends by itself after its last client; `errors` the
    number of failures by code, refusals included; `latency_us` covers all reads and writes.
    """

    version: str
    protocol_version: int
    worker: str
    path: str
    address: str
    started_ms: int
    uptime_ms: int
    shared: bool
    durability: Literal["full", "normal"]
    sqlite_version: str
    journal_mode: str
    synchronous: str
    health: Health
    stores: list[str]
    lanes: list[Lane]
    operations: list[OperationCounts]
    errors: dict[str, int]
    latency_us: Percentiles
    writer: WriterStatus
    readers: ReaderStatus
    wal: WalStatus
    receipts: ReceiptStatus
    process: ProcessStatus
    background: list[BackgroundTask]
    clients: list[ClientStatus]
    snapshots: list[SnapshotStatus]
    limits: Limits
    spool: SpoolStatus = msgspec.field(default_factory=SpoolStatus)


def as_builtins(status: WorkerStatus) -> dict[str, Any]:
    """The status as plain mappings, lists and numbers, every field under its name; fit for JSON."""
    plain: dict[str, Any] = msgspec.to_builtins(status)
    plain["health"] = _named(status.health)
    plain["limits"] = _named(status.limits)
    return plain


def _named(struct: msgspec.Struct) -> dict[str, Any]:
    # These travel as arrays in other envelopes; a program that reads JSON wants their names.
    return {name: getattr(struct, name) for name in struct.__struct_fields__}

"""What the worker tells of itself: health and the whole status."""

import os
import resource
import time

import psutil

from .database.opening import sqlite_version
from .peer import Peer
from .protocol.envelope import PROTOCOL_VERSION
from .protocol.limits import Limits
from .protocol.statements import Health
from .protocol.status import (
    ClientStatus,
    Histogram,
    OperationCounts,
    ProcessStatus,
    ReaderStatus,
    WorkerStatus,
    WriterStatus,
    percentiles,
)
from .protocol.status import Lane as LaneStatus
from .serving import Serving
from .snapshots import Snapshots
from .startup import Startup
from .version import VERSION

MS = 1_000_000


class Reporter:
    """Collects the figures of a worker's parts. Called by whoever serves the pipes."""

    def __init__(
        self, startup: Startup, worker: str, serving: Serving, snapshots: Snapshots, limits: Limits
    ) -> None:
        self._startup = startup
        self._worker = worker
        self._serving = serving
        self._snapshots = snapshots
        self._limits = limits
        self._started_ns = time.monotonic_ns()
        self._started_ms = time.time_ns() // MS
        self._process = psutil.Process()

    def health(self) -> Health:
        """Whether all is well, and why not."""
        serving = self._serving
        reasons = [serving.checkpoints.degraded()]
        refusal = serving.writer.refuse or serving.checkpoints.refuse
        if refusal is not None:
            reasons.append(f"writes are refused: {refusal.message}")
        if serving.writer.recovery.fence_owed:
            reasons.append("a COMMIT failed for want of space, and there is none yet for its fence")
        if serving.writer.blocked:
            reasons.append("another process holds SQLite's lock")
        reasons += [
            f"the background task {task.status.name} failed: {task.status.last_error}"
            for task in serving.background.tasks
            if task.status.state == "failed"
        ]
        reasons = [reason for reason in reasons if reason]
        if serving.intake.draining:
            return Health("draining", [serving.intake.draining, *reasons])
        return Health("degraded" if reasons else "healthy", reasons)

    def status(self) -> WorkerStatus:
        """Everything."""
        startup, serving = self._startup, self._serving
        now = time.monotonic_ns()
        serving.checkpoints.look(now)
        wal = serving.checkpoints.status
        wal.last_checkpoint_ago_ms = serving.checkpoints.last_checkpoint_ago_ms(now)
        wal.pinned_by = serving.checkpoints.pinned_by()
        return WorkerStatus(
            version=VERSION,
            protocol_version=PROTOCOL_VERSION,
            worker=self._worker,
            path=startup.path,
            address=startup.address,
            started_ms=self._started_ms,
            uptime_ms=(now - self._started_ns) // MS,
            shared=startup.owner_pid is None,
            durability=startup.durability,
            sqlite_version=sqlite_version(),
            journal_mode="wal",
            synchronous=startup.durability,
            health=self.health(),
            stores=self._stores(),
            lanes=self._lanes(now),
            operations=self._operations(),
            errors=dict(serving.intake.errors),
            latency_us=percentiles(self._latencies()),
            writer=self._writer(now),
            readers=self._readers(now),
            wal=wal,
            receipts=serving.writer.receipts.status,
            process=self._process_status(),
            background=serving.background.statuses(now),
            clients=[
                _client(peer, now)
                for peer in serving.intake.pipes.peers.values()
                if peer not in serving.intake.pipes.door.unfinished
            ],
            snapshots=self._snapshots.statuses(now),
            limits=self._limits,
            spool=serving.intake.transfers.spools.status,
        )

    def _stores(self) -> list[str]:
        return sorted({name.partition(".")[0] for name in self._serving.intake.operations})

    def _lanes(self, now_ns: int) -> list[LaneStatus]:
        intake = self._serving.intake
        foreground = intake.admission.status
        foreground.waiting_requests = sum(lane.requests for lane in intake.lanes)
        foreground.waiting_bytes = sum(lane.bytes for lane in intake.lanes)
        oldest = [at for lane in intake.lanes if (at := lane.oldest_ns()) is not None]
        foreground.oldest_wait_ms = (now_ns - min(oldest)) / MS if oldest else 0.0
        waiting = [task for task in self._serving.background.tasks if task.status.state == "waiting"]
        return [
            LaneStatus(name="control", admitted_requests=intake.control_requests),
            foreground,
            LaneStatus(name="background", waiting_requests=len(waiting)),
        ]

    def _operations(self) -> list[OperationCounts]:
        return [
            OperationCounts(
                name=served.name,
                kind=served.kind,
                succeeded_requests=served.succeeded,
                failed_requests=served.failed,
                latency_us=percentiles(served.latency_us),
            )
            for served in self._serving.intake.operations.values()
            if served.succeeded or served.failed
        ]

    def _latencies(self) -> Histogram:
        whole = Histogram()
        for served in self._serving.intake.operations.values():
            if served.kind != "control":
                whole.counts = [a + b for a, b in zip(whole.counts, served.latency_us.counts, strict=True)]
                whole.total += served.latency_us.total
                whole.largest = max(whole.largest, served.latency_us.largest)
        return whole

    def _writer(self, now_ns: int) -> WriterStatus:
        writer = self._serving.writer
        owner = writer.interactive.peer
        writer.status.lease_owner = owner.name if owner is not None else ""
        writer.status.lease_left_ms = max(0, (writer.interactive.end_ns - now_ns) // MS) if owner else 0
        return writer.status

    def _readers(self, now_ns: int) -> ReaderStatus:
        readers = self._serving.readers
        busy = readers.busy()
        readers.status.running_requests = len(busy)
        readers.status.waiting_requests = readers.pooled.requests + self._serving.intake.reads.requests
        readers.status.oldest_running_ms = max(
            ((now_ns - watch.started_ns) / MS for watch in busy), default=0.0
        )
        return readers.status

    def _process_status(self) -> ProcessStatus:
        process, checkpoints = self._process, self._serving.checkpoints
        with process.oneshot():
            cpu = process.cpu_times()
            return ProcessStatus(
                pid=os.getpid(),
                resident_bytes=process.memory_info().rss,
                user_cpu_seconds=cpu.user,
                system_cpu_seconds=cpu.system,
                threads=process.num_threads(),
                descriptors=process.num_fds(),
                descriptors_max=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                disk_free_bytes=checkpoints.free_bytes,
                disk_reserve_bytes=checkpoints.reserve_bytes,
            )


def _client(peer: Peer, now_ns: int) -> ClientStatus:
    return ClientStatus(
        name=peer.name,
        pid=peer.pid,
        role=peer.role,
        connected_ms=(now_ns - peer.connected_ns) // MS,
        in_flight_requests=len(peer.jobs),
        in_flight_bytes=peer.bytes_in_flight,
        unread_bytes=peer.unread_bytes,
        answered_requests=peer.answered_requests,
        refused_requests=peer.refused_requests,
    )

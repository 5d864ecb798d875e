"""Client processes that start together, and the figures of what they measured."""

import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
from multiprocess.connection import wait as wait_for_any
from multiprocess.context import ForkServerContext
from rich.console import Console

CLIENTS_MAX = 1_000
START_SECONDS_MAX = 60.0
WORK_SECONDS_MAX = 3_600.0
OVERRUN_SECONDS_MAX = 60.0
TABLE_CHARS = 128


class Sample(msgspec.Struct):
    """What one client process measured.

    `latencies_s` are the seconds of every operation that succeeded, as the bytes of an array of doubles;
    `cpu_seconds` its process's own time from the common start to its last answer.
    """

    latencies_s: bytes
    errors: dict[str, int]
    cpu_seconds: float

    @property
    def operations(self) -> int:
        """How many operations succeeded."""
        return len(self.latencies_s) // 8


class Figures(msgspec.Struct, kw_only=True):
    """The figures of one run, or of several runs of the same kind put together.

    `fairness` is the least-served client's operations over the most-served one's, the worst of all runs.
    `worker_cpu_us` and `client_cpu_us` are per operation; None where there is no worker.
    """

    operations: int
    operations_per_s: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    errors: dict[str, int]
    fairness: float
    worker_cpu_us: float | None
    client_cpu_us: float


class Run(msgspec.Struct):
    """The samples of all clients of one run, and the worker's CPU seconds meanwhile.

    `seconds` is the time within which the operations began, or all the time that a given amount of work took.
    One that began in time counts, however long it took: what that hides in throughput is seen in latency.
    """

    samples: list[Sample]
    seconds: float
    worker_cpu_seconds: float | None


class ClientFailedError(Exception):
    """A client process ended without a result; what it said stands on standard error."""


class Recorder:
    """Collects what a client loop measures; made after the common start."""

    def __init__(self) -> None:
        self.latencies_s = array("d")
        self.errors: dict[str, int] = {}
        self._cpu_started = time.process_time()

    def error(self, code: str) -> None:
        """Count one failed operation."""
        self.errors[code] = self.errors.get(code, 0) + 1

    def sample(self) -> Sample:
        """What was measured until now."""
        return Sample(
            self.latencies_s.tobytes(),
            self.errors,
            time.process_time() - self._cpu_started,
        )


Target = Callable[..., Sample]
"""A client's work: called with `start`, which returns when all clients are ready, and its own arguments."""


def _client(target: Target, barrier: Any, results: Any, arguments: tuple[Any, ...]) -> None:
    def start() -> None:
        barrier.wait(START_SECONDS_MAX)

    results.send_bytes(msgspec.msgpack.encode(target(start, *arguments)))


@contextmanager
def worker_cpu(pid: int | None) -> Iterator[Callable[[], float | None]]:
    """Gives a function for the CPU seconds of a process since the block began; None for no process."""
    process = None if pid is None else psutil.Process(pid)

    def used() -> float | None:
        return None if process is None else sum(process.cpu_times()[:2])

    before = used() or 0.0
    yield lambda: None if process is None else (used() or 0.0) - before


def processes(*preload: str) -> Any:
    """The context that client processes are started from: forked by a small server without threads.

    `preload` are modules that the server loads once for all of them.
    """
    context = ForkServerContext()
    context.set_forkserver_preload(list(preload))
    return context


def run_clients(
    context: Any,
    target: Target,
    arguments: Sequence[tuple[Any, ...]],
    *,
    seconds: float | None = None,
    worker_pid: int | None = None,
) -> Run:
    """Run one process for each entry of `arguments`, from a common start, and gather their samples.

    `seconds` is how long they begin operations, None where they have a given amount of work. Raises
    `ClientFailedError` where a process ends without a sample, or works longer than that and an overrun. No
    process outlives the call.
    """
    barrier = context.Barrier(len(arguments) + 1)
    started, receivers = [], {}
    try:
        for own in arguments:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_client, args=(target, barrier, sender, own), daemon=True)
            process.start()
            sender.close()
            started.append(process)
            receivers[receiver] = process
        # A client that fails before the start would leave the others waiting: its pipe ends instead.
        _wait_for_start(barrier, receivers)
        with worker_cpu(worker_pid) as used:
            began = time.perf_counter()
            samples = _gather(receivers, (seconds or WORK_SECONDS_MAX) + OVERRUN_SECONDS_MAX)
            took = time.perf_counter() - began
            cpu = used()
        return Run(samples, seconds or took, cpu)
    finally:
        for process in started:
            process.kill()
            process.join()
            process.close()
        for receiver in receivers:
            receiver.close()


def _wait_for_start(barrier: Any, receivers: dict[Any, Any]) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while barrier.n_waiting < barrier.parties - 1:
        if wait_for_any(list(receivers), timeout=0.01):
            barrier.abort()
            raise ClientFailedError("a client process failed before the common start")
        if time.monotonic() > deadline:
            barrier.abort()
            raise ClientFailedError(f"the clients were not ready after {START_SECONDS_MAX:.0f} s")
    barrier.wait(START_SECONDS_MAX)


def _gather(receivers: dict[Any, Any], seconds_max: float) -> list[Sample]:
    waiting = list(receivers)
    samples = []
    deadline = time.monotonic() + seconds_max
    while waiting:
        ready: list[Any] = wait_for_any(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise ClientFailedError(f"{len(waiting)} clients gave no result within {seconds_max:.0f} s")
        for receiver in ready:
            waiting.remove(receiver)
            try:
                samples.append(msgspec.msgpack.decode(receiver.recv_bytes(), type=Sample))
            except (EOFError, OSError) as error:
                process = receivers[receiver]
                process.join(1.0)
                raise ClientFailedError(f"a client process ended with status {process.exitcode}") from error
    return samples


def latencies_ms(runs: Sequence[Run]) -> "array[float]":
    """The latencies of all operations of the runs, in milliseconds, sorted."""
    everything = array("d")
    for run in runs:
        for sample in run.samples:
            everything.frombytes(sample.latencies_s)
    return array("d", sorted(value * 1e3 for value in everything))


def quantile(values: Sequence[float], q: float) -> float:
    """The value at the share `q` of sorted values; 0.0 where there are none."""
    return values[min(len(values) - 1, int(len(values) * q))] if values else 0.0


def figures(runs: Sequence[Run]) -> Figures:
    """The figures of runs of the same kind, all their operations together."""
    values = latencies_ms(runs)
    operations = len(values)
    errors: dict[str, int] = {}
    for run in runs:
        for sample in run.samples:
            for code, count in sample.errors.items():
                errors[code] = errors.get(code, 0) + count
    worker = [run.worker_cpu_seconds for run in runs if run.worker_cpu_seconds is not None]
    client = sum(sample.cpu_seconds for run in runs for sample in run.samples)
    return Figures(
        operations=operations,
        operations_per_s=operations / sum(run.seconds for run in runs),
        p50_ms=quantile(values, 0.5),
        p99_ms=quantile(values, 0.99),
        p999_ms=quantile(values, 0.999),
        max_ms=values[-1] if values else 0.0,
        errors=errors,
        fairness=min(_fairness(run) for run in runs),
        worker_cpu_us=sum(worker) / operations * 1e6 if worker and operations else None,
        client_cpu_us=client / operations * 1e6 if operations else 0.0,
    )


def _fairness(run: Run) -> float:
    counts = [sample.operations for sample in run.samples]
    return min(counts) / max(counts) if max(counts) else 0.0


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def terminal() -> Console:
    """A console wide enough for the tables of figures: a narrow terminal wraps lines, it cuts no number."""
    console = Console()
    return Console(width=max(console.width, TABLE_CHARS))


def complain(message: str) -> None:
    """Tell a person what went wrong."""
    print(message, file=sys.stderr)

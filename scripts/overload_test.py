#!/usr/bin/env python3
"""What a worker answers while many clients send more than it can do.

    scripts/overload_test.py
    scripts/overload_test.py --clients 64 --seconds 5 --json overload.json

Each client keeps a full pipeline in flight, and all together more than the worker's queue takes. Meanwhile one
more client asks for status, cancels, and writes now and then; at the end the worker is stopped. The exit status
is 0 where control is answered in time, 1 where not, 3 where it could not be measured.
"""

import bootstrap

# isort: split
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
import typer

import storage_worker as sw
from load_workloads import CREATE, INSERT, VALUE
from measuring import (
    ClientFailedError,
    Recorder,
    Run,
    Sample,
    complain,
    processes,
    quantile,
    run_clients,
    terminal,
)

assert bootstrap.entered()

CONTROL_MS_GOAL = 100.0
PAUSE_SECONDS = 0.02
MIB = 2**20


class Probe(msgspec.Struct):
    """What one more client saw: milliseconds of control requests and of its own writes, and the peak of memory."""

    control_ms: list[float] = []
    write_ms: list[float] = []
    refused: int = 0
    stop_ms: float = 0.0
    resident_peak_bytes: int = 0


def flood(start: Callable[[], None], pipe: sw.Pipe, seconds: float) -> Sample:
    """One client that never waits for an answer before it sends more."""
    client = pipe.connect()
    client.query("select 1")
    start()
    recorder = Recorder()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        futures = []
        began = time.perf_counter()
        try:
            with client.pipeline() as pipeline:
                futures = [pipeline.execute(INSERT, ("k", VALUE, number)) for number in range(512)]
        except sw.StorageError:
            pass_over = [future for future in futures if future.done()]
        else:
            pass_over = futures
        for future in pass_over:
            try:
                future.result(1.0)
            except sw.StorageError as error:
                recorder.error(error.code)
            else:
                recorder.latencies_s.append(time.perf_counter() - began)
    return recorder.sample()


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1000


def probe(worker: sw.StorageWorker, still: Callable[[], bool]) -> Probe:
    """Ask and write while the flood lasts; then stop the worker."""
    found = Probe()
    admin = worker.connect(role="admin")
    process = psutil.Process(worker.pid)
    while still():
        found.control_ms.append(_timed(admin.status))
        found.control_ms.append(_timed(admin.health))
        try:
            found.write_ms.append(_timed(lambda: admin.execute(INSERT, ("m", VALUE, 0), retries=0)))
        except sw.OverloadedError:
            found.refused += 1
        found.resident_peak_bytes = max(found.resident_peak_bytes, process.memory_info().rss)
        time.sleep(PAUSE_SECONDS)
    found.stop_ms = _timed(admin.stop)
    admin.close()
    return found


def main(
    clients: Annotated[int, typer.Option(min=1, max=200, help="Client processes.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.5, max=60.0, help="How long they send.")] = 5.0,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Measure what a worker answers under overload."""
    context = processes("load_workloads")
    runs: list[Run] = []
    failed: list[ClientFailedError] = []
    with (
        tempfile.TemporaryDirectory(prefix="overload-") as folder,
        sw.StorageWorker(f"{folder}/load.db") as worker,
    ):
        worker.connect().execute(CREATE)
        pipes = [worker.pipe() for _ in range(clients)]

        def run() -> None:
            try:
                runs.append(run_clients(context, flood, [(pipe, seconds) for pipe in pipes], seconds=seconds))
            except ClientFailedError as error:
                failed.append(error)

        flooding = threading.Thread(target=run)
        flooding.start()
        found = probe(worker, flooding.is_alive)
        flooding.join()
        for pipe in pipes:
            pipe.close()
    if failed:
        complain(str(failed[0]))
        raise typer.Exit(3)
    kept = max(found.control_ms) <= CONTROL_MS_GOAL and found.stop_ms <= CONTROL_MS_GOAL
    _report(runs[0], found, clients, json)
    raise typer.Exit(0 if kept else 1)


def _report(run: Run, found: Probe, clients: int, json: Path | None) -> None:
    control, writes = sorted(found.control_ms), sorted(found.write_ms) or [0.0]
    errors: dict[str, int] = {}
    for sample in run.samples:
        for code, count in sample.errors.items():
            errors[code] = errors.get(code, 0) + count
    figures = {
        "clients": clients,
        "done": sum(sample.operations for sample in run.samples),
        "refused": errors,
        "control_requests": len(control),
        "control_ms_p50": round(quantile(control, 0.5), 2),
        "control_ms_p99": round(quantile(control, 0.99), 2),
        "control_ms_max": round(control[-1], 2),
        "stop_ms": round(found.stop_ms, 2),
        "modest_writes": len(found.write_ms),
        "modest_writes_refused": found.refused,
        "modest_write_ms_p50": round(quantile(writes, 0.5), 2),
        "modest_write_ms_max": round(writes[-1], 2),
        "resident_peak_mib": round(found.resident_peak_bytes / MIB, 1),
    }
    console = terminal()
    for name, value in figures.items():
        console.print(f"{name:>22}  {value}")
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))


if __name__ == "__main__":
    typer.run(main)

#!/usr/bin/env python3
"""Large values: how fast they travel, and what eight clients that do not read theirs cost the worker and the others.

Usage: python scripts/chunk_benchmark.py [--mebibytes 60] [--readers 8] [--seconds 3] [--json FILE]

Every reader asks for one large result and is stopped (SIGSTOP) before it has read any of it. Beside them, and
before without them, one client does point reads and small writes, and its latency is told.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import storage_worker as sw
from storage_worker.protocol.limits import MIB

NEVER_MS = 600_000
SELECT = "select v from large"
MOST = sw.Limits().chunked_bytes_max


def deaf_reader(address: str) -> None:
    """A process that asks for a large result and stops before it reads any of it."""
    client = sw.connect(address)
    client.connect()
    pipeline = client.pipeline()
    pipeline.query(SELECT, max_result_bytes=MOST, timeout=300.0).flush()
    os.kill(os.getpid(), signal.SIGSTOP)


def timed(work: Callable[[], Any]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def latencies(client: sw.Client, seconds: float) -> dict[str, float]:
    """Milliseconds of point reads and small writes in turn."""
    reads: list[float] = []
    writes: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        reads.append(timed(lambda: client.query("select a from small where id = 1")))
        writes.append(timed(lambda: client.execute("update small set a = a + 1 where id = 1")))
    found = {}
    for name, values in (("read", reads), ("write", writes)):
        values.sort()
        for share, of in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
            found[f"{name}_{of}_ms"] = round(1000 * values[min(len(values) - 1, int(share * len(values)))], 3)
    return found


def peak_bytes(pid: int) -> int:
    """The most memory that a process ever had, 0 where the system does not tell."""
    try:
        told = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in told.splitlines() if line.startswith("VmHWM"))


def beside_readers(client: sw.Client, address: str, readers: int, seconds: float) -> dict[str, Any]:
    """The worker and another client while so many large results wait for readers that are stopped."""
    children = [
        subprocess.Popen([sys.executable, __file__, "--deaf-reader", address]) for _ in range(readers)
    ]
    try:
        while (status := client.status()).spool.downloads < readers:
            time.sleep(0.01)
        return {
            "spooled_mib": status.spool.spooled_bytes // MIB,
            "unread_mib_of_all": sum(each.unread_bytes for each in status.clients) / MIB,
            "resident_mib": status.process.resident_bytes // MIB,
            "peak_mib": peak_bytes(status.process.pid) // MIB,
            **latencies(client, seconds),
        }
    finally:
        for child in children:
            child.kill()
            child.wait()


def measure(mebibytes: int, readers: int, seconds: float) -> dict[str, Any]:
    """Everything, on a fresh database."""
    limits = msgspec.structs.replace(
        sw.Limits(), unread_ms_max=NEVER_MS, spool_bytes_max=readers * MOST + MOST
    )
    value = os.urandom(MIB) * mebibytes
    with (
        tempfile.TemporaryDirectory(prefix="sw-chunks-", ignore_cleanup_errors=True) as folder,
        sw.StorageWorker(f"{folder}/chunks.db", limits=limits) as worker,
        worker.connect() as client,
    ):
        client.execute("create table large(v)")
        client.execute("create table small(id integer primary key, a)")
        client.execute("insert into small values(1, 0)")
        idle = client.status().process.resident_bytes // MIB
        wrote = timed(lambda: client.execute("insert into large values(?)", (value,), timeout=300.0))
        read = timed(lambda: client.query(SELECT, max_result_bytes=MOST, timeout=300.0))
        return {
            "value_mib": mebibytes,
            "write_mib_per_s": round(mebibytes / wrote, 1),
            "read_mib_per_s": round(mebibytes / read, 1),
            "idle_resident_mib": idle,
            "alone": latencies(client, seconds),
            f"beside_{readers}_stopped_readers": beside_readers(client, worker.address, readers, seconds),
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=60)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--deaf-reader", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.deaf_reader:
        deaf_reader(options.deaf_reader)
        return
    text = json.dumps(measure(options.mebibytes, options.readers, options.seconds), indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

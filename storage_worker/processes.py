"""Which process a process id means: ids are used again, an id with its creation time is not."""

import os
import sys
from pathlib import Path

import psutil

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")

SAME_START_SECONDS_MAX = 1.0
"""How far two readings of one creation time may differ: a step of the system's clock moves them."""


def started_of(pid: int) -> float | None:
    """When a process was created, in seconds since the epoch; None where it does not run any more."""
    if pid < 1:
        return None
    try:
        process = psutil.Process(pid)
        ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return None if ended else process.create_time()
    except (psutil.NoSuchProcess, OverflowError):
        return None


def process_is(pid: int, started: float) -> bool:
    """Whether the process `pid` that was created at `started` (seconds since the epoch) still runs."""
    found = started_of(pid)
    return found is not None and abs(found - started) <= SAME_START_SECONDS_MAX


def open_pidfd(pid: int, started: float) -> int | None:
    """A descriptor that becomes readable when the process `pid` created at `started` ends.

    None where the platform has no such descriptors: then ask `process_is` from time to time. Raises
    `ProcessLookupError` where that process has ended already.
    """
    descriptor = pidfd_of(pid)
    # Only after the descriptor is open does the check hold for the process it stands for.
    if not process_is(pid, started):
        if descriptor is not None:
            os.close(descriptor)
        raise ProcessLookupError(f"process {pid} has ended")
    return descriptor


def pidfd_of(pid: int) -> int | None:
    """Like `open_pidfd`, for an id that stands for no other process: a child not waited for yet."""
    if sys.platform != "linux":
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        # An old kernel, or a sandbox that forbids the call.
        return None


def boot_id() -> str:
    """What tells this start of the operating system from every other."""
    try:
        return BOOT_ID_FILE.read_text("ascii").strip()
    except OSError:
        return str(round(psutil.boot_time()))

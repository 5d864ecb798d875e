"""Threads that keep no process from ending."""

import threading
from collections.abc import Callable

from ..protocol.errors import WorkerUnavailableError


def start_daemon(name: str, target: Callable[..., object], *arguments: object) -> threading.Thread:
    """Run `target` in a daemon thread, which is returned.

    Raises `WorkerUnavailableError` where no thread can be started: some versions of Python start none at the
    interpreter's exit, and a system has a bound on threads.
    """
    try:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
    except RuntimeError as error:
        raise _no_thread(error) from error
    return thread


def _no_thread(error: RuntimeError) -> WorkerUnavailableError:
    refusal = WorkerUnavailableError(
        f"this process cannot start the thread that it needs to reach a worker: {error}",
        outcome="not_committed",
    )
    refusal.retryable = False
    return refusal

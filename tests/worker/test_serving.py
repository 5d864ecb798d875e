"""The serving thread's loop and its deputy, with everything around them made up: when to wait, and for how long."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from storage_worker import exits
from storage_worker import serving as module
from storage_worker.admission import NEVER_NS
from storage_worker.gate import Gate
from storage_worker.intake import Intake
from storage_worker.peer import Peer
from storage_worker.pipes import Pipes as RealPipes
from storage_worker.protocol.limits import DEFAULT_LIMITS, MIB
from storage_worker.serving import Serving
from storage_worker.spool import Spools

PAST, FUTURE = 1, 2**62


class Pipes:
    """The pipes as the deputy uses them: `turns` counts, `wake` ends one."""

    def __init__(self) -> None:
        self.role = threading.Lock()
        self.has_unread = False
        self.turns = threading.Semaphore(0)
        self.woken = threading.Event()

    def wake(self) -> None:
        self.woken.set()


def worker(**changes: Any) -> SimpleNamespace:
    """The parts of a worker in which nothing is to be done."""
    found: dict[str, Any] = {
        "reads": False,
        "writes": False,
        "requests": 0,
        "transaction": False,
        "transaction_lane": False,
        "blocked_until_ns": 0,
        "background_ns": FUTURE,
        "idle_ns": 0,
    }
    return SimpleNamespace(**(found | changes))


def serving(state: SimpleNamespace | None = None, **limits: int) -> Serving:
    state = state or worker()
    pipes = Pipes()

    def turn(_: int) -> None:
        pipes.turns.release()
        pipes.woken.wait(30)
        pipes.woken.clear()

    intake = SimpleNamespace(
        pipes=pipes,
        turn=turn,
        reads=SimpleNamespace(is_ready=state.reads),
        writes=SimpleNamespace(is_ready=state.writes),
        admission=SimpleNamespace(requests=state.requests),
    )
    interactive = SimpleNamespace(
        is_open=state.transaction, lane=SimpleNamespace(is_ready=state.transaction_lane), end_ns=FUTURE - 1
    )
    writer = SimpleNamespace(
        interactive=interactive,
        blocked=state.blocked_until_ns > 0,
        blocked_until_ns=state.blocked_until_ns,
        watch=SimpleNamespace(job=None, own_end_ns=0),
    )
    readers = SimpleNamespace(offer=lambda: None, watches=[])
    of_checkpoints = SimpleNamespace(idle_ns=lambda: state.idle_ns)
    background = SimpleNamespace(due_ns=lambda: state.background_ns)
    of = msgspec.structs.replace(DEFAULT_LIMITS, **limits)
    parts: Any = (intake, writer, readers, of_checkpoints, background, of)
    return Serving(*parts)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (worker(), FUTURE),
        (worker(background_ns=0), NEVER_NS),
        (worker(background_ns=7), 7),
        (worker(idle_ns=7), 7),
        (worker(reads=True), 0),
        (worker(writes=True), 0),
        (worker(transaction_lane=True, transaction=True), 0),
        # What waits for a transaction's end keeps nobody busy meanwhile.
        (worker(transaction=True, writes=True), FUTURE - 1),
        (worker(transaction=True, idle_ns=PAST, background_ns=PAST), FUTURE - 1),
        # Nor does what waits for a foreign lock.
        (worker(blocked_until_ns=9, writes=True), 9),
        (worker(blocked_until_ns=9, writes=True, idle_ns=PAST, background_ns=PAST), 9),
    ],
)
def test_how_long_the_pipes_may_be_waited_for(state: SimpleNamespace, expected: int) -> None:
    assert serving(state)._until_ns() == expected


@pytest.mark.parametrize(
    ("state", "waits"),
    [
        (worker(), False),
        (worker(requests=1), True),
        (worker(requests=1, transaction=True), False),
    ],
)
def test_a_stop_waits_for_what_is_in_flight_only(state: SimpleNamespace, waits: bool) -> None:
    made = serving(state)
    made.stop_by_ns = FUTURE
    made._hung_look_ns = FUTURE - 2
    assert made._until_ns() == (FUTURE - 2 if waits else 0)
    made.intake.pipes.has_unread = True  # type: ignore[misc]
    assert made._until_ns() == (0 if state.transaction else FUTURE - 2 if waits else FUTURE)


def test_requests_in_flight_are_looked_after_from_time_to_time() -> None:
    made = serving(worker(requests=1))
    made._check_hung(5)
    assert 5 < made._until_ns() < 5 + 10**9


# The deputy


def ends(made: Serving) -> None:
    thread = threading.Thread(target=made.end)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "the deputy does not end"


def test_it_ends_in_the_middle_of_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEPUTY_IDLE_LOOKS", 0)
    made = serving(takeover_ms=60_000)
    made._deputy.start()
    ends(made)


def test_it_ends_while_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEPUTY_IDLE_LOOKS", 0)
    made = serving(takeover_ms=1)
    made._deputy.start()
    while not made._deputy_sleeps:
        pass
    ends(made)


def test_it_serves_when_the_serving_thread_is_away_also_after_it_slept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "DEPUTY_IDLE_LOOKS", 1)
    made = serving(takeover_ms=1)
    pipes: Any = made.intake.pipes
    made._deputy.start()
    for _ in range(5):
        while not made._deputy_sleeps:
            pass
        made._enter()
        assert pipes.turns.acquire(timeout=30), "the deputy does not serve"
        made._leave()
        # It lets go of the pipes for whoever comes back.
        assert pipes.role.acquire(timeout=30)
        pipes.role.release()
    ends(made)


def test_answers_are_sent_although_the_deputy_has_the_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = serving(takeover_ms=1)
    pipes: Any = made.intake.pipes
    delivered: list[object] = []
    monkeypatch.setattr(made.intake, "deliver", delivered.extend, raising=False)
    made._deputy.start()
    made._enter()
    assert pipes.turns.acquire(timeout=30)
    done: list[Any] = ["answer"]
    thread = threading.Thread(target=made._deliver, args=(done,))
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "the deputy does not let go of the pipes"
    assert (delivered, done) == (["answer"], [])
    made._leave()
    ends(made)


def test_a_short_absence_is_no_matter() -> None:
    made = serving(takeover_ms=60_000)
    made._deputy.start()
    for _ in range(1_000):
        made._enter()
        made._leave()
    assert not made.intake.pipes.turns.acquire(blocking=False)  # type: ignore[attr-defined]
    ends(made)


def test_who_reads_at_the_end_of_the_worker_gets_what_it_was_not_sent_yet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """More than its pipe holds: the end of what it sends must not be read before that is written."""
    monkeypatch.setattr(module, "PARTING_NS", 60 * 10**9)
    limits, answer = DEFAULT_LIMITS, b"x" * (4 * MIB)
    intake = Intake(pipes := RealPipes(limits), Spools(str(tmp_path / "t.db"), limits), limits, Gate())
    parts: Any = (intake, None, None, None, None, limits)
    ours, theirs = socket.socketpair()
    with ours, closing(pipes), ours.makefile("rb") as file, ThreadPoolExecutor(1) as pool:
        theirs.setblocking(False)
        peer = pipes.peers[theirs.fileno()] = Peer(theirs, limits.request_bytes_max, time.monotonic_ns())
        pipes.queue(peer, answer)
        pipes.flush()
        assert peer.unread
        reading = pool.submit(file.read)
        Serving(*parts)._part_with_clients("the worker ended")
        assert not pipes.peers
        assert reading.result() == answer


def test_a_deputy_that_fails_takes_the_worker_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    made = serving(takeover_ms=1)

    def fails(_: int) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(made.intake, "turn", fails)
    made._busy_since_ns = time.monotonic_ns()
    made._deputy.start()
    made._deputy.join(30)
    assert statuses == [exits.FATAL]

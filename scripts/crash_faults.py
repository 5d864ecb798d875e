"""What the crash test does to the processes, one fault a round."""

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from crash_clients import OWNED_KINDS, SHARED_KINDS
from crash_fleet import HOST_DEATH_SECONDS_MAX, Fleet, wait_until
from crash_points import AT_START, AT_STOP, RARE, Point
from crash_writes import ANSWER_SECONDS_MAX

STOP_SECONDS = (0.2, 0.4)
"""How long a process is stopped: longer than the short deadlines of the writes."""

LONG_STOP_SECONDS = 0.7
"""Longer than the lease of an interactive transaction."""

SOON_SECONDS = 0.1
POINT_SECONDS_MAX = 30.0
"""How long a worker may take until it passes a point."""

PASSES_MAX, SHARED_PASSES_MAX = 8, 3
"""At which passing of a point the worker dies; the shared one has few clients."""

Act = Callable[[Fleet, random.Random], bool]
"""Does something to a fleet and says whether that was possible."""


class Fault(NamedTuple):
    """What is done in a round; `act` does it and says whether it happened."""

    name: str
    owned: bool
    act: Act


def kill_worker(fleet: Fleet, dice: random.Random) -> bool:
    """At a random moment under load."""
    time.sleep(dice.uniform(0.0, SOON_SECONDS))
    fleet.kill_worker(fleet.worker())
    return True


def kill_worker_twice(fleet: Fleet, dice: random.Random) -> bool:
    """The next one is killed while it starts, or soon after."""
    fleet.kill_worker(fleet.worker())
    # From here on it cannot be said which of the two a client lost.
    fleet.mark(death=False)
    if not fleet.owned:
        fleet.kill_worker(fleet.worker())
        return True
    wait_until(lambda: fleet.kill_starting() > 0, dice.uniform(0.05, 0.4))
    fleet.mark(death=False)
    return True


def stop_worker(fleet: Fleet, dice: random.Random) -> bool:
    """Beyond deadlines; then it goes on, or is killed as it stands."""
    worker = fleet.worker()
    fleet.mark(death=False)
    worker.signal(signal.SIGSTOP)
    time.sleep(dice.uniform(*STOP_SECONDS))
    if dice.random() < 0.3:
        fleet.kill_worker(worker)
    else:
        worker.signal(signal.SIGCONT)
    return True


def end_worker(fleet: Fleet, dice: random.Random) -> bool:
    """SIGTERM: it finishes what it has and is started again."""
    time.sleep(dice.uniform(0.0, SOON_SECONDS))
    worker = fleet.worker()
    fleet.mark(death=False)
    worker.signal(signal.SIGTERM)
    if not worker.wait_ended(ANSWER_SECONDS_MAX):
        fleet.wrong.append("a worker did not end after SIGTERM")
    return True


def kill_host(fleet: Fleet, dice: random.Random) -> bool:
    """Its worker must follow, and the next host get the database."""
    time.sleep(dice.uniform(0.0, SOON_SECONDS))
    worker = fleet.worker()
    fleet.mark(death=False)
    _kill_host(fleet)
    _next_host(fleet, worker.wait_ended)
    return True


def kill_host_of_stopped_worker(fleet: Fleet, dice: random.Random) -> bool:
    """The worker sees it once it goes on."""
    worker = fleet.worker()
    fleet.mark(death=False)
    worker.signal(signal.SIGSTOP)
    _kill_host(fleet)
    time.sleep(dice.uniform(*STOP_SECONDS))
    worker.signal(signal.SIGCONT)
    _next_host(fleet, worker.wait_ended)
    return True


def _kill_host(fleet: Fleet) -> None:
    assert fleet.host is not None
    fleet.wrong += fleet.host.growth()
    fleet.host.kill()


def _next_host(fleet: Fleet, wait_ended: Callable[[float], bool]) -> None:
    began = time.monotonic()
    if not wait_ended(ANSWER_SECONDS_MAX):
        raise TimeoutError("a worker did not end with its host")
    took = time.monotonic() - began
    fleet.worker_outlived_host_s.append(took)
    if took > HOST_DEATH_SECONDS_MAX:
        fleet.wrong.append(f"a worker outlived its host by {took:.2f} s")
    fleet.start_host()


def stop_host(fleet: Fleet, dice: random.Random) -> bool:
    """Its worker goes on without it."""
    assert fleet.host is not None
    fleet.mark(death=False)
    fleet.host.signal(signal.SIGSTOP)
    time.sleep(dice.uniform(*STOP_SECONDS))
    fleet.host.signal(signal.SIGCONT)
    return True


def kill_worker_of_stopped_host(fleet: Fleet, dice: random.Random) -> bool:
    """Nobody starts the next worker until the host goes on."""
    assert fleet.host is not None
    worker = fleet.worker()
    fleet.mark(death=False)
    fleet.host.signal(signal.SIGSTOP)
    worker.signal(signal.SIGKILL)
    time.sleep(dice.uniform(*STOP_SECONDS))
    fleet.host.signal(signal.SIGCONT)
    return True


def kill_clients(kinds: tuple[str, ...]) -> Act:
    """The clients of those kinds fall together and are replaced."""

    def act(fleet: Fleet, dice: random.Random) -> bool:
        time.sleep(dice.uniform(0.0, SOON_SECONDS))
        for kind in kinds:
            fleet.wrong += fleet.members[kind].growth()
            fleet.members.pop(kind).kill()
        for kind in kinds:
            fleet.start_client(kind)
        return True

    return act


def stop_clients(kinds: tuple[str, ...]) -> Act:
    """The clients of those kinds stand still for a while."""

    def act(fleet: Fleet, dice: random.Random) -> bool:
        fleet.mark(death=False)
        members = [fleet.members[kind] for kind in kinds]
        for member in members:
            member.signal(signal.SIGSTOP)
        time.sleep(LONG_STOP_SECONDS if "transaction" in kinds else dice.uniform(*STOP_SECONDS))
        for member in members:
            member.signal(signal.SIGCONT)
        return True

    return act


def die_at(point: Point) -> Act:
    """The worker dies at a point."""

    def act(fleet: Fleet, dice: random.Random) -> bool:
        worker = fleet.worker()
        hits = fleet.switch.hits(point)
        passes_max = 1 if point in RARE else PASSES_MAX if fleet.owned else SHARED_PASSES_MAX
        fleet.switch.arm(point, dice.randint(1, passes_max))
        if point in AT_START:
            fleet.kill_worker(worker)
        elif point in AT_STOP:
            fleet.mark(death=False)
            worker.signal(signal.SIGTERM)
        died = wait_until(lambda: fleet.switch.hits(point) > hits, POINT_SECONDS_MAX)
        fleet.switch.disarm()
        if died:
            fleet.mark(death=point not in AT_START | AT_STOP, at_s=fleet.switch.died_s)
        return died

    return act


SHARED_POINTS = (Point.WAL_WRITE, Point.AMID_REPLIES, Point.RECORD)

OWNED_FAULTS: tuple[tuple[str, int, Act], ...] = (
    ("kill the worker", 2, kill_worker),
    ("kill it while it starts", 1, kill_worker_twice),
    ("stop the worker", 2, stop_worker),
    ("SIGTERM to the worker", 1, end_worker),
    ("kill the host", 1, kill_host),
    ("kill the host of a stopped worker", 1, kill_host_of_stopped_worker),
    ("stop the host", 1, stop_host),
    ("kill the worker of a stopped host", 1, kill_worker_of_stopped_host),
)
SHARED_FAULTS: tuple[tuple[str, int, Act], ...] = (
    ("kill the shared worker", 1, kill_worker),
    ("kill the shared worker twice", 1, kill_worker_twice),
    ("stop the shared worker", 1, stop_worker),
)


def deck() -> list[Fault]:
    """Every fault as often as it is to come among as many rounds."""
    cards = [Fault(name, True, act) for name, times, act in OWNED_FAULTS for _ in range(times)]
    cards += [Fault(name, False, act) for name, times, act in SHARED_FAULTS for _ in range(times)]
    cards += [Fault(f"die {point.text}", True, die_at(point)) for point in Point]
    cards += [Fault(f"die {point.text} (shared)", False, die_at(point)) for point in SHARED_POINTS]
    for kinds, owned in ((OWNED_KINDS, True), (SHARED_KINDS, False)):
        for some in _groups(kinds, KILLED_TOGETHER):
            cards.append(Fault(f"kill clients: {'; '.join(some)}", owned, kill_clients(some)))
        for some in _groups(kinds, STOPPED_TOGETHER):
            cards.append(Fault(f"stop clients: {'; '.join(some)}", owned, stop_clients(some)))
    return cards


KILLED_TOGETHER, STOPPED_TOGETHER = 2, 4


def _groups(kinds: tuple[str, ...], size: int) -> list[tuple[str, ...]]:
    return [kinds[start : start + size] for start in range(0, len(kinds), size)]


def faults(seed: int) -> Iterator[tuple[Fault, random.Random]]:
    """One fault after another for ever, with the dice of its round: the whole deck, shuffled, again and again."""
    number = 0
    while True:
        cards = deck()
        random.Random(f"{seed} {number}").shuffle(cards)
        for card in cards:
            yield card, random.Random(f"{seed} round {number}")
            number += 1


def rounds_of_a_deck() -> int:
    """After how many rounds every fault has come."""
    return len(deck())


def tally(done: Counter[str]) -> list[str]:
    """The faults of the deck that never happened."""
    return sorted({card.name for card in deck()} - set(done))

"""Places and lanes: bounds, round robin, first come first served, and what may not be given out."""

import threading
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from storage_worker.admission import NEVER_NS, Admission, Lane, expired
from storage_worker.execution import Served
from storage_worker.peer import Job, Peer
from storage_worker.protocol.errors import OverloadedError
from storage_worker.protocol.limits import DEFAULT_LIMITS, Limits
from storage_worker.protocol.operation import Operation
from storage_worker.protocol.statements import Nothing

SERVED = Served(Operation("test.work", "write", Nothing, None), lambda _tx, _arguments: None)
SOLO = Served(Operation("test.solo", "write", Nothing, None, solo=True), lambda _tx, _arguments: None)


class NoSocket:
    """What a client's record needs of its socket."""

    def fileno(self) -> int:
        return -1


def client(name: str = "client") -> Peer:
    peer = Peer(NoSocket(), 1024, 0)  # type: ignore[arg-type]
    peer.name = name
    return peer


def request(
    peer: Peer, number: int = 1, *, size: int = 10, deadline_ns: int = 100, served: Served = SERVED
) -> Job:
    return Job(peer, number, served, msgspec.Raw(b"\x90"), size, deadline_ns, 1000, number, served.solo)


def everything(lane: Lane, *, group: bool = False) -> list[Job]:
    """What the lane gives until it gives nothing more, each as the first of a group or all as one group."""
    found: list[Job] = []
    while (job := lane.take(first=not (group and found))) is not None:
        found.append(job)
    return found


# Lanes


def test_clients_take_turns_and_each_keeps_its_order() -> None:
    lane = Lane()
    hog, modest = client("hog"), client("modest")
    flood = [request(hog, number) for number in range(1, 5_001)]
    for job in flood:
        lane.add(job)
    one = request(modest)
    lane.add(one)
    taken = everything(lane, group=True)
    assert taken.index(one) <= 1
    assert [job for job in taken if job.peer is hog] == flood
    assert (lane.requests, lane.bytes, lane.is_ready) == (0, 0, False)


@given(st.lists(st.integers(0, 7), max_size=60))
def test_no_client_is_passed_over(owners: list[int]) -> None:
    """Between two requests of one client every other client that waits gets its turn, once."""
    peers = [client(str(number)) for number in range(8)]
    lane = Lane()
    for number, owner in enumerate(owners, 1):
        lane.add(request(peers[owner], number))
    waiting = Counter(owners)
    since: list[str] = []
    for job in everything(lane):
        name = job.peer.name
        if name in since:
            since = since[since.index(name) + 1 :]
            assert set(since) >= {str(owner) for owner, left in waiting.items() if left} - {name}
        since.append(name)
        waiting[int(name)] -= 1
    assert not waiting.total()


def test_what_is_put_back_comes_first_and_in_its_order() -> None:
    lane = Lane()
    first, second = client("first"), client("second")
    jobs = [request(first, 1), request(second, 1), request(first, 2), request(second, 2), request(first, 3)]
    for job in jobs:
        lane.add(job)
    taken = [found for _ in range(3) if (found := lane.take()) is not None]
    assert taken == jobs[:3]
    lane.put_back(taken)
    again = everything(lane)
    for peer in (first, second):
        assert [job for job in again if job.peer is peer] == [job for job in jobs if job.peer is peer]
    assert lane.requests == 0


def test_what_is_put_back_keeps_its_order_beside_what_still_waits() -> None:
    lane = Lane()
    first, second = client("a"), client("b")
    jobs = [request(first), request(second)]
    for job in [*jobs, request(first), request(first)]:
        lane.add(job)
    taken = [lane.take(), lane.take()]
    lane.put_back([job for job in taken if job is not None])
    assert [lane.take(), lane.take()] == taken == jobs


def test_one_that_must_run_alone_begins_a_group() -> None:
    lane = Lane()
    peers = [client(name) for name in "abc"]
    jobs = [request(peers[0]), request(peers[1], served=SOLO), request(peers[2])]
    for job in jobs:
        lane.add(job)
    more = request(peers[0])
    lane.add(more)
    assert lane.take(first=True) is jobs[0]
    assert lane.take(first=False) is jobs[2]
    assert lane.take(first=False) is more
    assert lane.take(first=False) is None
    assert lane.take(first=True) is jobs[1]


def test_those_that_must_run_alone_keep_their_turns() -> None:
    lane = Lane()
    peers = [client(name) for name in "abcd"]
    jobs = [request(peer, served=SOLO) for peer in peers[:3]]
    for job in jobs:
        lane.add(job)
    for _ in range(9):
        lane.add(request(peers[3]))
    begun = []
    while (one := lane.take(first=True)) is not None:
        begun.append(one)
        while lane.requests > 3 and lane.take(first=False) is not None:
            pass
    assert begun[:3] == jobs


def test_a_paused_client_keeps_its_places_and_gets_no_turn() -> None:
    lane = Lane()
    slow, other = client("slow"), client("other")
    jobs = [request(slow, 1), request(slow, 2)]
    lane.add(jobs[0])
    slow.paused = True
    lane.pause(slow)
    lane.add(jobs[1])
    assert (lane.requests, lane.is_ready, lane.take()) == (2, False, None)
    lane.add(request(other))
    assert [job.peer for job in everything(lane)] == [other]
    slow.paused = False
    lane.resume(slow)
    assert lane.is_ready
    assert everything(lane) == jobs


def test_what_is_put_back_of_a_client_paused_meanwhile_waits() -> None:
    lane = Lane()
    slow = client()
    job = request(slow)
    lane.add(job)
    assert lane.take() is job
    slow.paused = True
    lane.pause(slow)
    lane.put_back([job])
    assert (lane.is_ready, lane.requests) == (False, 1)
    assert lane.remove(job)
    slow.paused = False
    lane.resume(slow)
    assert (lane.is_ready, lane.requests) == (False, 0)


def test_take_of_gives_what_was_sent_before_a_write() -> None:
    lane = Lane()
    peer, other = client(), client()
    jobs = [request(peer, number) for number in (1, 2, 3)]
    for job, write in zip(jobs, (1, 1, 4), strict=True):
        job.write_number = write
        lane.add(job)
    assert lane.take_of(other, NEVER_NS) is None
    assert lane.take_of(peer, 1) is None
    assert [lane.take_of(peer, 2) for _ in range(3)] == [jobs[0], jobs[1], None]
    assert lane.take_of(peer, NEVER_NS) is jobs[2]
    assert lane.requests == 0


def test_expired_requests_are_taken_out_and_the_next_deadline_is_known() -> None:
    lanes = [Lane(), Lane()]
    peer, other = client(), client()
    late = [request(peer, 1, deadline_ns=5), request(other, 1, deadline_ns=10)]
    kept = request(peer, 2, deadline_ns=50)
    for job in (*late, kept):
        lanes[0].add(job)
    assert lanes[0].earliest_ns == 5
    assert expired(lanes, 4) == []
    assert expired(lanes, 10) == late
    assert (lanes[0].earliest_ns, lanes[1].earliest_ns) == (50, NEVER_NS)
    assert everything(lanes[0]) == [kept]
    assert expired(lanes, 60) == []
    assert lanes[0].earliest_ns == NEVER_NS


def test_the_oldest_wait_is_that_of_the_first_of_some_client() -> None:
    lane = Lane()
    assert lane.oldest_ns() is None
    peer, other = client(), client()
    for job in (request(peer, 7), request(other, 3), request(peer, 9)):
        lane.add(job)
    assert lane.oldest_ns() == 3


def test_two_threads_never_get_the_same_request() -> None:
    lane = Lane()
    peers = [client(str(number)) for number in range(20)]
    jobs = [request(peers[number % 20], number) for number in range(4_000)]
    taken: list[list[Job]] = [[], []]
    start = threading.Barrier(3)

    def take(into: list[Job]) -> None:
        start.wait()
        while len(taken[0]) + len(taken[1]) < len(jobs):
            job = lane.take()
            if job is not None:
                into.append(job)

    threads = [threading.Thread(target=take, args=(into,)) for into in taken]
    for thread in threads:
        thread.start()
    start.wait()
    for job in jobs:
        lane.add(job)
    for thread in threads:
        thread.join()
    assert sorted(job.id for into in taken for job in into) == list(range(4_000))
    assert (lane.requests, lane.bytes) == (0, 0)


@dataclass
class Model:
    """A lane as a plain list of requests, in the order of their clients' turns."""

    queues: dict[Peer, deque[Job]] = field(default_factory=dict)

    @property
    def jobs(self) -> list[Job]:
        return [job for queue in self.queues.values() for job in queue]


class LaneMachine(RuleBasedStateMachine):
    """Whatever is done to a lane, it knows what it holds, and each client's requests stay in their order."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.lane = Lane()
        self.peers = [client(name) for name in "abcd"]
        self.model = Model()
        self.number = 0

    @rule(owner=st.integers(0, 3), deadline=st.integers(1, 9), solo=st.booleans())
    def add(self, owner: int, deadline: int, solo: bool) -> None:
        self.number += 1
        served = SOLO if solo else SERVED
        job = request(self.peers[owner], self.number, size=self.number, deadline_ns=deadline, served=served)
        self.lane.add(job)
        self.model.queues.setdefault(job.peer, deque()).append(job)

    @rule(target=taken, count=st.integers(1, 5))
    def take_a_group(self, count: int) -> list[Job]:
        group: list[Job] = []
        while len(group) < count and (job := self.lane.take(first=not group)) is not None:
            assert not job.peer.paused
            assert not (job.alone and group)
            assert self.model.queues[job.peer].popleft() is job
            group.append(job)
        if not group:
            assert all(job.peer.paused for job in self.model.jobs)
        return group

    @rule(group=taken)
    def put_back(self, group: list[Job]) -> None:
        """Only what is not there again already, and only in front of what came later."""
        if all(job not in self.model.jobs for job in group) and self._is_older(group):
            self.lane.put_back(group)
            for job in reversed(group):
                self.model.queues.setdefault(job.peer, deque()).appendleft(job)

    def _is_older(self, group: list[Job]) -> bool:
        return all(job.id < queue[0].id for job in group if (queue := self.model.queues.get(job.peer)))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.model.jobs:
            job = data.draw(st.sampled_from(self.model.jobs))
            assert self.lane.remove(job)
            self.model.queues[job.peer].remove(job)
            assert not self.lane.remove(job)

    @rule(now=st.integers(1, 9))
    def expire(self, now: int) -> None:
        gone = expired([self.lane], now)
        assert {job.id for job in gone} == {job.id for job in self.model.jobs if job.deadline_ns <= now}
        for job in gone:
            self.model.queues[job.peer].remove(job)

    @rule(owner=st.integers(0, 3))
    def pause_or_resume(self, owner: int) -> None:
        peer = self.peers[owner]
        peer.paused = not peer.paused
        (self.lane.pause if peer.paused else self.lane.resume)(peer)

    @invariant()
    def counts(self) -> None:
        jobs = self.model.jobs
        assert self.lane.requests == len(jobs)
        assert self.lane.bytes == sum(job.size for job in jobs)
        assert self.lane.is_ready == any(not job.peer.paused for job in jobs)
        # It may be too early, after which it is looked at again; never too late.
        assert self.lane.earliest_ns <= min((job.deadline_ns for job in jobs), default=NEVER_NS)


TestLane = LaneMachine.TestCase
TestLane.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


# Places


def limits(**changes: int) -> Limits:
    return msgspec.structs.replace(DEFAULT_LIMITS, **changes)


def refusal(admission: Admission, peer: Peer, size: int = 10, waiting: int = 0) -> OverloadedError:
    lane = Lane()
    for number in range(waiting):
        lane.add(request(peer, number + 1_000_000))
    with pytest.raises(OverloadedError) as caught:
        admission.place(peer, size, [Lane(), lane])
    assert caught.value.retryable
    assert caught.value.outcome == "not_committed"
    return caught.value


def admit(admission: Admission, peer: Peer, number: int, size: int = 10) -> Job:
    admission.place(peer, size, [])
    job = request(peer, number, size=size)
    admission.add(job)
    return job


@pytest.mark.parametrize(
    ("bound", "changes"),
    [
        ("client_requests", {"client_requests_max": 3}),
        ("client_bytes", {"client_bytes_max": 30}),
        ("worker_requests", {"queue_requests_max": 3}),
        ("worker_bytes", {"queue_bytes_max": 30}),
    ],
)
def test_each_bound_is_exact_and_named(bound: str, changes: dict[str, int]) -> None:
    admission = Admission(limits(**changes))
    peer = client()
    jobs = [admit(admission, peer, number) for number in (1, 2, 3)]
    error = refusal(admission, peer, 1)
    assert error.details == {"bound": bound}
    assert str(next(iter(changes.values()))) in str(error)
    admission.remove(jobs[0])
    admit(admission, peer, 4)


def test_one_client_s_bound_is_no_other_s() -> None:
    admission = Admission(limits(client_requests_max=1))
    for name in "abc":
        peer = client(name)
        admit(admission, peer, 1)
        assert refusal(admission, peer).details == {"bound": "client_requests"}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12), st.booleans()), max_size=80))
def test_places_never_exceed_their_bounds_and_are_all_given_back(steps: list[tuple[int, int, bool]]) -> None:
    of = limits(client_requests_max=4, client_bytes_max=30, queue_requests_max=9, queue_bytes_max=60)
    admission = Admission(of)
    peers = [client(name) for name in "abc"]
    inside: list[Job] = []
    for number, (owner, size, adds) in enumerate(steps, 1):
        peer = peers[owner]
        if not adds and inside:
            admission.remove(inside.pop(number % len(inside)))
            continue
        try:
            inside.append(admit(admission, peer, number, size))
        except OverloadedError:
            mine = [job for job in inside if job.peer is peer]
            assert (
                len(mine) == of.client_requests_max
                or sum(job.size for job in mine) + size > of.client_bytes_max
                or len(inside) == of.queue_requests_max
                or sum(job.size for job in inside) + size > of.queue_bytes_max
            )
        for each in peers:
            assert len(each.jobs) <= of.client_requests_max
            assert each.bytes_in_flight <= of.client_bytes_max
        assert admission.requests == len(inside) <= of.queue_requests_max
        assert admission.bytes == sum(job.size for job in inside) <= of.queue_bytes_max
    for job in inside:
        admission.remove(job)
    assert (admission.requests, admission.bytes, admission.keyed) == (0, 0, {})


def test_keys_in_flight_are_known() -> None:
    admission = Admission(limits())
    jobs = [request(client(), number) for number in (1, 2, 3)]
    for job, key in zip(jobs, ("k", "k", None), strict=True):
        job.key = key
        admission.add(job)
    assert admission.keyed == {"k": jobs[:2]}
    admission.remove(jobs[0])
    assert admission.keyed == {"k": [jobs[1]]}
    admission.remove(jobs[1])
    assert admission.keyed == {}


def test_retry_after_follows_the_queue_and_the_recent_rate() -> None:
    of = limits(retry_after_ms_min=5, retry_after_ms_max=5_000)
    admission = Admission(of)
    keeps_busy = admit(admission, client(), 1)
    now = 0
    for _ in range(100):
        now += 10_000_000
        admission.served(10, now)
    # A request took a millisecond: of a thousand that wait, half are served in half a second.
    assert admission.retry_after_s(1000) == pytest.approx(0.5, rel=0.01)
    assert admission.retry_after_s(2000) == pytest.approx(1.0, rel=0.01)
    assert admission.retry_after_s(0) == of.retry_after_ms_min / 1000
    assert admission.retry_after_s(10**9) == of.retry_after_ms_max / 1000
    admission.remove(keeps_busy)


def test_time_without_requests_is_no_service_time() -> None:
    admission = Admission(limits(retry_after_ms_min=1))
    peer = client()
    job = admit(admission, peer, 1)
    for step in range(100):
        admission.served(1, step * 1_000_000)
    busy = admission.retry_after_s(1000)
    admission.remove(job)
    admission.served(1, 100_000_000)
    # An hour later.
    job = admit(admission, peer, 2)
    admission.served(1, 3_600_000_000_000)
    assert admission.retry_after_s(1000) == pytest.approx(busy, rel=0.05)

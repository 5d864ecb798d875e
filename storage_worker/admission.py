"""Places for requests: bounded by count and bytes, for the worker and for each client, in fair lanes."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import NoReturn

from .peer import Job, Peer
from .protocol.errors import InvalidRequestError, OverloadedError
from .protocol.limits import Limits
from .protocol.status import Lane as LaneStatus

NEVER_NS = 2**63


class Lane:
    """Waiting requests: round robin over clients, first come first served within one client.

    The pipes' side adds and removes, an executor takes, each from its own thread. The requests of a paused
    client keep their places, but none of them is given out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ring: deque[Peer] = deque()
        """The clients whose requests may be taken, in the order of their turns."""
        self._queues: dict[Peer, deque[Job]] = {}
        self.requests = 0
        self.bytes = 0
        self.earliest_ns = NEVER_NS

    def add(self, job: Job) -> None:
        """Place a request behind its client's others."""
        with self._lock:
            queue = self._queues.get(job.peer)
            if queue is None:
                queue = self._queues[job.peer] = deque()
                if not job.peer.paused:
                    self._ring.append(job.peer)
            queue.append(job)
            self.requests += 1
            self.bytes += job.size
            self.earliest_ns = min(self.earliest_ns, job.deadline_ns)

    def put_back(self, jobs: list[Job]) -> None:
        """Place requests that were taken in this order at the heads of their clients' queues again."""
        with self._lock:
            for job in reversed(jobs):
                queue = self._queues.get(job.peer)
                if queue is None:
                    queue = self._queues[job.peer] = deque()
                elif job.peer in self._ring:
                    self._ring.remove(job.peer)
                if not job.peer.paused:
                    self._ring.appendleft(job.peer)
                queue.appendleft(job)
                self._count(job, 1)
                self.earliest_ns = min(self.earliest_ns, job.deadline_ns)

    def take(self, first: bool = True) -> Job | None:
        """The next request, or None. One that must be `alone` is only given as the `first` of a group."""
        with self._lock:
            ring = self._ring
            for place, peer in enumerate(ring):
                queue = self._queues[peer]
                job = queue[0]
                # It keeps its turn for the next group; the others, whom it may have held up once, come first.
                if job.alone and not first:
                    continue
                queue.popleft()
                del ring[place]
                if queue:
                    ring.append(peer)
                else:
                    del self._queues[peer]
                self.requests -= 1
                self.bytes -= job.size
                return job
            return None

    @property
    def is_ready(self) -> bool:
        """Whether a request waits that may be taken."""
        return bool(self._ring)

    def take_of(self, peer: Peer, before: int) -> Job | None:
        """The client's next request if it was sent before its write of that number, else None."""
        with self._lock:
            queue = self._queues.get(peer)
            if queue is None or queue[0].write_number >= before:
                return None
            job = queue.popleft()
            self._count(job, -1)
            self._forget_if_empty(peer, queue)
            return job

    def pause(self, peer: Peer) -> None:
        """Give out no request of a client, which is marked as paused, until `resume`."""
        with self._lock:
            if peer in self._ring:
                self._ring.remove(peer)

    def resume(self, peer: Peer) -> None:
        """Give out its requests again, now that its mark is gone."""
        with self._lock:
            if peer in self._queues and peer not in self._ring:
                self._ring.append(peer)

    def remove(self, job: Job) -> bool:
        """Take out one waiting request; whether it was still waiting."""
        with self._lock:
            queue = self._queues.get(job.peer)
            if queue is None or job not in queue:
                return False
            queue.remove(job)
            self._count(job, -1)
            self._forget_if_empty(job.peer, queue)
            return True

    def remove_where(self, choose: Callable[[Job], bool]) -> list[Job]:
        """Take out all waiting requests that `choose` wants; the earliest deadline of the rest is kept."""
        with self._lock:
            gone: list[Job] = []
            earliest = NEVER_NS
            for peer, queue in list(self._queues.items()):
                kept: deque[Job] = deque()
                for job in queue:
                    if choose(job):
                        gone.append(job)
                        self._count(job, -1)
                    else:
                        kept.append(job)
                        earliest = min(earliest, job.deadline_ns)
                self._queues[peer] = kept
                self._forget_if_empty(peer, kept)
            self.earliest_ns = earliest
            return gone

    def oldest_ns(self) -> int | None:
        """When the request that waits longest was admitted."""
        with self._lock:
            return min((queue[0].admitted_ns for queue in self._queues.values()), default=None)

    def _count(self, job: Job, sign: int) -> None:
        self.requests += sign
        self.bytes += sign * job.size

    def _forget_if_empty(self, peer: Peer, queue: deque[Job]) -> None:
        if not queue:
            del self._queues[peer]
            if peer in self._ring:
                self._ring.remove(peer)


class Admission:
    """Decides who gets a place. Used only by whoever serves the pipes.

    A request holds its place from its admission to its answer.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.requests = 0
        self.bytes = 0
        self.keyed: dict[str, list[Job]] = {}
        self.status = LaneStatus(name="foreground")
        self._served_ns = 1_000_000.0
        self._last_ns = 0

    def place(self, peer: Peer, size: int, lanes: Iterable[Lane]) -> None:
        """Check for a place for `size` more bytes of a client, or raise `OverloadedError` at once.

        `lanes` have the requests that wait for an executor: what a repeat would wait behind.
        """
        limits = self._limits
        if len(peer.jobs) >= limits.client_requests_max:
            self._refuse("client", "requests", limits.client_requests_max, len(peer.jobs))
        if peer.bytes_in_flight + size > limits.client_bytes_max:
            self._refuse("client", "bytes", limits.client_bytes_max, len(peer.jobs))
        if self.requests >= limits.queue_requests_max:
            self._refuse("worker", "requests", limits.queue_requests_max, _waiting(lanes))
        if self.bytes + size > limits.queue_bytes_max:
            self._refuse("worker", "bytes", limits.queue_bytes_max, _waiting(lanes))

    def add(self, job: Job) -> None:
        """Give a request its place."""
        peer, size = job.peer, job.size
        peer.jobs[job.id] = job
        peer.bytes_in_flight += size
        self.requests += 1
        self.bytes += size
        self.status.admitted_requests += 1
        if job.key is not None:
            self.keyed.setdefault(job.key, []).append(job)

    def remove(self, job: Job) -> None:
        """Free the place of an answered request."""
        peer, size = job.peer, job.size
        del peer.jobs[job.id]
        peer.bytes_in_flight -= size
        self.requests -= 1
        self.bytes -= size
        if job.key is not None:
            others = self.keyed[job.key]
            others.remove(job)
            if not others:
                del self.keyed[job.key]

    def in_flight_with_key_of(self, job: Job) -> tuple[Job, ...]:
        """The requests in flight whose outcome a request asks for."""
        try:
            key = job.served.operation.decode_arguments(job.raw, self._limits.nesting_depth_max).key
        except InvalidRequestError:
            return ()  # its executor says so
        return tuple(self.keyed.get(key, ()))

    def served(self, count: int, now_ns: int) -> None:
        """Note that `count` requests were answered, for the estimate of `retry_after`."""
        if self._last_ns and count:
            each = min((now_ns - self._last_ns) / count, 1e9)
            self._served_ns += (each - self._served_ns) / 8
        # Time in which there is nothing to serve says nothing about how long a request takes.
        self._last_ns = now_ns if self.requests else 0

    def retry_after_s(self, waiting: int) -> float:
        """How long it should take until half of `waiting` requests are served, at the recent rate."""
        limits = self._limits
        wait_ms = self._served_ns * waiting / 2 / 1e6
        return min(max(wait_ms, limits.retry_after_ms_min), limits.retry_after_ms_max) / 1000

    def _refuse(self, whose: str, what: str, most: int, waiting: int) -> NoReturn:
        wait = self.retry_after_s(waiting)
        raise OverloadedError(
            f"the {whose} may have {most} {what} in flight, and this would be more; repeat in {wait:.3f} s",
            retry_after=wait,
            details={"bound": f"{whose}_{what}"},
        )


def _waiting(lanes: Iterable[Lane]) -> int:
    return sum(lane.requests for lane in lanes)


def expired(lanes: Iterable[Lane], now_ns: int) -> list[Job]:
    """Take out of the lanes all requests whose deadline has passed."""
    gone: list[Job] = []
    for lane in lanes:
        if lane.earliest_ns <= now_ns:
            gone += lane.remove_where(lambda job: job.deadline_ns <= now_ns)
    return gone

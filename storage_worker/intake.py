"""Intake: what clients say becomes requests in lanes, and what executors finish becomes answers.

Whoever serves the pipes holds their `role`; everything here is called with it held.
"""

import time
from collections.abc import Iterable

from .admission import NEVER_NS, Admission, Lane, expired
from .execution import Served, fail
from .finished import Finished
from .gate import Gate
from .peer import Job, Peer
from .pipes import Pipes
from .protocol.envelope import (
    Cancel,
    Chunk,
    Credit,
    FromClient,
    Goodbye,
    Hello,
    Request,
    decode_from_client,
    encode,
    failure_of,
    request_id_of,
)
from .protocol.errors import (
    BusyError,
    InvalidRequestError,
    Outcome,
    OverloadedError,
    ProtocolError,
    RequestCancelledError,
    StorageError,
    WorkerUnavailableError,
)
from .protocol.framing import frame
from .protocol.limits import Limits
from .protocol.session import State, check_hello
from .protocol.statements import OUTCOME
from .spool import Large, Spools
from .terms import bounds, checked_key, permitted
from .transfers import Transfers
from .watch import cancelled, deadline_exceeded

EXPIRE_LOOK_NS = 2_000_000
"""How often it is looked what has waited beyond its deadline while there is enough else to do."""


class Intake:
    """What is said on the pipes: hand-shakes, requests, cancels, and the answers."""

    def __init__(self, pipes: Pipes, spools: Spools, limits: Limits, gate: Gate) -> None:
        self.pipes = pipes
        self.transfers = Transfers(pipes, spools, limits)
        self.admission = Admission(limits)
        self.writes = Lane()
        self.reads = Lane()
        self.held = Lane()
        """Reads that wait for writes which their clients sent before them."""
        self.awaiting = Lane()
        """Questions for the outcome of what has no answer yet."""
        self.lanes: list[Lane] = [self.writes, self.reads, self.held, self.awaiting, self.transfers.arriving]
        self.copies = Lane()
        """Copies that are being made: whoever takes one out answers it."""
        self.operations: dict[str, Served] = {}
        self.errors: dict[str, int] = {}
        self.draining = ""
        self.control_requests = 0
        self._expire_look_ns = 0
        self._limits = limits
        self._gate = gate
        self.finished = Finished(pipes.wake)
        pipes.serve(self)

    def turn(self, until_ns: int) -> None:
        """Wait for the pipes until then, at the most, and serve what is ready."""
        if until_ns:
            until_ns = min(until_ns, self._earliest_ns())
            self._expire_look_ns = min(self._expire_look_ns, until_ns)
        self.pipes.turn(until_ns)
        now = time.monotonic_ns()
        if self.finished:
            self._answer_all(self.finished.take(), now)
        if now >= self._expire_look_ns:
            self._expire_look_ns = now + EXPIRE_LOOK_NS
            if now >= self._earliest_ns():
                self._expire(now)
        self.pipes.look_at_time(now)
        self.pipes.flush()
        self.finished.sent()

    def _earliest_ns(self) -> int:
        """The first deadline of what waits, or one before it."""
        return min(self.copies.earliest_ns, *[lane.earliest_ns for lane in self.lanes])

    def _expire(self, now_ns: int) -> None:
        """Answer what has waited beyond its deadline."""
        blocked = self._gate.writer_is_blocked()
        for job in expired(self.lanes, now_ns):
            if job.served.kind == "write" and blocked:
                error: StorageError = BusyError(
                    "another process holds SQLite's lock and did not let go before the deadline; repeat, or end it"
                )
            else:
                error = deadline_exceeded("waiting")
            fail(job, error, self._limits)
            self._answer(job, now_ns)
        for job in expired([self.copies], now_ns):
            fail(job, deadline_exceeded("execution"), self._limits)
            self._answer(job, now_ns)

    # What clients say

    def take_frame(self, peer: Peer, body: bytes) -> None:
        """A frame's body came from a client."""
        state = peer.session.state
        try:
            envelope = decode_from_client(body)
        except ProtocolError as error:
            request_id = request_id_of(body)
            may_ask = state is State.OPEN or state is State.DRAINING
            if request_id is None or not may_ask or request_id <= peer.last_id:
                raise
            peer.last_id = request_id
            self.refuse(
                peer, request_id, InvalidRequestError(f"the request does not decode: {error.message}")
            )
            return
        if type(envelope) is Request and (state is State.OPEN or state is State.DRAINING):
            self._take_request(peer, envelope, len(body))
        else:
            self._take_other(peer, envelope)

    def _take_other(self, peer: Peer, envelope: FromClient) -> None:
        peer.session.from_client(envelope)
        if type(envelope) is Cancel:
            self._cancel(peer, envelope.id)
        elif type(envelope) is Chunk:
            self._take_chunk(peer, envelope)
        elif type(envelope) is Credit:
            self.transfers.take_credit(peer, envelope)
        elif type(envelope) is Hello:
            self._greet(peer, envelope)
        elif type(envelope) is Goodbye:
            self.pipes.drop(peer)

    def _greet(self, peer: Peer, hello: Hello) -> None:
        check_hello(hello)
        peer.name = hello.name[: self._limits.client_name_chars_max]
        peer.pid = hello.pid
        peer.role = self._gate.granted(hello.role, hello.grant)
        assert self._gate.welcome is not None
        welcome = self._gate.welcome(peer)
        peer.session.from_worker(welcome)
        del self.pipes.door.unfinished[peer]
        self.pipes.queue(peer, frame(encode(welcome)))

    def _cancel(self, peer: Peer, request_id: int) -> None:
        job = peer.jobs.get(request_id)
        if job is None:
            self.transfers.cancel(peer, request_id)
        elif self._take_out(job):
            fail(job, cancelled(), self._limits)
            self._answer(job, time.monotonic_ns())
        else:
            job.cancelled = True
        self.transfers.no_more(peer, request_id)

    def _take_chunk(self, peer: Peer, chunk: Chunk) -> None:
        """A part of a request's arguments came; the request takes its turn once they are whole."""
        job = self.transfers.take_chunk(peer, chunk)
        if job is None:
            return
        lane = None
        if not job.code:
            try:
                lane = self._gate.place_in_transaction(job)
            except StorageError as error:
                fail(job, error, self._limits)
        if job.code:
            self._answer(job, time.monotonic_ns())
        else:
            self._line_up(job, lane)

    # Requests

    def _take_request(self, peer: Peer, request: Request, size: int) -> None:
        if request.id <= peer.last_id:
            raise ProtocolError(f"request id {request.id} after {peer.last_id}: ids must increase")
        peer.last_id = request.id
        try:
            job = self._admit(peer, request, size, time.monotonic_ns())
            if job is not None:
                self._place(job, request)
        except StorageError as error:
            self.refuse(peer, request.id, error)

    def _admit(self, peer: Peer, request: Request, size: int, now_ns: int) -> Job | None:
        """Check a request and give it its place; None where it is answered at once."""
        served = permitted(self.operations, peer, request)
        kind = served.kind
        deadline_ns, result_bytes = bounds(request, now_ns, self._limits)
        job = Job(
            peer, request.id, served, request.arguments, size, deadline_ns, result_bytes, now_ns, served.solo
        )
        if kind == "control":
            self.control_requests += 1
            self._gate.control(job)
            self.pipes.queue(peer, job.frame)
            self._count(job, now_ns)
            return None
        if self.draining:
            raise _leaving(self.draining)
        if request.flags or result_bytes > self._limits.result_bytes_max:
            job.large = Large(self.transfers.spools)
            job.alone = True
        self.admission.place(peer, size, self.lanes)
        job.transaction = request.transaction
        if kind == "write":
            refusal = self._gate.refuse_writes(now_ns)
            if request.key is not None:
                job.key = checked_key(served, request.key, self._limits)
            elif refusal is not None and served.adds:
                # What has a key may be a repeat: its receipt is looked for first.
                raise refusal
        return job

    def _place(self, job: Job, request: Request) -> None:
        """Give a request its place, or raise why it has none."""
        lane = self._gate.place_in_transaction(job)
        if job.served.name == OUTCOME.name:
            job.behind = self.admission.in_flight_with_key_of(job)
            if job.behind:
                self.admission.add(job)
                self.awaiting.add(job)
                return
        if not request.flags:
            self.admission.add(job)
            self._line_up(job, lane)
            return
        self.transfers.expect(job, request)
        self.admission.add(job)

    def _line_up(self, job: Job, lane: Lane | None) -> None:
        """Into the lane where its executor finds it."""
        peer = job.peer
        if lane is not None:
            lane.add(job)
        elif job.served.kind == "write":
            peer.write_number += 1
            job.write_number = peer.write_number
            peer.open_writes[job.write_number] = None
            self.writes.add(job)
        elif peer.open_writes:
            # First come first served within one client: it must see what was sent before it.
            job.write_number = peer.write_number
            self.held.add(job)
        else:
            self.reads.add(job)

    def refuse(self, peer: Peer, request_id: int, error: StorageError) -> None:
        """Answer a request that got no place."""
        if isinstance(error, OverloadedError):
            peer.refused_requests += 1
            self.admission.status.refused_requests += 1
        self.count_error(error.code)
        self.pipes.queue(peer, frame(encode(failure_of(request_id, error, self._limits.message_chars_max))))

    # Answers

    def deliver(self, jobs: Iterable[Job]) -> None:
        """Send the answers of these requests."""
        self._answer_all(jobs, time.monotonic_ns())
        self.pipes.flush()

    def _answer_all(self, jobs: Iterable[Job], now_ns: int) -> None:
        count = 0
        for job in jobs:
            self._answer(job, now_ns)
            count += 1
        self.admission.served(count, now_ns)

    def _answer(self, job: Job, now_ns: int, data: bytes | None = None) -> None:
        if job.answered:
            return
        job.answered = True
        peer = job.peer
        self.admission.remove(job)
        self._count(job, now_ns)
        if job.write_number and job.served.kind == "write":
            del peer.open_writes[job.write_number]
            if self.held.requests:
                self._release_reads(peer)
        if job.key is not None and self.awaiting.requests:
            self._release_questions()
        if job.large is not None:
            self.transfers.answered(job)
        elif not peer.closed:
            self.pipes.queue(peer, job.frame if data is None else data)

    def _release_reads(self, peer: Peer) -> None:
        oldest = next(iter(peer.open_writes), NEVER_NS)
        while (job := self.held.take_of(peer, oldest)) is not None:
            self.reads.add(job)

    def _release_questions(self) -> None:
        for job in self.awaiting.remove_where(lambda each: all(other.answered for other in each.behind)):
            self._line_up(job, None)

    def _count(self, job: Job, now_ns: int) -> None:
        served = job.served
        if job.code:
            served.failed += 1
            self.count_error(job.code)
        else:
            served.succeeded += 1
        served.latency_us.observe((now_ns - job.admitted_ns) // 1000)
        job.peer.answered_requests += 1

    def count_error(self, code: str) -> None:
        """Note that an error was sent."""
        self.errors[code] = self.errors.get(code, 0) + 1

    def forget(self, peer: Peer) -> None:
        """A connection was closed: what waits of it is dropped, what runs of it is cancelled."""
        now = time.monotonic_ns()
        for job in list(peer.jobs.values()):
            if self._take_out(job):
                job.code = RequestCancelledError.code
                self._answer(job, now)
            else:
                job.cancelled = True
        self.transfers.forget(peer)

    def _take_out(self, job: Job) -> bool:
        """Take a request from wherever it waits; false where an executor has it."""
        return any(lane.remove(job) for lane in (*self.lanes, self.copies))

    def pause(self, peer: Peer) -> None:
        """Run nothing more of a client: it leaves too many replies unread."""
        peer.paused = True
        for lane in self.lanes:
            lane.pause(peer)

    def send_next(self, peer: Peer) -> None:
        """Go on with the downloads of a client that reads."""
        self.transfers.send_next(peer)

    def resume(self, peer: Peer) -> None:
        """Run what waits of it, since it reads again."""
        peer.paused = False
        for lane in self.lanes:
            lane.resume(peer)
        self._gate.wake_readers()

    def refusal(self) -> StorageError | None:
        """Why no new connection is taken: the worker is stopping."""
        return _leaving(self.draining) if self.draining else None

    # The end

    def drain(self, reason: str) -> None:
        """Take nothing new from now on; tell every client."""
        if self.draining:
            return
        self.draining = reason
        data = Goodbye(reason)
        for peer in list(self.pipes.peers.values()):
            if peer.session.state is State.OPEN:
                peer.session.from_worker(data)
                self.pipes.queue(peer, frame(encode(data)))
        self.pipes.flush()

    def fail_all(self, why: str) -> None:
        """Answer whatever is still in flight: the worker ends."""
        now = time.monotonic_ns()
        for peer in list(self.pipes.peers.values()):
            for job in list(peer.jobs.values()):
                waited = self._take_out(job)
                # A write may be in the middle of its COMMIT.
                outcome: Outcome = "not_committed" if waited or job.served.kind == "read" else "unknown"
                failure = fail(
                    job,
                    WorkerUnavailableError(f"{why}; it had not answered this request yet"),
                    self._limits,
                    outcome,
                )
                # Not what its thread may make its answer just now, and never commits.
                self._answer(job, now, frame(encode(failure)))
        self.pipes.flush()


def _leaving(reason: str) -> WorkerUnavailableError:
    return WorkerUnavailableError(
        f"the worker is stopping ({reason}) and takes nothing new", outcome="not_committed"
    )

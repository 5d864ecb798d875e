"""Results on their way out of the worker, from the writer to the pipe, step by step."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from storage_worker.peer import Job, Peer
from storage_worker.pipes import Pipes
from storage_worker.protocol.envelope import Chunk, Credit, Failure, FromWorker, Reply, decode_from_worker
from storage_worker.protocol.framing import FrameReader
from storage_worker.protocol.limits import DEFAULT_LIMITS, KIB, MIB
from storage_worker.spool import Large, Spools
from storage_worker.transfers import Transfers
from tests.worker.workbench import Workbench

LIMITS = msgspec.structs.replace(
    DEFAULT_LIMITS, result_bytes_max=64 * KIB, result_bytes_default=64 * KIB, chunk_bytes_max=16 * KIB
)
RETURNING = "insert into t values(1) returning zeroblob(100000)"


class Way:
    """A writer, its pipes and one client's end."""

    def __init__(self, bench: Workbench, folder: Path) -> None:
        (folder / "t.db-sw").mkdir()
        self.bench = bench
        self.spools = Spools(str(folder / "t.db"), LIMITS)
        self.pipes = Pipes(LIMITS)
        self.pipes.serve(self)
        self.transfers = Transfers(self.pipes, self.spools, LIMITS)
        self.end, theirs = socket.socketpair()
        for each in (self.end, theirs):
            each.setblocking(False)
        self.peer = Peer(theirs, MIB, time.monotonic_ns())
        self.pipes.peers[self.peer.fd] = self.peer
        self.pipes._want(self.peer, 1)
        self._frames = FrameReader(MIB)

    def take_frame(self, peer: Peer, body: bytes) -> None:
        raise AssertionError(body)

    def forget(self, peer: Peer) -> None:
        self.transfers.forget(peer)

    def refusal(self) -> None:
        return None

    def count_error(self, code: str) -> None:
        raise AssertionError(code)

    def pause(self, peer: Peer) -> None:
        peer.paused = True

    def resume(self, peer: Peer) -> None:
        peer.paused = False

    def send_next(self, peer: Peer) -> None:
        self.transfers.send_next(peer)

    def answered(self) -> Job:
        """A request that has run, with a large result."""
        job = self.bench.execute(RETURNING, client=self.peer)
        job.large = Large(self.spools)
        self.bench.run_all()
        self.peer.last_id = job.id
        assert self.spools.status.spools == 1
        return job

    def turn(self) -> list[FromWorker]:
        """What the client gets in one turn."""
        self.pipes.turn(0)
        self.pipes.flush()
        try:
            return list(map(decode_from_worker, self._frames.feed(self.end.recv(MIB))))
        except BlockingIOError:
            return []

    def close(self) -> None:
        self.pipes.close()
        self.end.close()


@pytest.fixture
def way(tmp_path: Path) -> Iterator[Way]:
    with Workbench(tmp_path / "t.db", result_bytes_max=64 * KIB, result_bytes_default=64 * KIB) as bench:
        bench.execute("create table t(a)")
        bench.run_all()
        with closing(Way(bench, tmp_path)) as found:
            yield found


def test_one_chunk_goes_in_one_turn(way: Way) -> None:
    job = way.answered()
    way.transfers.answered(job)
    came = [way.turn() for _ in range(12)]
    assert max(map(len, came)) <= 2, "a chunk, or the last one and the reply"
    everything = [envelope for each in came for envelope in each]
    assert [each.sequence for each in everything if isinstance(each, Chunk)] == list(range(7))
    assert everything[-1] == Reply(job.id, everything[-1].result)  # type: ignore[union-attr]
    assert way.spools.status.spools == 0
    assert not way.pipes.has_unread


def test_it_is_not_begun_for_one_that_cancelled_meanwhile(way: Way) -> None:
    """Whoever does not want a result grants no credit for it: it would wait for ever, and all behind it."""
    job = way.answered()
    job.cancelled = True
    way.transfers.answered(job)
    (failure,) = way.turn()
    assert isinstance(failure, Failure)
    assert (failure.code, failure.outcome) == ("storage_cancelled", "committed")
    assert way.spools.status.spools == 0
    assert not way.peer.paused
    assert way.peer.spooled_bytes == 0


def test_a_client_that_left_gets_nothing(way: Way) -> None:
    job = way.answered()
    way.pipes.drop(way.peer)
    way.transfers.answered(job)
    assert (way.spools.status.spools, way.spools.status.downloads) == (0, 0)


def test_a_part_that_the_disk_does_not_give_back_ends_the_request(way: Way) -> None:
    job = way.answered()
    assert job.large is not None
    assert job.large.result is not None
    job.large.result._file.truncate(20_000)
    way.transfers.answered(job)
    came = [envelope for _ in range(5) for envelope in way.turn()]
    assert isinstance(came[0], Chunk)
    failure = came[-1]
    assert isinstance(failure, Failure)
    assert (failure.code, failure.outcome) == ("storage_operation_failed", "committed")
    assert way.spools.status.spools == 0


def test_credit_for_one_that_has_ended_is_no_fault(way: Way) -> None:
    job = way.answered()
    way.transfers.answered(job)
    way.transfers.cancel(way.peer, job.id)
    way.transfers.take_credit(way.peer, Credit(job.id, 5))
    assert way.spools.status.spools == 0

"""The pipes alone: turns among many clients, replies that are not read, and what closes meanwhile."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from storage_worker.peer import Peer
from storage_worker.pipes import Pipes
from storage_worker.protocol.errors import StorageError
from storage_worker.protocol.framing import frame
from storage_worker.protocol.limits import DEFAULT_LIMITS, MIB

Answer = Callable[[Peer, bytes], None]

FEW = 16
"""Frames of another client that one may have to wait for."""


class Listener:
    """Whoever understands the frames: notes what happens, in its order."""

    def __init__(self) -> None:
        self.took: list[tuple[str, bytes]] = []
        self.left: list[str] = []
        self.paused: list[str] = []
        self.resumed: list[str] = []
        self.answer: Answer = lambda _peer, _body: None

    def take_frame(self, peer: Peer, body: bytes) -> None:
        self.took.append((peer.name, body))
        self.answer(peer, body)

    def forget(self, peer: Peer) -> None:
        self.left.append(peer.name)

    def refusal(self) -> StorageError | None:
        return None

    def count_error(self, code: str) -> None:
        raise AssertionError(code)

    def pause(self, peer: Peer) -> None:
        peer.paused = True
        self.paused.append(peer.name)

    def resume(self, peer: Peer) -> None:
        peer.paused = False
        self.resumed.append(peer.name)

    def send_next(self, peer: Peer) -> None:
        raise AssertionError(peer.name)


class Bench:
    """Pipes and their clients' ends."""

    def __init__(self, **limits: int) -> None:
        self.pipes = Pipes(msgspec.structs.replace(DEFAULT_LIMITS, **limits))
        self.listener = Listener()
        self.pipes.serve(self.listener)
        self.ends: dict[str, socket.socket] = {}
        self.peers: dict[str, Peer] = {}

    def connect(self, name: str) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        ours.setblocking(False)
        peer = Peer(theirs, self.pipes._limits.request_bytes_max, time.monotonic_ns())
        peer.name = name
        self.pipes.peers[peer.fd] = peer
        self.pipes._want(peer, 1)
        self.ends[name], self.peers[name] = ours, peer
        return ours

    def turn(self) -> None:
        self.pipes.turn(0)
        self.pipes.flush()

    def close(self) -> None:
        self.pipes.close()
        for end in self.ends.values():
            end.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with contextlib.closing(Bench(unread_bytes_max=4 * MIB)) as bench:
        yield bench


def test_a_flood_of_one_client_does_not_keep_others_waiting(bench: Bench) -> None:
    flood = [b"%d" % number for number in range(3_000)]
    bench.connect("flood").sendall(b"".join(frame(body) for body in flood))
    bench.connect("modest").sendall(frame(b"one"))
    bench.turn()
    assert bench.listener.took.index(("modest", b"one")) <= FEW
    while len(bench.listener.took) <= len(flood):
        bench.turn()
    assert [body for name, body in bench.listener.took if name == "flood"] == flood


def test_floods_take_turns(bench: Bench) -> None:
    names = [f"flood {number}" for number in range(10)]
    for name in names:
        bench.connect(name).sendall(b"".join(frame(b"%d" % number) for number in range(400)))
    while len(bench.listener.took) < 4_000:
        bench.turn()
        served = {name: sum(each == name for each, _ in bench.listener.took) for name in names}
        assert max(served.values()) - min(served.values()) <= FEW


def test_a_turn_with_frames_left_over_waits_for_nothing(bench: Bench) -> None:
    end = bench.connect("flood")
    end.sendall(b"".join(frame(b"x") for _ in range(1_000)))
    bench.turn()
    end.sendall(frame(b"last"))
    while bench.listener.took[-1] != ("flood", b"last"):
        # As long as it likes: what is left over ends the waiting at once, and so do new bytes.
        bench.pipes.turn(2**63)


def test_a_client_that_goes_in_the_middle_of_its_flood(bench: Bench) -> None:
    bench.listener.answer = lambda peer, body: bench.pipes.drop(peer) if body == b"20" else None
    bench.connect("flood").sendall(b"".join(frame(b"%d" % number) for number in range(1_000)))
    while not bench.listener.left:
        bench.turn()
    bench.turn()
    assert [body for _, body in bench.listener.took] == [b"%d" % number for number in range(21)]
    assert bench.pipes.peers == {}


def test_whoever_leaves_too_much_unread_is_paused_until_it_reads(bench: Bench) -> None:
    bench.listener.answer = lambda peer, body: bench.pipes.queue(peer, b"r" * MIB)
    end = bench.connect("slow")
    for number in range(20):
        with contextlib.suppress(BlockingIOError):
            end.sendall(frame(b"%d" % number))
        bench.turn()
    assert bench.listener.paused == ["slow"]
    # One reply went out in part, four are allowed, and one more made it too much.
    assert len(bench.listener.took) <= 6
    assert bench.pipes.has_unread
    received = 0
    while len(bench.listener.took) < 20 or bench.pipes.has_unread:
        with contextlib.suppress(BlockingIOError):
            received += len(end.recv(MIB))
        bench.turn()
    assert bench.listener.resumed.count("slow") == bench.listener.paused.count("slow")
    with contextlib.suppress(BlockingIOError):
        while True:
            received += len(end.recv(MIB))
    assert received == 20 * MIB


def test_a_flood_whose_answers_are_not_read_is_served_no_further(bench: Bench) -> None:
    """Also what was read of it already."""
    bench.listener.answer = lambda peer, body: bench.pipes.queue(peer, b"r" * MIB)
    end = bench.connect("slow")
    end.sendall(b"".join(frame(b"%d" % number) for number in range(60)))
    for _ in range(20):
        bench.turn()
    assert len(bench.listener.took) <= FEW
    received = 0
    while received < 60 * MIB:
        with contextlib.suppress(BlockingIOError):
            received += len(end.recv(MIB))
        bench.turn()
    assert [body for _, body in bench.listener.took] == [b"%d" % number for number in range(60)]


def test_the_time_without_clients_begins_when_it_listens(bench: Bench) -> None:
    """However long the database took to open before."""
    bench.pipes.emptied_ns = 1
    with socket.socket(socket.AF_UNIX) as listener:
        bench.pipes.listen_on(listener)
        assert bench.pipes.emptied_ns > 1
        bench.pipes._selector.unregister(listener)


def test_a_client_closed_while_others_are_served_is_left_alone(bench: Bench) -> None:
    """Both are ready to be read and written in one turn; serving either of them closes the other."""
    both = ("one", "other")

    def close_the_other(peer: Peer, _: bytes) -> None:
        bench.pipes.drop(bench.peers[both[both[0] == peer.name]])

    for name in both:
        bench.connect(name)
        bench.pipes.queue(bench.peers[name], b"r" * MIB)
    bench.turn()
    bench.listener.answer = close_the_other
    for name in both:
        bench.ends[name].recv(MIB)
        bench.ends[name].sendall(frame(b"x"))
    bench.turn()
    assert len(bench.listener.took) == 1
    assert len(bench.listener.left) == 1
    bench.turn()


def test_a_client_that_never_reads_is_dropped(bench: Bench) -> None:
    bench.connect("slow")
    bench.pipes.queue(bench.peers["slow"], b"r" * MIB)
    bench.pipes.flush()
    due = bench.pipes.due_ns()
    bench.pipes.look_at_time(due - 1)
    assert bench.listener.left == []
    bench.pipes.look_at_time(due)
    assert bench.listener.left == ["slow"]


def test_progress_gives_more_time(bench: Bench) -> None:
    end = bench.connect("slow")
    bench.pipes.queue(bench.peers["slow"], b"r" * MIB)
    bench.pipes.flush()
    due = bench.pipes.due_ns()
    end.recv(MIB)
    bench.turn()
    bench.pipes.look_at_time(due)
    assert bench.listener.left == []
    assert bench.pipes.due_ns() > due


def test_clients_that_leave_their_frames_unfinished_share_a_bound_and_the_slowest_goes_first() -> None:
    size = 100_000
    with contextlib.closing(Bench(partial_bytes_max=3 * size + 100, request_bytes_max=2 * size)) as bench:
        begun = frame(bytes(2 * size))[:size]
        names = [f"stalled {number}" for number in range(4)]
        for name in names:
            bench.connect(name).setblocking(True)
        for name in names[:3]:
            bench.ends[name].sendall(begun)
        while bench.pipes._partial_bytes < 3 * size:
            bench.turn()
        # Whoever makes progress is not the slowest.
        bench.ends["stalled 0"].sendall(b"\0")
        while bench.peers["stalled 0"].partial_bytes == size:
            bench.turn()
        bench.ends["stalled 3"].sendall(begun)
        while bench.peers["stalled 3"].partial_bytes < size and not bench.peers["stalled 3"].closed:
            bench.turn()
        assert [name for name in names if bench.peers[name].closed] == ["stalled 1"]
        bench.ends["stalled 0"].sendall(frame(bytes(2 * size))[size + 1 :])
        while not bench.listener.took:
            bench.turn()
        assert bench.listener.took == [("stalled 0", bytes(2 * size))]
        # The rest of it took the room of the next one.
        assert bench.peers["stalled 2"].closed
        assert bench.pipes._partial_bytes == size


def test_what_all_clients_leave_unread_has_a_bound_and_the_worst_goes_first() -> None:
    with contextlib.closing(Bench(unread_bytes_max=8 * MIB, unread_total_bytes_max=10 * MIB)) as bench:
        for name, size in (("reads", 0), ("leaves 4", 4 * MIB), ("leaves 5", 5 * MIB)):
            bench.connect(name)
            bench.pipes.queue(bench.peers[name], bytes(size))
            bench.pipes.flush()
        assert not any(peer.closed for peer in bench.peers.values())
        bench.pipes.queue(bench.peers["reads"], bytes(3 * MIB))
        assert not any(peer.closed for peer in bench.peers.values()), "whoever queues goes on with its peer"
        bench.pipes.flush()
        assert [name for name, peer in bench.peers.items() if peer.closed] == ["leaves 5"]
        assert bench.pipes._unread_bytes == sum(peer.unread_bytes for peer in bench.peers.values()) < 10 * MIB

"""The public client: what it refuses before sending, how it outlives its worker, and how it ends."""

import copy
import enum
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from storage_worker.client import AddressDialer, Client, Connection
from storage_worker.protocol.envelope import Request
from storage_worker.protocol.errors import (
    BusyError,
    DeadlineExceededError,
    DeclaredError,
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    RequestTooLargeError,
    StorageError,
    StorageFullError,
    WorkerUnavailableError,
)
from storage_worker.protocol.limits import DEFAULT_LIMITS, KIB, MIB
from storage_worker.protocol.operation import Operation
from storage_worker.protocol.statements import (
    Batch,
    Finding,
    Health,
    KnownOutcome,
    OutcomeQuestion,
    Rows,
)
from tests.client.fake import (
    NOTHING,
    Answer,
    Calls,
    FakeWorker,
    Peer,
    echo,
    limits_with,
    nothing,
    number,
    statement,
)

ROOT = Path(__file__).parents[2]


class Wide(msgspec.Struct, array_like=True):
    values: Any


ANYTHING = Operation[[Any], Any]("tests.anything", "write", Wide, Any)


class Colour(enum.IntEnum):
    RED = 1


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


REFUSED: dict[str, Callable[[Client], object]] = {
    "an integer of 64 bit and more": lambda c: c.execute("x", (2**63,)),
    "an integer below 64 bit": lambda c: c.execute("x", (-(2**63) - 1,)),
    "a huge integer": lambda c: c.execute("x", (10**5000,)),
    "NaN": lambda c: c.query("x", (math.nan,)),
    "a lone surrogate in a value": lambda c: c.execute("x", ("\ud800",)),
    "a lone surrogate in a name": lambda c: c.execute("x", {"\ud800": 1}),
    "a lone surrogate in the SQL": lambda c: c.execute("select '\ud800'"),
    "a lone surrogate in a script": lambda c: c.script("select '\ud800'"),
    "a list as value": lambda c: c.execute("x", ([1],)),  # type: ignore[arg-type]
    "an enumeration": lambda c: c.execute("x", (Colour.RED,)),
    "an object": lambda c: c.execute("x", (object(),)),  # type: ignore[arg-type]
    "a bytearray": lambda c: c.execute("x", (bytearray(b"x"),)),  # type: ignore[arg-type]
    "a text for parameters": lambda c: c.execute("x", "abc"),
    "a number for parameters": lambda c: c.execute("x", 5),  # type: ignore[arg-type]
    "a set for parameters": lambda c: c.execute("x", {1, 2}),  # type: ignore[arg-type]
    "names that are no text": lambda c: c.execute("x", {1: 2}),  # type: ignore[dict-item]
    "too many values": lambda c: c.execute("x", [0] * (DEFAULT_LIMITS.bind_values_max + 1)),
    "SQL that is no text": lambda c: c.execute(b"select 1"),  # type: ignore[arg-type]
    "a batch of texts": lambda c: c.batch(["select 1"]),  # type: ignore[list-item]
    "a bad value in a batch": lambda c: c.batch([("x", (1,)), ("x", (2**63,))]),
    "too many statements": lambda c: c.batch([("x", ())] * (DEFAULT_LIMITS.batch_statements_max + 1)),
    "a key that is empty": lambda c: c.execute("x", request_key=""),
    "a key that is too long": lambda c: c.execute("x", request_key="ö" * 129),
    "a key with a lone surrogate": lambda c: c.execute("x", request_key="\ud800"),
    "a key that is no text": lambda c: c.execute("x", request_key=b"k"),  # type: ignore[arg-type]
    "no key at all": lambda c: c.outcome(None),  # type: ignore[arg-type]
    "a timeout that is no number": lambda c: c.execute("x", timeout="1"),  # type: ignore[arg-type]
    "a timeout of NaN": lambda c: c.execute("x", timeout=math.nan),
    "an endless timeout": lambda c: c.execute("x", timeout=math.inf),
    "a timeout that is too long": lambda c: c.execute("x", timeout=601),
    "no result at all": lambda c: c.execute("x", max_result_bytes=0),
    "a result that is too large": lambda c: c.execute("x", max_result_bytes=64 * MIB + 1),
    "a negative number of repeats": lambda c: c.execute("x", retries=-1),
    "a call that is none": lambda c: c.call("notes.add"),  # type: ignore[arg-type]
    "arguments that cannot be encoded": lambda c: c.call(ANYTHING(object())),
    "arguments of 100,000 levels": lambda c: c.call(ANYTHING(_nested(100_000))),
    "arguments with a huge integer": lambda c: c.call(ANYTHING(2**64)),
    "arguments with a lone surrogate": lambda c: c.call(ANYTHING(["\ud800"])),
    "a target that is no path": lambda c: c.backup(5),  # type: ignore[arg-type]
    "a window of nothing": lambda c: c.pipeline(0),
    "a window that would be refused": lambda c: c.pipeline(257),
    "a lease of nothing": lambda c: c.transaction(0),
    "a lease that is too long": lambda c: c.transaction(61),
    "a lease that is no number": lambda c: c.transaction("5"),  # type: ignore[arg-type]
    "a page of nothing": lambda c: c.pages("x", ("id",), page_rows=0),
    "pages without a key": lambda c: c.pages("x", ()),
    "a key column that has no name": lambda c: c.pages("x", ("",)),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_before_it_is_sent(
    worker: FakeWorker, call: Callable[[Client], object]
) -> None:
    seen: list[Request] = []

    def note(peer: Peer, request: Request) -> object:
        seen.append(request)
        return echo(peer, request)

    worker.answer = note
    client = worker.client()
    with pytest.raises(InvalidRequestError) as caught:
        call(client)
    assert caught.value.outcome == "not_committed"
    assert not seen
    assert client.query("select ?", (8,)).scalar() == 8


TOO_LARGE: dict[str, Callable[[Client], object]] = {
    "a value": lambda c: c.execute("x", (b"x" * MIB,)),
    "the SQL": lambda c: c.query("x" * (256 * KIB + 1)),
    "the SQL in bytes": lambda c: c.query("ö" * (128 * KIB + 1)),
    "a statement of a batch": lambda c: c.batch([("x", ()), ("x" * (256 * KIB + 1), ())]),
    "a whole batch": lambda c: c.batch([("x", (b"x" * 300_000,))] * 4),
    "a script": lambda c: c.script("x" * MIB),
    "arguments": lambda c: c.call(ANYTHING("x" * MIB)),
}


@pytest.mark.parametrize("call", TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_is_too_large_is_refused_before_it_is_sent(
    runtime_directory: Path, call: Callable[[Client], object]
) -> None:
    with FakeWorker(runtime_directory, echo, limits_with(chunked_bytes_max=MIB)) as worker:
        client, peer = worker.both()
        with pytest.raises(RequestTooLargeError) as caught:
            call(client)
        assert caught.value.outcome == "not_committed"
        assert peer.requests.empty()
        assert client.query("select ?", (8,)).scalar() == 8


def test_the_workers_own_limits_hold(worker: FakeWorker, runtime_directory: Path) -> None:
    limits = limits_with(
        request_bytes_max=1000, chunked_bytes_max=1000, sql_bytes_max=500, request_key_bytes_max=4
    )
    with FakeWorker(runtime_directory, echo, limits) as small:
        client = small.client()
        assert client.limits == limits
        with pytest.raises(RequestTooLargeError) as caught:
            client.execute("x", (b"x" * 1000,))
        assert caught.value.details["chunked_bytes_max"] == 1000
        with pytest.raises(RequestTooLargeError):
            client.execute("x" * 501)
        with pytest.raises(InvalidRequestError):
            client.execute("x", request_key="12345")


@pytest.mark.parametrize("timeout", [0, -1.5])
def test_no_time_left_is_a_deadline_before_anything_was_sent(worker: FakeWorker, timeout: float) -> None:
    client = worker.client()
    with pytest.raises(DeadlineExceededError) as caught:
        client.execute("x", timeout=timeout)
    assert caught.value.outcome == "not_committed"
    assert caught.value.details["stage"] == "client"


def test_values_arrive_unchanged(worker: FakeWorker) -> None:
    values = (None, 2**63 - 1, -(2**63), 1.5, -0.0, math.inf, "a\0b", "", "ö", b"", b"\0\xff", True)
    rows = worker.client().query("select ?", values)
    assert rows.one() == (*values[:-1], 1)
    assert type(rows.one()[-1]) is int


def test_named_parameters_travel_by_name(worker: FakeWorker) -> None:
    seen: list[object] = []

    def note(_peer: Peer, request: Request) -> object:
        seen.append(statement(request).parameters)
        return Rows()

    worker.answer = note
    worker.client().execute("insert into t values (:a, :b)", {"a": 1, "b": "x"})
    assert seen == [{"a": 1, "b": "x"}]


def test_the_terms_travel_in_the_envelope(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with Calls() as calls:
        result = calls.start(
            client.execute, "x", (1,), timeout=600, request_key="k", max_result_bytes=77, retries=0
        )
        request = peer.next()
        peer.reply(request.id, Rows())
        result.get()
    assert (request.operation, request.key, request.result_bytes) == ("sql.execute", "k", 77)
    assert (request.transaction, request.flags) == (0, 0)


def _batch(_peer: Peer, request: Request) -> object:
    sent = msgspec.msgpack.decode(request.arguments, type=Batch).statements
    return [Rows(rows_changed=place) for place, _ in enumerate(sent, 1)]


def _outcome(_peer: Peer, request: Request) -> object:
    question = msgspec.msgpack.decode(request.arguments, type=OutcomeQuestion)
    return KnownOutcome("fenced" if question.fence else "committed", "sql.execute")


OTHERS: list[tuple[str, Answer, Callable[[Client], object], object]] = [
    ("sql.batch", _batch, lambda c: [r.rows_changed for r in c.batch([("a", ()), ("b", (1,))])], [1, 2]),
    ("sql.script", lambda _p, _r: Rows(rows_changed=3), lambda c: c.script("a; b").rows_changed, 3),
    ("worker.outcome", _outcome, lambda c: c.outcome("k").committed, True),
    ("worker.outcome", _outcome, lambda c: c.outcome("k", fence=True).state, "fenced"),
    ("worker.health", lambda _p, _r: Health("degraded", ["x"]), lambda c: c.health().reasons, ["x"]),
    ("worker.check", lambda _p, _r: [Finding("bad page")], lambda c: c.check(), [Finding("bad page")]),
    ("worker.backup", lambda _p, _r: 4096, lambda c: c.backup("copy.db"), 4096),
    ("worker.stop", lambda _p, _r: None, lambda c: c.stop(), None),
    ("tests.anything", lambda _p, _r: {"a": 1}, lambda c: c.call(ANYTHING([1])), {"a": 1}),
]


@pytest.mark.parametrize(("operation", "answer", "call", "result"), OTHERS)
def test_the_other_calls(
    worker: FakeWorker, operation: str, answer: Answer, call: Callable[[Client], object], result: object
) -> None:
    seen: list[str] = []

    def note(peer: Peer, request: Request) -> object:
        seen.append(request.operation)
        return answer(peer, request)

    worker.answer = note
    assert call(worker.client()) == result
    assert seen == [operation]


def test_a_backups_target_means_the_same_to_the_worker(worker: FakeWorker) -> None:
    targets: list[Any] = []

    def note(_peer: Peer, request: Request) -> object:
        targets.extend(msgspec.msgpack.decode(request.arguments))
        return 1

    worker.answer = note
    client = worker.client()
    client.backup("copy.db")
    client.backup(Path("/x/../copy.db"))
    assert targets == [str(Path.cwd() / "copy.db"), "/copy.db"]


def test_a_result_of_another_type_is_a_protocol_error(worker: FakeWorker) -> None:
    worker.answer = lambda _p, _r: "no rows"
    client = worker.client()
    with pytest.raises(ProtocolError):
        client.query("select 1")
    with pytest.raises(ProtocolError):
        client.status()
    worker.answer = echo
    assert client.query("select ?", (8,)).scalar() == 8


def test_the_workers_errors_are_raised_with_all_they_say(worker: FakeWorker) -> None:
    class NoteMissingError(DeclaredError):
        code = "notes_missing_in_test_client"

    def fail(_peer: Peer, _request: Request) -> object:
        return NoteMissingError("no such note", details={"note": 5})

    worker.answer = fail
    with pytest.raises(NoteMissingError) as caught:
        worker.client().call(ANYTHING(1))
    assert caught.value.details == {"note": 5}
    assert caught.value.message == "no such note"


# Repeats


class Flaky:
    """Fails some times, then answers."""

    def __init__(self, *errors: StorageError) -> None:
        self.errors = list(errors)
        self.keys: list[str | None] = []

    def __call__(self, peer: Peer, request: Request) -> object:
        self.keys.append(request.key)
        return self.errors.pop(0) if self.errors else echo(peer, request)


def test_refusals_are_outlived(worker: FakeWorker) -> None:
    flaky = worker.answer = Flaky(OverloadedError("x", retry_after=0.001), BusyError("x"))
    assert worker.client().execute("x", (1,)).scalar() == 1
    assert len(flaky.keys) == 3


def test_a_full_disk_is_not_asked_again(worker: FakeWorker) -> None:
    flaky = worker.answer = Flaky(StorageFullError("x"))
    with pytest.raises(StorageFullError):
        worker.client().execute("x", (1,), retries=5)
    assert len(flaky.keys) == 1


def test_a_request_key_travels_with_every_repeat(worker: FakeWorker) -> None:
    flaky = worker.answer = Flaky(OverloadedError("x"), OverloadedError("x"))
    worker.client().execute("x", (1,), request_key="k")
    assert flaky.keys == ["k"] * 3


class Dying:
    """Dies some times when it has a request, then answers."""

    def __init__(self, deaths: int) -> None:
        self.deaths = deaths
        self.values: list[object] = []

    def __call__(self, peer: Peer, request: Request) -> object:
        self.values.append(number(request))
        if not self.deaths:
            return echo(peer, request)
        self.deaths -= 1
        peer.close()
        return NOTHING


@pytest.mark.parametrize("deaths", [1, 6])
def test_a_read_outlives_its_worker(worker: FakeWorker, deaths: int) -> None:
    dying = worker.answer = Dying(deaths)
    assert worker.client().query("select ?", (1,)).scalar() == 1
    assert dying.values == [1] * (deaths + 1)


@pytest.mark.parametrize("deaths", [1, 6])
def test_a_write_with_a_key_outlives_its_worker(worker: FakeWorker, deaths: int) -> None:
    dying = worker.answer = Dying(deaths)
    assert worker.client().execute("insert", (1,), request_key="k").scalar() == 1
    assert dying.values == [1] * (deaths + 1)


def test_a_write_without_a_key_is_never_sent_twice(worker: FakeWorker) -> None:
    dying = worker.answer = Dying(1)
    client = worker.client()
    with pytest.raises(WorkerUnavailableError) as caught:
        client.execute("insert", (1,))
    assert caught.value.outcome == "unknown"
    assert dying.values == [1]
    assert client.execute("insert", (2,)).scalar() == 2


def test_nothing_is_repeated_where_the_caller_says_so(worker: FakeWorker) -> None:
    dying = worker.answer = Dying(2)
    client = worker.client()
    with pytest.raises(WorkerUnavailableError) as caught:
        client.query("select ?", (1,), retries=0)
    assert caught.value.outcome == "not_committed"
    with pytest.raises(WorkerUnavailableError) as caught:
        client.execute("insert", (2,), request_key="k", retries=0)
    assert caught.value.outcome == "unknown"
    assert dying.values == [1, 2]


def test_a_worker_that_died_while_nothing_was_asked_is_not_noticed(worker: FakeWorker) -> None:
    """Not even by a write without a key and without repeats: nothing of it was sent to the dead one."""
    client, peer = worker.both()
    for place in range(5):
        peer.close()
        assert client.execute("insert", (place,), retries=0).scalar() == place
        peer = worker.next_peer()


def test_an_unreachable_worker_keeps_the_doubt_of_the_first_attempt(worker: FakeWorker) -> None:
    """The write may have been committed before the worker died, so nobody may promise that it was not."""

    def die(_peer: Peer, _request: Request) -> object:
        dead.start(worker.kill)
        return NOTHING

    worker.answer = die
    client = worker.client()
    with Calls() as dead, pytest.raises(StorageError) as caught:
        client.execute("insert", (1,), request_key="k", timeout=1)
    assert caught.value.outcome == "unknown"


def test_a_stop_is_not_sent_to_the_next_worker(worker: FakeWorker) -> None:
    seen: list[str] = []

    def die(peer: Peer, request: Request) -> object:
        seen.append(request.operation)
        peer.close()
        return NOTHING

    worker.answer = die
    with pytest.raises(WorkerUnavailableError):
        worker.client().stop()
    assert seen == ["worker.stop"]


# The end


def test_a_closed_client_says_so(worker: FakeWorker) -> None:
    client, peer = worker.both()
    client.close()
    client.close()
    with pytest.raises(InvalidRequestError):
        client.query("select 1")
    peer.join()
    assert peer.farewell == "closed"
    assert worker.peers.empty()


def test_closing_reaches_the_calls_in_flight(worker: FakeWorker) -> None:
    worker.answer = nothing
    client, peer = worker.both()
    with Calls() as calls:
        results = [calls.start(client.execute, "x", (n,)) for n in range(4)]
        for _ in results:
            peer.next()
        client.close()
        for result in results:
            with pytest.raises(WorkerUnavailableError) as caught:
                result.get()
            assert caught.value.outcome == "unknown"


def test_a_forgotten_client_leaves_no_connection(worker: FakeWorker) -> None:
    client = Client(AddressDialer(worker.address))
    client.connect()
    peer = worker.next_peer()
    del client
    peer.join()


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_client_does_not_travel(worker: FakeWorker, take: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="Pipe"):
        take(worker.client())


def test_a_dead_connections_descriptor_is_closed_at_once(worker: FakeWorker) -> None:
    connections: list[Connection] = []
    worker.answer = Dying(1)
    client = worker.client()
    connections.append(client._line.connected(2**63))
    with pytest.raises(WorkerUnavailableError):
        client.execute("insert", (1,))
    assert connections[0]._sock.fileno() == -1


def test_a_process_with_open_clients_ends(worker: FakeWorker) -> None:
    """With threads in the middle of calls that nobody answers, and no `close`."""
    worker.answer = nothing
    program = f"""
import threading
from storage_worker.client import AddressDialer, Client
clients = [Client(AddressDialer({worker.address!r})) for _ in range(3)]
for client in clients:
    client.connect()
    for _ in range(2):
        threading.Thread(target=client.query, args=("select 1",), daemon=True).start()
clients[0].pipeline().__enter__().execute("insert")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    for _ in range(3):
        worker.next_peer().join()

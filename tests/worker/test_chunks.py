"""Large values in a real worker: whole at every size, bounded in memory and on the disk, whoever stops in the middle."""

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import storage_worker as sw
from storage_worker.client import AddressDialer, Client
from storage_worker.protocol.chunks import part_bytes
from storage_worker.protocol.envelope import (
    ARGUMENTS_FOLLOW,
    Cancel,
    Chunk,
    Credit,
    Failure,
    FromWorker,
    Reply,
    encode,
)
from storage_worker.protocol.limits import DEFAULT_LIMITS, KIB, MIB, PROTOCOL_ENVELOPE_BYTES
from storage_worker.protocol.statements import BEGIN, EXECUTE, QUERY, ROLLBACK, Begin, Nothing, Statement
from storage_worker.protocol.status import WorkerStatus
from tests.client.fake import Calls
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.hostile import Bystander, ask_with, error_in, everything, last_words, until
from tests.worker.raw import PATIENCE_S, RawClient

SMALL = {
    "request_bytes_max": 64 * KIB,
    "sql_bytes_max": 32 * KIB,
    "result_bytes_default": 64 * KIB,
    "result_bytes_max": 64 * KIB,
    "chunk_bytes_max": 16 * KIB,
    "chunked_bytes_max": 4 * MIB,
}
"""Bounds with which a hundred kilobytes are large."""

MOST = 4 * MIB
LONG_MS = 600_000
"""Long enough that no test sees it pass."""

TABLE = "create table if not exists t(id integer primary key, v)"
INSERT = "insert into t(v) values(?)"


@pytest.fixture
def worker(start_worker: StartWorker) -> RunningWorker:
    return start_worker(**SMALL, unread_bytes_max=64 * KIB, unread_ms_max=LONG_MS)


@pytest.fixture
def client(worker: RunningWorker) -> Iterator[Client]:
    with client_of(worker) as connected:
        connected.execute(TABLE)
        yield connected


def client_of(worker: RunningWorker) -> Client:
    return Client(AddressDialer(worker.record.address))


def nothing_is_left(status: WorkerStatus) -> bool:
    spool = status.spool
    return not (spool.uploads or spool.downloads or spool.spools or spool.spooled_bytes)


def announce(client: RawClient, size: object, operation: str = EXECUTE.name, **fields: Any) -> int:
    """Send a request whose arguments follow; its id."""
    return ask_with(client, encode(size), operation, flags=ARGUMENTS_FOLLOW, **fields)


def upload(client: RawClient, request_id: int, arguments: bytes, parts: int | None = None) -> None:
    """Send arguments, or only their first parts, as the worker grants them."""
    size = part_bytes(client_limits(client))
    pieces = [arguments[start : start + size] for start in range(0, len(arguments), size)]
    credit = 0
    for number, piece in enumerate(pieces[:parts]):
        while not credit:
            granted = client.receive()
            assert isinstance(granted, Credit), granted
            assert granted.id == request_id
            credit += granted.count
        client.send(Chunk(request_id, number, piece))
        credit -= 1


def client_limits(client: RawClient) -> sw.Limits:
    assert client.welcome is not None
    return client.welcome.limits


def download(client: RawClient, request_id: int) -> bytes:
    """A result in chunks, whole."""
    data = b""
    while isinstance(envelope := client.receive(), Chunk):
        assert envelope.id == request_id
        data += envelope.part
        client.send(Credit(request_id, 1))
    assert envelope == Reply(request_id, msgspec.Raw(b"\xc0"))
    return data


def rows(client: RawClient | Client) -> int:
    found = client.query("select count(*) from t").scalar()
    assert isinstance(found, int)
    return found


def random_bytes(size: int) -> bytes:
    return os.urandom(size)


# Whole, at every size


PART = SMALL["chunk_bytes_max"] - PROTOCOL_ENVELOPE_BYTES
FRAME = 64 * KIB


@pytest.mark.parametrize("around", [FRAME, FRAME + PROTOCOL_ENVELOPE_BYTES, 5 * PART, 40 * PART, MOST])
def test_every_size_comes_back(client: Client, around: int) -> None:
    """A value whose encoding is a byte below, at and above each bound, as an argument and as a result."""
    beside = len(encode(Statement(INSERT, [b"x" * around]))) - around
    for size in range(around - beside - 1, around - beside + 1 + (around < MOST)):
        value = random_bytes(size)
        number = client.execute(INSERT, (value,)).last_insert_rowid
        assert (
            client.query("select v from t where id = ?", (number,), max_result_bytes=MOST).scalar() == value
        )
    assert nothing_is_left(client.status())


@pytest.mark.parametrize("around", [FRAME, FRAME + PROTOCOL_ENVELOPE_BYTES, 5 * PART])
def test_every_size_of_a_result(client: Client, around: int) -> None:
    for size in range(around - 30, around + 2):
        found = client.query("select cast(zeroblob(?) as text) || 'end'", (size,), max_result_bytes=MOST)
        assert found.scalar() == "\0" * size + "end"


def test_the_largest_values_of_the_default_limits(start_worker: StartWorker) -> None:
    most = DEFAULT_LIMITS.chunked_bytes_max
    with client_of(start_worker(durability="normal")) as client:
        client.execute(TABLE)
        beside = len(encode(Statement(INSERT, [b"x" * most]))) - most
        value = random_bytes(MIB) * 64
        with pytest.raises(sw.RequestTooLargeError) as caught:
            client.execute(INSERT, (value[beside - 1 :],))
        assert caught.value.details == {"argument_bytes": most + 1, "chunked_bytes_max": most}
        client.execute(INSERT, (value[beside:],))
        assert client.query("select v from t", max_result_bytes=most).scalar() == value[beside:]
        with pytest.raises(sw.ResultTooLargeError):
            client.query("select v, v from t", max_result_bytes=most)
        assert nothing_is_left(client.status())


def test_a_result_beyond_what_was_allowed_undoes_its_write(client: Client) -> None:
    with pytest.raises(sw.ResultTooLargeError):
        client.execute("insert into t(v) values(1) returning zeroblob(200000)", max_result_bytes=150_000)
    assert rows(client) == 0
    found = client.execute("insert into t(v) values(1) returning zeroblob(200000)", max_result_bytes=MOST)
    assert (len(found.scalar()), found.last_insert_rowid, rows(client)) == (200_000, 1, 1)


def test_many_small_rows_are_bounded_by_their_memory(start_worker: StartWorker) -> None:
    """A row of one small number takes two bytes on its way, and fifty times as much where it is read."""
    with client_of(start_worker(**SMALL, result_memory_bytes_max=MOST)) as client:
        client.execute(TABLE)
        numbers = (
            "with recursive c(n) as (select 1 union all select n + 1 from c where n < ?) select 1 from c"
        )
        assert len(client.query(numbers, (40_000,), max_result_bytes=MOST)) == 40_000
        with pytest.raises(sw.ResultTooLargeError) as caught:
            client.query(numbers, (45_000,), max_result_bytes=MOST)
        assert caught.value.details == {"result_memory_bytes_max": MOST}
        with pytest.raises(sw.ResultTooLargeError):
            client.execute(f"insert into t(v) {numbers} returning v", (45_000,), max_result_bytes=MOST)
        assert rows(client) == 0


def test_batches_and_handlers_of_many_rows(client: Client) -> None:
    """Not only one value may be large: so may be many, and a handler's result."""
    client.batch([(INSERT, (f"{number} {'x' * 100}",)) for number in range(2_000)])
    found = client.query("select v from t order by id", max_result_bytes=MOST)
    assert [row[0] for row in found] == [f"{number} {'x' * 100}" for number in range(2_000)]
    results = client.batch([("select v from t order by id", ())] * 3, max_result_bytes=MOST)
    assert [len(each) for each in results] == [2_000] * 3
    with client.transaction() as tx:
        tx.execute(INSERT, (b"x" * 300_000,))
        assert len(tx.query("select max(v) from t", max_result_bytes=MOST).scalar()) == 300_000
    pages = list(client.pages("select id, v from t", ["id"], page_rows=700, max_result_bytes=MOST))
    assert [len(page) for page in pages] == [700, 700, 601]


def test_request_keys_hold_for_large_arguments(client: Client) -> None:
    value = random_bytes(300_000)
    for _ in range(2):
        assert client.execute(INSERT, (value,), request_key="k").last_insert_rowid == 1
    with pytest.raises(sw.RequestConflictError):
        client.execute(INSERT, (value + b"x",), request_key="k")
    returning = "insert into t(v) values(1) returning zeroblob(300000)"
    assert len(client.execute(returning, request_key="l", max_result_bytes=MOST).scalar()) == 300_000
    with pytest.raises(sw.ResultNotKeptError):
        client.execute(returning, request_key="l", max_result_bytes=MOST)
    assert rows(client) == 2
    assert client.outcome("l").committed


# One slow client, and the others


def is_waiting(size: int) -> Callable[[WorkerStatus], bool]:
    return lambda status: status.spool.downloads == 1 and status.spool.spooled_bytes >= size


def test_a_result_that_is_not_read_waits_on_the_disk(worker: RunningWorker) -> None:
    bystander = Bystander(worker)
    deaf = worker.connect(name="deaf")
    request_id = deaf.ask(QUERY, Statement("select zeroblob(4000000)"), result_bytes=MOST)
    status = until(bystander.client, is_waiting(4_000_000))
    (unread,) = [each.unread_bytes for each in status.clients if each.name == "deaf"]
    assert unread <= SMALL["chunk_bytes_max"]
    for _ in range(5):
        bystander.check()
    assert len(download(deaf, request_id)) > 4_000_000
    assert nothing_is_left(bystander.client.status())


def test_eight_that_do_not_read_cost_little_memory(start_worker: StartWorker) -> None:
    """All their results wait at once, on the disk: not even one of them more is in memory than before."""
    worker = start_worker(unread_ms_max=LONG_MS)
    bystander = Bystander(worker)
    before = bystander.client.status().process.resident_bytes
    size = 40 * MIB
    deaf = [worker.connect(name="deaf") for _ in range(8)]
    for client in deaf:
        client.ask(QUERY, Statement(f"select zeroblob({size})"), result_bytes=64 * MIB)
    status = until(bystander.client, lambda status: status.spool.downloads == len(deaf))
    assert status.spool.spooled_bytes > len(deaf) * (size - MIB)
    assert status.process.resident_bytes - before < size
    assert sum(each.unread_bytes for each in status.clients) <= len(deaf) * DEFAULT_LIMITS.chunk_bytes_max
    bystander.check()


def test_nothing_more_is_run_for_it_but_others_are_served(worker: RunningWorker) -> None:
    bystander = Bystander(worker)
    bystander.client.execute(TABLE)
    deaf = worker.connect(name="deaf")
    first = deaf.ask(QUERY, Statement("select zeroblob(4000000)"), result_bytes=MOST)
    until(bystander.client, is_waiting(4_000_000))
    second = deaf.ask(EXECUTE, Statement(INSERT, [1]))
    bystander.check()
    assert rows(bystander.client) == 0
    # Its credits are read all the same, and it is served again before all of the result is there.
    answers: list[int] = []
    while len(answers) < 2:
        envelope = deaf.receive()
        if isinstance(envelope, Chunk):
            deaf.send(Credit(first, 1))
        else:
            assert isinstance(envelope, Reply)
            answers.append(envelope.id)
    assert sorted(answers) == [first, second]
    assert rows(bystander.client) == 1


@pytest.mark.parametrize("reads", [False, True], ids=["reads nothing", "grants nothing"])
def test_one_without_progress_is_dropped(start_worker: StartWorker, reads: bool) -> None:
    worker = start_worker(**SMALL, unread_bytes_max=64 * KIB, unread_ms_max=200)
    bystander = Bystander(worker)
    deaf = worker.connect(name="deaf")
    deaf.ask(QUERY, Statement("select zeroblob(4000000)"), result_bytes=MOST)
    if reads:
        assert len(everything(deaf)) == DEFAULT_LIMITS.chunks_ahead_max
    until(bystander.client, lambda status: all(each.name != "deaf" for each in status.clients))
    assert nothing_is_left(bystander.client.status())
    assert "does not read its replies" in worker.log()
    bystander.check()


def test_small_answers_come_between_the_chunks(worker: RunningWorker) -> None:
    client = worker.connect()
    large = client.ask(QUERY, Statement("select zeroblob(4000000)"), result_bytes=MOST)
    assert isinstance(client.receive(), Chunk)
    small = client.ask("worker.health", [])
    kinds: list[FromWorker] = []
    while not isinstance(envelope := client.receive(), Reply) or envelope.id != large:
        kinds.append(envelope)
        if isinstance(envelope, Chunk):
            client.send(Credit(large, 1))
    place = next(place for place, each in enumerate(kinds) if isinstance(each, Reply) and each.id == small)
    assert place < 60
    assert isinstance(kinds[-1], Chunk)


def test_results_of_one_client_take_turns(worker: RunningWorker) -> None:
    client = worker.connect()
    first, second = (
        client.ask(QUERY, Statement("select zeroblob(300000)"), result_bytes=MOST) for _ in range(2)
    )
    got = {first: 0, second: 0}
    ends: list[int] = []
    while len(ends) < 2:
        envelope = client.receive()
        if isinstance(envelope, Chunk):
            got[envelope.id] += len(envelope.part)
            client.send(Credit(envelope.id, 1))
        else:
            assert isinstance(envelope, Reply)
            ends.append(envelope.id)
    assert min(got.values()) > 300_000


def test_a_request_takes_its_turn_when_its_arguments_are_whole(worker: RunningWorker) -> None:
    client = worker.connect()
    client.execute(TABLE)
    arguments = encode(Statement(INSERT, [b"x" * 200_000]))
    large = announce(client, len(arguments))
    upload(client, large, arguments, parts=3)
    assert client.execute(INSERT, "before").last_insert_rowid == 1
    rest = arguments[3 * PART :]
    for place in range(0, len(rest), PART):
        client.send(Chunk(large, 3 + place // PART, rest[place : place + PART]))
    assert isinstance(client.answer(large), Reply)
    assert client.query("select length(v) from t order by id").rows == [(6,), (200_000,)]


# Cut short


def test_cancel_in_the_middle_of_arguments(worker: RunningWorker) -> None:
    client = worker.connect()
    client.execute(TABLE)
    large = announce(client, 200_000)
    upload(client, large, b"x" * 200_000, parts=2)
    client.send(Cancel(large))
    assert error_in(client.answer(large)).code == "storage_cancelled"
    assert nothing_is_left(client.status())
    assert rows(client) == 0


def test_a_deadline_in_the_middle_of_arguments(worker: RunningWorker) -> None:
    client = worker.connect()
    client.execute(TABLE)
    large = announce(client, 200_000, deadline_ns=deadline_in(0.2))
    upload(client, large, b"x" * 200_000, parts=2)
    error = error_in(client.answer(large))
    assert (error.code, error.outcome) == ("storage_deadline", "not_committed")
    # What was on its way already is no fault.
    client.send(Chunk(large, 2, b"x" * PART))
    client.send(Cancel(large))
    assert nothing_is_left(client.status())


def deadline_in(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


@pytest.mark.parametrize(
    ("sql", "outcome"),
    [("select zeroblob(4000000)", "not_committed"), (f"{INSERT} returning zeroblob(4000000)", "committed")],
)
def test_cancel_in_the_middle_of_a_result(worker: RunningWorker, sql: str, outcome: str) -> None:
    bystander = Bystander(worker)
    client = worker.connect()
    client.execute(TABLE)
    statement = Statement(sql, [1] if "?" in sql else [])
    operation = EXECUTE if outcome == "committed" else QUERY
    large = client.ask(operation, statement, result_bytes=MOST)
    until(bystander.client, is_waiting(3_000_000))
    client.send(Cancel(large))
    error = error_in(client.answer(large))
    assert (error.code, error.outcome) == ("storage_cancelled", outcome)
    assert rows(client) == (outcome == "committed")
    assert nothing_is_left(client.status())


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_client_that_goes_in_the_middle(worker: RunningWorker, direction: str) -> None:
    bystander = Bystander(worker)
    client = worker.connect(name="leaver")
    client.execute(TABLE)
    if direction == "up":
        upload(client, announce(client, 200_000), b"x" * 200_000, parts=2)
        until(bystander.client, lambda status: status.spool.uploads == 1)
    else:
        client.ask(QUERY, Statement("select zeroblob(4000000)"), result_bytes=MOST)
        until(bystander.client, is_waiting(3_000_000))
    client.close()
    status = until(bystander.client, nothing_is_left)
    assert sum(lane.waiting_requests for lane in status.lanes) == 0
    bystander.check()


def test_a_worker_killed_in_the_middle(start_worker: StartWorker, tmp_path: Path) -> None:
    """Before the arguments are whole nothing can be committed; afterwards nobody knows."""
    worker = start_worker(**SMALL)
    with client_of(worker) as client:
        client.execute(TABLE)
        pid = worker.record.pid
        os.kill(pid, signal.SIGSTOP)
        errors: list[BaseException] = []

        def call() -> None:
            try:
                client.execute(INSERT, (b"x" * 300_000,), retries=0, timeout=1)
            except sw.StorageError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        os.kill(pid, signal.SIGKILL)
        thread.join()
    (error,) = errors
    assert isinstance(error, sw.WorkerUnavailableError)
    assert error.outcome == "not_committed"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tmp")] == []


def test_a_stopping_worker_sends_what_it_has(worker: RunningWorker) -> None:
    bystander = Bystander(worker)
    client = worker.connect(name="slow")
    large = client.ask(QUERY, Statement("select zeroblob(4000000)"), result_bytes=MOST)
    until(bystander.client, is_waiting(3_000_000))
    os.kill(worker.record.pid, signal.SIGTERM)
    data = 0
    while not isinstance(envelope := client.receive(), Reply):
        if isinstance(envelope, Chunk):
            data += len(envelope.part)
            with contextlib.suppress(ConnectionError):  # it has said all, and gone
                client.send(Credit(large, 1))
    assert data > 4_000_000


def test_a_worker_at_its_end_says_what_became_of_a_result_that_it_cannot_send(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(**SMALL, stop_grace_ms=50)
    client = worker.connect()
    client.execute(TABLE)
    insert = client.ask(EXECUTE, Statement(f"{INSERT} returning zeroblob(3000000)", [1]), result_bytes=MOST)
    for _ in range(client_limits(client).chunks_ahead_max):
        assert isinstance(client.receive(), Chunk)
    os.kill(worker.record.pid, signal.SIGTERM)
    answer = client.answer(insert)
    assert isinstance(answer, Failure)
    assert answer.outcome == "committed"


# Bounds


def test_a_client_has_a_bound_on_arguments_under_way(start_worker: StartWorker) -> None:
    worker = start_worker(**SMALL, client_spool_bytes_max=MOST)
    client, other = worker.connect(), worker.connect()
    held = announce(client, MOST - 1)
    assert isinstance(client.receive(), Credit)
    error = error_in(client.answer(announce(client, 2)))
    assert (error.code, error.details["bound"]) == ("storage_overloaded", "client_spool_bytes")
    assert isinstance(other_credit(other), Credit)
    client.send(Cancel(held))
    client.answer(held)
    announce(client, 2)
    assert isinstance(client.receive(), Credit)


def other_credit(client: RawClient) -> FromWorker:
    announce(client, MOST)
    return client.receive()


@pytest.mark.parametrize("bound", ["spools", "spool_bytes"])
def test_the_worker_has_a_bound_on_all_of_them(start_worker: StartWorker, bound: str) -> None:
    """What finds no room is refused: arguments before they come, a write's result before its COMMIT."""
    limits = {"spools_max": 1, "client_spools_max": 1} if bound == "spools" else {"spool_bytes_max": MOST}
    worker = start_worker(**SMALL, client_spool_bytes_max=MOST, **limits)
    client, other = worker.connect(), worker.connect()
    client.execute(TABLE)
    held = announce(other, MOST)
    assert isinstance(other.receive(), Credit)
    for answer in (
        client.answer(announce(client, 200_000)),
        client.answer(
            client.ask(EXECUTE, Statement(f"{INSERT} returning zeroblob(200000)", [1]), result_bytes=MOST)
        ),
    ):
        error = error_in(answer)
        assert (error.code, error.outcome) == ("storage_overloaded", "not_committed")
        assert error.details["bound"] == bound
    assert rows(client) == 0
    other.send(Cancel(held))
    other.answer(held)
    assert nothing_is_left(client.status())


def test_requests_that_ended_in_the_middle_count_until_their_client_says_so(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(**SMALL, client_spools_max=4)
    client = worker.connect()
    refused = [announce(client, 200_000, deadline_ns=deadline_in(0.05)) for _ in range(4)]
    for request_id in refused:
        assert error_in(client.answer(request_id)).code == "storage_deadline"
    error = error_in(client.answer(announce(client, 200_000)))
    assert (error.code, error.details["bound"]) == ("storage_overloaded", "client_spools")
    client.send(Cancel(refused[0]))
    announce(client, 200_000)
    assert isinstance(client.receive(), Credit)


# Hostile


@pytest.mark.parametrize("size", [0, -1, MOST + 1, 2**64 - 1, 1.5, None, "1", []])
def test_announced_sizes_that_cannot_be(worker: RunningWorker, size: object) -> None:
    client = worker.connect()
    error = error_in(client.answer(announce(client, size)))
    assert error.code in {"storage_invalid_request", "storage_request_too_large"}
    assert client.query("select 1").scalar() == 1


def test_a_control_request_is_no_large_one(worker: RunningWorker) -> None:
    client = worker.connect()
    assert error_in(client.answer(announce(client, 100, "worker.health"))).code == "storage_invalid_request"


FAULTS: dict[str, Callable[[int], Chunk | Credit]] = {
    "out of order": lambda request_id: Chunk(request_id, 1, b"x" * PART),
    "too small": lambda request_id: Chunk(request_id, 0, b"x"),
    "empty": lambda request_id: Chunk(request_id, 0, b""),
    "too large": lambda request_id: Chunk(request_id, 0, b"x" * (PART + 1)),
    "of no request": lambda request_id: Chunk(request_id + 1, 0, b"x" * PART),
    "of a request without": lambda request_id: Chunk(request_id - 1, 0, b"x" * PART),
    "credit for a later one": lambda request_id: Credit(request_id + 1, 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_chunks_that_cannot_be_end_the_connection(worker: RunningWorker, fault: str) -> None:
    bystander = Bystander(worker)
    client = worker.connect()
    client.query("select 1")
    request_id = announce(client, 200_000)
    assert isinstance(client.receive(), Credit)
    client.send(FAULTS[fault](request_id))
    assert last_words(client).code == "storage_protocol"
    until(bystander.client, nothing_is_left)
    bystander.check()


def test_more_chunks_after_the_end_than_were_granted(worker: RunningWorker) -> None:
    client = worker.connect()
    request_id = announce(client, MOST, deadline_ns=deadline_in(0.05))
    granted = client.receive()
    assert isinstance(granted, Credit)
    assert error_in(client.answer(request_id)).code == "storage_deadline"
    for number in range(granted.count):
        client.send(Chunk(request_id, number, b"x" * PART))
    assert client.query("select 1").scalar() == 1
    client.send(Chunk(request_id, granted.count, b"x" * PART))
    assert last_words(client).code == "storage_protocol"


@pytest.mark.parametrize("count", [DEFAULT_LIMITS.chunks_ahead_max + 1, 2**63])
def test_more_credit_than_may_be_outstanding(worker: RunningWorker, count: int) -> None:
    bystander = Bystander(worker)
    client = worker.connect()
    request_id = client.ask(QUERY, Statement("select zeroblob(4000000)"), result_bytes=MOST)
    until(bystander.client, is_waiting(3_000_000))
    client.send(Credit(request_id, count))
    assert last_words(client).code == "storage_protocol"
    until(bystander.client, nothing_is_left)


def test_arguments_that_do_not_decode(worker: RunningWorker) -> None:
    client = worker.connect()
    for arguments in (b"\xc1" * 200_000, b"\x91" * 100_000 + b"\xc0"):
        request_id = announce(client, len(arguments))
        upload(client, request_id, arguments)
        assert error_in(client.answer(request_id)).code == "storage_invalid_request"
    assert nothing_is_left(client.status())


# Interactive transactions


def test_large_arguments_inside_a_transaction(worker: RunningWorker) -> None:
    client = worker.connect()
    client.execute(TABLE)
    number = client.call(BEGIN, Begin(0))
    arguments = encode(Statement(INSERT, [b"x" * 200_000]))
    refused = error_in(client.answer(announce(client, len(arguments))))
    assert refused.code == "storage_invalid_request"
    inside = announce(client, len(arguments), transaction=number)
    upload(client, inside, arguments)
    assert isinstance(client.answer(inside), Reply)
    client.call(ROLLBACK, Nothing(), transaction=number)
    assert rows(client) == 0


def test_a_lease_that_ends_in_the_middle(worker: RunningWorker) -> None:
    client = worker.connect()
    client.execute(TABLE)
    number = client.call(BEGIN, Begin(100))
    arguments = encode(Statement(INSERT, [b"x" * 200_000]))
    inside = announce(client, len(arguments), transaction=number)
    upload(client, inside, arguments, parts=2)
    other = worker.connect()
    other.execute(INSERT, 1)
    rest = arguments[2 * PART :]
    for place in range(0, len(rest), PART):
        client.send(Chunk(inside, 2 + place // PART, rest[place : place + PART]))
    assert error_in(client.answer(inside)).code == "storage_transaction_expired"
    assert rows(client) == 1
    assert nothing_is_left(client.status())


# All of it at once

SIZES = (10, 60_000, 70_000, 300_000, 900_000)
IMPATIENT_S = (0.001, 0.01, 0.05)


def some_calls(client: Client, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        value, kind = chance.randbytes(chance.choice(SIZES)), chance.random()
        if kind < 0.4:
            number = client.execute(INSERT, (value,)).last_insert_rowid
            found = client.query("select v from t where id = ?", (number,), max_result_bytes=MOST)
            assert found.scalar() == value
        elif kind < 0.6:
            with contextlib.suppress(sw.DeadlineExceededError):
                client.execute(
                    f"{INSERT} returning v",
                    (value,),
                    max_result_bytes=MOST,
                    timeout=chance.choice(IMPATIENT_S),
                )
        elif kind < 0.7:
            with client.pipeline() as pipeline:
                futures = [
                    pipeline.query("select ?, zeroblob(?)", (place, size), max_result_bytes=MOST)
                    for place, size in enumerate(SIZES)
                ]
                assert [future.result().one()[0] for future in futures] == list(range(len(SIZES)))
        else:
            assert client.query("select ?", (seed,)).scalar() == seed


def test_threads_with_all_sizes_at_once(client: Client) -> None:
    with Calls() as calls:
        for outcome in [calls.start(some_calls, client, seed) for seed in range(8)]:
            outcome.get()
    until_nothing_is_left(client)


async def some_async_calls(client: sw.AsyncClient, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        value, kind = chance.randbytes(chance.choice(SIZES)), chance.random()
        if kind < 0.4:
            number = (await client.execute(INSERT, (value,))).last_insert_rowid
            found = await client.query("select v from t where id = ?", (number,), max_result_bytes=MOST)
            assert found.scalar() == value
        elif kind < 0.7:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(chance.choice(IMPATIENT_S)):
                    await client.execute(f"{INSERT} returning v", (value,), max_result_bytes=MOST)
        else:
            assert (await client.query("select ?", (seed,))).scalar() == seed


def test_tasks_with_all_sizes_at_once(worker: RunningWorker, client: Client) -> None:
    async def main() -> None:
        async with await sw.connect_async(worker.record.address) as connected:
            await asyncio.gather(*(some_async_calls(connected, seed) for seed in range(12)))

    asyncio.run(main())
    until_nothing_is_left(client)


def until_nothing_is_left(client: Client) -> None:
    """What was cancelled last may still be on its way."""
    end = time.monotonic() + PATIENCE_S
    while not nothing_is_left(status := client.status()):
        assert time.monotonic() < end, status.spool
    assert "storage_protocol" not in status.errors

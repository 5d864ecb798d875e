"""Bytes that are not the protocol: whatever comes, it is refused by a typed failure and hurts nobody else."""

import random
import socket
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage_worker.protocol.envelope import (
    PROTOCOL_VERSION,
    Cancel,
    Failure,
    Goodbye,
    Hello,
    Reply,
    Welcome,
    encode,
)
from storage_worker.protocol.errors import InvalidRequestError, ProtocolError, WorkerUnavailableError
from storage_worker.protocol.framing import frame
from storage_worker.protocol.limits import DEFAULT_LIMITS
from storage_worker.protocol.statements import (
    BATCH,
    EXECUTE,
    HEARTBEAT,
    OUTCOME,
    QUERY,
    STATUS,
    STOP,
    Nothing,
    Statement,
)
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.hostile import (
    BOMB,
    ENDLESS,
    WRITE,
    Bystander,
    ask_with,
    error_in,
    everything,
    last_words,
    refusal,
    request,
    table_is_empty,
    until,
)
from tests.worker.raw import RawClient

Dial = Callable[..., RawClient]

HELLO = frame(encode(Hello(PROTOCOL_VERSION, "hostile", 1, "write", 0)))
INSERT = Statement("insert into hostile values(?)", [1])


@pytest.fixture(scope="module")
def table(standing_worker: RunningWorker) -> None:
    with RawClient(standing_worker.address) as client:
        client.execute("create table if not exists hostile(a)")


@pytest.fixture
def dial(standing_worker: RunningWorker, table: None) -> Iterator[Dial]:
    """Connect to the standing worker; afterwards a bystander finds it as it was."""
    clients: list[RawClient] = []
    bystander = Bystander(standing_worker)

    def connect(**options: object) -> RawClient:
        clients.append(RawClient(standing_worker.address, **options))  # type: ignore[arg-type]
        return clients[-1]

    bystander.check()
    yield connect
    for client in clients:
        client.close()
    bystander.check()
    bystander.client.close()


def header(size: int) -> bytes:
    return size.to_bytes(4, "big", signed=True)


BAD_LENGTHS = {
    "64-bit extension": header(-1) + (2**40).to_bytes(8, "big"),
    "-1 alone": header(-1),
    "the smallest": header(-(2**31)),
    "the largest": header(2**31 - 1),
    "one too many": header(DEFAULT_LIMITS.request_bytes_max + 1),
}


@pytest.mark.parametrize("length", BAD_LENGTHS.values(), ids=BAD_LENGTHS)
def test_a_bad_length_closes_its_connection(dial: Dial, length: bytes) -> None:
    for greet, lead in ((False, b""), (False, HELLO), (True, frame(request(1, Statement("select 1"))))):
        client = dial(greet=greet)
        client.send_bytes(lead + length)
        error = last_words(client)
        assert isinstance(error, ProtocolError)
        assert error.details["frame_bytes"] == int.from_bytes(length[:4], "big", signed=True)


def test_announced_sizes_are_not_allocated(dial: Dial) -> None:
    watcher = dial()
    before = watcher.status().process.resident_bytes
    for _ in range(32):
        dial().send_bytes(header(DEFAULT_LIMITS.request_bytes_max) + b"x")
    assert watcher.status().process.resident_bytes - before < 16 * 1024**2


def test_a_frame_cut_at_every_point_does_nothing(dial: Dial) -> None:
    whole = frame(request(1, INSERT, WRITE))
    for cut in range(len(whole)):
        with dial() as client:
            client.send_bytes(whole[:cut])
            client.socket.shutdown(socket.SHUT_WR)
            assert everything(client) == []
    assert table_is_empty(dial(), "hostile")


def test_a_stalled_frame_hinders_nobody_and_may_go_on(dial: Dial) -> None:
    body = frame(request(1, Statement("select 7")))
    stalled = [dial() for _ in range(8)]
    for client, cut in zip(stalled, range(1, len(body), len(body) // 8), strict=False):
        client.send_bytes(body[:cut])
        client.last_id = cut
    assert dial().query("select 1").scalar() == 1
    for client in stalled:
        client.send_bytes(body[client.last_id :])
        answer = client.answer(1)
        assert isinstance(answer, Reply)
        assert QUERY.decode_result(answer.result).scalar() == 7


@pytest.mark.parametrize("seed", range(4))
def test_any_split_of_the_bytes_gives_the_same_answers(dial: Dial, seed: int) -> None:
    chance = random.Random(seed)
    bodies = [request(number, Statement("select ?", ["x" * number * 50])) for number in range(1, 30)]
    data = HELLO + b"".join(frame(body) for body in bodies)
    client = dial(greet=False)
    # Seed 0 sends it byte by byte, without which no half a header ever comes.
    while data:
        size = 1 if not seed else chance.choice((1, 2, 3, 5, 50, 5_000))
        client.send_bytes(data[:size])
        data = data[size:]
    assert isinstance(client.receive(), Welcome)
    found = {}
    for _ in range(1, 30):
        # The first of them runs in the pool, and a later one may have its answer before.
        answer = client.receive()
        assert isinstance(answer, Reply)
        found[answer.id] = QUERY.decode_result(answer.result).scalar()
    assert found == {number: "x" * number * 50 for number in range(1, 30)}


NO_ENVELOPES = {
    "empty": b"",
    "nil": b"\xc0",
    "text": b"\xa5hello",
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
    "unknown tag": b"\x92\x63\x01",
    "a worker's": encode(Reply(1, msgspec.Raw(b"\xc0"))),
    "no tag": b"\x90",
    "a map": b"\x81\x01\x02",
    "huge array": b"\xdd\xff\xff\xff\xff",
    "bomb": BOMB,
    "cancel of 0": b"\x92\x06\x00",
    "request of id 0": request(0, Statement("select 1")),
    "request of too few fields": b"\x92\x03\x01",
}


@pytest.mark.parametrize("body", NO_ENVELOPES.values(), ids=NO_ENVELOPES)
def test_a_frame_that_is_no_envelope_closes_its_connection(dial: Dial, body: bytes) -> None:
    for greet in (False, True):
        client = dial(greet=greet)
        client.send_bytes(frame(body))
        error = last_words(client)
        assert isinstance(error, ProtocolError)
        assert error.outcome == "unknown"


UNDECODABLE = {
    "nested arguments": request(1, BOMB),
    "nested operation": b"\x99\x03\x01" + BOMB,
    "nested key": b"\x99\x03\x01\xa1x\x00\x00" + BOMB,
    "cut": request(1, Statement("select 1"))[:-1],
    "trailing": request(1, Statement("select 1")) + b"\xc0",
    "operation of another type": b"\x99\x03\x01\x05\x00\x00\xc0\x00\x00\x90",
    "operation with a lone surrogate": b"\x99\x03\x01\xa3\xed\xa0\x80\x00\x00\xc0\x00\x00\x90",
    "key with a lone surrogate": b"\x99\x03\x01\xa1x\x00\x00\xa3\xed\xa0\x80\x00\x00\x90",
    "negative deadline": b"\x99\x03\x01\xa1x\xff\x00\xc0\x00\x00\x90",
    "deadline that is no whole number": b"\x99\x03\x01\xa1x\xcb\x3f\xf8" + bytes(6) + b"\x00\xc0\x00\x00\x90",
    "negative flags": b"\x99\x03\x01\xa1x\x00\x00\xc0\x00\xff\x90",
    "huge text": b"\x99\x03\x01\xdb\xff\xff\xff\xff",
    "unknown byte": b"\x99\x03\x01\xa1x\x00\x00\xc0\x00\x00\xc1",
}


@pytest.mark.parametrize("body", UNDECODABLE.values(), ids=UNDECODABLE)
def test_a_request_that_does_not_decode_is_answered_by_its_id(dial: Dial, body: bytes) -> None:
    client = dial()
    client.send_bytes(frame(body))
    error = error_in(client.answer(1))
    assert isinstance(error, InvalidRequestError)
    assert error.outcome == "not_committed"
    client.last_id = 1
    assert client.query("select 1").scalar() == 1


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ids_of_any_length_are_answered(dial: Dial, size: int) -> None:
    client = dial()
    client.last_id = 2 ** (8 * size) - 2
    assert isinstance(refusal_without_more(client), InvalidRequestError)
    assert client.last_id == 2 ** (8 * size) - 1


def refusal_without_more(client: RawClient) -> Exception:
    return error_in(client.answer(ask_with(client, BOMB)))


@pytest.mark.parametrize("second", [7, 6, 1])
@pytest.mark.parametrize("decodes", [True, False])
def test_ids_that_repeat_or_decrease_close_the_connection(dial: Dial, second: int, decodes: bool) -> None:
    client = dial()
    client.send_bytes(frame(request(7, Statement("select 1"))))
    assert isinstance(client.answer(7), Reply)
    client.send_bytes(frame(request(second, Statement("select 1") if decodes else BOMB)))
    assert isinstance(last_words(client), ProtocolError)


@pytest.mark.parametrize(
    "arguments",
    [
        b"\xc0",
        b"\x05",
        b"\xa1x",
        b"\x81\xa3sql\xa1x",
        b"\x91\x05",
        b"\x93\xa8select 1\x90\x90",
        b"\x91\x91" + b"\x91" * 70 + b"\xc0",
    ],
    ids=["nil", "number", "text", "map", "of another type", "surplus", "nested"],
)
def test_arguments_that_are_not_the_operations(dial: Dial, arguments: bytes) -> None:
    client = dial()
    for operation in (EXECUTE.name, QUERY.name, BATCH.name, OUTCOME.name, STATUS.name, HEARTBEAT.name):
        error = refusal(client, arguments, operation)
        assert isinstance(error, InvalidRequestError)
        assert operation in str(error)


@pytest.mark.parametrize(
    "name", ["", "sql", "sql.drop", "SQL.EXECUTE", "sql.execute\0", "x" * 100_000, "__class__"]
)
def test_an_unknown_operation(dial: Dial, name: str) -> None:
    error = refusal(dial(), Statement("select 1"), name)
    assert isinstance(error, InvalidRequestError)
    assert len(str(error)) < 1_000


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes(dial: Dial, seed: int) -> None:
    chance = random.Random(seed)
    for greet in (False, True) * 10:
        with dial(greet=greet) as client:
            client.send_bytes(chance.randbytes(chance.choice((1, 4, 7, 100, 5_000))))
            client.socket.shutdown(socket.SHUT_WR)
            assert all(isinstance(each, Failure) and each.id == 0 for each in everything(client))


# What fuzzing starts from: proper frames, whose bytes it then changes.
SEEDS = (
    HELLO[4:],
    request(1, Statement("select ?", [1])),
    request(2, INSERT, WRITE, key="k"),
    request(3, [[Statement("select ?", [2.5]), Statement("select 1")]], BATCH.name),
    request(4, [], STATUS.name),
    request(5, ["key", False], OUTCOME.name),
    encode(Cancel(1)),
    encode(Goodbye("bye")),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    body = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, max(0, len(body) - 1)))
        body[place : place + draw(st.integers(0, 2))] = draw(st.binary(max_size=3))
    return bytes(body)


@st.composite
def well_typed(draw: st.DrawFn) -> bytes:
    name = draw(st.sampled_from((EXECUTE.name, QUERY.name, BATCH.name, OUTCOME.name, STATUS.name, "x")))
    return request(
        draw(st.integers(1, 2**64 - 1)),
        draw(values),
        name,
        deadline_ns=draw(st.just(0) | st.integers(0, 2**64 - 1)),
        result_bytes=draw(st.just(0) | st.integers(0, 2**64 - 1)),
        key=draw(st.none() | st.text()),
        transaction=draw(st.just(0) | st.integers(0, 2**64 - 1)),
        flags=draw(st.just(0) | st.integers(0, 2**64 - 1)),
    )


envelopes = st.tuples(st.integers(0, 9), values).map(lambda pair: encode([pair[0], pair[1]]))
bodies = changed() | well_typed() | envelopes | st.binary(max_size=40)
frames = st.lists(bodies.map(frame) | st.binary(max_size=12), max_size=8).map(b"".join)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=frames, greet=st.booleans())
def test_whatever_comes_is_answered_or_closed(dial: Dial, data: bytes, greet: bool) -> None:
    """What is read back is envelopes of a worker and then the end, and another client's request succeeds."""
    with dial(greet=greet) as client:
        try:
            client.send_bytes(data)
            client.socket.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, OSError):
            pass  # closed by the worker already: that is one of the two good answers
        for envelope in everything(client):
            assert isinstance(envelope, Welcome | Reply | Failure | Goodbye)


def test_the_worker_keeps_its_descriptors(dial: Dial) -> None:
    watcher = dial()
    before = watcher.status().process.descriptors
    for _ in range(50):
        with dial() as client:
            client.send_bytes(header(-5))
            last_words(client)
    assert watcher.status().process.descriptors == before


def test_a_worker_that_stops_still_answers_by_id(start_worker: StartWorker) -> None:
    worker = start_worker()
    client, admin = worker.connect(), worker.connect(role="admin")
    running = ask_with(client, Statement(ENDLESS))
    until(admin, lambda status: status.readers.running_requests == 1)
    admin.call(STOP, Nothing())
    assert isinstance(client.receive(), Goodbye)
    for arguments in (BOMB, Statement("select 1"), b"\xc0"):
        error = error_in(client.answer(ask_with(client, arguments)))
        assert isinstance(error, InvalidRequestError if arguments is BOMB else WorkerUnavailableError)
        assert error.outcome == "not_committed"
    late = last_words(worker.connect(greet=False))
    assert isinstance(late, WorkerUnavailableError)
    assert late.outcome == "not_committed"
    client.send(Cancel(running))
    assert error_in(client.answer(running)).code == "storage_cancelled"
    assert everything(client) == []

"""Cancels and goodbyes: whatever they are about, the request has one answer, and its mates theirs."""

from collections.abc import Iterator

import pytest

from storage_worker.protocol.envelope import Cancel, Goodbye, Reply, encode
from storage_worker.protocol.framing import frame
from storage_worker.protocol.statements import (
    BEGIN,
    COMMIT,
    EXECUTE,
    QUERY,
    Begin,
    Statement,
)
from storage_worker.protocol.status import WorkerStatus
from tests.worker.conftest import RunningWorker
from tests.worker.hostile import (
    ENDLESS,
    ENDLESS_WRITE,
    WRITE,
    Bystander,
    ask_with,
    error_in,
    everything,
    request,
    table_is_empty,
    until,
)
from tests.worker.raw import RawClient

INSERT = Statement("insert into kept values(1)")
CANCELLED = "storage_cancelled"


@pytest.fixture
def client(standing_worker: RunningWorker) -> Iterator[RawClient]:
    """A client of the standing worker with an empty table `kept`; afterwards a bystander finds it as it was."""
    bystander = Bystander(standing_worker)
    with RawClient(standing_worker.address, name="cancelling") as client:
        client.execute("drop table if exists kept")
        client.execute("create table kept(a)")
        yield client
    bystander.check()
    bystander.client.close()


@pytest.fixture
def owner(standing_worker: RunningWorker, client: RawClient) -> Iterator[RawClient]:
    """Another client, in whose transaction everybody's writes wait."""
    with RawClient(standing_worker.address, name="owner") as owner:
        owner.call(BEGIN, Begin(60_000))
        yield owner


def end_of(owner: RawClient) -> None:
    """Whose transaction is rolled back, so that the others' writes go on."""
    owner.close()


def waiting(status: WorkerStatus) -> int:
    return sum(lane.waiting_requests for lane in status.lanes)


def in_flight(name: str, status: WorkerStatus) -> int:
    return sum(each.in_flight_requests for each in status.clients if each.name == name)


def code_of(client: RawClient, number: int) -> str:
    error = error_in(client.answer(number))
    assert error.outcome == "not_committed"
    return error.code


def test_a_waiting_write(client: RawClient, owner: RawClient) -> None:
    first, second, third = (ask_with(client, INSERT, WRITE) for _ in range(3))
    client.send(Cancel(second))
    assert code_of(client, second) == CANCELLED
    end_of(owner)
    assert isinstance(client.answer(first), Reply)
    assert isinstance(client.answer(third), Reply)
    assert client.query("select count(*) from kept").scalar() == 2


def test_a_read_that_is_held_behind_a_write(client: RawClient, owner: RawClient) -> None:
    write = ask_with(client, INSERT, WRITE)
    reads = [ask_with(client, Statement("select count(*) from kept")) for _ in range(3)]
    client.send(Cancel(reads[1]))
    assert code_of(client, reads[1]) == CANCELLED
    end_of(owner)
    assert isinstance(client.answer(write), Reply)
    answers = sorted((client.receive() for _ in range(2)), key=lambda each: getattr(each, "id", 0))
    for number, answer in zip((reads[0], reads[2]), answers, strict=True):
        assert isinstance(answer, Reply)
        assert answer.id == number
        assert QUERY.decode_result(answer.result).scalar() == 1


def test_a_held_read_meets_its_own_deadline(client: RawClient, owner: RawClient) -> None:
    write = ask_with(client, INSERT, WRITE)
    read = client.ask(QUERY, Statement("select 1"), seconds=0.2)
    assert code_of(client, read) == "storage_deadline"
    client.send(Cancel(write))
    assert code_of(client, write) == CANCELLED


def test_a_running_read(client: RawClient) -> None:
    number = ask_with(client, Statement(ENDLESS))
    until(client, lambda status: status.readers.running_requests == 1)
    client.send(Cancel(number))
    assert code_of(client, number) == CANCELLED
    until(client, lambda status: status.readers.running_requests == 0)


def test_a_running_write_and_its_mates(
    standing_worker: RunningWorker, client: RawClient, owner: RawClient
) -> None:
    """Ending a write undoes the whole transaction; its mates run again and commit once."""
    with RawClient(standing_worker.address) as mate, RawClient(standing_worker.address) as watcher:
        before = [ask_with(mate, INSERT, WRITE) for _ in range(5)]
        number = ask_with(client, Statement(ENDLESS_WRITE), WRITE)
        last = ask_with(mate, Statement("select count(*) from kept"))
        until(watcher, lambda status: in_flight("cancelling", status) == 1)
        end_of(owner)
        for each in [*before, last]:
            assert isinstance(mate.answer(each), Reply)
        until(watcher, lambda status: waiting(status) == 0)
        after = [ask_with(mate, INSERT, WRITE) for _ in range(5)]
        client.send(Cancel(number))
        assert code_of(client, number) == CANCELLED
        for each in after:
            assert isinstance(mate.answer(each), Reply)
        assert mate.query("select count(*) from kept").scalar() == 10
        assert mate.query("select count(*) from ledger where owner = 'endless'").scalar() == 0


def test_a_keyed_write_that_was_cancelled_may_be_repeated(client: RawClient, owner: RawClient) -> None:
    number = ask_with(client, INSERT, WRITE, key="cancelled")
    client.send(Cancel(number))
    assert code_of(client, number) == CANCELLED
    end_of(owner)
    for _ in range(2):
        client.call(EXECUTE, INSERT, key="cancelled")
    assert client.query("select count(*) from kept").scalar() == 1


@pytest.mark.parametrize("number", [1, 2**32, 2**64 - 1])
def test_one_that_is_not_there(client: RawClient, number: int) -> None:
    client.send(Cancel(number))
    client.send(Cancel(number))
    assert client.query("select 1").scalar() == 1


def test_one_that_comes_before_its_request(client: RawClient) -> None:
    client.send(Cancel(client.last_id + 1))
    assert client.query("select 1").scalar() == 1


def test_one_that_has_its_answer(client: RawClient) -> None:
    number = ask_with(client, INSERT, WRITE)
    assert isinstance(client.answer(number), Reply)
    client.send(Cancel(number))
    assert client.query("select count(*) from kept").scalar() == 1


def test_one_in_the_same_write_as_its_request(client: RawClient) -> None:
    """Whatever comes of it, it is one answer, and it is true."""
    for _ in range(50):
        client.last_id += 1
        client.send_bytes(
            frame(request(client.last_id, INSERT, WRITE)) + frame(encode(Cancel(client.last_id)))
        )
    answers = [client.receive() for _ in range(50)]
    done = sum(isinstance(each, Reply) for each in answers)
    assert client.query("select count(*) from kept").scalar() == done


def test_another_clients_is_none_of_ours(
    standing_worker: RunningWorker, client: RawClient, owner: RawClient
) -> None:
    number = ask_with(client, INSERT, WRITE)
    with RawClient(standing_worker.address) as other:
        other.send(Cancel(number))
        assert other.query("select 1").scalar() == 1
    end_of(owner)
    assert isinstance(client.answer(number), Reply)


def test_a_statement_of_a_transaction(client: RawClient) -> None:
    """What was cut off cannot be repeated there: the transaction goes with it, and says so."""
    number = client.call(BEGIN, Begin())
    client.execute("insert into kept values(1)", transaction=number)
    endless = ask_with(client, Statement(ENDLESS_WRITE), WRITE, transaction=number)
    behind = ask_with(client, INSERT, WRITE, transaction=number)
    until(client, lambda status: waiting(status) == 1)
    client.send(Cancel(endless))
    error = error_in(client.answer(endless))
    assert error.code == CANCELLED
    assert error.details["transaction_ended"] is True
    assert code_of(client, behind) == "storage_transaction_expired"
    assert (
        code_of(client, ask_with(client, [], COMMIT.name, transaction=number))
        == "storage_transaction_expired"
    )
    assert table_is_empty(client, "kept")


def test_one_that_waits_in_a_transaction(client: RawClient) -> None:
    number = client.call(BEGIN, Begin())
    running = ask_with(client, Statement(ENDLESS), EXECUTE.name, transaction=number)
    waits = ask_with(client, INSERT, WRITE, transaction=number)
    client.send(Cancel(waits))
    assert code_of(client, waits) == CANCELLED
    client.send(Cancel(running))
    assert error_in(client.answer(running)).code == CANCELLED
    assert table_is_empty(client, "kept")


def test_a_begin_that_waits(client: RawClient, owner: RawClient) -> None:
    number = ask_with(client, Begin(), BEGIN.name)
    client.send(Cancel(number))
    assert code_of(client, number) == CANCELLED
    end_of(owner)
    assert client.call(EXECUTE, INSERT).rows_changed == 1


@pytest.mark.parametrize("reason", ["", "bye", "x" * 100_000, "\0"])
def test_goodbye(standing_worker: RunningWorker, reason: str) -> None:
    bystander = Bystander(standing_worker)
    with RawClient(standing_worker.address, name="leaving") as client:
        client.send_bytes(frame(encode(Goodbye(reason))) + frame(request(1, INSERT, WRITE)))
        assert everything(client) == []
    until(bystander.client, lambda status: "leaving" not in [each.name for each in status.clients])
    bystander.check()
    bystander.client.close()


def test_a_goodbye_ends_what_is_in_flight(standing_worker: RunningWorker, client: RawClient) -> None:
    with RawClient(standing_worker.address, name="leaving") as leaving:
        number = leaving.call(BEGIN, Begin())
        ask_with(leaving, INSERT, WRITE, transaction=number)
        ask_with(leaving, Statement(ENDLESS))
        leaving.send(Goodbye("bye"))
        everything(leaving)
    until(client, lambda status: status.readers.running_requests == 0 and waiting(status) == 0)
    assert client.call(EXECUTE, INSERT).rows_changed == 1
    assert client.query("select count(*) from kept").scalar() == 1

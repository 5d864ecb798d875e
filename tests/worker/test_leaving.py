"""Clients that vanish: in the middle of a request, of a reply, with requests waiting and running."""

import socket
from collections.abc import Callable, Iterator

import pytest

from storage_worker.protocol.envelope import Reply
from storage_worker.protocol.framing import frame
from storage_worker.protocol.limits import MIB
from storage_worker.protocol.statements import BEGIN, COMMIT, Begin, Statement
from storage_worker.protocol.status import WorkerStatus
from tests.worker.conftest import RunningWorker
from tests.worker.hostile import (
    ENDLESS,
    ENDLESS_WRITE,
    WRITE,
    Bystander,
    ask_with,
    error_in,
    request,
    table_is_empty,
    until,
)
from tests.worker.raw import RawClient

INSERT = Statement("insert into kept values(1)")
Leave = Callable[[RawClient], None]


def by_closing(client: RawClient) -> None:
    client.close()


def by_half(client: RawClient) -> None:
    client.socket.shutdown(socket.SHUT_WR)


def by_nonsense(client: RawClient) -> None:
    client.send_bytes(b"\xff" * 4)


@pytest.fixture
def bystander(standing_worker: RunningWorker) -> Iterator[Bystander]:
    bystander = Bystander(standing_worker)
    bystander.client.execute("drop table if exists kept")
    bystander.client.execute("create table kept(a)")
    yield bystander
    bystander.check()
    bystander.client.close()


@pytest.fixture
def leaving(standing_worker: RunningWorker, bystander: Bystander) -> Iterator[RawClient]:
    with RawClient(standing_worker.address, name="leaving") as client:
        yield client


def is_over(status: WorkerStatus) -> bool:
    """Whether nothing is left of the client that has left."""
    return (
        "leaving" not in [each.name for each in status.clients]
        and sum(lane.waiting_requests for lane in status.lanes) == 0
        and status.readers.running_requests == 0
    )


@pytest.mark.parametrize("leave", [by_closing, by_half, by_nonsense])
class TestLeaving:
    def test_with_a_running_read(self, leaving: RawClient, bystander: Bystander, leave: Leave) -> None:
        ask_with(leaving, Statement(ENDLESS))
        until(bystander.client, lambda status: status.readers.running_requests == 1)
        leave(leaving)
        until(bystander.client, is_over)

    def test_with_all_readers_busy(self, leaving: RawClient, bystander: Bystander, leave: Leave) -> None:
        for _ in range(20):
            ask_with(leaving, Statement(ENDLESS))
        until(bystander.client, lambda status: status.readers.running_requests == 2)
        leave(leaving)
        until(bystander.client, is_over)

    def test_with_a_running_write(self, leaving: RawClient, bystander: Bystander, leave: Leave) -> None:
        ask_with(leaving, Statement(ENDLESS_WRITE), WRITE)
        ask_with(leaving, INSERT, WRITE)
        until(bystander.client, lambda status: sum(each.in_flight_requests for each in status.clients) == 2)
        leave(leaving)
        bystander.check()
        until(bystander.client, is_over)
        assert bystander.client.query("select count(*) from ledger where owner = 'endless'").scalar() == 0
        assert bystander.client.query("select count(*) from kept").scalar() in (0, 1)

    def test_with_waiting_requests(
        self, standing_worker: RunningWorker, leaving: RawClient, bystander: Bystander, leave: Leave
    ) -> None:
        with RawClient(standing_worker.address) as owner:
            number = owner.call(BEGIN, Begin())
            for _ in range(10):
                ask_with(leaving, INSERT, WRITE)
                ask_with(leaving, Statement("select 1"))
            until(bystander.client, lambda status: sum(lane.waiting_requests for lane in status.lanes) == 20)
            leave(leaving)
            until(bystander.client, is_over)
            owner.call(COMMIT, [], transaction=number)
        assert table_is_empty(bystander.client, "kept")

    def test_with_a_transaction(self, leaving: RawClient, bystander: Bystander, leave: Leave) -> None:
        number = leaving.call(BEGIN, Begin(60_000))
        leaving.execute("insert into kept values(1)", transaction=number)
        leave(leaving)
        bystander.check()
        assert table_is_empty(bystander.client, "kept")

    def test_with_a_statement_of_a_transaction_running(
        self, leaving: RawClient, bystander: Bystander, leave: Leave
    ) -> None:
        number = leaving.call(BEGIN, Begin(60_000))
        ask_with(leaving, Statement(ENDLESS_WRITE), WRITE, transaction=number)
        ask_with(leaving, INSERT, WRITE, transaction=number)
        leave(leaving)
        bystander.check()
        until(bystander.client, is_over)
        assert table_is_empty(bystander.client, "kept")

    def test_in_the_middle_of_a_request(self, leaving: RawClient, bystander: Bystander, leave: Leave) -> None:
        body = frame(request(1, INSERT, WRITE))
        leaving.send_bytes(body[:-1])
        leave(leaving)
        if leave is not by_nonsense:  # which is the rest of the frame
            until(bystander.client, is_over)
            assert table_is_empty(bystander.client, "kept")

    def test_in_the_middle_of_a_reply(self, leaving: RawClient, bystander: Bystander, leave: Leave) -> None:
        ask_with(leaving, Statement("select zeroblob(5000000)"), result_bytes=8 * MIB)
        assert len(leaving.socket.recv(1_000)) > 0
        leave(leaving)
        if leave is not by_closing:
            leaving.close()
        until(bystander.client, is_over)

    def test_with_acknowledged_writes(self, leaving: RawClient, bystander: Bystander, leave: Leave) -> None:
        numbers = [ask_with(leaving, INSERT, WRITE) for _ in range(20)]
        for number in numbers[:10]:
            assert isinstance(leaving.answer(number), Reply)
        leave(leaving)
        until(bystander.client, is_over)
        assert 10 <= bystander.client.query("select count(*) from kept").scalar() <= 20


def test_many_that_leave_at_once(standing_worker: RunningWorker, bystander: Bystander) -> None:
    clients = [RawClient(standing_worker.address, name="leaving") for _ in range(40)]
    for number, client in enumerate(clients):
        for _ in range(5):
            ask_with(client, INSERT, WRITE)
            ask_with(client, Statement("select count(*) from kept"))
        if number % 2:
            client.send_bytes(b"\x00\x00\x10\x00half")
    for client in clients:
        client.close()
    bystander.check()
    until(bystander.client, is_over)


def test_an_owner_that_returns_has_no_transaction(
    standing_worker: RunningWorker, leaving: RawClient, bystander: Bystander
) -> None:
    number = leaving.call(BEGIN, Begin(60_000))
    leaving.close()
    bystander.check()
    with RawClient(standing_worker.address) as again:
        error = error_in(again.answer(ask_with(again, INSERT, WRITE, transaction=number)))
        assert error.code == "storage_transaction_expired"
    assert table_is_empty(bystander.client, "kept")

"""Interactive transactions: they end at the end of their block, whatever happens inside, and never linger."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from storage_worker.client.aio import AsyncClient
from storage_worker.client.aio_transaction import AsyncInteractiveTransaction
from storage_worker.protocol.envelope import OutgoingReply, Request
from storage_worker.protocol.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OperationFailedError,
    OverloadedError,
    TransactionExpiredError,
    WorkerUnavailableError,
)
from storage_worker.protocol.operation import Operation
from storage_worker.protocol.statements import KnownOutcome, Rows, Statement
from tests.client.fake import NOTHING, FakeWorker, Peer, Transactions, echo, nothing, number
from tests.client.test_transaction import LosingCommit
from tests.client_async.conftest import Run
from tests.client_async.peers import Near, NearPeer, away, both_of, client_of, row, turns, until

Body = Callable[[AsyncInteractiveTransaction], Awaitable[object]]

CUSTOM = Operation[[str], Rows]("tests.custom", "write", Statement, Rows)


@pytest.fixture
def transactions(worker: FakeWorker) -> Transactions:
    found = Transactions()
    worker.answer = found
    return found


async def insert(transaction: AsyncInteractiveTransaction, value: object = 1) -> Rows:
    return await transaction.execute("insert", (value,))  # type: ignore[arg-type]


async def use(client: AsyncClient, body: Body, **options: Any) -> None:
    async with client.transaction(**options) as transaction:
        await body(transaction)


async def fail(transaction: AsyncInteractiveTransaction) -> None:
    await insert(transaction)
    raise ZeroDivisionError


def names(transactions: Transactions) -> list[str]:
    return [name for name, _ in transactions.log]


def test_every_method_carries_the_number_and_the_end_commits(
    run: Run[None], worker: FakeWorker, transactions: Transactions
) -> None:
    async def body(transaction: AsyncInteractiveTransaction) -> None:
        assert (await insert(transaction)).scalar() == 1
        assert (await transaction.query("select ?", (2,))).scalar() == 2
        await transaction.call(CUSTOM("x"))

    async def main() -> None:
        async with client_of(worker) as client:
            await use(client, body, request_key="k")
        assert transactions.log == [
            ("begin", 0),
            ("execute", 1),
            ("query", 1),
            ("custom", 1),
            ("commit", 1),
        ]
        assert transactions.keys == [None, None, None, None, "k"]

    run(main())


def test_an_exception_rolls_back(run: Run[None], worker: FakeWorker, transactions: Transactions) -> None:
    async def main() -> None:
        async with client_of(worker) as client:
            with pytest.raises(ZeroDivisionError):
                await use(client, fail)
            transactions.errors["execute"] = OverloadedError("x")
            with pytest.raises(OverloadedError):
                await use(client, insert)
            transactions.errors["begin"] = OverloadedError("x")
            await use(client, insert)
        assert names(transactions) == [
            *("begin", "execute", "rollback"),
            *("begin", "execute", "rollback"),
            *("begin", "begin", "execute", "commit"),
        ]

    run(main())


def test_savepoints_undo_alone_and_nest(
    run: Run[None], worker: FakeWorker, transactions: Transactions
) -> None:
    async def body(transaction: AsyncInteractiveTransaction) -> None:
        async with transaction.savepoint():
            await insert(transaction)
            with pytest.raises(ZeroDivisionError):
                async with transaction.savepoint():
                    await fail(transaction)

    async def main() -> None:
        async with client_of(worker) as client:
            await use(client, body)
        assert names(transactions) == [
            *("begin", "open s1", "execute", "open s2", "execute"),
            *("rollback s2", "release s2", "release s1", "commit"),
        ]

    run(main())


def test_a_savepoint_that_cannot_be_undone_ends_the_transaction(
    run: Run[None], worker: FakeWorker, transactions: Transactions
) -> None:
    """Else the end of the block would commit what was to be undone."""

    async def body(transaction: AsyncInteractiveTransaction) -> None:
        transactions.errors["rollback s1"] = OperationFailedError("cannot")
        with pytest.raises(ZeroDivisionError):
            async with transaction.savepoint():
                await fail(transaction)

    async def main() -> None:
        async with client_of(worker) as client:
            with pytest.raises(TransactionExpiredError):
                await use(client, body)
        assert "commit" not in names(transactions)

    run(main())


def test_a_commit_or_rollback_inside_ends_it(
    run: Run[None], worker: FakeWorker, transactions: Transactions
) -> None:
    async def commit(transaction: AsyncInteractiveTransaction) -> None:
        await transaction.commit(request_key="k")
        with pytest.raises(TransactionExpiredError) as caught:
            await insert(transaction)
        assert caught.value.outcome == "committed"

    async def roll_back(transaction: AsyncInteractiveTransaction) -> None:
        await transaction.rollback()
        with pytest.raises(TransactionExpiredError) as caught:
            await transaction.commit()
        assert caught.value.outcome == "not_committed"

    async def main() -> None:
        async with client_of(worker) as client:
            await use(client, commit)
            await use(client, roll_back)
        assert transactions.log == [("begin", 0), ("commit", 1), ("begin", 0), ("rollback", 2)]
        assert transactions.keys == [None, "k", None, None]

    run(main())


def test_a_commit_that_fails_lets_go_of_the_writer(
    run: Run[None], worker: FakeWorker, transactions: Transactions
) -> None:
    async def main() -> None:
        transactions.errors["commit"] = InvalidRequestError("a deferred foreign key")
        async with client_of(worker) as client:
            with pytest.raises(InvalidRequestError):
                await use(client, insert)
        assert transactions.log[-1] == ("rollback", 1)

    run(main())


def test_what_ended_it_is_raised_even_where_the_block_swallows_it(
    run: Run[None], worker: FakeWorker, transactions: Transactions
) -> None:
    async def outlive_the_lease(transaction: AsyncInteractiveTransaction) -> None:
        transactions.owner = None
        for _ in range(2):
            with pytest.raises(TransactionExpiredError):
                await insert(transaction)

    async def miss_a_deadline(transaction: AsyncInteractiveTransaction) -> None:
        transactions.errors["execute"] = DeadlineExceededError("x", details={"transaction_ended": True})
        with pytest.raises(DeadlineExceededError):
            await insert(transaction)

    async def main() -> None:
        async with client_of(worker) as client:
            for body in (outlive_the_lease, miss_a_deadline):
                with pytest.raises(TransactionExpiredError):
                    await use(client, body)

    run(main())


def test_a_lost_connection_is_the_end_of_it(
    run: Run[None], worker: FakeWorker, transactions: Transactions
) -> None:
    async def main() -> None:
        async with client_of(worker) as client:

            async def body(transaction: AsyncInteractiveTransaction) -> None:
                await insert(transaction)
                assert transactions.owner is not None
                await away(transactions.owner.close)
                for _ in range(2):
                    with pytest.raises(TransactionExpiredError) as caught:
                        await insert(transaction)
                    assert caught.value.outcome == "not_committed"

            with pytest.raises(TransactionExpiredError):
                await use(client, body)
            assert (await client.query("select ?", (6,))).scalar() == 6
            await use(client, insert)

    run(main())


def test_a_lost_commit_is_looked_up_by_its_key(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        async with client_of(worker) as client:
            worker.answer = LosingCommit(KnownOutcome("committed"))
            with pytest.raises(WorkerUnavailableError) as caught:
                await use(client, insert)
            assert caught.value.outcome == "unknown"
            await use(client, insert, request_key="k")
            worker.answer = LosingCommit(KnownOutcome("not_found"))
            with pytest.raises(TransactionExpiredError) as expired:
                await use(client, insert, request_key="k")
            assert expired.value.outcome == "not_committed"
            worker.answer = LosingCommit(OperationFailedError("x"))
            with pytest.raises(WorkerUnavailableError) as caught:
                await use(client, insert, request_key="k")
            assert caught.value.outcome == "unknown"

    run(main())


def test_a_cancelled_commit_is_not_denied_by_what_comes_after(
    run: Run[None], worker: FakeWorker, transactions: Transactions
) -> None:
    def silent(peer: Peer, request: Request) -> object:
        answer = transactions(peer, request)
        return NOTHING if names(transactions).count("commit") == 1 else answer

    async def main() -> None:
        async with client_of(worker) as client:

            async def body(transaction: AsyncInteractiveTransaction) -> None:
                await insert(transaction)
                worker.answer = silent
                task = asyncio.create_task(transaction.commit())
                await until(lambda: "commit" in names(transactions))
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()

            with pytest.raises(TransactionExpiredError) as caught:
                await use(client, body)
            assert caught.value.outcome == "unknown"
            assert names(transactions).count("commit") == 2

    run(main())


def test_an_answer_from_before_a_cancelled_commit_does_not_deny_it(
    run: Run[None], worker: FakeWorker, transactions: Transactions
) -> None:
    held: list[tuple[Peer, Request]] = []

    def slow(peer: Peer, request: Request) -> object:
        answer = transactions(peer, request)
        if request.operation not in {"sql.query", "sql.commit"}:
            return answer
        held.append((peer, request))
        return NOTHING

    async def main() -> None:
        async with client_of(worker) as client:

            async def body(transaction: AsyncInteractiveTransaction) -> None:
                worker.answer = slow
                asking = asyncio.create_task(transaction.query("select", (1,)))
                await until(lambda: len(held) == 1)
                committing = asyncio.create_task(transaction.commit())
                await until(lambda: len(held) == 2)
                committing.cancel()
                await asyncio.wait([committing])
                peer, request = held[0]
                peer.reply(request.id, row(1))
                assert (await asking).scalar() == 1
                await insert(transaction)

            with pytest.raises(TransactionExpiredError) as caught:
                await use(client, body)
            assert caught.value.outcome == "unknown"

    run(main())


# One client and many tasks


def test_the_tasks_own_write_is_refused_and_other_tasks_go_on(
    run: Run[None], worker: FakeWorker, transactions: Transactions
) -> None:
    async def main() -> None:
        client, peer = await both_of(worker)
        async with client:

            async def body(transaction: AsyncInteractiveTransaction) -> None:
                with pytest.raises(InvalidRequestError):
                    await client.execute("insert", (1,))
                others = [asyncio.create_task(client.execute("insert", (place,))) for place in range(4)]
                assert [(await other).scalar() for other in others] == list(range(4))
                # In other tasks, it is still the transaction.
                assert (await asyncio.wait_for(insert(transaction, 5), 30)).scalar() == 5
                with pytest.raises(InvalidRequestError, match="savepoint"):
                    await use(client, insert)

            await use(client, body)
            # The connection is kept for the next one.
            await use(client, insert)
            assert transactions.owner is None
            assert worker.next_peer() is not peer
            assert worker.peers.empty()
            assert (await client.execute("insert", (9,))).scalar() == 9

    run(main())


def test_transactions_of_many_tasks_do_not_disturb_each_other(run: Run[None], worker: FakeWorker) -> None:
    open_ones: dict[Peer, int] = {}

    def answer(peer: Peer, request: Request) -> object:
        if request.operation == "sql.begin":
            open_ones[peer] = request.id
            return request.id
        if request.transaction != open_ones.get(peer, 0):
            return InvalidRequestError("not through the transaction")
        if request.operation == "sql.commit":
            del open_ones[peer]
            return None
        return echo(peer, request)

    async def main() -> None:
        worker.answer = answer
        async with client_of(worker) as client:

            async def work(name: int) -> None:
                for place in range(20):
                    async with client.transaction() as transaction:
                        value = name * 1000 + place
                        assert (await insert(transaction, value)).scalar() == value
                    assert (await client.execute("insert", (place,))).scalar() == place

            await asyncio.gather(*(work(name) for name in range(6)))
        assert not open_ones

    run(main())


def test_it_is_used_in_a_with_statement_and_once(
    run: Run[None], worker: FakeWorker, transactions: Transactions
) -> None:
    async def main() -> None:
        async with client_of(worker) as client:
            transaction = client.transaction()
            with pytest.raises(InvalidRequestError):
                await insert(transaction)
            async with transaction:
                await insert(transaction)
            with pytest.raises(InvalidRequestError):
                await transaction.__aenter__()

    run(main())


def test_closing_the_client_ends_its_transaction(
    run: Run[None], worker: FakeWorker, transactions: Transactions
) -> None:
    async def main() -> None:
        client = client_of(worker)

        async def body(transaction: AsyncInteractiveTransaction) -> None:
            await client.close()
            with pytest.raises(TransactionExpiredError):
                await insert(transaction)

        with pytest.raises(TransactionExpiredError):
            await use(client, body)

    run(main())


# Cancellation


def test_a_begin_without_an_answer_lets_go_of_the_writer(run: Run[None], worker: FakeWorker) -> None:
    """Its grant could come late, and nobody would end the transaction before its lease does."""

    async def main() -> None:
        worker.answer = nothing
        async with client_of(worker) as client:
            with pytest.raises(DeadlineExceededError) as caught:
                await use(client, insert, timeout=0.5)
            assert caught.value.outcome == "not_committed"
            await away((await away(worker.next_peer)).join)
            task = asyncio.create_task(use(client, insert))
            peer = await away(worker.next_peer)
            await away(peer.next)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await away(peer.join)
            worker.answer = echo
            assert (await client.execute("insert", (1,))).scalar() == 1

    run(main())


class Writer:
    """A worker with one writer: what it was told is done at once, and its answer comes when the test says so."""

    def __init__(self, near: Near) -> None:
        self.near = near
        self.owner: NearPeer | None = None
        self.done: list[str] = []
        self.committed: list[list[str]] = []

    def serve(self) -> bool:
        """Do what was asked."""
        for peer in self.near.dialer.peers:
            for envelope in peer.listen():
                if isinstance(envelope, Request):
                    self._do(peer, envelope)
            if peer is self.owner and peer.is_over:
                self.owner, self.done = None, []
        return True

    def _do(self, peer: NearPeer, request: Request) -> None:
        name = request.operation.partition(".")[2]
        result: object = None
        if name == "begin":
            assert self.owner is None
            self.owner, self.done, result = peer, [], 1
        elif not request.transaction:
            result = row(number(request))
        elif peer is not self.owner:
            peer.fail(request, TransactionExpiredError("it is over"))
            return
        elif name == "commit":
            self.committed.append(self.done)
            self.owner, self.done = None, []
        elif name == "rollback":
            self.owner, self.done = None, []
        else:
            self.done.append(str(number(request)))
            result = row(number(request))
        peer.say(OutgoingReply(request.id, result))


@pytest.mark.parametrize("swallow", [False, True])
def test_a_transaction_is_cancelled_at_every_turn(run: Run[None], swallow: bool) -> None:
    """All of it is committed or nothing, also where the block swallows the cancellation of one call."""

    async def main() -> None:
        ends = set()
        for serve_every in (1, 2, 3):
            for cancel_at in range(60):
                ends.add(await cancel_one(cancel_at, serve_every, swallow))
        assert ends == ({"cancelled", "failed", "done"} if swallow else {"cancelled", "done"})

    run(main())


async def cancel_one(cancel_at: int, serve_every: int, swallow: bool) -> str:
    async with Near(steps=1) as near:
        writer = Writer(near)
        task = asyncio.create_task(insert_two(near.client, swallow))
        step = 0
        while not task.done():
            if step == cancel_at:
                task.cancel()
            if step % serve_every == 0:
                writer.serve()
            await turns(1)
            step += 1
            assert step < 1000
        await turns(3)
        writer.serve()
        # Nobody owns the writer, and the client is in order.
        assert writer.owner is None
        assert writer.committed in ([], [["a", "b"]])
        await near.works()
        again = asyncio.create_task(insert_two(near.client, swallow))
        await until(lambda: writer.serve() and again.done())
        await again
        assert writer.committed[-1] == ["a", "b"]
        if task.cancelled():
            return "cancelled"
        return "failed" if task.exception() else "done"


async def insert_two(client: AsyncClient, swallow: bool) -> None:
    async with client.transaction() as transaction:
        for place in ("a", "b"):
            try:
                await insert(transaction, place)
            except asyncio.CancelledError:
                if not swallow:
                    raise

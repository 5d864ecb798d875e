"""Interactive transactions from the client's side."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from storage_worker.client import Client, InteractiveTransaction
from storage_worker.protocol.envelope import Request
from storage_worker.protocol.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    OperationFailedError,
    OverloadedError,
    StorageError,
    TransactionExpiredError,
    WorkerUnavailableError,
)
from storage_worker.protocol.statements import KnownOutcome, Rows
from tests.client.fake import NOTHING, Calls, FakeWorker, Peer, Transactions, echo, nothing

SHORT_S = 0.05

Use = Callable[[InteractiveTransaction], object]


@pytest.fixture
def transactions(worker: FakeWorker) -> Transactions:
    answers = Transactions()
    worker.answer = answers
    return answers


def use(client: Client, body: Use, **options: Any) -> None:
    with client.transaction(**options) as transaction:
        body(transaction)


def insert(transaction: InteractiveTransaction, value: object = 1) -> Rows:
    return transaction.execute("insert", (value,))  # type: ignore[arg-type]


def fail(transaction: InteractiveTransaction) -> None:
    insert(transaction)
    raise ZeroDivisionError


def test_a_block_commits_at_its_end(worker: FakeWorker, transactions: Transactions) -> None:
    client = worker.client()
    with client.transaction(lease=5.0) as transaction:
        assert transaction.query("select ?", (4,)).scalar() == 4
        assert insert(transaction, 5).rows_changed == 1
    assert transactions.log == [("begin", 0), ("query", 1), ("execute", 1), ("commit", 1)]
    assert client.query("select ?", (6,)).scalar() == 6
    assert transactions.log[-1] == ("query", 0)


def test_an_exception_rolls_back(worker: FakeWorker, transactions: Transactions) -> None:
    client = worker.client()
    with pytest.raises(ZeroDivisionError):
        use(client, fail)
    assert transactions.log == [("begin", 0), ("execute", 1), ("rollback", 1)]
    use(client, insert)
    assert transactions.log[-1] == ("commit", 2)


def test_the_lease_travels_in_ms(worker: FakeWorker) -> None:
    leases: list[bytes] = []

    def note(peer: Peer, request: Request) -> object:
        if request.operation == "sql.begin":
            leases.append(bytes(request.arguments))
        return answers(peer, request)

    answers = Transactions()
    worker.answer = note
    client = worker.client()
    for lease in (None, 0.25, 60):
        use(client, insert, lease=lease)
    assert leases == [b"\x91\x00", b"\x91\xcc\xfa", b"\x91\xcd\xea\x60"]


def test_a_failed_statement_leaves_the_transaction(worker: FakeWorker, transactions: Transactions) -> None:
    def body(transaction: InteractiveTransaction) -> None:
        transactions.errors["execute"] = OperationFailedError("constraint")
        with pytest.raises(OperationFailedError):
            insert(transaction)
        insert(transaction)

    use(worker.client(), body)
    assert transactions.log[-1] == ("commit", 1)


def test_statements_are_never_sent_again(worker: FakeWorker, transactions: Transactions) -> None:
    transactions.errors["execute"] = OverloadedError("x")
    with pytest.raises(OverloadedError):
        use(worker.client(), insert)
    assert [name for name, _ in transactions.log] == ["begin", "execute", "rollback"]


def test_a_refused_begin_is_repeated(worker: FakeWorker, transactions: Transactions) -> None:
    transactions.errors["begin"] = OverloadedError("x")
    use(worker.client(), insert)
    assert [name for name, _ in transactions.log] == ["begin", "begin", "execute", "commit"]


def test_savepoints_undo_alone_and_nest(worker: FakeWorker, transactions: Transactions) -> None:
    def body(transaction: InteractiveTransaction) -> None:
        with transaction.savepoint():
            insert(transaction)
            with pytest.raises(ZeroDivisionError), transaction.savepoint():
                fail(transaction)

    use(worker.client(), body)
    assert [name for name, _ in transactions.log] == [
        "begin",
        "open s1",
        "execute",
        "open s2",
        "execute",
        "rollback s2",
        "release s2",
        "release s1",
        "commit",
    ]


def test_a_savepoint_that_cannot_be_undone_ends_the_transaction(
    worker: FakeWorker, transactions: Transactions
) -> None:
    """Else the end of the block would commit what was to be undone."""

    def body(transaction: InteractiveTransaction) -> None:
        transactions.errors["rollback s1"] = OperationFailedError("cannot")
        with pytest.raises(ZeroDivisionError), transaction.savepoint():
            fail(transaction)

    with pytest.raises(TransactionExpiredError):
        use(worker.client(), body)
    assert ("commit", 1) not in transactions.log


def test_a_commit_or_rollback_inside_ends_it(worker: FakeWorker, transactions: Transactions) -> None:
    def commit(transaction: InteractiveTransaction) -> None:
        transaction.commit(request_key="k")
        with pytest.raises(TransactionExpiredError) as caught:
            insert(transaction)
        assert caught.value.outcome == "committed"

    def roll_back(transaction: InteractiveTransaction) -> None:
        transaction.rollback()
        with pytest.raises(TransactionExpiredError) as caught:
            transaction.commit()
        assert caught.value.outcome == "not_committed"

    client = worker.client()
    use(client, commit)
    use(client, roll_back)
    assert transactions.log == [("begin", 0), ("commit", 1), ("begin", 0), ("rollback", 2)]
    assert transactions.keys == [None, "k", None, None]


def test_the_blocks_end_may_commit_with_a_key(worker: FakeWorker, transactions: Transactions) -> None:
    use(worker.client(), insert, request_key="k")
    assert transactions.keys == [None, None, "k"]


def test_a_commit_that_fails_lets_go_of_the_writer(worker: FakeWorker, transactions: Transactions) -> None:
    transactions.errors["commit"] = InvalidRequestError("a deferred foreign key")
    with pytest.raises(InvalidRequestError):
        use(worker.client(), insert)
    assert transactions.log[-1] == ("rollback", 1)


def test_an_expired_lease_is_raised_even_where_the_block_swallows_it(
    worker: FakeWorker, transactions: Transactions
) -> None:
    def body(transaction: InteractiveTransaction) -> None:
        transactions.owner = None
        for _ in range(2):
            with pytest.raises(TransactionExpiredError):
                insert(transaction)

    with pytest.raises(TransactionExpiredError):
        use(worker.client(), body)
    assert [name for name, _ in transactions.log] == ["begin", "execute"]


def test_a_deadline_that_ended_the_transaction_says_so(
    worker: FakeWorker, transactions: Transactions
) -> None:
    def body(transaction: InteractiveTransaction) -> None:
        transactions.errors["execute"] = DeadlineExceededError("x", details={"transaction_ended": True})
        with pytest.raises(DeadlineExceededError):
            insert(transaction)

    with pytest.raises(TransactionExpiredError):
        use(worker.client(), body)


def test_a_lost_connection_is_the_end_of_it(worker: FakeWorker, transactions: Transactions) -> None:
    client, peer = worker.both()

    def body(transaction: InteractiveTransaction) -> None:
        insert(transaction)
        peer.close()
        for _ in range(2):
            with pytest.raises(TransactionExpiredError) as caught:
                insert(transaction)
            assert caught.value.outcome == "not_committed"

    with pytest.raises(TransactionExpiredError):
        use(client, body)
    assert client.query("select ?", (6,)).scalar() == 6


# A commit whose worker was lost


class LosingCommit(Transactions):
    def __init__(self, known: KnownOutcome | StorageError) -> None:
        super().__init__()
        self.known = known

    def __call__(self, peer: Peer, request: Request) -> object:
        if request.operation == "worker.outcome":
            return self.known
        if request.operation == "sql.commit":
            peer.close()
            return NOTHING
        return super().__call__(peer, request)


def test_a_lost_commit_without_a_key_is_unknown(worker: FakeWorker) -> None:
    worker.answer = LosingCommit(KnownOutcome("committed"))
    with pytest.raises(WorkerUnavailableError) as caught:
        use(worker.client(), insert)
    assert caught.value.outcome == "unknown"


def test_a_lost_commit_with_a_key_is_looked_up(worker: FakeWorker) -> None:
    worker.answer = LosingCommit(KnownOutcome("committed"))
    client = worker.client()
    use(client, insert, request_key="k")
    worker.answer = LosingCommit(KnownOutcome("not_found"))
    with pytest.raises(TransactionExpiredError) as caught:
        use(client, insert, request_key="k")
    assert caught.value.outcome == "not_committed"
    worker.answer = LosingCommit(OperationFailedError("x"))
    with pytest.raises(WorkerUnavailableError) as lost:
        use(client, insert, request_key="k")
    assert lost.value.outcome == "unknown"


def test_a_commit_that_the_ending_worker_leaves_open_is_looked_up(worker: FakeWorker) -> None:
    """The worker's own word that it does not know is no better than its loss."""

    class Ending(LosingCommit):
        def __call__(self, peer: Peer, request: Request) -> object:
            if request.operation == "sql.commit":
                return WorkerUnavailableError("it ended in the middle", outcome="unknown")
            return super().__call__(peer, request)

    worker.answer = Ending(KnownOutcome("committed"))
    client = worker.client()
    use(client, insert, request_key="k")
    with pytest.raises(WorkerUnavailableError) as caught:
        use(client, insert)
    assert caught.value.outcome == "unknown"


def lost_commit(_client: Client, _worker: FakeWorker) -> type[StorageError]:
    return WorkerUnavailableError


def late_commit(_client: Client, worker: FakeWorker) -> type[StorageError]:
    answers = worker.answer

    def silent(peer: Peer, request: Request) -> object:
        answer = answers(peer, request)
        return NOTHING if request.operation == "sql.commit" else answer

    worker.answer = silent
    return DeadlineExceededError


@pytest.mark.parametrize("how", [lost_commit, late_commit])
def test_what_comes_after_a_commit_in_doubt_does_not_deny_it(
    worker: FakeWorker, how: Callable[[Client, FakeWorker], type[StorageError]]
) -> None:
    worker.answer = LosingCommit(KnownOutcome("committed")) if how is lost_commit else Transactions()
    client = worker.client()
    expected = how(client, worker)

    def body(transaction: InteractiveTransaction) -> None:
        insert(transaction)
        with pytest.raises(expected) as caught:
            transaction.commit(timeout=SHORT_S if how is late_commit else None)
        assert caught.value.outcome == "unknown"
        with pytest.raises(TransactionExpiredError) as expired:
            insert(transaction)
        assert expired.value.outcome == "unknown"

    with pytest.raises(TransactionExpiredError) as caught:
        use(client, body)
    assert caught.value.outcome == "unknown"


# One client and many threads


def test_a_threads_own_write_is_refused_and_other_threads_go_on(
    worker: FakeWorker, transactions: Transactions
) -> None:
    client, peer = worker.both()

    def body(_transaction: InteractiveTransaction) -> None:
        with pytest.raises(InvalidRequestError):
            client.execute("insert", (1,))
        with Calls() as calls:
            results = [calls.start(client.execute, "insert", (place,)) for place in range(4)]
            assert [result.get().scalar() for result in results] == list(range(4))

    use(client, body)
    assert worker.next_peer() is not peer
    assert worker.peers.empty()
    assert client.execute("insert", (9,)).scalar() == 9


def test_transactions_of_many_threads_do_not_disturb_each_other(worker: FakeWorker) -> None:
    lock = threading.Lock()
    open_ones: dict[Peer, int] = {}

    def answer(peer: Peer, request: Request) -> object:
        with lock:
            if request.operation == "sql.begin":
                open_ones[peer] = request.id
                return request.id
            if request.transaction != open_ones.get(peer, 0):
                return InvalidRequestError("not through the transaction")
            if request.operation == "sql.commit":
                del open_ones[peer]
                return None
        return echo(peer, request)

    worker.answer = answer
    client = worker.client()

    def work(name: int) -> None:
        for place in range(30):
            with client.transaction() as transaction:
                assert insert(transaction, name * 1000 + place).scalar() == name * 1000 + place
            assert client.execute("insert", (place,)).scalar() == place

    with Calls() as calls:
        for result in [calls.start(work, name) for name in range(6)]:
            result.get()
    assert not open_ones


def test_a_transaction_inside_a_transaction_is_refused(
    worker: FakeWorker, transactions: Transactions
) -> None:
    client = worker.client()

    def body(_transaction: InteractiveTransaction) -> None:
        with pytest.raises(InvalidRequestError, match="savepoint"):
            use(client, insert)

    use(client, body)
    assert [name for name, _ in transactions.log] == ["begin", "commit"]


def test_it_is_used_in_a_with_statement_and_once(worker: FakeWorker, transactions: Transactions) -> None:
    transaction = worker.client().transaction()
    with pytest.raises(InvalidRequestError):
        insert(transaction)
    with transaction:
        insert(transaction)
    with pytest.raises(InvalidRequestError):
        transaction.__enter__()


def test_a_begin_without_an_answer_lets_go_of_the_writer(worker: FakeWorker) -> None:
    """Its grant could come late, and nobody would end the transaction before its lease does."""
    worker.answer = nothing
    client, peer = worker.both()
    with pytest.raises(DeadlineExceededError) as caught:
        use(client, insert, timeout=SHORT_S)
    assert caught.value.outcome == "not_committed"
    peer.join()
    worker.answer = echo
    assert client.execute("insert", (1,)).scalar() == 1


def test_closing_the_client_ends_its_transaction(worker: FakeWorker, transactions: Transactions) -> None:
    client = worker.client()

    def body(transaction: InteractiveTransaction) -> None:
        client.close()
        with pytest.raises(TransactionExpiredError):
            insert(transaction)

    with pytest.raises(TransactionExpiredError):
        use(client, body)

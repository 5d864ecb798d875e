"""Many clients, random good and bad requests, and a ledger: what was acknowledged is there once, the rest is not."""

import random
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from storage_worker.protocol.envelope import Cancel, Failure, Reply
from storage_worker.protocol.errors import StorageError
from storage_worker.protocol.statements import (
    BATCH,
    BEGIN,
    COMMIT,
    EXECUTE,
    ROLLBACK,
    SAVEPOINT,
    Batch,
    Begin,
    Nothing,
    Savepoint,
    Statement,
)
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.raw import PATIENCE_S, RawClient

CLIENTS = 10
ROUNDS = 40
SCHEMA = (
    "create table rows(token)",
    "create table one(a unique)",
    "insert into one values(1)",
    "create table parent(id integer primary key)",
    "create table child(p references parent(id) deferrable initially deferred)",
    "create table r(token)",
    "create trigger g after insert on r begin insert into rows values(new.token); select raise(rollback, 'x'); end",
    "create table f(token)",
    "create trigger h after insert on f begin insert into rows values(new.token); select raise(fail, 'x'); end",
)
INSERT = "insert into rows values(?)"
LONG = (
    "insert into rows with recursive c(n) as (values(1) union all select n + 1 from c where n < 400000)"
    " select ? from c where n = 400000"
)
FALSE_PROMISES = {"storage_dead_transaction", "storage_protocol"}


class Ledger:
    """Tokens by what was said of them. A key stands for one token, however often it is sent."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kept: set[int] = set()
        self.gone: set[int] = set()
        self.unknown: set[int] = set()
        self.codes: Counter[str] = Counter()
        self.keys: dict[str, int] = {}
        self._last = 0

    def token(self) -> int:
        self._last += 1
        return self._last

    def note(self, tokens: set[int], answer: Reply | Failure) -> None:
        if isinstance(answer, Reply):
            self.kept |= tokens
            return
        self.codes[answer.code] += 1
        assert answer.code not in FALSE_PROMISES, answer
        {"not_committed": self.gone, "committed": self.kept, "unknown": self.unknown}[answer.outcome].update(
            tokens
        )

    def check(self, client: RawClient) -> None:
        found = Counter(token for (token,) in client.query("select token from rows"))
        assert [token for token, count in found.items() if count > 1] == []
        # A key that failed once and was sent again may have been kept then.
        assert self.kept - set(found) == set()
        assert (self.gone - self.kept) & set(found) == set()
        assert client.query("select count(*) from child").scalar() == 0
        assert client.query("select count(*) from one").scalar() == 1
        assert client.query("select (select count(*) from r) + (select count(*) from f)").scalar() == 0


class Player:
    """One client that keeps several requests in flight."""

    def __init__(self, client: RawClient, ledger: Ledger) -> None:
        self.client = client
        self.ledger = ledger
        self.pending: dict[int, set[int]] = {}

    def send(
        self, statement: str, *parameters: object, tokens: set[int] | None = None, **options: object
    ) -> int:
        request = self.client.ask(EXECUTE, Statement(statement, list(parameters)), **options)  # type: ignore[arg-type]
        self.pending[request] = tokens or set()
        return request

    def good(self) -> None:
        token = self.ledger.token()
        self.send(INSERT, token, tokens={token})

    def returning(self) -> None:
        token = self.ledger.token()
        self.send(INSERT + " returning token", token, tokens={token})

    def too_large(self) -> None:
        token = self.ledger.token()
        self.send(INSERT + " returning token, zeroblob(5000)", token, tokens={token}, result_bytes=1000)

    def keyed(self) -> None:
        key = f"k{self.ledger.random.randrange(60)}"
        token = self.ledger.keys.setdefault(key, self.ledger.token())
        self.send(INSERT, token, tokens={token}, key=key)

    def bad(self) -> None:
        token = self.ledger.token()
        sql = self.ledger.random.choice(
            (
                "insert or fail into one values(?), (1)",
                "insert or rollback into one values(?), (1)",
                "insert or rollback into one values(?), (1) returning a",
                "insert or abort into one values(?), (1)",
                "insert into r values(?)",
                "insert into f values(?)",
                "insert into child values(?)",
                "insert into nowhere values(?)",
                "commit -- ?",
                "rollback",
            )
        )
        self.send(sql, *[token] * sql.split("--")[0].count("?"), tokens={token})

    def batch(self) -> None:
        tokens = {self.ledger.token() for _ in range(3)}
        statements = [Statement(INSERT, [token]) for token in tokens]
        if self.ledger.random.random() < 0.5:
            statements.insert(
                self.ledger.random.randrange(4), Statement("insert or rollback into one values(1)")
            )
        self.pending[self.client.ask(BATCH, Batch(statements))] = tokens

    def long(self) -> None:
        token = self.ledger.token()
        request = self.send(LONG, token, tokens={token}, seconds=self.ledger.random.choice((0.01, 0.05, 20)))
        if self.ledger.random.random() < 0.3:
            self.client.send(Cancel(request))

    def cancelled(self) -> None:
        token = self.ledger.token()
        self.client.send(Cancel(self.send(INSERT, token, tokens={token})))

    def collect(self) -> None:
        while self.pending:
            answer = self.client.receive()
            assert isinstance(answer, Reply | Failure)
            self.ledger.note(self.pending.pop(answer.id), answer)

    def transaction(self) -> None:
        """An interactive one, while the others' requests wait."""
        ledger, client = self.ledger, self.client
        number = client.call(BEGIN, Begin(30_000))
        tokens, undone = set(), set()
        for _ in range(3):
            token = ledger.token()
            client.execute(INSERT, token, transaction=number)
            tokens.add(token)
        client.call(SAVEPOINT, Savepoint("open", "s"), transaction=number)
        token = ledger.token()
        client.execute(INSERT, token, transaction=number)
        undone.add(token)
        client.call(SAVEPOINT, Savepoint("rollback", "s"), transaction=number)
        try:
            if ledger.random.random() < 0.3:
                client.execute("insert or rollback into one values(1)", transaction=number)
            client.call(ledger.random.choice((COMMIT, ROLLBACK, COMMIT)), Nothing(), transaction=number)
        except StorageError as error:
            ledger.codes[error.code] += 1
        ended: set[Any] = {
            token for (token,) in client.query("select token from rows where token in (?, ?, ?)", *tokens)
        }
        assert ended in (set(), tokens)
        ledger.kept |= ended
        ledger.gone |= undone | (tokens - ended)

    def play(self) -> None:
        moves: list[Callable[[], None]] = [
            self.good, self.good, self.good, self.returning, self.keyed, self.keyed, self.bad, self.bad,
            self.batch, self.too_large, self.cancelled,
        ]  # fmt: skip
        for _ in range(self.ledger.random.randrange(1, 6)):
            self.ledger.random.choice(moves)()
        if self.ledger.random.random() < 0.05:
            self.long()


def players(worker: RunningWorker, ledger: Ledger) -> list[Player]:
    return [Player(worker.connect(name=f"player {number}"), ledger) for number in range(CLIENTS)]


def prepared(worker: RunningWorker) -> RawClient:
    client = worker.connect(name="referee")
    for sql in SCHEMA:
        client.execute(sql)
    return client


@pytest.mark.parametrize("seed", range(3))
def test_what_was_acknowledged_is_there_once(worker: RunningWorker, seed: int) -> None:
    referee = prepared(worker)
    ledger = Ledger(seed)
    playing = players(worker, ledger)
    for _ in range(ROUNDS):
        alone = ledger.random.choice(playing)
        for player in playing:
            if player is not alone:
                player.play()
        alone.transaction()
        for player in playing:
            player.collect()
    ledger.check(referee)
    assert not ledger.unknown
    status = referee.status()
    assert status.writer.replays > 0
    assert status.receipts.kept == len(ledger.keys)
    assert status.writer.failed_commits == 0
    assert {"storage_operation_failed", "storage_not_permitted", "storage_result_too_large"} <= set(
        ledger.codes
    )


def test_what_was_acknowledged_outlives_a_killed_worker(start_worker: StartWorker) -> None:
    worker = start_worker()
    prepared(worker)
    ledger = Ledger(7)
    for _ in range(4):
        playing = players(worker, ledger)
        for _ in range(4):
            for player in playing:
                player.play()
            for player in playing[::2]:
                player.collect()
        for player in playing:
            player.play()
        worker.child.send_signal(signal.SIGKILL)
        worker.child.wait(PATIENCE_S)
        for player in playing:
            try:
                player.collect()
            except (EOFError, ConnectionResetError):
                for tokens in player.pending.values():
                    ledger.unknown |= tokens
        worker = start_worker()
    ledger.check(worker.connect())
    assert ledger.kept
    assert ledger.unknown

"""Everything at once: whatever meets whatever, each request has one answer, and what it says is true."""

import random
import threading
from collections import Counter

import pytest

from storage_worker.protocol.envelope import Cancel, Failure, Reply
from storage_worker.protocol.limits import KIB
from storage_worker.protocol.statements import (
    BEGIN,
    COMMIT,
    EXECUTE,
    HEARTBEAT,
    QUERY,
    ROLLBACK,
    STATUS,
    Begin,
    Nothing,
    Statement,
)
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.hostile import until
from tests.worker.raw import RawClient

LONG = "with recursive c(n) as (select 1 union all select n + 1 from c limit ?) select max(n) from c"
LONG_INSERT = f"insert into ledger select ?, (select 0 from ({LONG.replace('?', '?2')}))"

SETTINGS = {
    "takeover_ms": 1,
    "wal_checkpoint_bytes": 64 * KIB,
    "wal_live_frames_max": 50,
    "wal_idle_ms": 5,
    "client_requests_max": 32,
    "queue_requests_max": 100,
    "quick_reads_remembered": 4,
    "pipeline_window": 8,
    "unread_bytes_max": 9 * 1024 * KIB,
    "background_slice_ms_max": 1,
}


class Actor:
    """A client that does what chance tells it, and keeps account of what it was told."""

    def __init__(self, worker: RunningWorker, name: str, seed: int, steps: int) -> None:
        self.worker = worker
        self.name = name
        self.chance = random.Random(f"{seed} {name}")
        self.steps = steps
        self.number = 0
        self.committed: set[int] = set()
        self.not_committed: set[int] = set()
        self.codes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._client = worker.connect(name=name)
        self._waits: dict[int, int | None] = {}

    def run(self) -> None:
        try:
            for _ in range(self.steps):
                self._step()
            self._settle()
        except Exception as error:  # noqa: BLE001 - the test tells of it
            self.wrong.append(f"{self.name}: {error!r}")
        finally:
            self._client.close()

    def _step(self) -> None:
        chance, client = self.chance, self._client
        seconds = chance.choice((30.0, 30.0, 30.0, 0.02, 0.002))
        match chance.randrange(12):
            case 0 | 1 | 2 | 3:
                self._write(
                    Statement("insert into ledger values(?, zeroblob(3000))", [self._next()]), seconds
                )
            case 4:
                steps = chance.choice((100, 3_000, 60_000))
                self._write(Statement(LONG_INSERT, [self._next(), steps]), seconds)
            case 5 | 6:
                self._waits[client.ask(QUERY, Statement("select count(*) from ledger"), seconds=seconds)] = (
                    None
                )
            case 7:
                sql = LONG + f" -- {chance.randrange(8)}"
                steps = chance.choice((10, 50_000))
                self._waits[client.ask(QUERY, Statement(sql, [steps]), seconds=seconds)] = None
            case 8:
                self._waits[client.ask(chance.choice((HEARTBEAT, STATUS)), Nothing())] = None
            case 9 if self._waits:
                client.send(Cancel(chance.choice(list(self._waits))))
            case 10:
                self._settle()
                self._interact()
            case _:
                self._settle()
                if chance.random() < 0.3:
                    self._leave_in_the_middle()

    def _next(self) -> str:
        self.number += 1
        return f"{self.name} {self.number}"

    def _write(self, statement: Statement, seconds: float) -> None:
        self._waits[self._client.ask(EXECUTE, statement, seconds=seconds)] = self.number

    def _settle(self) -> None:
        """Hear the answers to all that was asked."""
        while self._waits:
            answer = self._client.receive()
            assert isinstance(answer, Reply | Failure), answer
            # An answer that comes twice finds nothing here the second time.
            number = self._waits.pop(answer.id)
            if isinstance(answer, Failure):
                self.codes[answer.code] += 1
            if number is not None:
                assert isinstance(answer, Reply) or answer.outcome == "not_committed", answer
                (self.committed if isinstance(answer, Reply) else self.not_committed).add(number)

    def _interact(self) -> None:
        client = self._client
        begun = client.answer(client.ask(BEGIN, Begin(self.chance.choice((20, 5_000))), seconds=0.5))
        if isinstance(begun, Failure):
            self.codes[begun.code] += 1
            return
        transaction = BEGIN.decode_result(begun.result)
        who = self._next()
        insert = Statement("insert into ledger values(?, 1)", [who])
        client.answer(client.ask(EXECUTE, insert, transaction=transaction))
        if self.chance.random() < 0.2:
            # The lease or the lost connection ends it.
            self._client.close()
            self._client = self.worker.connect(name=self.name)
            self.not_committed.add(self.number)
            return
        end = self.chance.choice((COMMIT, ROLLBACK))
        answer = client.answer(client.ask(end, Nothing(), transaction=transaction))
        done = isinstance(answer, Reply) and end is COMMIT
        (self.committed if done else self.not_committed).add(self.number)

    def _leave_in_the_middle(self) -> None:
        """What it asked last may or may not have been done: it never heard."""
        self._client.ask(EXECUTE, Statement("insert into ledger values('unheard', 1)"))
        self._client.ask(QUERY, Statement(LONG, [50_000]))
        self._client.close()
        self._client = self.worker.connect(name=self.name)


@pytest.mark.parametrize("seed", range(2))
def test_each_request_has_one_true_answer(start_worker: StartWorker, seed: int) -> None:
    worker = start_worker(durability="normal", **SETTINGS)
    control = worker.connect(name="control")
    control.execute("create table ledger(who, what)")
    actors = [Actor(worker, f"actor {number}", seed, 120) for number in range(6)]
    threads = [threading.Thread(target=actor.run) for actor in actors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [wrong for actor in actors for wrong in actor.wrong] == []
    found = Counter(who for (who,) in control.query("select who from ledger where who <> 'unheard'").rows)
    assert found == Counter(f"{actor.name} {number}" for actor in actors for number in actor.committed)
    assert sum(len(actor.committed) for actor in actors) > 100
    status = until(control, lambda status: len(status.clients) == 1 and not status.readers.running_requests)
    assert status.lanes[1].waiting_requests == 0
    assert status.writer.lease_owner == ""
    assert status.health.state == "healthy"
    # Nothing is left of all this that could keep the worker busy or its places taken.
    places = [control.ask(EXECUTE, Statement("insert into ledger values('last', 1)")) for _ in range(32)]
    for request_id in places:
        answer = control.receive()
        assert isinstance(answer, Reply), answer
        assert answer.id == request_id
    assert "Traceback" not in worker.log()


def test_a_worker_stopped_in_the_middle_tells_the_truth_to_each(start_worker: StartWorker) -> None:
    worker = start_worker(durability="normal", stop_grace_ms=30, **SETTINGS)
    admin = worker.connect(role="admin")
    admin.execute("create table ledger(who, what)")
    answers: list[tuple[str, Reply | Failure]] = []

    def write(name: str) -> None:
        with RawClient(worker.address, name=name) as client:
            number = 0
            while True:
                number += 1
                who = f"{name} {number}"
                try:
                    answer = client.answer(client.ask(EXECUTE, Statement(LONG_INSERT, [who, 5_000])))
                except (EOFError, OSError):
                    return
                answers.append((who, answer))

    threads = [threading.Thread(target=write, args=(f"writer {number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    until(admin, lambda status: status.writer.committed_requests > 50)
    admin.ask("worker.stop", [])
    for thread in threads:
        thread.join()
    assert worker.child.wait(30) is not None
    again = start_worker()
    found = {who for (who,) in again.connect().query("select who from ledger").rows}
    assert {who for who, answer in answers if isinstance(answer, Reply)} <= found
    refused = {
        who for who, answer in answers if isinstance(answer, Failure) and answer.outcome == "not_committed"
    }
    assert refused
    assert not refused & found

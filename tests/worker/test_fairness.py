"""Turns: who wants little is served beside who wants much, and each client's requests keep their order.

A table's row ids say in which order inserts ran; nothing here asks a clock.
"""

import pytest

from storage_worker.protocol.envelope import Reply
from storage_worker.protocol.statements import EXECUTE, Statement
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.gates import STORE, Gate, write_alone
from tests.worker.raw import RawClient

TABLE = "create table t(id integer primary key autoincrement, who text, number integer)"
GROUP = 64


@pytest.fixture
def crowded(start_worker: StartWorker) -> RunningWorker:
    """A worker in which one client may have thousands waiting, with small groups."""
    worker = start_worker(
        stores=[STORE], client_requests_max=4_000, group_requests_max=GROUP, group_work_ms_max=10_000
    )
    worker.connect().execute(TABLE)
    return worker


def hold_the_writer(worker: RunningWorker, gate: Gate) -> RawClient:
    """Have the writer stand at the gate; the client whose request does."""
    client = worker.connect(name="holder")
    client.ask(write_alone.name, [gate.path])
    gate.wait()
    return client


def insert(client: RawClient, who: str, number: int) -> int:
    return client.ask(EXECUTE, Statement("insert into t(who, number) values(?, ?)", [who, number]))


def acknowledged(client: RawClient, ids: list[int]) -> None:
    """All of these were answered by a result, in their order."""
    for request_id in ids:
        answer = client.receive()
        assert isinstance(answer, Reply), answer
        assert answer.id == request_id


def places(client: RawClient, who: str) -> list[int]:
    """The places of one client's inserts in the order in which all ran."""
    rows = client.query(
        "select id, number from t where who = ? order by id", who, result_bytes=8_000_000
    ).rows
    assert [number for _, number in rows] == list(range(len(rows)))
    return [place for place, _ in rows]


def test_a_modest_client_beside_one_with_thousands_waiting(crowded: RunningWorker, gate: Gate) -> None:
    control, hog, modest = (crowded.connect(name=name) for name in ("control", "hog", "modest"))
    held = hold_the_writer(crowded, gate)
    flood = [insert(hog, "hog", number) for number in range(3_000)]
    while control.status().lanes[1].waiting_requests < 3_000:
        pass
    few = [insert(modest, "modest", number) for number in range(5)]
    while control.status().lanes[1].waiting_requests < 3_005:
        pass
    gate.open()
    acknowledged(modest, few)
    status = control.status()
    # Few groups have run when the modest client has all its answers: the hog waits still.
    assert status.writer.committed_requests < 3_000
    assert isinstance(held.receive(), Reply)
    acknowledged(hog, flood)
    assert max(places(control, "modest")) <= 2 * GROUP
    assert len(places(control, "hog")) == 3_000


def test_many_clients_advance_evenly(crowded: RunningWorker, gate: Gate) -> None:
    control = crowded.connect()
    held = hold_the_writer(crowded, gate)
    clients = {f"client {number}": crowded.connect() for number in range(8)}
    # The first has its hundred there before the last has one.
    ids = {who: [insert(client, who, number) for number in range(100)] for who, client in clients.items()}
    while control.status().lanes[1].waiting_requests < 800:
        pass
    gate.open()
    assert isinstance(held.receive(), Reply)
    for who, client in clients.items():
        acknowledged(client, ids[who])
    of_all = [places(control, who) for who in clients]
    for number in range(100):
        turn = [of_one[number] for of_one in of_all]
        assert max(turn) - min(turn) < len(clients)


def test_each_client_s_order_survives_replays(crowded: RunningWorker, gate: Gate) -> None:
    """Requests whose group is undone run again, with others of the same clients in front of and behind them."""
    control, one, other = (crowded.connect() for _ in range(3))
    control.execute("create table u(a unique)")
    control.execute("insert into u values('taken')")
    held = hold_the_writer(crowded, gate)
    ids: dict[RawClient, list[int]] = {one: [], other: []}
    for number in range(60):
        for client, who in ((one, "one"), (other, "other")):
            ids[client].append(insert(client, who, number))
        if number % 7 == 0:
            # It leaves a row behind, so that the group has to be undone; and one that ends it altogether.
            one.ask(EXECUTE, Statement("insert or fail into u values(?), ('taken')", [number]))
            other.ask(EXECUTE, Statement("insert or rollback into u values(?), ('taken')", [number]))
    gate.open()
    assert isinstance(held.receive(), Reply)
    for client, mine in ids.items():
        for request_id in mine:
            assert isinstance(client.answer(request_id), Reply)
    assert len(places(control, "one")) == len(places(control, "other")) == 60
    assert control.query("select a from u").rows == [("taken",)]
    assert control.status().writer.replays > 0


def test_one_that_runs_alone_keeps_its_place_among_its_client_s(crowded: RunningWorker, gate: Gate) -> None:
    control, client = crowded.connect(role="admin"), crowded.connect(role="admin")
    held = hold_the_writer(crowded, gate)
    ids = []
    for number in range(0, 20, 2):
        ids.append(insert(client, "mixed", number))
        ids.append(client.ask("sql.script", [f"insert into t(who, number) values('mixed', {number + 1})"]))
    gate.open()
    assert isinstance(held.receive(), Reply)
    acknowledged(client, ids)
    assert len(places(control, "mixed")) == 20

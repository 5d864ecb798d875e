"""What a connection may do: its role, and the grant without which nobody gets the highest."""

from collections.abc import Iterator

import pytest

from storage_worker.protocol.envelope import PROTOCOL_VERSION, Hello, Reply, Role, Welcome
from storage_worker.protocol.errors import InvalidRequestError, NotPermittedError, StorageError
from storage_worker.protocol.statements import (
    BACKUP,
    BATCH,
    BEGIN,
    CHECK,
    COMMIT,
    EXECUTE,
    HEALTH,
    HEARTBEAT,
    OUTCOME,
    QUERY,
    ROLLBACK,
    SAVEPOINT,
    SCRIPT,
    STATUS,
    STOP,
)
from storage_worker.startup import grant_for
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.hostile import WRITE, Bystander, ask_with, error_in, refusal
from tests.worker.raw import SECRET, RawClient

READS = {CHECK.name: [], QUERY.name: ["select 1", []], STATUS.name: [], HEALTH.name: [], HEARTBEAT.name: []}
WRITES = {
    EXECUTE.name: ["insert into roles values(1)", []],
    BATCH.name: [[["insert into roles values(1)", []]]],
    OUTCOME.name: ["key", True],
    BEGIN.name: [0],
    COMMIT.name: [],
    ROLLBACK.name: [],
    SAVEPOINT.name: ["open", "a"],
}
ADMINS = {SCRIPT.name: ["delete from roles"], BACKUP.name: ["/nowhere/backup.db"], STOP.name: []}


@pytest.fixture
def worker(standing_worker: RunningWorker) -> Iterator[RunningWorker]:
    bystander = Bystander(standing_worker)
    bystander.client.execute("create table if not exists roles(a)")
    yield standing_worker
    assert bystander.client.query("select count(*) from roles").scalar() == 0
    bystander.check()
    bystander.client.close()


def greeted(worker: RunningWorker, role: Role, grant: bytes) -> RawClient:
    client = RawClient(worker.address, greet=False)
    client.send(Hello(PROTOCOL_VERSION, "x", 1, role, 0, grant))
    welcome = client.receive()
    assert isinstance(welcome, Welcome)
    client.welcome = welcome
    return client


def role_of(client: RawClient) -> Role:
    assert client.welcome is not None
    return client.welcome.role


@pytest.mark.parametrize("role", ["read", "write", "admin"])
def test_a_grant_gives_the_role_it_was_made_for(worker: RunningWorker, role: Role) -> None:
    with greeted(worker, role, grant_for(SECRET, role)) as client:
        assert role_of(client) == role
        assert [each.role for each in client.status().clients if each.name == "x"] == [role]


NO_GRANTS = {
    "none": b"",
    "another role's": grant_for(SECRET, "write"),
    "another secret's": grant_for(b"t" * 32, "admin"),
    "cut": grant_for(SECRET, "admin")[:-1],
    "with more behind": grant_for(SECRET, "admin") + b"\0",
    "the secret itself": SECRET,
    "huge": b"x" * 100_000,
}


@pytest.mark.parametrize("grant", NO_GRANTS.values(), ids=NO_GRANTS)
def test_without_its_grant_nobody_is_admin(worker: RunningWorker, grant: bytes) -> None:
    with greeted(worker, "admin", grant) as client:
        assert role_of(client) == "write"
        for name, arguments in ADMINS.items():
            assert isinstance(refusal(client, arguments, name), NotPermittedError)


@pytest.mark.parametrize("grant", [b"", grant_for(SECRET, "admin")])
@pytest.mark.parametrize("role", ["read", "write"])
def test_a_lower_role_is_what_was_asked_for(worker: RunningWorker, role: Role, grant: bytes) -> None:
    with greeted(worker, role, grant) as client:
        assert role_of(client) == role


def test_a_reader_writes_nothing(worker: RunningWorker) -> None:
    with RawClient(worker.address, role="read") as client:
        for name, arguments in (WRITES | ADMINS).items():
            error = refusal(client, arguments, name)
            assert isinstance(error, NotPermittedError)
            assert error.outcome == "not_committed"
            assert name in str(error)
            assert "read" in str(error)


@pytest.mark.parametrize("role", ["read", "write", "admin"])
def test_everybody_reads(worker: RunningWorker, role: Role) -> None:
    with RawClient(worker.address, role=role) as client:
        for name, arguments in READS.items():
            assert isinstance(client.answer(ask_with(client, arguments, name)), Reply)


def test_a_reader_writes_nothing_by_a_query(worker: RunningWorker) -> None:
    with RawClient(worker.address, role="read") as client:
        for sql in ("insert into roles values(1)", "pragma user_version=7", "create table reader(a)"):
            assert isinstance(refusal(client, [sql, []]), InvalidRequestError)
        # A handler of kind read sees no writable connection, whatever the role that asks.
    with RawClient(worker.address, role="admin") as client:
        assert isinstance(refusal(client, ["insert into roles values(1)", []]), InvalidRequestError)


def test_a_reader_has_no_part_in_a_transaction(worker: RunningWorker) -> None:
    with RawClient(worker.address) as owner, RawClient(worker.address, role="read") as reader:
        number = owner.call(BEGIN, [0])
        owner.execute("insert into roles values(1)", transaction=number)
        error = refusal(reader, ["select count(*) from roles", []], transaction=number)
        assert isinstance(error, StorageError)
        assert error.code == "storage_transaction_expired"
        assert reader.query("select count(*) from roles").scalar() == 0
        owner.call(ROLLBACK, [], transaction=number)


def test_nobody_takes_part_in_anothers_transaction(worker: RunningWorker) -> None:
    with RawClient(worker.address) as owner, RawClient(worker.address) as other:
        number = owner.call(BEGIN, [0])
        for name, arguments in (
            (WRITE, ["insert into roles values(1)", []]),
            (COMMIT.name, []),
            (ROLLBACK.name, []),
        ):
            error = error_in(other.answer(ask_with(other, arguments, name, transaction=number)))
            assert error.code == "storage_transaction_expired"
        owner.call(ROLLBACK, [], transaction=number)


def test_without_the_sql_store_there_is_no_sql(start_worker: StartWorker) -> None:
    worker = start_worker(sql=False)
    client = worker.connect(role="admin")
    for name in (EXECUTE.name, QUERY.name, BATCH.name, SCRIPT.name, BEGIN.name, COMMIT.name):
        error = error_in(client.answer(ask_with(client, (WRITES | ADMINS | READS)[name], name)))
        assert isinstance(error, InvalidRequestError)
    client.call(HEARTBEAT, [])

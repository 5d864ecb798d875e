"""Every method: it asks the worker for the same as the synchronous one, refuses the same, and gives the same."""

import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from storage_worker.client import AddressDialer, Client
from storage_worker.client.aio import AsyncClient
from storage_worker.protocol.envelope import Request
from storage_worker.protocol.errors import (
    DeadlineExceededError,
    DeclaredError,
    InvalidRequestError,
    OperationFailedError,
    ProtocolError,
    RequestTooLargeError,
    ResultTooLargeError,
    StorageError,
)
from storage_worker.protocol.operation import Operation
from storage_worker.protocol.statements import Finding, Health, KnownOutcome, Rows
from tests.client.fake import FakeWorker, Peer, echo
from tests.client.test_client import REFUSED
from tests.client_async.conftest import Run
from tests.client_async.peers import away, client_of
from tests.protocol.test_status import a_status


class Wide(msgspec.Struct, array_like=True):
    values: Any


ANYTHING = Operation[[Any], Any]("tests.anything", "write", Wide, Any)

CALLS: dict[str, Callable[[Any], Any]] = {
    "execute": lambda c: c.execute("insert", (1, None, "x", b"y", 2.5)),
    "execute with names": lambda c: c.execute("insert", {"a": 1, "b": "x"}),
    "execute with terms": lambda c: c.execute(
        "insert", (1,), timeout=60, request_key="k", max_result_bytes=777, retries=0
    ),
    "query": lambda c: c.query("select ?", (1,), max_result_bytes=99, retries=0),
    "batch": lambda c: c.batch([("insert", (1,)), ("insert", (2,))], request_key="b"),
    "script": lambda c: c.script("a; b", request_key="s"),
    "call": lambda c: c.call(ANYTHING({"a": [1, 2]}), request_key="c"),
    "outcome": lambda c: c.outcome("k"),
    "outcome with a fence": lambda c: c.outcome("k", fence=True),
    "status": lambda c: c.status(retries=0),
    "health": lambda c: c.health(),
    "backup": lambda c: c.backup("copy.db"),
    "check": lambda c: c.check(),
    "stop": lambda c: c.stop(),
}

RESULTS: dict[str, object] = {
    "sql.execute": Rows(("a",), [(1,)], 1, 7),
    "sql.query": Rows(("a",), [(1,)]),
    "sql.batch": [Rows(), Rows()],
    "sql.script": Rows(),
    "tests.anything": {"b": 1},
    "worker.outcome": KnownOutcome("committed", "sql.execute", b"\xc0"),
    "worker.status": a_status(),
    "worker.health": Health("healthy", []),
    "worker.backup": 4096,
    "worker.check": [Finding("bad")],
    "worker.stop": None,
}


class Asked:
    """Notes what it was asked for, without ids and times."""

    def __init__(self) -> None:
        self.requests: list[tuple[Any, ...]] = []

    def __call__(self, _peer: Peer, request: Request) -> object:
        self.requests.append(
            (
                request.operation,
                request.result_bytes,
                request.key,
                request.transaction,
                request.flags,
                bytes(request.arguments),
            )
        )
        return RESULTS[request.operation]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_asks_for_the_same_and_gives_the_same(
    run: Run[Any], worker: FakeWorker, call: Callable[[Any], Any]
) -> None:
    asked = Asked()
    worker.answer = asked
    expected = call(worker.client())

    async def main() -> object:
        async with client_of(worker) as client:
            return await call(client)

    found = run(main())
    assert type(found) is type(expected)
    assert found == expected
    first, second = asked.requests
    assert first == second


def test_it_refuses_the_same_before_a_byte_is_sent(run: Run[None], worker: FakeWorker) -> None:
    plain = worker.client()

    async def main() -> None:
        async with client_of(worker) as client:
            await client.connect()
            asked = worker.answer = Asked()
            refusals: dict[str, Callable[[Any], Any]] = {**REFUSED}
            for name, refused in refusals.items():
                with pytest.raises(StorageError) as expected:
                    refused(plain)
                with pytest.raises(type(expected.value)) as caught:
                    await as_awaitable(refused(client))
                assert caught.value.message == expected.value.message, name
            assert asked.requests == []

    run(main())


async def as_awaitable(found: Any) -> Any:
    return await found if isinstance(found, Awaitable) else found


def test_a_timeout_of_nothing_sends_nothing(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        async with client_of(worker) as client:
            for timeout in (0, -1):
                with pytest.raises(DeadlineExceededError) as caught:
                    await client.execute("insert", timeout=timeout)
                assert caught.value.outcome == "not_committed"
        assert worker.peers.empty()

    run(main())


def test_limits_and_the_welcome_are_the_workers(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        async with client_of(worker) as client:
            welcome = await client.connect(timeout=30)
            assert welcome.worker == "fake"
            assert client.limits == worker.limits
            peer = await away(worker.next_peer)
            assert peer.hello.role == "write"

    run(main())


class OwnError(DeclaredError):
    code = "tests_async_own"


@pytest.mark.parametrize("error", [OwnError("own"), OperationFailedError("no"), ResultTooLargeError("big")])
def test_the_workers_errors_are_raised(run: Run[None], worker: FakeWorker, error: StorageError) -> None:
    async def main() -> None:
        async with client_of(worker) as client:
            worker.answer = lambda _peer, _request: error
            with pytest.raises(type(error)) as caught:
                await client.call(ANYTHING(1))
            assert caught.value.message == error.message
            worker.answer = echo
            assert (await client.query("select ?", (1,))).scalar() == 1

    run(main())


@pytest.mark.parametrize("call", [CALLS["query"], CALLS["status"], CALLS["check"]])
def test_a_result_that_does_not_decode(
    run: Run[None], worker: FakeWorker, call: Callable[[AsyncClient], Awaitable[object]]
) -> None:
    async def main() -> None:
        async with client_of(worker) as client:
            worker.answer = lambda _peer, _request: "nonsense"
            with pytest.raises(ProtocolError):
                await call(client)
            worker.answer = echo
            assert (await client.query("select ?", (1,))).scalar() == 1

    run(main())


def test_requests_have_their_limit(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        async with client_of(worker) as client:
            most = client.limits.chunked_bytes_max
            with pytest.raises(RequestTooLargeError) as caught:
                await client.execute("insert", (b"x" * most,))
            assert caught.value.details["chunked_bytes_max"] == most
            assert (await client.query("select ?", (1,))).scalar() == 1

    run(main())


def test_a_closed_client_says_so(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        async with client_of(worker) as client:
            await client.connect()
            peer = await away(worker.next_peer)
        await client.close()
        with pytest.raises(InvalidRequestError, match="closed"):
            await client.query("select 1")
        with pytest.raises(InvalidRequestError, match="closed"):
            async with client.transaction():
                pass
        await away(peer.join)
        assert peer.farewell == "closed"
        assert worker.peers.empty()

    run(main())


def test_a_client_does_not_travel(run: Run[None], worker: FakeWorker) -> None:
    with pytest.raises(TypeError, match="Pipe"):
        pickle.dumps(client_of(worker))


def test_a_client_may_be_made_outside_of_a_loop(run: Run[Any], worker: FakeWorker) -> None:
    client = client_of(worker)
    assert run(client.query("select ?", (1,))).scalar() == 1
    assert run(client.query("select ?", (2,))).scalar() == 2
    run(client.close())


def test_both_kinds_of_client_side_by_side(run: Run[None], worker: FakeWorker) -> None:
    async def main() -> None:
        plain = Client(AddressDialer(worker.address))
        async with client_of(worker) as client:
            found = await client.query("select ?", (1,)), await away(plain.query, "select ?", (1,))
            assert found[0] == found[1]
        plain.close()

    run(main())


def test_it_is_no_part_of_a_hosts_first_import() -> None:
    import subprocess
    import sys

    program = "import sys, storage_worker as sw; assert 'asyncio' not in sys.modules; sw.AsyncClient, sw.connect_async"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)


def test_what_is_not_there_is_no_attribute() -> None:
    import storage_worker

    with pytest.raises(AttributeError, match="AsyncNonsense"):
        storage_worker.AsyncNonsense  # noqa: B018

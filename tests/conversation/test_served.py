"""The store behind a real worker: many processes at once, deaths, and what clients see of it."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from multiprocess.context import ForkContext

import storage_worker as sw
from storage_worker import conversation
from storage_worker.conversation import payload_client
from storage_worker.conversation.records import Event, Page
from tests.conversation.mortal_store import STORES, admit_and_die, ingest_and_die

ROOM = "room"
PATIENCE_S = 60.0
TOGETHER = 32
DIRECTORIES = 20
"""How often the race for a new session is run; each time in a new directory."""


@pytest.fixture
def worker(database: Path) -> Iterator[sw.StorageWorker]:
    with sw.StorageWorker(database, stores=STORES) as worker:
        yield worker


@pytest.fixture
def client(worker: sw.StorageWorker) -> Iterator[sw.Client]:
    with worker.connect() as client:
        client.call(conversation.create_room(ROOM))
        yield client


def events_of(client: sw.Client, session: str, page_rows: int = 500) -> list[Event]:
    found: list[Event] = []
    page: Page[Event] = Page([], 0, True)
    while page.more:
        page = client.call(conversation.events(session, page.cursor, page_rows))
        found += page.items
    return found


def append_together(link: Any, barrier: Any, number: int) -> None:
    """For each address that comes: connect, and append at the same instant as all others."""
    while (address := link.recv()) is not None:
        with sw.connect(address) as client:
            client.connect()
            barrier.wait(PATIENCE_S)
            link.send(client.call(conversation.append("new session", "note", {"number": number})).created)


@contextmanager
def writers_together() -> Iterator[list[Any]]:
    """Pipes to `TOGETHER` processes that append together; they are started once for all directories."""
    context = ForkContext()
    barrier = context.Barrier(TOGETHER)
    links: list[Any] = []
    running: list[Any] = []
    try:
        for number in range(TOGETHER):
            ours, theirs = context.Pipe()
            links.append(ours)
            running.append(context.Process(target=append_together, args=(theirs, barrier, number)))
            running[-1].start()
            theirs.close()
        yield links
        for link in links:
            link.send(None)
        for process in running:
            process.join(PATIENCE_S)
        assert [process.exitcode for process in running] == [0] * TOGETHER
    finally:
        for process in running:
            process.kill()
            process.join()
        for link in links:
            link.close()


def test_a_new_session_is_made_once_by_many_at_once(tmp_path: Path) -> None:
    with writers_together() as links:
        for number in range(DIRECTORIES):
            folder = tmp_path / str(number)
            folder.mkdir()
            with sw.StorageWorker(folder / "app.db", stores=["storage_worker.conversation:store"]) as worker:
                for link in links:
                    link.send(worker.address)
                for link in links:
                    assert link.poll(PATIENCE_S)
                    assert link.recv()
                with worker.connect() as client:
                    assert_made_once(client)


def assert_made_once(client: sw.Client) -> None:
    events = events_of(client, "new session")
    assert [event.sequence for event in events] == list(range(1, TOGETHER + 1))
    assert sorted(event.attributes["number"] for event in events) == list(range(TOGETHER))
    assert len({event.room for event in events}) == 1
    rows = client.query("select count(*) from conversation_sessions where id = 'new session'")
    assert rows.scalar() == 1
    assert len(client.call(conversation.rooms()).items) == 1


class TestTransactionsInFlight:
    def test_the_same_transaction_twice_in_flight(self, client: sw.Client) -> None:
        with client.pipeline() as pipeline:
            futures = [
                pipeline.call(conversation.admit("s", "x", client_transaction_id="t")) for _ in range(20)
            ]
            admitted = [future.result() for future in futures]
        assert [each.created for each in admitted] == [True] + [False] * 19
        assert len({each.message_id for each in admitted}) == 1
        assert len(events_of(client, "s")) == 1

    def test_other_content_in_flight(self, worker: sw.StorageWorker, client: sw.Client) -> None:
        outcomes: list[str] = []
        with worker.connect() as other, client.pipeline() as one, other.pipeline() as two:
            futures = [
                pipeline.call(conversation.admit("s", text, client_transaction_id="t"))
                for pipeline, text in ((one, "x"), (two, "y"), (one, "x"), (two, "y"))
            ]
            for future in futures:
                try:
                    outcomes.append("created" if future.result().created else "repeat")
                except conversation.EventConflictError as error:
                    outcomes.append(f"conflict, {error.outcome}")
        assert sorted(outcomes) == ["conflict, not_committed"] * 2 + ["created", "repeat"]
        assert len(events_of(client, "s")) == 1


class TestDeaths:
    def test_a_replay_after_a_death_between_commit_and_answer(
        self, worker: sw.StorageWorker, client: sw.Client
    ) -> None:
        with pytest.raises(sw.WorkerUnavailableError) as caught:
            client.call(admit_and_die("s", "x", "t"), retries=0)
        assert caught.value.outcome == "unknown"
        again = client.call(conversation.admit("s", "x", client_transaction_id="t"), timeout=PATIENCE_S)
        assert (again.created, again.sequence, again.message_number) == (False, 1, 1)
        with pytest.raises(conversation.EventConflictError):
            client.call(conversation.admit("s", "y", client_transaction_id="t"))
        event = {"type": "assistant_message", "event_id": "e", "text": "x"}
        with pytest.raises(sw.WorkerUnavailableError):
            client.call(ingest_and_die("s", event, ROOM), retries=0)
        done = client.call(conversation.ingest_output("s", event, room=ROOM), timeout=PATIENCE_S)
        assert done.duplicate
        assert [each.type for each in events_of(client, "s")] == ["user_message", "assistant_message"]
        assert worker.restarts == 2

    def test_a_request_key_answers_with_the_first_result(self, client: sw.Client) -> None:
        client.call(conversation.append("s", "before"))
        call = admit_and_die("s", "x", "t")
        assert client.call(call, request_key="k", timeout=PATIENCE_S) is None
        assert len(events_of(client, "s")) == 2

    def test_killed_again_and_again_while_many_ingest(
        self, worker: sw.StorageWorker, client: sw.Client
    ) -> None:
        context = ForkContext()
        writers, each = 4, 60
        running = [
            context.Process(target=ingest_until_done, args=(worker.address, number, each))
            for number in range(writers)
        ]
        for process in running:
            process.start()
        for wanted in (20, 60, 120):
            while len(client.call(conversation.events("shared"), timeout=PATIENCE_S).items) < wanted:
                assert any(process.is_alive() for process in running)
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
        for process in running:
            process.join(PATIENCE_S)
        assert [process.exitcode for process in running] == [0] * writers
        events = events_of(client, "shared")
        assert [event.sequence for event in events] == list(range(1, writers * each + 1))
        assert {event.event_id for event in events} == {
            f"{number}-{place}" for number in range(writers) for place in range(each)
        }
        numbers = client.query("select number from conversation_messages order by number").rows
        assert [row[0] for row in numbers] == list(range(1, writers * each + 1))


def ingest_until_done(address: str, own: int, count: int) -> None:
    with sw.connect(address) as client:
        for place in range(count):
            event = {"type": "assistant_message", "event_id": f"{own}-{place}", "text": f"text {place}"}
            while True:
                try:
                    client.call(conversation.ingest_output("shared", event, room=ROOM), timeout=PATIENCE_S)
                except sw.WorkerUnavailableError:
                    continue
                break


def test_a_collision_is_kept_although_the_call_fails(client: sw.Client) -> None:
    def ingest(text: str, key: str | None = None) -> Any:
        event = {"type": "assistant_message", "event_id": "e", "text": text}
        return client.call(conversation.ingest_output("s", event, room=ROOM), request_key=key)

    ingest("one")
    details = []
    for _ in range(2):
        with pytest.raises(conversation.OutputIdentityCollisionError) as caught:
            ingest("two", "k")
        assert (caught.value.outcome, caught.value.retryable) == ("committed", False)
        details.append(caught.value.details)
    assert details[0] == details[1]
    assert [event.type for event in events_of(client, "s")] == [
        "assistant_message",
        "output_identity_collision",
    ]
    assert [message.text for message in client.call(conversation.messages("s")).items] == ["one"]


def test_a_long_session_is_paged_while_another_appends(worker: sw.StorageWorker, client: sw.Client) -> None:
    count = 1_500
    with client.pipeline() as pipeline:
        for number in range(count):
            pipeline.call(conversation.append("long", "note", {"number": number}))
    found: list[Event] = []
    page: Page[Event] = Page([], 0, True)
    appended = itertools.count(count)
    with worker.connect() as other:
        while page.more and len(found) < 2 * count:
            page = client.call(conversation.events("long", page.cursor, 100))
            assert 0 < len(page.items) <= 100
            found += page.items
            number = next(appended)
            assert other.call(conversation.append("long", "note", {"number": number})).created
    assert [event.attributes["number"] for event in found] == list(range(len(found)))
    assert len(found) >= count


def test_roles(worker: sw.StorageWorker, client: sw.Client, database: Path) -> None:
    with worker.connect(role="read") as reader:
        assert reader.call(conversation.rooms()).items
        with pytest.raises(sw.NotPermittedError):
            reader.call(conversation.admit("s", "x"))
        with pytest.raises(sw.NotPermittedError):
            reader.call(conversation.append("s", "note"))
        for body in (b"small", b"large" * 200_000):
            with pytest.raises(sw.NotPermittedError, match="role write"):
                payload_client.put(reader, body)
    assert not list(Path(f"{database}-sw").glob("payloads/*/*"))


def test_a_host_that_imports_the_store_loads_no_driver() -> None:
    program = (
        "import sys, storage_worker.conversation as c; assert len(c.store.operations) > 15;"
        " print('apsw' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_the_store_is_found_by_both_names() -> None:
    assert conversation.store.import_string == "storage_worker.conversation.schema:store"

"""A process is killed at each step of a put, a commit and a sweep: no row is without its file, and all is well again."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import storage_worker as sw
from storage_worker.conversation import payload_client as client_side
from storage_worker.conversation import payload_placing
from storage_worker.conversation.payload_files import GZIP_BYTES_MAX
from storage_worker.conversation.records import PayloadRef
from tests.conversation.payload_places import Payloads, age, in_child, serving, status_of
from tests.conversation.payload_store import PLAN, arm, drop, hold, watch_steps

SMALL, LARGE = 5_000, GZIP_BYTES_MAX + 5_000

IN_CLIENT = ("made", "written")
IN_PLACING = ("synced", "renamed", "placed")
IN_COMMIT = ("counted", "committed")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Payloads]:
    """A worker that looks at the plan, and is restarted without doing so when it was killed."""
    with serving(tmp_path / "app.db") as store:
        store.put(b"")
        store.client.call(arm())
        yield store
        assert not plan_of(store).exists(), "the step was never reached"


def plan_of(store: Payloads) -> Path:
    return Path(store.folder.path) / PLAN


def plan(store: Payloads, step: str) -> None:
    plan_of(store).write_text(step)


def body_of(size: int, step: str) -> bytes:
    return step.encode() * (size // len(step))


def is_well(store: Payloads) -> None:
    """No row is without its file, and what was left behind goes at last."""
    assert store.findings() == []
    for path in Path(store.folder.path).rglob("*"):
        if path.is_file():
            age(path)
    store.sweep()
    assert store.temporaries() == []
    assert store.findings() == []


def survives(store: Payloads, ref: PayloadRef, body: bytes) -> None:
    """A reference is good: it can be held, also after a sweep, and read."""
    store.client.call(hold(ref))
    is_well(store)
    assert client_side.read(store.client, ref) == body


def test_a_client_is_killed_while_it_puts(store: Payloads) -> None:
    for step in IN_CLIENT:
        for size in (SMALL, LARGE):
            body = body_of(size, step)

            def put(body: bytes = body) -> None:
                watch_steps(store.folder.path)
                with sw.connect(store.worker.address) as client:
                    client_side.put(client, body, retention_class="test")

            plan(store, step)
            assert status_of(in_child(put)) == -signal.SIGKILL
            assert len(store.temporaries()) == 1
            is_well(store)
            survives(store, store.put(body), body)


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("step", IN_PLACING)
def test_the_worker_is_killed_while_it_places(store: Payloads, step: str, size: int) -> None:
    """The client's call is repeated with the next worker, and gives the reference."""
    body = body_of(size, step)
    restarts = store.worker.restarts
    plan(store, step)
    ref = store.put(body)
    assert store.worker.restarts == restarts + 1
    survives(store, ref, body)


@pytest.mark.parametrize("step", IN_COMMIT)
def test_the_worker_is_killed_while_a_reference_is_committed(store: Payloads, step: str) -> None:
    body = body_of(SMALL, step)
    ref = store.put(body)
    plan(store, step)
    assert store.client.call(hold(ref), request_key=f"hold {step}") == 1
    assert store.row(ref) == ("committed", 1)
    is_well(store)
    assert client_side.read(store.client, ref) == body


@pytest.mark.parametrize("is_held", [False, True])
def test_the_worker_is_killed_while_it_removes(store: Payloads, is_held: bool) -> None:
    """The file is out of its place then, and no row names it; whoever comes next writes it anew."""
    body = body_of(SMALL, f"aside {is_held}")
    ref = store.put(body)
    if is_held:
        store.client.call(hold(ref))
        store.client.call(drop(ref))
        store.age(ref)
        store.sweep()
        assert store.row(ref) is None
    age(store.file(ref))
    plan(store, "aside")
    with pytest.raises(sw.WorkerUnavailableError):
        store.sweep()
    assert not store.file(ref).exists()
    survives(store, store.put(body), body)


def test_steps_are_inert_by_default() -> None:
    assert payload_placing.reached is payload_placing._pass

"""Fixtures for the conversation store."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import storage_worker as sw
from storage_worker.conversation.records import PayloadRef
from storage_worker.transaction import Transaction
from tests.client_async.conftest import new_loop, run
from tests.conversation.payload_places import Payloads, serving

from .desk import Desk, desk_at

__all__ = ["new_loop", "run"]
"""Fixtures of the asynchronous client's tests, used here too."""


@pytest.fixture
def desk(database: Path) -> Iterator[Desk]:
    """The handlers on a new database."""
    with desk_at(database) as desk:
        yield desk


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> list[PayloadRef]:
    """References that were committed; there are no files behind them."""
    found: list[PayloadRef] = []

    def commit(_: Transaction, ref: PayloadRef) -> None:
        found.append(ref)

    monkeypatch.setattr(importlib.import_module("storage_worker.conversation.payloads"), "commit", commit)
    return found


@pytest.fixture(scope="module")
def store_of_module(tmp_path_factory: pytest.TempPathFactory, runtime_directory: Path) -> Iterator[Payloads]:
    """A worker with the payload store for all tests of a module."""
    with serving(tmp_path_factory.mktemp("payloads") / "app.db") as store:
        yield store


@pytest.fixture
def store(store_of_module: Payloads) -> Payloads:
    """The worker of the module; the payloads of each test have a body of its own."""
    return store_of_module


@pytest.fixture
def client(worker: sw.StorageWorker) -> Iterator[sw.Client]:
    """A client of the module's own worker."""
    with worker.connect() as client:
        yield client

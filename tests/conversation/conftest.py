"""Fixtures for the conversation store."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_worker.conversation.records import PayloadRef
from storage_worker.transaction import Transaction
from tests.client_async.conftest import new_loop, run

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

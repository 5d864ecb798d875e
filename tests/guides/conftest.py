"""Fixtures of the guides' tests: each guide is run as its reader runs it."""

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from storage_worker.launch import find
from storage_worker.ownership import is_owned, read_record
from storage_worker.protocol.errors import WorkerUnavailableError
from tests.client.fake import until

GUIDES = Path(__file__).parents[2] / "scripts" / "guides"

Rows = list[tuple[Any, ...]]


@pytest.fixture
def stored(database: Path) -> Callable[[str], Rows]:
    """What a statement finds in the database after its worker has ended; a shared one is told to."""

    def read(sql: str) -> Rows:
        record = read_record(str(database))
        if record is not None:
            # It may end by itself meanwhile.
            with suppress(WorkerUnavailableError), find(database) as client:
                client.stop()
            until(lambda: not is_owned(str(database)))
        with closing(sqlite3.connect(database)) as connection:
            return connection.execute(sql).fetchall()

    return read

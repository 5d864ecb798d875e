"""A worker whose files were replaced is not started again: the next one would serve other files."""

from pathlib import Path

import pytest

from storage_worker import StorageReplacedError, StorageWorker


def test_a_renamed_database_is_told_to_its_clients_and_not_made_anew(database: Path) -> None:
    with StorageWorker(str(database)) as worker:
        client = worker.connect()
        client.execute("create table t(a)")
        database.rename(database.with_name("elsewhere.db"))
        with pytest.raises(StorageReplacedError) as caught:
            client.execute("insert into t values(1)")
        assert caught.value.outcome == "unknown"
        with pytest.raises(StorageReplacedError):
            client.execute("insert into t values(2)")
        assert not database.exists()

"""A store whose module puts a file system that fails on demand below SQLite. Only workers import it."""

from pathlib import Path
from typing import Any

import apsw

from storage_worker.store import Store
from storage_worker.transaction import Transaction
from tests.worker.faults import DATABASE, WAL, Faults

BASE = "unix"

faults = Store("faults")


@faults.write(solo=True)
def alone(tx: Transaction, text: str) -> int:
    return int(tx.execute("insert into t(a) values(?) returning id", (text,)).scalar())


@faults.write
def add_and_read(tx: Transaction, text: str, swallow: bool = False) -> int:
    """Reads a table that nothing has read since the database was opened."""
    tx.execute("insert into t(a) values(?)", (text,))
    try:
        return int(tx.scalar("select sum(length(b)) from large"))
    except Exception:
        if not swallow:
            raise
        return 0


class FaultyFile(apsw.VFSFile):
    """One open file; what does not fail is done by the platform's own file system."""

    def __init__(self, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__(BASE, name, flags)
        path = str(name.filename()) if isinstance(name, apsw.URIFilename) else str(name)
        self._suffix = WAL if path.endswith(WAL) else DATABASE
        self._faults = Faults(Path(path.removesuffix(WAL)))

    def _meet(self, method: str) -> None:
        if code := self._faults.meet(method, self._suffix):
            raise apsw.exception_for(code)

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802 - the driver's name
        self._meet("xRead")
        return super().xRead(amount, offset)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802 - the driver's name
        self._meet("xWrite")
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:  # noqa: N802 - the driver's name
        self._meet("xSync")
        super().xSync(flags)


class FaultyFiles(apsw.VFS):
    """The file system; SQLite's default one from here on."""

    def __init__(self) -> None:
        super().__init__("faulty", BASE, makedefault=True)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> FaultyFile:  # noqa: N802 - the driver's name
        return FaultyFile(name, flags)


files = FaultyFiles()

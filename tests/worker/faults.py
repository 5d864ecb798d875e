"""Says what fails in the file system below a worker that was started with `FAULTY_STORE`."""

from pathlib import Path
from typing import NamedTuple

FAULTY_STORE = "tests.worker.faulty_store:faults"
PLAN_SUFFIX = ".faults"
FOREVER = 1_000_000

# SQLite's extended codes.
FULL, IOERR_READ, IOERR_WRITE, IOERR_FSYNC, CORRUPT = 13, 266, 778, 1034, 11

WAL, DATABASE = "-wal", ""


class Fault(NamedTuple):
    """The next `times` calls of a method of the files with a suffix fail with a code."""

    method: str
    suffix: str
    code: int
    times: int = FOREVER


class Faults:
    """The plan for one database: a file beside it, which every call of the faulty file system looks at."""

    def __init__(self, database: Path) -> None:
        self._file = Path(f"{database}{PLAN_SUFFIX}")

    def set(self, fault: Fault) -> None:
        new = Path(f"{self._file}.new")
        new.write_text("|".join(str(part) for part in fault))
        new.replace(self._file)

    def get(self) -> Fault | None:
        """What fails next."""
        try:
            method, suffix, code, times = self._file.read_text().split("|")
        except FileNotFoundError:
            return None
        return Fault(method, suffix, int(code), int(times))

    def clear(self) -> None:
        self._file.unlink(missing_ok=True)

    def meet(self, method: str, suffix: str) -> int:
        """The code with which this call is to fail, which counts it; 0 where it is not to fail."""
        fault = self.get()
        if fault is None or (fault.method, fault.suffix) != (method, suffix):
            return 0
        if fault.times > 1:
            self.set(fault._replace(times=fault.times - 1))
        else:
            self.clear()
        return fault.code

"""A host that ends with writes on their way: it ends soon, and what was acknowledged is stored, once each."""

import itertools
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from storage_worker.ownership import is_owned
from storage_worker.spawn import module_path
from tests.client.fake import until

HOST_ENDS_SECONDS_MAX = 5.0
FIRST, LAST = 0, 1_000_000

STATUSES = {
    "SIGINT": -signal.SIGINT,
    "SIGINT to the group": -signal.SIGINT,
    "SIGTERM": -signal.SIGTERM,
    "SIGTERM handled": 0,
    "return": 0,
    "exception": 1,
    "atexit": 0,
}
"""How a host ends, and its exit status then."""

CALLS = ("threads", "pipeline", "tasks")
SIGNALS = tuple(ending for ending in STATUSES if ending.startswith("SIG"))


# A block of a pipeline waits for its answers, and so does a write at the interpreter's exit.
STOPPED = {"threads": tuple(STATUSES)[:-1], "pipeline": SIGNALS, "tasks": tuple(STATUSES)[:-1]}

CASES = [
    *((calls, ending, "answering") for calls in CALLS for ending in STATUSES),
    *((calls, ending, "stopped") for calls in CALLS for ending in STOPPED[calls]),
]


class Host:
    """The program, in a process group of its own."""

    def __init__(self, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.launch.exiting_host", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(module_path())},
            process_group=0,
        )
        self.acknowledged: set[int] = set()
        self.worker = psutil.Process(int(self._line()))

    def end(self, how: str) -> tuple[int, str]:
        """Send it its signal once the writes are on their way; its exit status and what it complained of."""
        while (line := self._line()) != "ending":
            self.acknowledged.add(int(line))
        if how == "SIGINT to the group":
            os.killpg(self._process.pid, signal.SIGINT)
        elif how in SIGNALS:
            self._process.send_signal(signal.Signals[how.split(maxsplit=1)[0]])
        try:
            heard, complaint = self._process.communicate(timeout=HOST_ENDS_SECONDS_MAX)
        finally:
            self._process.kill()
        self.acknowledged |= {int(line) for line in heard.split() if line != "ending"}
        return self._process.returncode, complaint

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._process.communicate()[1]
        return line.strip()


@pytest.mark.parametrize(
    ("ownership", "calls", "ending", "worker"),
    [
        (ownership, *case)
        for ownership, case in zip(itertools.cycle(("owned", "shared")), CASES, strict=False)
    ],
)
def test_a_host_ends_with_writes_on_their_way(
    database: Path, ownership: str, calls: str, ending: str, worker: str
) -> None:
    host = Host(database, ownership, calls, ending, worker)
    try:
        status, complaint = host.end(ending)
    finally:
        host.worker.send_signal(signal.SIGCONT)
    assert status == STATUSES[ending], complaint
    last = complaint.strip().split("\n")[-1]
    assert last.split(".")[-1] == {"SIGINT": "KeyboardInterrupt", "exception": "HostFailedError"}.get(
        ending.split(maxsplit=1)[0], ""
    ), complaint
    assert "never" not in complaint
    assert FIRST in host.acknowledged
    assert len(host.acknowledged) > 1 or worker == "stopped"
    assert (LAST in host.acknowledged) == (ending == "atexit")
    until(lambda: not is_owned(str(database)))
    with closing(sqlite3.connect(database)) as connection:
        stored = dict(connection.execute("select id, count(*) from t group by id"))
    assert host.acknowledged <= set(stored)
    assert set(stored.values()) <= {1}

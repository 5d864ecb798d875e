"""Another program that has the database open: its own process, with Python's own SQLite."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PROGRAM = """
import select, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
connection.execute(sys.argv[2]).fetchall()
for statement in sys.argv[3:]:
    connection.execute(statement).fetchall()
print("holds", flush=True)
seconds = sys.stdin.readline()
if seconds:
    select.select([sys.stdin], [], [], float(seconds))
"""


@contextmanager
def foreign_process(database: Path, *statements: str) -> Iterator[Callable[[float], None]]:
    """Run statements in another process, which keeps its transaction open until the block ends.

    The block gets a function: called with seconds, it has the process end by itself so much later.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(database), *statements],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin, process.stdout:
        assert process.stdout.readline() == b"holds\n"
        order = process.stdin

        def end_after(seconds: float) -> None:
            order.write(f"{seconds}\n".encode())
            order.flush()

        yield end_after
        order.close()
        assert process.wait() == 0

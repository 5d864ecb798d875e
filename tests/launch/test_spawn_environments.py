"""Hosts in unusual surroundings: a real worker starts there, and the user's code runs once only."""

import asyncio
import importlib
import os
import pty
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from storage_worker.ownership import is_owned
from storage_worker.protocol.limits import READ_BYTES
from storage_worker.spawn import module_path
from tests.client.fake import PATIENCE_S, until

DESCRIPTORS = 1_100

MARK = """
with open({marks!r}, "a") as file:
    _ = file.write("ran\\n")

"""
"""A blank line ends a block of an interactive session."""

USE = """
import asyncio
import storage_worker as sw
from storage_worker import launch
launch.DEFAULT_LIMITS = sw.Limits(shared_idle_ms=50)

def use(kind):
    if kind == "shared":
        with sw.connect({path!r}, timeout=60) as client:
            return count(client)
    with sw.StorageWorker({path!r}) as worker, worker.connect() as client:
        if kind == "owned":
            return count(client)
        return asyncio.run(count_async(worker))

def count(client):
    client.execute("create table if not exists t(a)")
    client.execute("insert into t values (1)")
    return client.query("select count(*) from t").scalar()

async def count_async(worker):
    async with await worker.connect_async() as client:
        await client.execute("create table if not exists t(a)")
        await client.execute("insert into t values (1)")
        return (await client.query("select count(*) from t")).scalar()

"""

USE_ALL = """
print(use("owned"), use("async"), use("shared"))
"""

Code = Callable[[str], str]


@pytest.fixture
def code(database: Path, tmp_path: Path) -> Iterator[Code]:
    """Completes a program that is to run once: afterwards no worker is left."""
    marks = tmp_path / "marks"
    yield lambda text: (MARK + USE + text).format(marks=str(marks), path=str(database))
    until(lambda: not is_owned(str(database)))
    assert marks.read_text() == "ran\n"


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(module_path()), **changes}


def run(program: str, *before: str, **changes: str) -> str:
    """What a program prints that must end well and complain of nothing."""
    done = subprocess.run(
        [*before, sys.executable, "-c", program],
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_a_terminal(code: Code) -> None:
    """A person types into the interpreter's own prompt."""
    typed = code("print('counted', use('owned') + use('shared') + 40)\nexit()\n")
    terminal, theirs = pty.openpty()
    shell = subprocess.Popen(
        [sys.executable, "-q"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(TERM="dumb", PYTHON_BASIC_REPL="1"),
        start_new_session=True,
    )
    os.close(theirs)
    heard = b""
    try:
        for line in typed.splitlines(keepends=True):
            os.write(terminal, line.encode())
        with suppress(OSError):  # so a terminal ends on Linux
            while data := os.read(terminal, READ_BYTES):
                heard += data
        assert shell.wait(PATIENCE_S) == 0, heard.decode()
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)
    assert b"counted 43" in heard


def test_a_notebook(code: Code, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel has a main module of its own, and an event loop that runs already."""
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(module_path()))
    starting = f"with sw.StorageWorker({str(database)!r}) as worker:\n    print(await count_async(worker))"
    sources = [code(""), "print(use('owned'))", starting, "print(use('shared'))"]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]  # type: ignore[no-untyped-call]
    notebook = nbformat.v4.new_notebook(cells=cells)  # type: ignore[no-untyped-call]
    asyncio.run(NotebookClient(notebook, timeout=PATIENCE_S, kernel_name="python3").async_execute())
    assert [output.text for cell in notebook.cells for output in cell.outputs] == ["1\n", "2\n", "3\n"]


def in_daemon(program: str, said: Any) -> None:
    names: dict[str, Any] = {}
    exec(program, names)
    said.put([names["use"](kind) for kind in ("owned", "async", "shared")])


@pytest.mark.parametrize("package", ["multiprocess", "multiprocessing"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_daemonic_process(code: Code, package: str, method: str) -> None:
    context = importlib.import_module(package).get_context(method)
    said = context.SimpleQueue()
    child = context.Process(target=in_daemon, args=(code(""), said), daemon=True)
    child.start()
    assert said.get() == [1, 2, 3]
    child.join()
    child.close()
    said.close()


def test_without_shared_memory(code: Code) -> None:
    """In a mount namespace of its own a folder that takes nothing stands in the place of `/dev/shm`."""
    hidden = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o ro none /dev/shm && exec "$@"', "sh")
    if shutil.which("unshare") is None or subprocess.run([*hidden, "true"], check=False).returncode:
        pytest.skip("this system lets nobody change its mounts")
    program = code(
        USE_ALL
        + "import multiprocessing\ntry:\n    multiprocessing.Lock()\nexcept OSError:\n    print('none')"
    )
    assert run(program, *hidden) == "1 2 3\nnone"


def test_descriptors_above_1023(code: Code) -> None:
    """Where `select` can look at none of them."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS + 100:
        pytest.skip("this system lets a process have too few descriptors")
    many = f"""
import os, resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS + 100}, hard))
kept = [os.dup(0) for _ in range({DESCRIPTORS})]
"""
    assert run(code(many + USE_ALL)) == "1 2 3"


def test_closed_standard_descriptors(code: Code, tmp_path: Path) -> None:
    """So a program runs that was made a daemon of the old kind."""
    heard = tmp_path / "heard"
    program = code("import os\nos.closerange(0, 3)\nfound = [use('owned'), use('async'), use('shared')]\n")
    run(program + f"open({str(heard)!r}, 'w').write(str(found))")
    assert heard.read_text() == "[1, 2, 3]"


def directory_of(letter: str, size: int) -> str:
    """A fresh directory whose path has so many bytes, of a letter or of what is no text."""
    path = os.fsencode(tempfile.mkdtemp(prefix="sw-", dir="/tmp")) + b"/"
    encoded = os.fsencode(letter)
    path += encoded * ((size - len(path)) // len(encoded))
    path += b"_" * (size - len(path))
    Path(os.fsdecode(path)).mkdir(0o700)
    return os.fsdecode(path)


LETTER_E, SIGN, NO_TEXT = "\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{CJK UNIFIED IDEOGRAPH-8CC7}", "\udcff"


@pytest.mark.parametrize(
    ("letter", "size"),
    [
        *(("x", size) for size in (80, 107, 108, 200)),
        *((LETTER_E, size) for size in (60, 120)),
        *((SIGN, size) for size in (60, 200)),
        *((NO_TEXT, size) for size in (60, 200)),
    ],
)
def test_directories_of_sockets(code: Code, database: Path, letter: str, size: int) -> None:
    """The path of a socket has little room, and is no text where its directory's is none."""
    directory = directory_of(letter, size)
    try:
        program = code("print(use('owned'), use('shared'))")
        assert run(program, XDG_RUNTIME_DIR=directory, TMPDIR=directory) == "1 2"
        until(lambda: not is_owned(str(database)))
        assert [path for path in Path(directory).rglob("*") if not path.is_dir()] == []
    finally:
        shutil.rmtree(Path(directory).parent)

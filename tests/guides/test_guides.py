"""The guides do what they say: the script, the command-line tool, the asyncio service and the notebook."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from storage_worker.launch import find
from storage_worker.ownership import is_owned
from storage_worker.spawn import module_path
from tests.client.fake import PATIENCE_S
from tests.launch.programs import first_line, start_program

from .conftest import GUIDES, Rows

Stored = Callable[[str], Rows]


def run(guide: str, *arguments: object, status: int = 0) -> str:
    """What a guide prints that is run to its end."""
    program = start_program("", forms=(str(GUIDES / guide), *map(str, arguments)))
    heard, complaint = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == status, complaint
    return heard + complaint


def test_a_script(database: Path, stored: Stored) -> None:
    heard = run("script.py", database).splitlines()
    assert heard[0] == "first and last spoon: 4 103"
    assert "storage_operation_failed" in heard[-1]
    assert not is_owned(str(database))
    run("script.py", database)
    assert stored("select item, count(*) from orders group by item") == [
        ("box", 2),
        ("cup", 2),
        ("spoon", 200),
        ("tea", 1),
    ]


def test_a_command_line_tool(database: Path, stored: Stored) -> None:
    programs = [
        start_program(
            "", forms=(str(GUIDES / "command_line_tool.py"), str(database), "add", f"note {number}")
        )
        for number in range(8)
    ]
    heard = [program.communicate(timeout=PATIENCE_S) for program in programs]
    assert sorted(heard) == [(f"{number}\n", "") for number in range(1, 9)]
    for _ in range(2):
        run("command_line_tool.py", database, "add", "once", "--key", "k")
    lines = run("command_line_tool.py", database, "list").splitlines()
    assert len(lines) == 9
    assert lines[-1] == "9 once"
    assert "does not exist" in run(
        "command_line_tool.py", database.parent / "none" / "app.db", "list", status=1
    )
    assert len(stored("select * from notes")) == 9


class Sender:
    """Someone who sends readings to the asyncio service."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self._lines = self._socket.makefile("rb")

    def send(self, text: str) -> None:
        self._socket.sendall(text.encode())

    def answer(self) -> str:
        return self._lines.readline().decode().rstrip("\n")

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@pytest.mark.parametrize("enough", [signal.SIGTERM, signal.SIGINT])
def test_an_asyncio_service(database: Path, stored: Stored, enough: signal.Signals) -> None:
    service = start_program("", forms=(str(GUIDES / "asyncio_service.py"), str(database), "--port", "0"))
    port = int(first_line(service).split()[-1])
    senders = [Sender(port) for _ in range(20)]
    for place, sender in enumerate(senders):
        sender.send("".join(f"{place}-{each} s{place} {each}\n" for each in range(10)))
    numbers: dict[int, tuple[str, float]] = {}
    for place, sender in enumerate(senders):
        for each in range(10):
            numbers[int(sender.answer())] = (f"s{place}", each)
    assert len(numbers) == 200
    first, second, third, *_ = senders
    first.send("0-0 s0 0\nnonsense\n")
    assert int(first.answer()) in numbers
    assert first.answer() == "error: a line is a name, a sensor and a number"
    second.send("x" * 5_000 + "\n")
    assert second.answer() == "error: the line is too long"
    assert second.answer() == ""
    third.send("the end\n")
    service.send_signal(enough)
    heard = service.communicate(timeout=PATIENCE_S)
    for sender in senders:
        sender.close()
    assert (service.returncode, heard) == (0, ("", ""))
    assert not is_owned(str(database))
    rows = stored("select id, sensor, value from readings")
    assert {row[0]: row[1:] for row in rows} == numbers


def test_a_notebook(database: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A real kernel runs it, cell by cell."""
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(module_path()))
    notebook = nbformat.read(GUIDES / "notebook.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    runner = NotebookClient(
        notebook, timeout=PATIENCE_S, resources={"metadata": {"path": str(tmp_path)}}, kernel_name="python3"
    )
    cells = [(place, cell) for place, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    experiments = tmp_path / "experiments.db"

    async def run_cells() -> None:
        async with runner.async_setup_kernel():
            for place, cell in cells[:-1]:
                await runner.async_execute_cell(cell, place)
            with find(experiments) as client:
                assert client.query("select count(*) from runs").scalar() == 3
            place, cell = cells[-1]
            await runner.async_execute_cell(cell, place)
            assert not is_owned(str(experiments))

    asyncio.run(run_cells())
    results = [output["data"]["text/plain"] for _, cell in cells for output in cell.outputs]
    assert results == ["(0.01, 0.0001)", "[{'runs': 3, 'loss': 0.0001}]"]

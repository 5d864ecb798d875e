"""What the README shows runs as it stands there."""

import re
from pathlib import Path

import pytest

from storage_worker.conversation.vocabulary import EVENT_TYPES
from storage_worker.launch import find
from storage_worker.ownership import is_owned
from tests.client.fake import until
from tests.launch.programs import start_program

README = Path(__file__).parents[2] / "README.md"

pytestmark = pytest.mark.worker


def program(first_line: str) -> str:
    """The README's example whose text holds this."""
    (found,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
        if first_line in block
    )
    return str(found)


def run(code: str, folder: Path) -> str:
    started = start_program(f"import os; os.chdir({str(folder)!r})\n{code}")
    heard, complaint = started.communicate(timeout=60)
    assert (started.returncode, complaint) == (0, "")
    return heard


def test_a_host_with_its_worker(tmp_path: Path) -> None:
    heard = run(program("A host that owns its worker"), tmp_path).splitlines()
    assert heard[0] == "('id', 'item') [(1, 'tea')]"
    assert heard[1].startswith("unix://")


def test_children_with_pipes(tmp_path: Path) -> None:
    code = program("pipe.connect()")
    (tmp_path / "host.py").write_text(code)
    started = start_program("", forms=(str(tmp_path / "host.py"),), cwd=tmp_path)
    heard, complaint = started.communicate(timeout=60)
    assert (started.returncode, complaint, heard) == (0, "", "4\n")


def test_the_event_loop(tmp_path: Path) -> None:
    check = 'client = sw.connect("app.db")\nprint(client.query("select item from orders").scalar())\n'
    assert run(program("sw.connect_async") + check, tmp_path) == "tea\n"
    database = tmp_path / "app.db"
    with find(database) as client:
        client.stop()
    until(lambda: not is_owned(str(database)))


def test_the_conversation_store(tmp_path: Path) -> None:
    assert run(program("client_transaction_id="), tmp_path) == "['Where is my order?', 'On its way.']\n"


def test_the_table_of_an_agents_events() -> None:
    told: dict[str, tuple[str, ...]] = {}
    for row in re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \| `(\w+)` \| ([\w ]+) \| (\w*)", README.read_text(), re.MULTILINE
    ):
        told |= dict.fromkeys(re.findall(r"\w+", row[0]), row[1:])
    leaves = {"message": "a message", "observation": "an observation", "nothing": "its event"}
    own_of_imports = {"attachment", "transcript_record", "import_finished"}
    assert told == {
        name: (kind.body, leaves[kind.leaves], kind.session_status or "")
        for name, kind in EVENT_TYPES.items()
        if name not in own_of_imports
    }


def test_payloads(tmp_path: Path) -> None:
    heard = run(program("payload_client.put"), tmp_path)
    assert sum(int(line) for line in heard.splitlines()) == 1_000_000


def test_a_store_with_background_work(tmp_path: Path) -> None:
    declared = program("notes = sw.Store").split("note_id =")[0]
    (tmp_path / "notes" / "migrations").mkdir(parents=True)
    (tmp_path / "notes" / "migrations" / "0001_notes.sql").write_text(
        "create table notes(id integer primary key, text text);\n"
    )
    (tmp_path / "mystore.py").write_text(declared + program("@notes.background"))
    heard = run(
        "import sys; sys.path.insert(0, os.getcwd())\nimport storage_worker as sw\nfrom mystore import add\n"
        'with sw.StorageWorker("app.db", stores=["mystore:notes"]) as worker, worker.connect() as client:\n'
        '    print(client.call(add("hello"), timeout=20.0, request_key="note-1"))\n'
        "    print([task.name for task in client.status().background])\n",
        tmp_path,
    ).splitlines()
    assert heard[0] == "1"
    assert "notes.tidy" in heard[1]

import dataclasses
import functools
import json
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import pytest

from storage_worker.protocol.errors import InvalidRequestError, OperationFailedError, SchemaError
from storage_worker.registry import load
from storage_worker.shipping import ship, unship
from storage_worker.store import Store
from storage_worker.transaction import Transaction

from . import shipped_program
from .doubles import noting

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("shipped_program.py")
WORKER = Path(__file__).with_name("shipped_worker.py")

SMALL = """
from storage_worker.shipping import ship
from storage_worker.store import Store
from storage_worker.transaction import Transaction
import msgspec, sys

class Note(msgspec.Struct):
    text: str

notes = Store("notes")

@notes.read
def echo(tx: Transaction, note: Note) -> Note:
    return Note(note.text + "!")

sys.stdout.buffer.write(ship([notes])[1])
"""


def python(*arguments: str, given: bytes = b"") -> bytes:
    """What a fresh Python writes; the worker's way of starting keeps its folder off the path."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-P", *arguments], input=given, env=environment, capture_output=True, check=False
    )
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout


def in_worker(shipment: bytes, *calls: tuple[str, list[Any]]) -> Any:
    """What another process makes of a shipment, and of calls of its operations."""
    return json.loads(python(str(WORKER), json.dumps(calls), given=shipment))


@functools.cache
def shipment_of(way: str) -> bytes:
    if way == "module":
        return python("-m", "tests.store.shipped_program")
    return python(str(PROGRAM), *(["--spawned"] if way == "spawned" else []))


class TestAProgramsStores:
    @pytest.fixture(params=["script", "module", "spawned"])
    def shipment(self, request: pytest.FixtureRequest) -> bytes:
        """The store of a program that was run as a script, as a module, or by a child that it spawned."""
        return shipment_of(request.param)

    def test_operations_with_all_they_use_run_in_a_worker(self, shipment: bytes) -> None:
        names = "notes.add,notes.add_both,notes.grow,notes.keep,notes.look,notes.missing,notes.page"
        node = {"myId": 3, "name": "x", "kids": [{"myId": 4, "name": "y"}], "color": "blue"}
        found = in_worker(
            shipment,
            ("notes.add", ["hi", ["a", "b"], "red"]),
            ("notes.add_both", ["hi"]),
            ("notes.look", [node]),
            ("notes.grow", [node, 1]),
            ("notes.keep", [{"type": "dog", "tricks": 2}]),
            ("notes.page", [2]),
            ("notes.missing", []),
        )
        kid = {"myId": 4, "name": "y", "kids": [], "color": "red"}
        assert found["outcomes"] == [
            ["done", "hi a/b Red 4", 1],
            ["done", ["hi  Blue 4", "HI  Blue 4", names], 2],
            [
                "done",
                {
                    "names": ["x", "y"],
                    "kids": 1,
                    "double": 6,
                    "kind": "base",
                    "is": [True, True],
                    "equal": True,
                    "qualname": "Node",
                    "json": "[7]",
                },
                0,
            ],
            ["done", {"myId": 4, "name": "d1", "kids": [node | {"kids": [kid]}], "color": "red"}, 0],
            ["done", "Dog x", 0],
            ["done", {"items": [0, 1], "more": True}, 0],
            ["note_missing", "no such note"],
        ]

    def test_arguments_are_checked_as_the_program_declares_them(self, shipment: bytes) -> None:
        calls: list[tuple[str, list[Any]]] = [
            ("notes.add", ["hi", [], "green"]),
            ("notes.add", ["hi", [], "red", 1]),
            ("notes.look", [{"myId": -1, "name": "x"}]),
            ("notes.look", [{"myId": 1, "name": "bad"}]),
            ("notes.look", [{"my_id": 1, "name": "x"}]),
            ("notes.look", [{"myId": 1, "name": "x", "kids": [{"myId": "1", "name": "y"}]}]),
            ("notes.keep", [{"type": "cow"}]),
            ("notes.keep", [{"type": "dog", "tricks": 1, "lives": 9}]),
            ("notes.keep", [{"type": "cat", "lives": 9}, [1, "long"]]),
        ]
        outcomes = in_worker(shipment, *calls)["outcomes"]
        assert [outcome[0] for outcome in outcomes] == ["storage_invalid_request"] * len(calls)

    def test_migrations_go_along(self, shipment: bytes) -> None:
        found = in_worker(shipment)
        (migration,) = shipped_program.notes.migrations()
        assert found["migrations"] == [[1, "create", migration.checksum]]
        assert found["sql"] == ["create table notes(text)"]

    @pytest.mark.parametrize("way", ["text", "input"])
    def test_programs_without_a_file(self, way: str) -> None:
        shipment = python("-c", SMALL) if way == "text" else python("-", given=SMALL.encode())
        assert in_worker(shipment, ("notes.echo", [{"text": "a"}]))["outcomes"] == [
            ["done", {"text": "a!"}, 0]
        ]


class TestWhichWay:
    def test_an_attribute_of_a_module_is_named(self) -> None:
        names, shipped = ship([shipped_program.notes, "a.b:c"])
        assert names == ["tests.store.shipped_program:notes", "a.b:c"]
        assert shipped == b""
        assert load(names[:1], shipped) == [shipped_program.notes]

    def test_a_store_that_another_module_made_is_named_by_its_operations(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = Store("made")

        def count(tx: Transaction) -> int:
            return 0

        count.__module__ = "tests.store.shipped_worker"
        made.read(count)
        made.__module__ = "tests.store.doubles"
        from . import doubles, shipped_worker  # noqa: F401

        monkeypatch.setattr(shipped_worker, "made", made, raising=False)
        assert ship([made]) == (["tests.store.shipped_worker:made"], b"")

    def test_a_local_store_is_packed_with_its_folder(self, tmp_path: Path) -> None:
        (tmp_path / "0001_notes.sql").write_text("create table notes(a)")
        factor = 3

        class Local(msgspec.Struct, kw_only=True):
            unit: str = "m"
            number: int

        local = Store("local", 1, tmp_path)

        @local.read
        def times(tx: Transaction, given: Local) -> Local:
            return Local(number=given.number * factor)

        names, shipped = ship([local])
        assert names == []
        (tmp_path / "0001_notes.sql").unlink()
        (made,) = unship(shipped)
        assert [each.sql for each in made.migrations()] == ["create table notes(a)"]
        operation = made.operations["local.times"]
        arguments = operation.decode_arguments(msgspec.msgpack.encode([{"number": 2}]), 64)
        assert msgspec.to_builtins(operation.run(noting()[0], arguments)) == {"unit": "m", "number": 6}

    def test_a_module_that_no_other_process_can_import_packs_its_stores(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = types.ModuleType("swtest_made_up")
        monkeypatch.setitem(sys.modules, "swtest_made_up", module)
        exec(SMALL.rpartition("\n\n")[0], module.__dict__)
        names, shipped = ship([module.notes])
        assert names == []
        assert shipped

    def test_nothing(self) -> None:
        assert ship([]) == ([], b"")


class Pair(NamedTuple):
    a: int


class TestWhatCannotBeShipped:
    def refusal(self, store: Store) -> InvalidRequestError:
        with pytest.raises(InvalidRequestError) as caught:
            ship([Store("fine"), store])
        return caught.value

    def test_a_handler_that_holds_what_has_no_copy(self) -> None:
        local = Store("local")
        running = (number for number in range(3))

        @local.read
        def fine(tx: Transaction) -> int:
            return 1

        @local.read
        def following(tx: Transaction) -> int:
            return next(running)

        error = self.refusal(local)
        assert error.message.startswith("local.following cannot be shipped to the worker")
        assert error.details["store"] == "local.following"

    def test_a_migration_that_holds_what_has_no_copy(self) -> None:
        running = (number for number in range(3))

        def create(tx: Transaction) -> None:
            tx.execute(str(next(running)))

        assert self.refusal(Store("local", 1, [create])).details["store"] == "local: migration 1"

    def test_types_that_would_no_longer_check_their_fields(self) -> None:
        @dataclasses.dataclass
        class Item:
            number: int

        local = Store("local")

        @local.read
        def first(tx: Transaction, given: Pair) -> None: ...

        @local.read
        def second(tx: Transaction, given: list[Item]) -> None: ...

        error = self.refusal(local)
        assert error.details["store"] == "local.second"
        assert "Item is no msgspec.Struct" in error.message

    @pytest.mark.filterwarnings("default")
    def test_a_class_that_could_not_be_read_again(self) -> None:
        class Knot:
            ends: ClassVar[list[Any]] = []

        Knot.ends.append(Knot)
        local = Store("local")

        @local.read
        def count(tx: Transaction) -> int:
            return len(Knot.ends)

        error = self.refusal(local)
        assert error.details == {"store": "local.count", "exception": "PicklingWarning"}

    def test_a_module_of_the_programs_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType("swtest_made_up")
        local = Store("local")

        @local.read
        def look(tx: Transaction) -> str:
            return module.__name__

        assert "swtest_made_up" in self.refusal(local).message

    def test_migrations_that_are_wrong_keep_their_own_error(self, tmp_path: Path) -> None:
        with pytest.raises(SchemaError, match="store local"):
            ship([Store("local", 1, tmp_path / "nowhere")])

    @pytest.mark.parametrize("given", ["notes", "a b:c", 3, None])
    def test_what_is_no_store(self, given: Any) -> None:
        with pytest.raises(InvalidRequestError, match=str(given)):
            ship([given])

    def test_what_the_worker_cannot_make(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType("swtest_vanishing")
        module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, "swtest_vanishing", module)
        local = Store("local")

        @local.read
        def look(tx: Transaction) -> str:
            return module.__name__

        _, shipped = ship([local])
        monkeypatch.delitem(sys.modules, "swtest_vanishing")
        with pytest.raises(OperationFailedError, match=r"\(local\).*swtest_vanishing") as caught:
            unship(shipped)
        assert caught.value.details == {"store": "local", "exception": "ModuleNotFoundError"}


class TestOrdinaryPickles:
    def test_stores_and_operations_are_pickled_by_their_names(self) -> None:
        for value in (shipped_program.notes, shipped_program.add):
            assert pickle.loads(pickle.dumps(value)) is value

    def test_local_ones_are_refused(self) -> None:
        local = Store("local")

        @local.read
        def count(tx: Transaction) -> int:
            return 0

        with pytest.raises(pickle.PicklingError, match="no attribute of its module"):
            pickle.dumps(local)
        with pytest.raises((pickle.PicklingError, AttributeError)):
            pickle.dumps(count)


def test_stores_load_neither_dill_nor_a_driver() -> None:
    text = (
        "import sys, storage_worker.registry, storage_worker.sql, storage_worker.migrations\n"
        "print(sorted({'dill', 'multiprocess', 'apsw', 'sqlite3'} & set(sys.modules)))"
    )
    assert python("-c", text).strip() == b"[]"

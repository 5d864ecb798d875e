import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from storage_worker.migrations import Origin, migrate, read_migrations
from storage_worker.protocol.errors import BusyError, NotPermittedError, SchemaError
from storage_worker.store import Store
from storage_worker.transaction import Transaction

from .doubles import MigratedFile

FIRST = """
-- the table; a semicolon in a comment
create table notes(id integer primary key, text text default 'a;b');
create table log(what text);
create trigger noted after insert on notes begin
  insert into log values ('one;');
  insert into log values ('two');
end;
insert into notes(text) values ('first'); /* at the end; */
"""


@pytest.fixture
def migrated(database: Path) -> Iterator[MigratedFile]:
    """A database without migrations."""
    file = MigratedFile(database)
    yield file
    file.database.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two migrations and what does not concern them."""
    made = tmp_path / "migrations"
    made.mkdir()
    (made / "0001_notes.sql").write_text(FIRST)
    (made / "0002_authors.sql").write_text("create table authors(name text)")
    (made / "README.md").write_text("not a migration")
    (made / "__init__.py").write_text("")
    return made


def first(tx: Transaction) -> None:
    tx.execute("create table one(a)")


def second(tx: Transaction) -> None:
    tx.execute("create table two(a)")


def failing(tx: Transaction) -> None:
    tx.execute("create table half(a)")
    raise ZeroDivisionError("no reason")


async def later(tx: Transaction) -> None: ...


class TestReading:
    def test_a_folder_of_numbered_files(self, folder: Path) -> None:
        found = Store("notes", 2, str(folder)).migrations()
        assert [(each.number, each.name) for each in found] == [(1, "notes"), (2, "authors")]
        assert Store("notes", 2, folder).migrations() == found

    def test_a_list_of_functions_and_files(self, folder: Path) -> None:
        found = Store("notes", 2, [first, folder / "0002_authors.sql"]).migrations()
        assert [(each.number, each.name) for each in found] == [(1, "first"), (2, "authors")]

    def test_none(self) -> None:
        assert Store("notes").migrations() == ()

    @pytest.mark.parametrize("name", ["3_more.sql", "0003-more.sql", "0003_.sql", "more.sql", "0003_a b.sql"])
    def test_a_misnamed_file_is_refused(self, folder: Path, name: str) -> None:
        (folder / name).write_text("select 1")
        with pytest.raises(SchemaError, match="has no name like"):
            Store("notes", 3, folder).migrations()

    @pytest.mark.parametrize("name", ["0004_gap.sql", "0002_twice.sql", "0000_zero.sql"])
    def test_numbers_that_are_not_1_2_3_are_refused(self, folder: Path, name: str) -> None:
        (folder / name).write_text("select 1")
        with pytest.raises(SchemaError, match="not numbered 1, 2, 3"):
            Store("notes", 3, folder).migrations()

    def test_a_listed_file_out_of_place_is_refused(self, folder: Path) -> None:
        with pytest.raises(SchemaError, match="place 1"):
            Store("notes", 1, [folder / "0002_authors.sql"]).migrations()

    @pytest.mark.parametrize("entry", [later, 3, None])
    def test_what_is_no_migration_is_refused(self, entry: Any) -> None:
        with pytest.raises(SchemaError, match="migration 1"):
            Store("notes", 1, [entry]).migrations()

    def test_a_missing_folder_is_refused_with_the_places(self, tmp_path: Path) -> None:
        with pytest.raises(SchemaError, match=r"looked at .*nowhere"):
            Store("notes", 1, tmp_path / "nowhere").migrations()

    def test_a_file_instead_of_a_folder_is_refused(self, folder: Path) -> None:
        with pytest.raises(SchemaError, match="no folder"):
            Store("notes", 1, folder / "0001_notes.sql").migrations()

    def test_text_that_is_no_utf_8_is_refused(self, folder: Path) -> None:
        (folder / "0002_authors.sql").write_bytes(b"select '\xff'")
        with pytest.raises(SchemaError, match="cannot be read"):
            Store("notes", 2, folder).migrations()

    def test_line_endings_do_not_change_a_migration(self, folder: Path) -> None:
        before = Store("notes", 2, folder).migrations()
        (folder / "0001_notes.sql").write_bytes(FIRST.replace("\n", "\r\n").encode())
        assert Store("notes", 2, folder).migrations() == before


@pytest.fixture
def declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], ModuleType]]:
    """Write and import a module, which may be one in a package: `declared("pack.storage", text)`."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def declare(name: str, text: str) -> ModuleType:
        path = tmp_path.joinpath(*name.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        if "." in name:
            (path.parent / "__init__.py").touch()
        path.with_suffix(".py").write_text(text)
        __import__(name)
        return sys.modules[name]

    yield declare
    for name in set(sys.modules) - before:
        del sys.modules[name]


DECLARATION = "from storage_worker.store import Store\nstored = Store('stored', 2, {path!r})\n"


class TestPlaces:
    def test_beside_the_module(
        self, declared: Callable[[str, str], ModuleType], folder: Path, tmp_path: Path
    ) -> None:
        folder.rename(tmp_path / "beside")
        module = declared("swtest_flat", DECLARATION.format(path="beside"))
        assert len(module.stored.migrations()) == 2

    def test_in_an_import_package(
        self, declared: Callable[[str, str], ModuleType], folder: Path, tmp_path: Path
    ) -> None:
        module = declared("swtest_pack.storage", DECLARATION.format(path="swtest_pack/migrations"))
        folder.rename(tmp_path / "swtest_pack" / "migrations")
        assert len(module.stored.migrations()) == 2

    def test_beside_the_module_comes_first(
        self, declared: Callable[[str, str], ModuleType], folder: Path, tmp_path: Path
    ) -> None:
        module = declared("swtest_both.storage", DECLARATION.format(path="swtest_both/migrations"))
        (tmp_path / "swtest_both" / "migrations").mkdir()
        beside = tmp_path / "swtest_both" / "swtest_both"
        beside.mkdir()
        folder.rename(beside / "migrations")
        assert len(module.stored.migrations()) == 2

    def test_a_plain_module_is_no_package(self) -> None:
        with pytest.raises(SchemaError, match="are not found"):
            read_migrations(Origin("json/migrations", None), "notes")
        with pytest.raises(SchemaError, match="are not found"):
            read_migrations(Origin("bisect/migrations", None), "notes")

    def test_a_package_that_is_not_imported_is_not_run(
        self, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "swtest_asleep").mkdir()
        (tmp_path / "swtest_asleep" / "__init__.py").write_text("raise RuntimeError")
        folder.rename(tmp_path / "swtest_asleep" / "migrations")
        assert len(read_migrations(Origin("swtest_asleep/migrations", None), "notes")) == 2
        assert "swtest_asleep" not in sys.modules

    def test_without_a_file_in_the_working_directory(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(folder.parent)
        assert len(read_migrations(Origin("migrations", None), "notes")) == 2


class TestMigrating:
    def test_each_in_a_transaction_of_its_own_and_once(self, migrated: MigratedFile, folder: Path) -> None:
        notes = Store("notes", 2, folder)
        migrate(migrated, [notes])
        assert migrated.begun == 2
        assert migrated.tables() == ["authors", "log", "notes"]
        assert migrated.database.own("select what from log") == [("one;",), ("two",)]
        migrate(migrated, [notes])
        assert migrated.begun == 2
        recorded = migrated.applied_migrations("notes")
        assert [(each.name, each.checksum) for each in recorded] == [
            (each.name, each.checksum) for each in notes.migrations()
        ]

    def test_the_new_ones_only(self, migrated: MigratedFile) -> None:
        migrate(migrated, [Store("notes", 1, [first])])
        migrate(migrated, [Store("notes", 2, [first, second])])
        assert migrated.numbers("notes") == [1, 2]
        assert migrated.tables() == ["one", "two"]

    def test_stores_have_numbers_of_their_own(self, migrated: MigratedFile) -> None:
        migrate(migrated, [Store("notes", 1, [first]), Store("people", 1, [second])])
        assert (migrated.numbers("notes"), migrated.numbers("people")) == ([1], [1])

    def test_a_failure_leaves_those_before_it(self, migrated: MigratedFile) -> None:
        with pytest.raises(
            SchemaError, match=r"store notes: migration 2 \(failing\).*ZeroDivision"
        ) as caught:
            migrate(migrated, [Store("notes", 3, [first, failing, second])])
        assert caught.value.details == {"store": "notes", "number": 2, "exception": "ZeroDivisionError"}
        assert migrated.tables() == ["one"]
        assert migrated.numbers("notes") == [1]

    def test_failing_sql_leaves_nothing_of_its_file(self, migrated: MigratedFile, folder: Path) -> None:
        (folder / "0002_authors.sql").write_text("create table authors(name); create table notes(a);")
        with pytest.raises(SchemaError, match=r"migration 2 \(authors\)"):
            migrate(migrated, [Store("notes", 2, folder)])
        assert migrated.tables() == ["log", "notes"]

    @pytest.mark.parametrize(
        "sql",
        ["commit", "attach 'other.db' as other", "delete from _sw_migrations", "create temp table t(a)"],
    )
    def test_migrations_are_guarded_like_handlers(
        self, migrated: MigratedFile, folder: Path, sql: str
    ) -> None:
        (folder / "0002_authors.sql").write_text(f"create table authors(name); {sql};")
        with pytest.raises(SchemaError, match="migration 2") as caught:
            migrate(migrated, [Store("notes", 2, folder)])
        assert isinstance(caught.value.__cause__, NotPermittedError)
        assert migrated.numbers("notes") == [1]

    def test_a_busy_database_is_no_fault_of_the_schema(self, migrated: MigratedFile) -> None:
        def busy(tx: Transaction) -> None:
            raise BusyError("locked")

        with pytest.raises(BusyError):
            migrate(migrated, [Store("notes", 1, [busy])])


class TestRefusing:
    def test_a_newer_database_before_any_store_is_migrated(self, migrated: MigratedFile) -> None:
        migrate(migrated, [Store("notes", 2, [first, second])])
        with pytest.raises(SchemaError, match=r"store notes: the database is at version 2.* up to 1"):
            migrate(migrated, [Store("people", 1, [failing]), Store("notes", 1, [first])])
        assert migrated.numbers("people") == []

    def test_a_newer_database_where_the_store_has_no_migrations(self, migrated: MigratedFile) -> None:
        migrate(migrated, [Store("notes", 1, [first])])
        with pytest.raises(SchemaError, match="version 1"):
            migrate(migrated, [Store("notes")])

    def test_a_changed_file(self, migrated: MigratedFile, folder: Path) -> None:
        migrate(migrated, [Store("notes", 2, folder)])
        (folder / "0001_notes.sql").write_text(FIRST + " ")
        with pytest.raises(SchemaError, match=r"migration 1 \(notes\) was changed"):
            migrate(migrated, [Store("notes", 2, folder)])

    def test_another_function_in_its_place(self, migrated: MigratedFile) -> None:
        migrate(migrated, [Store("notes", 1, [first])])
        with pytest.raises(SchemaError, match=r"migration 1 \(second\) was changed"):
            migrate(migrated, [Store("notes", 1, [second])])

    def test_a_record_that_is_missing(self, migrated: MigratedFile) -> None:
        notes = Store("notes", 2, [first, second])
        migrate(migrated, [notes])
        migrated.database.own("delete from _sw_migrations where number = 1")
        with pytest.raises(SchemaError, match="no record of migration 1"):
            migrate(migrated, [notes])

    def test_a_version_that_is_not_the_number_of_files(self, migrated: MigratedFile, folder: Path) -> None:
        with pytest.raises(SchemaError, match="declares version 3 and has 2 migrations"):
            migrate(migrated, [Store("notes", 3, folder)])
        assert migrated.tables() == []

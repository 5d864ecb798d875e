"""The command, on real workers: what it prints, and its exit status."""

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import storage_worker as sw
from storage_worker.cli import app

pytestmark = pytest.mark.worker

SERVE = (sys.executable, "-c", "from storage_worker.cli import main; main()", "serve")
READY_SECONDS_MAX = 60.0


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def run_json(*arguments: object, status: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


@pytest.fixture
def served(database: Path) -> Iterator[Path]:
    with sw.StorageWorker(database) as worker, worker.connect() as client:
        client.execute("create table t(a, b)")
        client.execute("insert into t values (1, 'one'), (2, x'00ff')")
        yield database


@pytest.fixture
def shared(database: Path) -> Iterator[Path]:
    assert run("sql", database, "create table t(a unique)", "--write").exit_code == 0
    yield database
    assert run("stop", database).exit_code == 0


class TestSql:
    def test_a_table_for_people(self, served: Path) -> None:
        result = run("sql", served, "select a, b from t order by a")
        assert result.exit_code == 0
        assert "one" in result.output
        assert "x'00ff'" in result.output
        assert "2 rows" in result.output

    def test_json_for_programs(self, served: Path) -> None:
        assert run_json("sql", served, "select a, b from t order by a") == {
            "columns": ["a", "b"],
            "rows": [[1, "one"], [2, {"base64": "AP8="}]],
            "rows_changed": 0,
            "last_insert_rowid": 0,
        }

    @pytest.mark.parametrize(
        ("given", "stored"),
        [
            ("7", 7),
            ("1.5", 1.5),
            ("null", None),
            ("seven", "seven"),
            ('"7"', "7"),
            ("[1]", "[1]"),
            ("true", 1),
        ],
    )
    def test_parameters(self, served: Path, given: str, stored: object) -> None:
        assert run_json("sql", served, "select ?", "--param", given)["rows"] == [[stored]]

    def test_statement_from_standard_input(self, served: Path) -> None:
        assert "2" in run("sql", served, "-", stdin="select count(*) from t\n").output

    def test_a_query_does_not_write(self, served: Path) -> None:
        refused = run_json("sql", served, "delete from t", status=3)
        assert refused["code"] == "storage_invalid_request"
        # In the command's own words: it has no `execute`.
        assert "--write" in refused["message"]
        assert "execute" not in refused["message"]
        assert run_json("sql", served, "select count(*) from t")["rows"] == [[2]]

    def test_several_statements_are_a_script(self, served: Path, tmp_path: Path) -> None:
        text = "insert into t values (8, 'x'); insert into t values (9, 'y');"
        refused = run_json("sql", served, text, "--write", status=3)
        assert refused["code"] == "storage_invalid_request"
        assert "one statement for each call" in refused["message"]
        assert "batch" not in refused["message"]
        file = tmp_path / "more.sql"
        file.write_text(text)
        assert run("sql", served, "--script", file).exit_code == 0
        assert run("sql", served, "--script", "-", stdin="delete from t where a = 9;").exit_code == 0
        assert run_json("sql", served, "select a from t order by a")["rows"] == [[1], [2], [8]]

    def test_a_script_is_all_or_nothing_and_tells_its_outcome(self, served: Path) -> None:
        result = run("sql", served, "--script", "-", stdin="delete from t; select nope;")
        assert (result.exit_code, "outcome: not committed" in result.stderr) == (3, True)
        assert run_json("sql", served, "select count(*) from t")["rows"] == [[2]]

    def test_a_script_makes_a_database(self, database: Path) -> None:
        assert run("sql", database, "--script", "-", stdin="create table t(a);").exit_code == 0
        assert database.exists()
        assert run("stop", database).exit_code == 0

    def test_other_invalid_requests_keep_their_words(self, served: Path) -> None:
        refused = run_json("sql", served, "", status=3)
        assert refused["message"] == "the SQL text holds no statement"

    def test_a_request_key_makes_a_write_happen_once(self, served: Path) -> None:
        for _ in range(2):
            found = run_json("sql", served, "insert into t values (3, 'x')", "--write", "--request-key", "k")
            assert found["rows_changed"] == 1
        assert run_json("sql", served, "select count(*) from t")["rows"] == [[3]]

    def test_a_shared_worker_is_started_where_none_runs(self, shared: Path) -> None:
        assert run_json("status", shared)["shared"] is True

    def test_a_wrong_path_makes_no_database(self, database: Path) -> None:
        assert run_json("sql", database, "select 1", status=3)["code"] == "storage_path"
        assert not database.exists()

    def test_a_typed_error_is_readable(self, served: Path) -> None:
        result = run("sql", served, "select nope")
        assert result.exit_code == 3
        assert "storage_operation_failed" in result.stderr
        assert "no such column: nope" in result.stderr
        assert "outcome" not in result.stderr
        assert "Traceback" not in result.output


class TestStatus:
    def test_tables_and_json(self, served: Path) -> None:
        result = run("status", served)
        assert result.exit_code == 0
        assert "healthy" in result.output
        assert "sql.execute" in result.output
        plain = run_json("status", served)
        assert plain["limits"]["queue_requests_max"] == sw.Limits().queue_requests_max
        assert {client["role"] for client in plain["clients"]} == {"write", "admin"}

    def test_none_runs(self, database: Path) -> None:
        found = run_json("status", database, status=3)
        assert found["code"] == "storage_unavailable"
        assert "no worker serves" in found["message"]


class TestMaintenance:
    def test_a_sound_database(self, served: Path) -> None:
        assert run_json("check", served) == {"sound": True, "findings": [], "unchecked": None}

    def test_findings_have_a_status_of_their_own(self, database: Path) -> None:
        with closing(sqlite3.connect(database)) as foreign, foreign:
            # Plain SQLite checks no foreign keys unless it is told to.
            foreign.execute("create table parent(id integer primary key)")
            foreign.execute("create table child(parent references parent)")
            foreign.execute("insert into child values (7)")
        found = run_json("check", database, status=1)
        assert found["sound"] is False
        assert any("child" in finding for finding in found["findings"])
        assert run("stop", database).exit_code == 0

    def test_backup(self, served: Path, tmp_path: Path) -> None:
        target = tmp_path / "copy.db"
        found = run_json("backup", served, target)
        size = target.stat().st_size
        nothing = {"payloads": 0, "payload_bytes": 0, "findings": []}
        assert found == {"target": str(target), "bytes": size, **nothing}
        assert not Path(f"{target}-sw").exists()
        with sw.StorageWorker(target) as worker, worker.connect() as client:
            assert client.query("select count(*) from t").scalar() == 2

    def test_backup_overwrites_nothing(self, served: Path, tmp_path: Path) -> None:
        target = tmp_path / "copy.db"
        target.write_text("precious")
        assert run_json("backup", served, target, status=3)["code"] == "storage_path"
        assert target.read_text() == "precious"

    def test_stop_where_none_runs(self, database: Path) -> None:
        assert run_json("stop", database) == {"stopped": False}


class TestServe:
    @pytest.fixture
    def serving(self, database: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
        with subprocess.Popen(
            [*SERVE, str(database), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                lines = iter(process.stdout.readline, "}\n")
                told = json.loads("".join(lines) + "}")
                assert told["path"] == str(database)
                yield process, database
                process.terminate()
                process.wait(READY_SECONDS_MAX)
            finally:
                process.kill()

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_ends_it(self, serving: tuple[subprocess.Popen[str], Path], number: int) -> None:
        process, database = serving
        with sw.connect(database) as client:
            client.execute("create table t(a)")
        process.send_signal(number)
        assert process.wait(READY_SECONDS_MAX) == 0
        assert run_json("status", database, status=3)["code"] == "storage_unavailable"

    def test_stop_ends_it(self, serving: tuple[subprocess.Popen[str], Path]) -> None:
        process, database = serving
        assert run_json("stop", database)["stopped"] is True
        assert process.wait(READY_SECONDS_MAX) == 0

    def test_a_second_one_is_refused(self, serving: tuple[subprocess.Popen[str], Path]) -> None:
        _, database = serving
        refused = subprocess.run(
            [*SERVE, str(database), "--json"], capture_output=True, text=True, check=False
        )
        assert refused.returncode == 3
        assert json.loads(refused.stdout)["code"] == "storage_already_owned"

    def test_the_worker_of_another_host_is_named(self, served: Path) -> None:
        refused = run_json("serve", served, status=3)
        assert refused["code"] == "storage_already_owned"
        assert refused["details"]["pid"] == run_json("status", served)["process"]["pid"]

    def test_a_dead_worker_is_an_error(self, serving: tuple[subprocess.Popen[str], Path]) -> None:
        process, database = serving
        with sw.connect(database) as client:
            pid = client.connect().pid
        subprocess.run(["kill", "-KILL", str(pid)], check=True)
        assert process.wait(READY_SECONDS_MAX) == 3


class TestUsage:
    @pytest.mark.parametrize(
        "arguments",
        [
            (),
            ("sql",),
            ("serve", "a.db", "--durability", "some"),
            ("serve", "a.db", "--limit", "no_such_limit=1"),
            ("serve", "a.db", "--limit", "busy_ms=x"),
            ("serve", "a.db", "--limit", "busy_ms=0"),
            ("sql", "a.db", "select 1", "--request-key", "k"),
            ("sql", "a.db"),
            ("sql", "a.db", "select 1", "--script", "-"),
            ("sql", "a.db", "--script", "no such file"),
            ("sql", "a.db", "--script", "-", "--param", "1"),
        ],
    )
    def test_wrong_usage_has_its_own_status(self, arguments: tuple[str, ...]) -> None:
        assert run(*arguments).exit_code == 2

    @pytest.mark.parametrize("command", ["serve", "status", "sql", "check", "backup", "stop"])
    def test_help_has_examples(self, command: str) -> None:
        result = run(command, "--help")
        assert result.exit_code == 0
        assert f"$ storage-worker {command} app.db" in result.output

    def test_the_commands_own_help_has_examples_too(self) -> None:
        result = run("--help")
        assert result.exit_code == 0
        assert "$ storage-worker serve app.db" in result.output

    def test_version(self) -> None:
        assert run("--version").output.startswith("storage-worker ")

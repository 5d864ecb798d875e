"""Import, export and looking at conversations, on a real worker: what is printed, and the exit status."""

import contextlib
import io
import json
import os
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import storage_worker as sw
from storage_worker import conversation_client
from storage_worker.cli import app
from storage_worker.protocol.errors import StorageFullError
from storage_worker.signals import signals_call
from tests.cli.commands import run, run_json
from tests.transcripts import samples


@pytest.fixture
def imported(database: Path, tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "transcripts"
    folder.mkdir()
    samples.write_all(folder)
    samples.write(folder, "LICENSE", "do what you like")
    done = run_json("import", database, folder, "--processes", 1)
    assert (done["total"]["sessions"], done["problems"], len(done["skipped"])) == (11, [], 2)
    yield database
    assert run("stop", database).exit_code == 0


def test_looking_at_what_was_imported(imported: Path) -> None:
    rooms = run("rooms", imported)
    assert rooms.exit_code == 0
    assert "sessions.json" in rooms.output
    assert rooms.output.splitlines()[0].split()[:2] == ["room", "title"]
    assert {room["title"] for room in run_json("rooms", imported)["rooms"]} >= {"trees.jsonl", "x.ascii.txt"}

    page = run_json("sessions", imported, "--rows", 2)
    assert (len(page["sessions"]), page["more"]) == (2, True)
    rest = run_json("sessions", imported, "--after", page["cursor"])
    ids = [each["session"] for each in page["sessions"] + rest["sessions"]]
    assert len(set(ids)) == len(ids) == 11
    assert "there are more: --after" in run("sessions", imported, "--rows", 2).output
    assert [
        each["session"] for each in run_json("sessions", imported, "--room", "agent-logs")["sessions"]
    ] == ["session-1"]
    assert "session-1" in run("sessions", imported).output

    for command in ("sessions", "export"):
        missing = run(command, imported, "--room", "nothing")
        assert (missing.exit_code, "room_not_found" in missing.output) == (3, True)
    missing = run("show", imported, "nothing")
    assert (missing.exit_code, "session_not_found" in missing.output) == (3, True)


def test_a_conversation_is_shown_readably_and_harmlessly(imported: Path) -> None:
    shown = run("show", imported, "session-1")
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert any("look at this" in line for line in lines)
    assert "records of the import not shown" in shown.output
    whole = run("show", imported, "session-1", "--full").output
    for kept in ("transcript_record", "import_finished"):
        assert (kept in shown.output, kept in whole) == (False, True)
    [call, _] = [line for line in lines if "→" in line]
    assert "Read" in call
    [failed, _] = [line for line in lines if "←" in line]
    assert "failed text/plain" in failed
    assert "image/png" in shown.output
    events = run_json("show", imported, "session-1")["events"]
    assert [each["event"]["sequence"] for each in events] == list(range(1, len(events) + 1))

    chat = next(
        each["session"] for each in run_json("sessions", imported)["sessions"] if each["session"][-2:] == "-0"
        and each["session"].startswith("chat-")
    )  # fmt: skip
    assert not any(line.isspace() or not line for line in run("show", imported, chat).output.splitlines())
    short, full = run("show", imported, chat).output, run("show", imported, chat, "--full").output
    for output in (short, full):
        assert "\x1b" not in output
        assert "\x00" not in output
        assert "done \\x00\\x1b[31m" in output
    assert "cut; " in short
    assert "cut; " not in full
    assert len(full) > len(samples.LARGE) > len(short)


def test_an_export_is_imported_into_another_database(imported: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "all.jsonl", tmp_path / "other.db"
    assert run("export", imported, file).exit_code == 0
    one = run("export", imported, "--session", "session-1")
    kinds = {json.loads(line)["kind"] for line in one.stdout.splitlines()}
    assert kinds == {"storage-worker-export", "room", "session", "payload", "event", "session_state", "end"}
    done = run("import", other, file, "--processes", 1)
    assert done.exit_code == 0
    assert "export" in done.output
    try:
        names = ("session", "status", "preview", "last_sequence", "last_message")
        found, wanted = (
            sorted([each[name] for name in names] for each in run_json("sessions", path)["sessions"])
            for path in (other, imported)
        )
        assert found == wanted
    finally:
        assert run("stop", other).exit_code == 0


def test_an_export_tells_of_payloads_that_are_missing(imported: Path, tmp_path: Path) -> None:
    payloads = [each for each in Path(f"{imported}-sw", "payloads").rglob("*") if each.is_file()]
    for payload in payloads:
        payload.write_bytes(b"damaged")
    file = tmp_path / "all.jsonl"
    done = run("export", imported, file)
    assert done.exit_code == 1
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    missing = [number for number, line in enumerate(lines, 1) if line["kind"] == "missing"]
    assert len(missing) == len(payloads)
    for number, told in zip(missing, done.stderr.splitlines(), strict=True):
        sha256 = lines[number - 1]["sha256"]
        assert told.startswith(f"{file}:{number}: the payload {sha256}")
        assert told.count(sha256) == 1
        assert "cannot be read: its file has 7 bytes, recorded are" in told
        assert told.endswith("; import a good export or put its body again, then export again")
    # Its own store has all events already.
    again = run_json("import", imported, file, "--processes", 1)
    assert (again["total"]["added"], again["problems"]) == (0, [])


def test_an_export_with_less_leaves_the_file_that_has_more(imported: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    assert run("export", imported, file).exit_code == 0
    whole = file.read_bytes()
    for payload in Path(f"{imported}-sw", "payloads").rglob("*"):
        if payload.is_file():
            payload.write_bytes(b"damaged")
    done = run("export", imported, file)
    assert (done.exit_code, file.read_bytes()) == (1, whole)
    assert b'"missing"' in Path(f"{file}.incomplete").read_bytes()
    assert done.stderr.splitlines()[-1] == (
        f"{file} stays as it was; what could be exported is in {file}.incomplete"
    )


def test_what_an_export_found_missing_is_told_also_where_it_cannot_go_on(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for payload in Path(f"{imported}-sw", "payloads").rglob("*"):
        if payload.is_file():
            payload.write_bytes(b"damaged")

    def full(lines: Iterator[bytes], *_: object, **__: object) -> None:
        for line in lines:
            if b'"missing"' in line:
                raise StorageFullError("no space left")

    monkeypatch.setattr("storage_worker.cli_conversation.write_lines", full)
    done = run("export", imported, tmp_path / "all.jsonl")
    assert done.exit_code == 3
    told = done.stderr.splitlines()
    assert told[0].startswith(f"{tmp_path / 'all.jsonl'}:")
    assert "no space left" in told[-1]


def test_a_dash_is_standard_output(imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for payload in Path(f"{imported}-sw", "payloads").rglob("*"):
        if payload.is_file():
            payload.write_bytes(b"damaged")
    done = run("export", imported, "-")
    assert done.exit_code == 1
    assert done.stdout == run("export", imported).stdout != ""
    assert done.stderr.startswith("standard output:")
    assert not (tmp_path / "-").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_export_that_is_told_to_end_leaves_nothing_behind(
    imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def lines(*_: object, **__: object) -> Iterator[bytes]:
        yield b"{}\n"
        assert list(tmp_path.glob(".export-*"))
        os.kill(os.getpid(), number)
        yield b"{}\n"

    monkeypatch.setattr("storage_worker.cli_conversation.export_lines", lines)
    before = signal.getsignal(number)
    done = run("export", imported, tmp_path / "all.jsonl")
    assert done.exit_code == 128 + number
    assert not [*tmp_path.glob(".export-*"), *tmp_path.glob("all.jsonl")]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_import_that_is_told_to_end_tidies_up(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    tidied: list[str] = []

    def import_paths(*_: object, **__: object) -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            tidied.append("processes, and the cursor")

    monkeypatch.setattr("storage_worker.cli_conversation.import_paths", import_paths)
    # Without the command's own handler this is raised nowhere, and the test fails instead of ending its process.
    with signals_call(lambda *_: None, number):
        assert run("import", database, tmp_path).exit_code == 128 + number
    assert tidied


@pytest.mark.parametrize(
    "arguments", [("rooms",), ("show", "session-1"), ("sessions", "--json"), ("metrics",)]
)
def test_an_output_that_cannot_be_written_is_told(
    imported: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    capfd: pytest.CaptureFixture[str],
) -> None:
    command, *more = arguments
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            app([command, str(imported), *more])
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert ended.value.code == 3
    assert capfd.readouterr().err.startswith("storage_full: cannot write to standard output")


def test_what_the_terminals_encoding_has_not_is_written_out(
    imported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, wanted in (
        (("show", "session-1"), rb"\u2192 Read"),
        (("show", "session-1", "--json"), "\U0001f600".encode()),
    ):
        command, *more = arguments
        out = io.BytesIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
            with pytest.raises(SystemExit) as ended:
                app([command, str(imported), *more])
            sys.stdout.flush()
            assert ended.value.code == 0
            assert wanted in out.getvalue()


def test_ids_of_others_are_told_harmlessly(imported: Path, tmp_path: Path) -> None:
    records = [
        samples.agent_record(own, None, {"role": "user", "content": "x"}, sessionId=f"evil\x1b[31m{own}")
        for own in "ab"
    ]
    samples.write_lines(tmp_path, "evil.jsonl", records)
    assert run("import", imported, tmp_path / "evil.jsonl", "--processes", 1).exit_code == 0
    refused = run("show", imported, "evil")
    assert (refused.exit_code, "\x1b" in refused.stderr) == (3, False)
    assert r"'evil\x1b[31ma', 'evil\x1b[31mb'" in refused.stderr


def test_a_failed_export_leaves_the_file_and_the_database(imported: Path, tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    file.write_text("old")
    before = imported.read_bytes()
    missing = run("export", imported, file, "--session", "nothing")
    assert (missing.exit_code, "session_not_found" in missing.output) == (3, True)
    assert run("export", imported, imported).exit_code == 3
    assert run("export", imported, tmp_path / "no" / "where").exit_code == 3
    assert (file.read_text(), imported.read_bytes()) == ("old", before)


def test_a_text_that_cannot_be_read_leaves_the_rest_of_the_page(imported: Path) -> None:
    [chat, *_] = [
        each["session"] for each in run_json("sessions", imported)["sessions"] if each["session"][-2:] == "-0"
        and each["session"].startswith("chat-")
    ]  # fmt: skip
    for payload in Path(f"{imported}-sw", "payloads").rglob("*"):
        if payload.is_file():
            payload.write_bytes(b"damaged")
    shown = run("show", imported, chat, "--full")
    assert shown.exit_code == 0
    assert "which cannot be read" in shown.output
    assert samples.LARGE[:50] in shown.output
    assert "done" in shown.output


def test_the_timeout_is_that_of_the_whole_command(imported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: int) -> float:
        return 0.0

    monkeypatch.setattr("storage_worker.cli_conversation.seconds_left", nothing)
    for arguments in (("rooms", imported), ("sessions", imported), ("show", imported, "session-1")):
        result = run(*arguments)
        assert (result.exit_code, "storage_deadline" in result.output) == (3, True)


def test_a_worker_without_the_store_is_told_at_once(database: Path, tmp_path: Path) -> None:
    path = samples.write_lines(tmp_path, "a.jsonl", [samples.CHAT])
    with sw.StorageWorker(database, stores=[conversation_client.STORE]):
        pass
    with sw.StorageWorker(database):
        for arguments in (("import", database, path), ("rooms", database), ("export", database)):
            result = run(*arguments)
            assert result.exit_code == 3
            assert "does not serve the conversation store" in result.output
            assert "Traceback" not in result.output


def test_what_cannot_be_read_is_told_with_its_place_and_status(database: Path, tmp_path: Path) -> None:
    good = json.dumps({"messages": samples.CHAT})
    path = samples.write(tmp_path, "a.jsonl", f"{good}\n{good[:20]}\n{good}\n")
    try:
        result = run("import", database, path, "--processes", 1)
        assert result.exit_code == 1
        assert f"{path}:2: no JSON" in result.output
        assert len(run_json("sessions", database)["sessions"]) == 2
        again = run_json("import", database, path, "--processes", 1, status=1)
        assert again["formats"]["chat"] | {"size_bytes": 0, "events": 0} == {
            "sessions": 2, "known": 2, "records": 0, "events": 0, "added": 0, "size_bytes": 0,
        }  # fmt: skip
    finally:
        assert run("stop", database).exit_code == 0


def test_reading_makes_no_database(database: Path) -> None:
    for arguments in (("rooms",), ("sessions",), ("export",)):
        result = run(*arguments, database)
        assert (result.exit_code, "storage_path" in result.output) == (3, True)
    assert run("show", database, "s").exit_code == 3
    assert not database.exists()
    assert run("import", database, "nothing").exit_code == 2
    assert run("export", database, "--session", "a", "--room", "b").exit_code == 2


def test_the_beginning_of_an_id_is_enough_where_only_one_has_it(imported: Path) -> None:
    whole = run("show", imported, "session-1").output
    assert run("show", imported, "sess").output == whole
    exported = [run("export", imported, "--session", each).stdout for each in ("sess", "session-1")]
    assert exported[0] == exported[1] != ""
    ids = sorted(each["session"] for each in run_json("sessions", imported)["sessions"])
    several = [each for each in ids if each.startswith("chat-")]
    assert len(several) > 1
    refused = run_json("show", imported, "chat-", status=3)
    assert refused["code"] == "storage_invalid_request"
    assert all(each in refused["message"] for each in several)
    empty = run_json("show", imported, "", status=3)
    assert empty["message"] == "the session's id is empty"


def test_nothing_to_be_listed_is_no_error(imported: Path) -> None:
    for arguments, told in (
        (("rooms", imported, "--after", 1_000_000), "no rooms"),
        # The newest come first.
        (("sessions", imported, "--after", 1), "no sessions"),
        (("show", imported, "session-1", "--after", 1_000_000), "no events"),
    ):
        result = run(*arguments)
        assert (result.exit_code, result.output) == (0, f"{told}\n")


def test_a_cut_file_of_which_nothing_can_be_read_leaves_nothing(database: Path, tmp_path: Path) -> None:
    path = samples.write(tmp_path, "cut.jsonl", json.dumps(samples.TREES[0])[:-30] + "\n")
    whole = samples.write_lines(tmp_path, "whole.jsonl", samples.TREES)
    cut = samples.write(tmp_path, "part.jsonl", whole.read_text()[:-30])
    try:
        for added, known in ((5, 0), (0, 1)):
            done = run_json("import", database, cut, "--processes", 1, status=1)["total"]
            assert (done["sessions"], done["known"], done["added"]) == (1, known, added)
        done = run_json("import", database, path, "--processes", 1, status=1)
        assert done["total"]["sessions"] == 0
        assert [room["title"] for room in run_json("rooms", database)["rooms"]][-1] == "part.jsonl"
    finally:
        assert run("stop", database).exit_code == 0


class TestADatabaseWithoutTheStore:
    """Looking at it changes nothing, and starts no worker."""

    LOOKS = (("rooms",), ("sessions",), ("show", "s"), ("export",))

    def refused(self, path: Path) -> None:
        for command, *more in self.LOOKS:
            result = run(command, path, *more)
            assert (result.exit_code, "there is no conversation store in" in result.stderr) == (3, True)

    @pytest.mark.parametrize("mode", ["delete", "wal", "empty file"])
    def test_that_nobody_has_open(self, database: Path, mode: str) -> None:
        database.touch()
        if mode != "empty file":
            with closing(sqlite3.connect(database)) as foreign, foreign:
                foreign.execute(f"pragma journal_mode={mode}")
                foreign.execute("create table t(a)")
        before = database.read_bytes()
        self.refused(database)
        assert database.read_bytes() == before
        assert [each.name for each in database.parent.iterdir()] == [database.name]

    def test_whose_wal_holds_all(self, database: Path) -> None:
        with closing(sqlite3.connect(database)) as foreign, foreign:
            foreign.execute("pragma journal_mode=wal")
            foreign.execute("create table t(a)")
            foreign.commit()
            before = sorted((each.name, each.read_bytes()) for each in database.parent.iterdir())
            self.refused(database)
            after = sorted((each.name, each.read_bytes()) for each in database.parent.iterdir())
            assert [each for each in after if each[0][-4:] != "-shm"] == [
                each for each in before if each[0][-4:] != "-shm"
            ]
            assert [each[0] for each in after] == [each[0] for each in before]

    def test_whose_worker_runs(self, database: Path) -> None:
        with sw.StorageWorker(database) as worker, worker.connect() as client:
            client.execute("create table t(a)")
            self.refused(database)
            found = client.query("select count(*) from sqlite_schema where name like 'conversation%'")
            assert found.scalar() == 0

    def test_what_is_no_database_is_told(self, database: Path) -> None:
        database.write_bytes(b"no database " * 1_000)
        assert run_json("rooms", database, status=3)["code"] == "storage_corrupt"
        assert [each.name for each in database.parent.iterdir()] == [database.name]

    def test_a_store_that_stands_in_the_wal_is_seen(self, database: Path) -> None:
        with sw.StorageWorker(database, stores=[conversation_client.STORE]):
            assert Path(f"{database}-wal").stat().st_size > 0
            assert conversation_client.has_store(database) is True


def test_what_was_skipped_is_named_and_nothing_else_is_printed(imported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    samples.write(folder, "0.md", "a note")
    one = run("import", imported, folder, "--processes", 1)
    assert "skipped 1 file that is no transcript:" in one.stdout
    assert str(folder / "0.md") in one.stdout
    assert one.stdout.splitlines()[0].strip()
    # No progress where nobody watches it.
    assert one.stderr == ""
    for number in range(1, 12):
        samples.write(folder, f"{number}.md", "a note")
    many = run("import", imported, folder, "--processes", 1).stdout
    assert "skipped 12 files that are no transcripts:" in many
    assert many.count(".md") == 10
    assert "and 2 more" in many


class TestAWorkerWithoutTheStore:
    @pytest.fixture
    def plain(self, database: Path) -> Iterator[Path]:
        """A database with the store, whose shared worker does not serve it."""
        with sw.StorageWorker(database, stores=[conversation_client.STORE]):
            pass
        assert run("sql", database, "create table t(a)", "--write").exit_code == 0
        yield database
        assert run("stop", database).exit_code == 0

    def test_a_shared_one_is_waited_for(self, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wait, waited = conversation_client.has_ended, []

        def stop_and_wait(pid: int, seconds: float) -> bool:
            # It would end by itself, some seconds later.
            assert run("stop", plain).exit_code == 0
            waited.append(pid)
            return wait(pid, seconds)

        monkeypatch.setattr(conversation_client, "has_ended", stop_and_wait)
        first = run_json("status", plain)["process"]["pid"]
        assert run_json("rooms", plain)["rooms"] == []
        assert waited == [first]
        assert run_json("sql", plain, "select count(*) from t")["rows"] == [[0]]

    def test_one_that_others_use_is_told_of(self, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(conversation_client, "IDLE_SECONDS_MAX", 0.0)
        with sw.connect(plain):
            refused = run("rooms", plain)
        assert refused.exit_code == 3
        assert "it has other clients" in refused.stderr
        assert "outcome" not in refused.stderr

    def test_one_of_a_program_is_not_waited_for(
        self, database: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(conversation_client, "has_ended", pytest.fail)
        with sw.StorageWorker(database, stores=[conversation_client.STORE]):
            pass
        with sw.StorageWorker(database):
            refused = run_json("rooms", database, status=3)
        assert "start it with stores=" in refused["message"]

    def test_no_other_command_makes_the_stores_tables(self, database: Path, tmp_path: Path) -> None:
        assert run("sql", database, "create table t(a)", "--write").exit_code == 0
        assert run("stop", database).exit_code == 0
        assert run("check", database).exit_code == 0
        assert run("backup", database, tmp_path / "copy.db").exit_code == 0
        found = run_json("sql", database, "select name from sqlite_schema where name like 'conversation%'")
        assert found["rows"] == []
        assert run("stop", database).exit_code == 0

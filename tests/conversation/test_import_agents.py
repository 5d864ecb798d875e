"""Logs of coding agents in the store: sessions with several files, sessions that are live, odd times."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import import_checks
import storage_worker as sw
from measuring import Recorder
from storage_worker import conversation
from storage_worker.conversation.bounds import TIME_MS_MAX
from storage_worker.conversation_client import STORE
from storage_worker.import_fleet import import_paths
from storage_worker.import_session import Imported, import_transcript
from storage_worker.protocol.operation import Call
from storage_worker.transcripts import formats
from storage_worker.transcripts.records import Transcript, canonical
from tests.transcripts.samples import agent_record, write_lines

SESSION = "session-1"
NOTE = {"type": "mode", "sessionId": SESSION, "mode": "plan"}
"""A line without an id, equal in every file."""


def said(own: str, parent: str | None, minute: int, **more: Any) -> dict[str, Any]:
    """A record of two events."""
    content = [{"type": "thinking", "thinking": f"thought {own}"}, {"type": "text", "text": f"text {own}"}]
    message = {"role": "assistant", "content": content}
    return agent_record(own, parent, message, timestamp=f"2026-03-01T10:{minute:02}:00Z", **more)


MAIN = [NOTE, *(said(f"a{n}", None, n) for n in range(6)), NOTE, NOTE]
AGENT = [NOTE, *(said(f"b{n}", None, 20 + n, isSidechain=True) for n in range(6)), NOTE]


@pytest.fixture
def worker(database: Path) -> Iterator[sw.StorageWorker]:
    with sw.StorageWorker(database, stores=[STORE]) as worker:
        yield worker


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """The log of a session and that of its sub-agent, whose name sorts before it."""
    folder = tmp_path / "logs"
    folder.mkdir()
    return write_lines(folder, "main.jsonl", MAIN), write_lines(folder, "agent.jsonl", AGENT)


def import_here(client: sw.Client, *paths: Path) -> Imported:
    """Import files of one session in this process."""
    found = [each for each in formats.transcripts(*map(str, paths)) if isinstance(each, Transcript)]
    assert [each.session for each in found] == [SESSION]
    return import_transcript(client, found[0])


def values(client: sw.Client) -> list[Any]:
    return [value for _, value in import_checks.stored_records(client, SESSION)]


def count_events(client: sw.Client) -> int:
    return int(client.query("select count(*) from conversation_events").scalar())


def is_same(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether two lists hold the same values, each as often."""
    return sorted(map(canonical, found)) == sorted(map(canonical, wanted))


def test_files_of_one_session_are_one_piece_of_work(
    worker: sw.StorageWorker, client: sw.Client, files: tuple[Path, Path]
) -> None:
    summary = import_paths(worker.address, [files[1], files[0]], processes=2)
    assert (summary.problem_count, summary.failures, summary.total.sessions) == (0, [], 1)
    assert values(client) == MAIN + AGENT
    expected = import_checks.expected_of(list(files))
    assert import_checks.verify(client, expected, Recorder()).differences == []
    assert expected[SESSION].records == len(MAIN) + len(AGENT)
    before = count_events(client)
    again = import_paths(worker.address, [files[0].parent], processes=2)
    assert (again.total.known, again.total.added, count_events(client)) == (1, 0, before)


@pytest.mark.parametrize("runs", [[(0,), (0, 1)], [(1,), (0, 1)], [(0,), (1,)], [(1,), (0,)], [(0, 1), (1,)]])
def test_files_that_come_one_after_the_other_lose_and_double_nothing(
    client: sw.Client, files: tuple[Path, Path], runs: list[tuple[int, ...]]
) -> None:
    for run in runs:
        done = import_here(client, *(files[each] for each in run))
        assert (done.problems, done.failure) == ([], None)
    assert is_same(values(client), MAIN + AGENT)
    before = count_events(client)
    for run in runs:
        assert import_here(client, *(files[each] for each in run)).added == 0
    assert count_events(client) == before


def test_a_resumed_log_that_begins_with_a_copy_adds_what_is_new(
    client: sw.Client, files: tuple[Path, Path]
) -> None:
    import_here(client, files[0])
    resumed = write_lines(files[0].parent, "resumed.jsonl", [*MAIN, said("c0", "a5", 40), NOTE])
    done = import_here(client, *files[:1], resumed)
    assert (done.problems, done.added) == ([], 3)
    assert values(client) == [*MAIN, said("c0", "a5", 40), NOTE]


def test_the_same_id_with_other_content_in_another_file_is_told_with_its_place(
    client: sw.Client, files: tuple[Path, Path]
) -> None:
    other = said("a1", None, 30, more="x")
    write_lines(files[1].parent, files[1].name, [AGENT[1], other, AGENT[2]])
    done = import_here(client, *files)
    assert [(each.path, each.line) for each in done.problems] == [(str(files[1]), 2)]
    assert values(client) == [*MAIN, *AGENT[1:3]]
    apart = import_here(client, files[1])
    assert [(each.path, each.line) for each in apart.problems] == [(str(files[1]), 2)]
    assert "record a1 was refused" in apart.problems[0].reason
    assert values(client) == [*MAIN, *AGENT[1:3]]


def test_a_record_that_was_broken_off_is_whole_again_behind_another_file(
    client: sw.Client, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, left = client.call, 5

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise sw.StorageCorruptError("no more")
        return call(*arguments, **options)

    monkeypatch.setattr(client, "call", failing)
    assert import_here(client, files[0]).added == 3
    monkeypatch.undo()
    import_here(client, files[1])
    import_here(client, *files)
    assert is_same(values(client), MAIN + AGENT)


def test_each_export_is_imported_alone(
    worker: sw.StorageWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = {"kind": "storage-worker-export", "version": 1}
    lines = [head, {"kind": "room", "id": "a"}, {"kind": "room", "id": "b"}, {"kind": "end", "events": 0}]
    for name in ("a", "b"):
        write_lines(tmp_path, f"{name}.export", lines)
        write_lines(tmp_path, f"{name}.jsonl", [[{"role": "user", "content": name}]])
        write_lines(tmp_path, f"{name}.log", MAIN)
    together: list[list[str]] = []

    def run(_: Any, transcripts: Iterator[Transcript]) -> list[Imported]:
        together.append([Path(each.path).name for each in transcripts])
        return []

    monkeypatch.setattr("storage_worker.import_fleet._Fleet.run", run)
    import_paths(worker.address, [tmp_path])
    assert together == [
        ["a.export", "a.export"],
        ["a.jsonl"],
        ["b.export", "b.export"],
        ["b.jsonl", "a.log"],
    ]


def status(client: sw.Client) -> str:
    found = client.call(conversation.session(SESSION))
    assert found is not None
    return found.status


def test_an_import_that_adds_nothing_leaves_a_live_session_alone(
    client: sw.Client, files: tuple[Path, Path]
) -> None:
    import_here(client, files[0])
    assert status(client) == "idle"
    client.call(conversation.set_session_status(SESSION, "running"))
    before = (client.call(conversation.session(SESSION)), count_events(client))
    # It is being written to: what has come says nothing yet.
    with files[0].open("a") as log:
        log.write('\n{"type": "user", "uu')
    done = import_here(client, files[0])
    assert (done.added, done.problem_count) == (0, 1)
    assert (client.call(conversation.session(SESSION)), count_events(client)) == before
    import_here(client, files[0].with_name("agent.jsonl"))
    assert status(client) == "idle"


def test_an_import_that_was_broken_off_behind_its_last_record_ends_the_session(
    client: sw.Client, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage_worker.import_session._SessionImport._finish", lambda *_: None)
    import_here(client, files[0])
    assert status(client) == "running"
    monkeypatch.undo()
    assert import_here(client, files[0]).added == 0
    assert status(client) == "idle"


def test_output_that_came_live_keeps_its_status(client: sw.Client, files: tuple[Path, Path]) -> None:
    import_here(client, files[0])
    live = {"type": "message_started", "event_id": "live"}
    client.call(conversation.ingest_output(SESSION, live, room="agent-logs"))
    assert import_here(client, files[0]).added == 0
    assert status(client) == "running"


def test_the_first_and_the_last_time_that_there_are_can_be_stored(client: sw.Client, tmp_path: Path) -> None:
    times = ("9999-12-31T23:59:59.999999Z", "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+12:00")
    lines = [said(f"t{n}", None, 0) | {"timestamp": each} for n, each in enumerate(times)]
    assert import_here(client, write_lines(tmp_path, "a.jsonl", lines)).problems == []
    created = [each.created_ms for each in client.call(conversation.events(SESSION)).items]
    # Two events of each record, and the end of the import, which has the time of the last one.
    assert created == [TIME_MS_MAX] * 4 + [0] * 3


@pytest.mark.parametrize("created_ms", [TIME_MS_MAX + 1, 2**63 - 1, 1_700_000_000_000_000, -1])
def test_times_beyond_the_year_9999_are_refused(client: sw.Client, created_ms: int) -> None:
    client.call(conversation.create_room("room"))
    calls: list[Call[Any]] = [
        conversation.ingest_user("s", "hello", room="room", created_ms=created_ms),
        conversation.ingest_output("s", {"type": "reasoning"}, room="room", created_ms=created_ms),
        conversation.append("s", "note", room="room", created_ms=created_ms),
        conversation.upsert_session("s", "room", activity_ms=created_ms),
    ]
    for call in calls:
        with pytest.raises(sw.InvalidRequestError):
            client.call(call)
    assert client.call(conversation.session("s")) is None


def test_a_clock_that_goes_ahead_is_none_of_an_error(client: sw.Client) -> None:
    client.call(conversation.create_room("room"))
    client.call(conversation.ingest_user("s", "hello", room="room", created_ms=TIME_MS_MAX))
    found = client.call(conversation.session("s"))
    assert found is not None
    assert found.activity_ms == TIME_MS_MAX

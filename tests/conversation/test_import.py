"""Transcripts in the store: all of them, once, in order, whoever is killed meanwhile."""

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import import_checks
import storage_worker as sw
from measuring import Recorder
from storage_worker import conversation, import_fleet, import_session
from storage_worker.conversation import payload_client
from storage_worker.conversation.records import PayloadRef
from storage_worker.conversation_client import STORE
from storage_worker.import_fleet import Summary, import_paths, input_bytes
from storage_worker.import_session import Imported, import_transcript
from tests.transcripts import samples
from tests.transcripts.originals import sessions_in
from tests.transcripts.shared import SHARED, needs_shared

PROCESSES = 2


@pytest.fixture
def worker(database: Path) -> Iterator[sw.StorageWorker]:
    limits = sw.Limits(crash_loop_deaths=1_000, restart_backoff_ms_max=50)
    with sw.StorageWorker(database, stores=[STORE], limits=limits) as worker:
        yield worker


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "transcripts"
    found.mkdir()
    return found


def import_here(client: sw.Client, path: Path) -> list[Imported]:
    """Import in this process."""
    return [import_transcript(client, each) for each in sessions_in(path)]


def count_events(client: sw.Client) -> int:
    return int(client.query("select count(*) from conversation_events").scalar())


def verified(client: sw.Client, path: Path) -> int:
    """How many sessions the store holds, each with its source's count and digest."""
    verdict = import_checks.verify(client, import_checks.expected_of([path]), Recorder())
    assert not verdict.differences
    return verdict.sessions


def test_every_format_by_many_processes_and_again(
    worker: sw.StorageWorker, client: sw.Client, folder: Path
) -> None:
    samples.write_all(folder)
    first = import_paths(worker.address, [folder], processes=PROCESSES)
    assert (first.problem_count, first.failures, first.total.known) == (0, [], 0)
    assert first.total.events == first.total.added
    assert {name: count.sessions for name, count in first.formats.items()} == {
        "agent-log": 1,
        "chat": 3,
        "dialogue": 2,
        "linked": 2,
        "room-log": 1,
        "tree": 2,
    }
    assert verified(client, folder) == 11
    before = count_events(client)
    progress: list[int] = []
    again = import_paths(worker.address, [folder], processes=PROCESSES, on_progress=progress.append)
    assert (again.total.known, again.total.added) == (11, 0)
    assert count_events(client) == before
    assert sum(progress) == input_bytes([folder]) > again.total.size_bytes > 0
    assert {each.status for each in import_checks.sessions_of(client)} == {"idle"}


def test_a_session_that_went_on_after_its_import_is_known_event_by_event(
    client: sw.Client, folder: Path
) -> None:
    path = samples.write_lines(folder, "a.jsonl", samples.AGENT_LOG)
    [first] = import_here(client, path)
    client.call(conversation.admit("session-1", "and now?", room="agent-logs"))
    before = count_events(client)
    [again] = import_here(client, path)
    assert (again.known, again.added, again.events) == (1, 0, first.events)
    assert count_events(client) == before


def test_a_log_that_has_grown_adds_what_is_new(client: sw.Client, folder: Path) -> None:
    path = samples.write_lines(folder, "a.jsonl", samples.AGENT_LOG[:-1])
    import_here(client, path)
    samples.write_lines(folder, "a.jsonl", samples.AGENT_LOG)
    [grown] = import_here(client, path)
    assert grown.added == 1
    assert verified(client, path) == 1


def test_unreadable_lines_are_told_and_all_else_is_stored(client: sw.Client, folder: Path) -> None:
    lines = [json.dumps(record) for record in samples.AGENT_LOG]
    lines[3] = lines[3][:40]
    path = samples.write(folder, "a.jsonl", "\n".join(lines))
    [first], [again] = import_here(client, path), import_here(client, path)
    for done in (first, again):
        assert [(each.path, each.line) for each in done.problems] == [(str(path), 4)]
    assert verified(client, path) == 1
    assert (first.added, again.added) == (first.events, 0)


def test_an_import_with_less_problems_than_before_is_a_later_one(
    client: sw.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = samples.write_lines(folder, "a.jsonl", samples.AGENT_LOG)
    put = payload_client.put

    def refuse(*_: Any, **__: Any) -> Any:
        raise sw.RequestTooLargeError("too large")

    monkeypatch.setattr(payload_client, "put", refuse)
    [first] = import_here(client, path)
    monkeypatch.setattr(payload_client, "put", put)
    [again], [known] = import_here(client, path), import_here(client, path)
    assert first.problem_count > 0
    assert (again.failure, again.problems, again.known, known.known) == (None, [], 0, 1)


def test_the_same_id_with_other_content_is_told(client: sw.Client, folder: Path) -> None:
    other = {**samples.AGENT_LOG[1], "message": {"role": "user", "content": "something else"}}
    path = samples.write_lines(folder, "a.jsonl", [samples.AGENT_LOG[1], other, samples.AGENT_LOG[2]])
    [done] = import_here(client, path)
    assert [each.line for each in done.problems] == [2]
    assert "record u1 was there before with other content" in done.problems[0].reason
    texts = [message.text for message in client.call(conversation.messages("session-1")).items]
    assert texts == ["look at this", "see"]


def test_large_bodies_and_images_stand_in_the_payload_store(client: sw.Client, folder: Path) -> None:
    import_here(client, samples.write_lines(folder, "a.jsonl", samples.AGENT_LOG))
    bodies = {
        (each.event.type, each.event.body.content_type): payload_client.read(client, each.event.body)
        for each in import_checks.events_of(client, "session-1")
        if isinstance(each.event.body, PayloadRef)
    }
    assert bodies["attachment", "image/png"] == samples.PNG
    assert bodies["tool_execution_finished", "text/plain"].decode() == samples.LARGE
    assert json.loads(bodies["transcript_record", "application/json"])["toolUseResult"] == {
        "file": samples.LARGE
    }
    assert not list(payload_client.check(client))


@pytest.mark.parametrize("depth", [20, 100, 700, 960])
def test_deep_records_are_kept_or_told(client: sw.Client, folder: Path, depth: int) -> None:
    record = {**samples.AGENT_LOG[1], "more": "@deep", "big": -(2**90)}
    tools = {"type": "tool_use", "id": "t", "name": "n", "input": {"a": "@deep", "b": "\x00" * 20_000}}
    other = samples.agent_record("u2", "u1", {"role": "assistant", "content": [tools]})
    path = samples.write_lines(folder, "a.jsonl", [record, other, samples.AGENT_LOG[4]])
    path.write_text(path.read_text().replace('"@deep"', "[" * depth + "]" * depth))
    [done] = import_here(client, path)
    assert done.records + len(done.problems) >= 3
    assert done.problems == [] or depth > 500
    if not done.problems:
        assert verified(client, path) == 1


def test_names_as_long_as_they_may_be(client: sw.Client, folder: Path) -> None:
    name = "\x01" * 512
    call = {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
    message = {"role": "assistant", "name": name, "content": None, "tool_calls": [call], "x": "y" * 3_900}
    path = samples.write_lines(folder, "a.jsonl", [[message, {"role": name * 2, "content": "\x00"}]])
    [done] = import_here(client, path)
    assert done.problems == []
    assert verified(client, path) == 1


def test_repeated_tool_calls_are_told_apart(client: sw.Client, folder: Path) -> None:
    import_here(client, samples.write_lines(folder, "a.jsonl", [samples.CHAT]))
    [session] = import_checks.sessions_of(client)
    found = client.call(conversation.observations(session.id)).items
    assert [(each.kind, each.tool_call_id, each.invocation) for each in found] == [
        ("tool_call", "c1", 1),
        ("tool_call", "c2", 1),
        ("tool_result", "c1", 1),
        ("tool_result", "c2", 1),
        ("tool_call", "c1", 2),
        ("tool_result", "c1", 2),
    ]


def test_a_rooms_log_has_its_order_and_its_threads(client: sw.Client, folder: Path) -> None:
    samples.write_all(folder)
    import_here(client, folder / "x.ascii.txt")
    [session] = import_checks.sessions_of(client)
    found = client.call(conversation.messages(room=session.room, page_rows=1_000)).items
    assert [message.number for message in found] == list(range(1, len(samples.LOG_LINES) + 1))
    roots = {message.number: message.thread_root for message in found if message.thread_root is not None}
    assert roots == {3: 2, 5: 2}
    events = list(import_checks.events_of(client, session.id))
    assert events[4].event.attributes["answers"] == ["1", "2"]


def test_what_ends_an_import_early_leaves_its_counts(
    client: sw.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = samples.write_lines(folder, "a.jsonl", [samples.CHAT])
    [transcript] = sessions_in(path)
    call, left = client.call, 6

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise sw.StorageCorruptError("no more")
        return call(*arguments, **options)

    monkeypatch.setattr(client, "call", failing)
    done = import_transcript(client, transcript)
    assert done.failure == "StorageCorruptError: no more"
    assert done.events == done.added > 0
    assert done.records > 0


def test_a_full_disk_is_waited_for(client: sw.Client, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    call, left = client.call, 3

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 2:
            raise sw.StorageFullError("full", retry_after=7.0)
        if left >= 0:
            raise sw.StorageFullError("full")
        return call(*arguments, **options)

    monkeypatch.setattr(client, "call", failing)
    monkeypatch.setattr("storage_worker.import_session.time.sleep", pauses.append)
    [transcript] = sessions_in(samples.write_lines(folder, "a.jsonl", [samples.CHAT]))
    done = import_transcript(client, transcript)
    assert (done.failure, done.errors) == (None, {"storage_full": 3})
    assert pauses[0] == 7.0
    assert len(pauses) == 3
    assert all(pause > 0 for pause in pauses)


def test_a_disk_that_stays_full_is_waited_for_once(
    client: sw.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def failing(*_: Any, **__: Any) -> Any:
        raise sw.StorageFullError("full", retry_after=import_session.PATIENCE_SECONDS_MAX / 2 + sum(pauses))

    monkeypatch.setattr(client, "call", failing)
    monkeypatch.setattr("storage_worker.import_session.time.sleep", pauses.append)
    patience = import_session.Patience()
    sessions = sessions_in(samples.write_lines(folder, "a.jsonl", [samples.CHAT] * 3))
    waited = []
    for transcript in sessions:
        assert import_transcript(client, transcript, patience).failure == "StorageFullError: full"
        waited.append(len(pauses))
    assert waited == [1, 1, 1]


def test_a_session_that_another_import_stores_meanwhile_stands_in_the_store(
    client: sw.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = samples.write_lines(folder, "a.jsonl", [samples.CHAT])
    [first] = import_here(client, path)
    monkeypatch.setattr(import_session._SessionImport, "_last_event", lambda _: None)
    [late] = import_here(client, path)
    assert (first.sessions, first.known) == (1, 0)
    assert (late.sessions, late.known, late.added, late.events) == (1, 1, 0, first.events)


def test_a_session_that_ends_processes_ends_no_others(folder: Path) -> None:
    samples.write_lines(folder, "a.jsonl", [samples.CHAT] * 4)
    share = sessions_in(folder)
    fleet = import_fleet._Fleet("nowhere", 1)
    assert fleet._put_back(share) == []
    assert list(fleet._again) == [[transcript] for transcript in share]
    for _ in range(import_fleet.ATTEMPTS_MAX - 1):
        assert fleet._put_back(share[:1]) == []
    [given_up] = fleet._put_back(share[:1])
    assert (given_up.session, given_up.failure) == (
        share[0].session,
        "5 processes ended while they imported it",
    )
    assert fleet._put_back(share[1:2]) == []


def importers() -> list[psutil.Process]:
    """This process's import clients that live."""
    found = []
    for child in psutil.Process().children():
        try:
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue  # it has just ended
    return found


def import_under_fire(worker: sw.StorageWorker, path: Path, seed: int, kills: int) -> Summary:
    """Import while workers and importers are killed, at moments that the seed decides."""
    dice = random.Random(seed)
    left = kills

    def on_progress(_: int) -> None:
        nonlocal left
        if left and dice.random() < 0.5:
            left -= 1
            living = importers()
            if worker.pid is not None and (not living or dice.random() < 0.5):
                os.kill(worker.pid, signal.SIGKILL)
            elif living:
                dice.choice(living).kill()

    summary = import_paths(worker.address, [path], processes=PROCESSES, on_progress=on_progress)
    assert left == 0, f"seed {seed}"
    assert not summary.failures, f"seed {seed}"
    return summary


def test_killed_workers_and_importers_lose_and_double_nothing(
    worker: sw.StorageWorker, client: sw.Client, folder: Path
) -> None:
    seed = random.randrange(2**32)
    for number in range(12):
        chat = [{"role": "user", "content": f"{number}/{place} {'x' * 200}"} for place in range(60)]
        samples.write_lines(folder, f"{number}.jsonl", [chat])
    import_under_fire(worker, folder, seed, 4)
    assert verified(client, folder) == 12, f"seed {seed}"
    assert [each.event.sequence for each in import_checks.events_of(client, first_session(client))] == list(
        range(1, 62)
    )
    before = count_events(client)
    assert import_paths(worker.address, [folder], processes=1).total.known == 12
    assert count_events(client) == before


def first_session(client: sw.Client) -> str:
    return next(iter(import_checks.sessions_of(client))).id


def test_an_import_that_is_broken_off_goes_on_where_it_was(
    worker: sw.StorageWorker, client: sw.Client, folder: Path
) -> None:
    for number in range(6):
        chat = [{"role": "user", "content": f"{number}/{place} {'x' * 2_000}"} for place in range(10)]
        samples.write_lines(folder, f"{number}.jsonl", [chat])

    def interrupt(done_bytes: int) -> None:
        # Less than that is what stands around a session.
        if done_bytes > 2_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_paths(worker.address, [folder], processes=PROCESSES, on_progress=interrupt)
    assert not importers()
    before = count_events(client)
    assert before > 0
    summary = import_paths(worker.address, [folder], processes=PROCESSES)
    assert summary.total.known >= 1
    assert verified(client, folder) == 6
    assert count_events(client) == 6 * 11


def test_an_import_suits_the_machine() -> None:
    assert [import_fleet.processes_for(cores) for cores in (None, 1, 2, 5, 64)] == [2, 2, 2, 5, 8]


def test_a_target_that_cannot_be_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(sw.DatabasePathError):
        import_paths(tmp_path, [tmp_path])


@needs_shared
def test_real_sessions_under_fire(worker: sw.StorageWorker, client: sw.Client) -> None:
    seed = random.randrange(2**32)
    path = SHARED / "tau-bench" / "MockAirlineDomainEnv-few_shot.jsonl"
    import_under_fire(worker, path, seed, 3)
    assert verified(client, path) == 19, f"seed {seed}"

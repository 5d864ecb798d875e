"""An export holds everything: what is imported from it tells the same as the store it came from."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

import import_checks
import storage_worker as sw
from storage_worker import conversation
from storage_worker.conversation import payload_client
from storage_worker.conversation_client import STORE
from storage_worker.exporting import all_pages, export_lines, write_lines, write_out
from storage_worker.import_export_file import import_export
from storage_worker.import_session import Imported, import_transcript
from storage_worker.transcripts import exports, formats
from storage_worker.transcripts.records import Problem, Transcript
from tests.transcripts import samples
from tests.transcripts.originals import sessions_in

MakeClient = Callable[[str], sw.Client]


@pytest.fixture
def make_client(tmp_path: Path) -> Iterator[MakeClient]:
    """Clients of new databases."""
    with ExitStack() as stack:

        def make(name: str) -> sw.Client:
            worker = stack.enter_context(sw.StorageWorker(tmp_path / f"{name}.db", stores=[STORE]))
            return stack.enter_context(worker.connect())

        yield make


def write_export(client: sw.Client, path: Path, session: str | None = None, room: str | None = None) -> Path:
    path.write_bytes(b"".join(export_lines(client, session, room)))
    return path


def restore_all(client: sw.Client, path: Path) -> Imported:
    """What became of all rooms of an export together."""
    whole = Imported(format="", session="", size_bytes=0, sessions=0, problems=[])
    for found in formats.transcripts(str(path)):
        if isinstance(found, Problem):
            whole.problems.append(found)
        elif isinstance(found, Transcript):
            done = import_export(client, found)
            whole.problems += done.problems
            whole.added += done.added
            whole.sessions += done.sessions
            whole.known += done.known
            whole.failure = whole.failure or done.failure
    return whole


def fill(client: sw.Client) -> None:
    """Everything that a host can leave in the store."""
    call = client.call
    call(conversation.restore_room("empty", "Nothing is in it", created_ms=11, archived_ms=12))
    call(conversation.restore_session("silent", "empty", status="waiting", created_ms=13, activity_ms=14))
    call(conversation.create_room("old", "An old room"))
    call(conversation.upsert_session("child", "old", parent="plain", runtime_binding="bound"))
    admitted = call(
        conversation.admit("plain", "hi", actor="ann", client_transaction_id="t1", turn_id="turn")
    )
    root = admitted.message_number
    call(conversation.admit("plain", "two", actor="ann", thread_root=root, attributes={"a": [1, None]}))
    event = {"type": "assistant_message", "event_id": "e1", "text": "x", "role": "helper", "more": {"b": 2}}
    sender = conversation.Sender("Bot", "agent", "key")
    provenance = conversation.Provenance("p", "q", "r")
    call(conversation.ingest_output("plain", event, sender=sender, thread_root=root, provenance=provenance))
    call(conversation.ingest_output("plain", {"type": "assistant_message", "text": "no id"}))
    call(conversation.ingest_output("plain", {"type": "of my own", "event_id": "e2", "body": [1, "two"]}))
    with pytest.raises(conversation.OutputIdentityCollisionError):
        call(conversation.ingest_output("plain", {**event, "text": "y"}))
    call(
        conversation.append(
            "child", "note", {"n": 1}, "a body", aggregate_kind="thing", aggregate_id="7", version=3
        )
    )
    call(conversation.append("child", "note", {"n": 1}, "a body", client_transaction_id="t2"))
    call(conversation.append("only events", "note", created_ms=17))
    large = payload_client.put(client, b"\x00\xff" * 700_000, "application/x-thing", "audit")
    call(conversation.append("child", "file", body=large, event_id="f", preview="a file"))
    text = conversation.prepare_text(client, samples.LARGE)
    call(conversation.admit("child", text.body, room="old", preview=text.preview))
    # The same bytes are two payloads: one for each retention class and each content type.
    for kind, kept in (("text/plain", "short"), ("text/plain", "long"), ("text/x", "short")):
        ref = payload_client.put(client, "y" * 20_000, kind, kept)
        call(conversation.append("child", "file", body=ref, event_id=f"{kind} {kept}"))
    call(conversation.set_session_status("child", "waiting"))
    call(conversation.archive_room("old"))


def default_room(client: sw.Client) -> str:
    return next(room.id for room in all_pages(client, conversation.rooms) if room.is_default)


def digests(client: sw.Client) -> dict[str, str]:
    sessions = {each.event.session for each in import_checks.events_of(client)}
    return {session: import_checks.content_digest(client, session) for session in sessions}


def standing(client: sw.Client) -> dict[str, tuple[Any, ...]]:
    """All that is said of each room, session and navigation; the numbers of sessions are those of a store."""
    rooms = {f"room {each.id}": each for each in all_pages(client, conversation.rooms)}
    sessions = {f"session {each.id}": each for each in import_checks.sessions_of(client)}
    shown = all_pages(client, lambda after: conversation.navigation(None, after))
    found = {**rooms, **sessions, **{f"navigation {each.session}": each for each in shown}}
    return {name: msgspec.structs.astuple(each)[1:] for name, each in found.items()}


def places(client: sw.Client) -> dict[tuple[str, int], tuple[int, int | None] | None]:
    """Where each event and its message stand in their session and their room."""
    return {
        (each.event.session, each.event.sequence): None
        if each.message is None
        else (each.message.number, each.message.thread_root)
        for each in import_checks.events_of(client)
    }


def test_everything_comes_back_and_only_once(make_client: MakeClient, tmp_path: Path) -> None:
    source, target = make_client("source"), make_client("target")
    fill(source)
    path = write_export(source, tmp_path / "e.jsonl")
    done = restore_all(target, path)
    assert (done.problems, done.added) == ([], len(list(import_checks.events_of(source))))
    count = len(list(import_checks.sessions_of(source)))
    assert (done.sessions, done.known) == (count, 0)
    assert digests(target) == digests(source)
    assert places(target) == places(source)
    assert standing(target) == standing(source)
    assert not list(payload_client.check(target))
    again = restore_all(target, path)
    assert (again.problems, again.added) == ([], 0)
    assert (again.sessions, again.known) == (count, count)
    assert digests(target) == digests(source)
    assert standing(target) == standing(source)
    repeat = target.call(conversation.append("child", "note", {"n": 1}, "a body", client_transaction_id="t2"))
    assert not repeat.created


def test_source_records_can_be_built_from_what_was_exported(make_client: MakeClient, tmp_path: Path) -> None:
    source, target = make_client("source"), make_client("target")
    folder = tmp_path / "transcripts"
    folder.mkdir()
    samples.write_all(folder)
    transcripts = sessions_in(folder)
    assert {each.format for each in transcripts} == {
        "agent-log", "chat", "dialogue", "linked", "room-log", "tree",
    }  # fmt: skip
    for transcript in transcripts:
        import_transcript(source, transcript)
    assert restore_all(target, write_export(source, tmp_path / "e.jsonl")).problems == []
    assert digests(target) == digests(source)
    for transcript in transcripts:
        wanted, found = (
            import_checks.stored_tally(client, transcript.session) for client in (source, target)
        )
        assert (found.records, found.digest) == (wanted.records, wanted.digest)
        assert found.records > 0
        # A second import finds all of it there.
        assert import_transcript(target, transcript).known == 1


def test_one_session_or_one_room(make_client: MakeClient, tmp_path: Path) -> None:
    source, target = make_client("source"), make_client("target")
    fill(source)
    path = write_export(source, tmp_path / "s.jsonl", session="plain")
    kinds = [json.loads(line)["kind"] for line in path.read_bytes().splitlines()]
    assert kinds[:3] == ["storage-worker-export", "room", "session"]
    assert restore_all(target, path).problems == []
    assert digests(target) == {"plain": import_checks.content_digest(source, "plain")}
    assert set(standing(target)) == {f"room {default_room(source)}", "session plain", "navigation plain"}
    path = write_export(source, tmp_path / "r.jsonl", room="old")
    assert len(sessions_in(path)) == 1
    sessions = {json.loads(line).get("session") for line in path.read_bytes().splitlines()}
    assert sessions == {None, "child"}


def test_what_is_not_there(make_client: MakeClient) -> None:
    client = make_client("source")
    with pytest.raises(conversation.SessionNotFoundError):
        next(export_lines(client, session="nothing"))
    with pytest.raises(conversation.RoomNotFoundError):
        next(export_lines(client, room="nothing"))
    with pytest.raises(sw.InvalidRequestError):
        next(export_lines(client, session="a", room="b"))
    assert [json.loads(line) for line in export_lines(client)][1:] == [{"kind": "end", "events": 0}]


def test_damaged_lines_are_told_and_all_else_is_stored(make_client: MakeClient, tmp_path: Path) -> None:
    source, target = make_client("source"), make_client("target")
    fill(source)
    lines = write_export(source, tmp_path / "e.jsonl").read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in lines]
    parts = [number for number, kind in enumerate(kinds) if kind == "payload"]
    broken = kinds.index("event")
    lines[broken] = lines[broken][:50] + b"\n"
    del lines[parts[1]]
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"".join(lines))
    done = restore_all(target, path)
    reasons = " / ".join(each.reason for each in done.problems)
    assert [each.line for each in done.problems if "no line of an export" in each.reason] == [broken + 1]
    assert "is missing" in reasons
    assert "does not stand before its event" in reasons
    assert f"{kinds.count('event') - 1} events instead of {kinds.count('event')}" in reasons
    assert done.added == kinds.count("event") - 2


def test_an_export_that_is_cut_off_or_goes_on_behind_its_end_is_told(
    make_client: MakeClient, tmp_path: Path
) -> None:
    source, target = make_client("source"), make_client("target")
    fill(source)
    whole = write_export(source, tmp_path / "e.jsonl").read_bytes()
    path = tmp_path / "other.jsonl"
    without_end = b"".join(whole.splitlines(keepends=True)[:-1])
    for written, line, reason in (
        (without_end, 0, "cut off"),
        (whole + whole, whole.count(b"\n") + 1, "has ended"),
        (whole.replace(b'"kind":"room"', b'"kind":"rom"', 1), 2, "'rom'"),
    ):
        path.write_bytes(written)
        problem = restore_all(target, path).problems[0]
        assert (problem.line, reason in problem.reason) == (line, True)
    assert digests(target) == digests(source)


def test_what_stands_behind_a_cut_payload_and_without_its_room_is_stored(
    make_client: MakeClient, tmp_path: Path
) -> None:
    source, target = make_client("source"), make_client("target")
    source.call(conversation.create_room("r"))
    large = payload_client.put(source, bytes(range(256)) * 5_000)
    source.call(conversation.append("s", "note", body="before", event_id="1", room="r"))
    source.call(conversation.append("s", "file", body=large, event_id="2", room="r"))
    source.call(conversation.ingest_output("t", {"type": "assistant_message", "text": "x"}, room="r"))
    lines = write_export(source, tmp_path / "e.jsonl").read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in lines]
    last_part = max(place for place, kind in enumerate(kinds) if kind == "payload")
    room = kinds.index("room")
    lines[room] = lines[room][:20] + b"\n"
    # The event stands where the rest of its body should.
    del lines[last_part]
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"".join(lines))
    done = restore_all(target, path)
    assert len(done.problems) == 3
    assert done.failure is None
    kept = [each.event for each in import_checks.events_of(target)]
    assert [(event.session, event.room) for event in kept] == [("s", "r"), ("t", "r")]


def test_what_is_there_is_left_as_it_is(make_client: MakeClient, tmp_path: Path) -> None:
    source, target = make_client("source"), make_client("target")
    fill(source)
    path = write_export(source, tmp_path / "e.jsonl")
    assert restore_all(target, path).problems == []
    target.call(conversation.upsert_session("child", status="running", runtime_binding="a live one"))
    target.call(conversation.admit("plain", "and now?"))
    before = standing(target)
    again = restore_all(target, path)
    assert (again.problems, again.added) == ([], 0)
    assert standing(target) == before


def test_events_without_ids_are_known_by_their_place(make_client: MakeClient, tmp_path: Path) -> None:
    source, target = make_client("source"), make_client("target")
    for _ in range(3):
        source.call(conversation.append("s", "note", {"n": 1}, "the same", created_ms=5))
    path = write_export(source, tmp_path / "e.jsonl")
    assert restore_all(target, path).added == 3
    # An export of a copy is another file, so that no request key is known any more.
    assert restore_all(target, write_export(target, tmp_path / "copy.jsonl")).added == 0
    assert len(list(import_checks.events_of(target))) == 3


def test_a_session_that_is_given_something_was_not_there_before(
    make_client: MakeClient, tmp_path: Path
) -> None:
    source, target = make_client("source"), make_client("target")
    source.call(conversation.admit("s", "one"))
    assert restore_all(target, write_export(source, tmp_path / "one.jsonl")).added == 1
    source.call(conversation.admit("s", "two"))
    done = restore_all(target, write_export(source, tmp_path / "two.jsonl"))
    assert (done.added, done.sessions, done.known) == (1, 1, 0)


def test_a_later_version_is_refused(make_client: MakeClient, tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(exports.encode(exports.Head(version=2)) + b"\n")
    [problem] = restore_all(make_client("target"), path).problems
    assert "an export of version 2" in problem.reason


def test_rooms_are_pieces_of_work_and_those_that_share_a_session_are_one(
    make_client: MakeClient, tmp_path: Path
) -> None:
    source, target = make_client("source"), make_client("target")
    for room in ("a", "b", "c"):
        source.call(conversation.create_room(room))
    # The same bytes twice: events of other rooms need each of the two.
    one, two = (payload_client.put(source, samples.LARGE, None, kept) for kept in ("one", "two"))
    events = (("1", "a", one), ("2", "c", two), ("1", "b", one), ("2", "c", one), ("3", "a", two))
    for number, (session, room, body) in enumerate(events):
        source.call(
            conversation.append(session, "note", {"n": number}, body, room=room, event_id=str(number))
        )
    path = write_export(source, tmp_path / "e.jsonl")
    assert len(sessions_in(path)) == 2
    assert restore_all(target, path).problems == []
    assert places(target) == places(source)
    assert digests(target) == digests(source)


class TestWhereAnExportGoes:
    @pytest.fixture
    def database(self, tmp_path: Path) -> Path:
        path = tmp_path / "app.db"
        path.write_bytes(b"a database")
        (tmp_path / "app.db-sw" / "payloads").mkdir(parents=True)
        return path

    def test_a_file_is_whole_and_private(self, database: Path, tmp_path: Path) -> None:
        target = tmp_path / "e.jsonl"
        target.write_bytes(b"old")
        target.chmod(0o644)
        write_lines([b"1\n", b"2\n"], str(target), str(database))
        assert target.read_bytes() == b"1\n2\n"
        assert target.stat().st_mode & 0o777 == 0o600

    def test_a_failure_leaves_what_was_there(self, database: Path, tmp_path: Path) -> None:
        target = tmp_path / "e.jsonl"
        target.write_bytes(b"old")
        before = sorted(tmp_path.iterdir())

        def failing() -> Iterator[bytes]:
            yield b"new"
            raise sw.WorkerUnavailableError("gone")

        with pytest.raises(sw.WorkerUnavailableError, match="gone"):
            write_lines(failing(), str(target), str(database))
        assert target.read_bytes() == b"old"
        assert sorted(tmp_path.iterdir()) == before

    def test_the_database_and_what_is_its_own_are_refused(self, database: Path, tmp_path: Path) -> None:
        (tmp_path / "linked.db").symlink_to(database)
        (tmp_path / "hard").hardlink_to(database)
        (tmp_path / "side").symlink_to(tmp_path / "app.db-sw")
        (tmp_path / "app.db-wal").touch()
        names = ("app.db", "linked.db", "hard", "app.db-wal", "app.db-sw/new", "side/payloads/new")
        for name in names:
            with pytest.raises(sw.DatabasePathError, match="belongs to the database"):
                write_lines([b"x"], str(tmp_path / name), str(tmp_path / "linked.db"))
        assert database.read_bytes() == b"a database"
        assert not list((tmp_path / "app.db-sw" / "payloads").iterdir())

    def test_what_cannot_be_written_is_a_typed_error(self, database: Path, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for name, reason in (("no/where", "No such file"), ("pipe", "no regular file"), (".", "no regular")):
            with pytest.raises(sw.DatabasePathError, match=reason):
                write_lines([b"x"], str(tmp_path / name), str(database))

    def test_a_full_disk_is_a_typed_error(self) -> None:
        with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(sw.StorageFullError):
            write_out([b"x"], full)

    def test_a_link_stays_one(self, database: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("e.jsonl")
        write_lines([b"x"], str(tmp_path / "link"), str(database))
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "e.jsonl").read_bytes() == b"x"

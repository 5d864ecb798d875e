"""An export holds everything: what is imported from it tells the same as the store it came from."""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

import import_checks
import storage_worker as sw
from storage_worker import conversation
from storage_worker.conversation import payload_client
from storage_worker.conversation.bounds import LOOK_AHEAD_COUNT_MAX
from storage_worker.conversation.session_restores import Made, Shown
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


def unexpected(problem: Problem) -> None:
    raise AssertionError(str(problem))


def lines_of(client: sw.Client, session: str | None = None, room: str | None = None) -> Iterator[bytes]:
    """An export of which nothing is missing."""
    return export_lines(client, session, room, on_problem=unexpected)


def write_export(client: sw.Client, path: Path, session: str | None = None, room: str | None = None) -> Path:
    path.write_bytes(b"".join(lines_of(client, session, room)))
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
    call(conversation.restore_session("silent", "empty", created_ms=13))
    silent = Made(None, "silent", "waiting", None, "it was told", 14, 13)
    call(conversation.restore_session_state("silent", "empty", 0, Shown("thinking", "shown", 15), silent))
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
    fill_threads(client, root)
    fill_outputs(client)
    # Known as its own: the session is told by its name.
    call(conversation.append("child", "note", event_id="own", aggregate_id="child"))
    call(conversation.set_session_status("child", "waiting"))
    call(conversation.archive_room("old"))


def fill_threads(client: sw.Client, root: int) -> None:
    """Threads that begin in another session, with a message of no id, with one to come, and with none."""
    call = client.call
    call(conversation.admit("answers", "to another session", thread_root=root, event_id="a1"))
    without_id = call(conversation.ingest_output("answers", {"type": "assistant_message", "text": "I"}))
    assert without_id.message_number is not None
    call(conversation.admit("plain", "to what has no id", thread_root=without_id.message_number))
    early = call(conversation.admit("plain", "before its root", thread_root=without_id.message_number + 3))
    call(conversation.admit("answers", "the root behind it", event_id="a2"))
    assert early.message_number == without_id.message_number + 2
    output = {"type": "assistant_message", "text": "no such root"}
    call(conversation.ingest_output("answers", output, thread_root=9_999))


def fill_outputs(client: sw.Client) -> None:
    """Statistics of the store's and of the producer's own, and outputs that name their room and that do not."""

    def ingest(session: str, type_: str, room: str | None = None, **fields: Any) -> None:
        client.call(conversation.ingest_output(session, {"type": type_, **fields}, room=room))

    told: list[dict[str, Any]] = [
        {},
        {"statistics": {"mine": 1}},
        {"statistics": None},
        {"aborted": True},
    ]
    for index, own in enumerate(told):
        metrics = {"output_tokens": 10 + index, "output_tokens_basis": "counted"}
        ingest("plain", "tool_execution_finished", event_id=f"t{index}", output="x", metrics=metrics)
        ingest("plain", "compaction_end", event_id=f"c{index}", index=index, **own)
    ingest("plain", "compaction_end")
    ingest("roomless", "assistant_message", text="whose is it?", event_id="r1")
    ingest("roomless", "message_started")
    # The room of the session is that which is named first: what came before stays where it was.
    ingest("late", "assistant_message", text="before", event_id="l1")
    ingest("late", "reasoning", text="before")
    ingest("late", "message_started", room="old", event_id="l2")
    ingest("late", "assistant_message", text="behind", event_id="l3")
    ingest("late", "session_error", error="its session knows nothing of it")


def default_room(client: sw.Client) -> str:
    return next(room.id for room in all_pages(client, conversation.rooms) if room.is_default)


def digests(client: sw.Client) -> dict[str, str]:
    sessions = {each.event.session for each in import_checks.events_of(client)}
    return {session: import_checks.content_digest(client, session) for session in sessions}


def states(client: sw.Client) -> dict[str, tuple[Any, ...]]:
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
    count = len(list(all_pages(source, lambda after: conversation.navigation(None, after))))
    assert (done.sessions, done.known) == (count, 0)
    assert digests(target) == digests(source)
    assert places(target) == places(source)
    assert states(target) == states(source)
    assert not list(payload_client.check(target))
    again = restore_all(target, path)
    assert (again.problems, again.added) == ([], 0)
    assert (again.sessions, again.known) == (count, count)
    assert digests(target) == digests(source)
    assert states(target) == states(source)
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
    path = write_export(source, tmp_path / "s.jsonl", session="child")
    kinds = [json.loads(line)["kind"] for line in path.read_bytes().splitlines()]
    assert kinds[:3] == ["storage-worker-export", "room", "session"]
    assert restore_all(target, path).problems == []
    assert digests(target) == {"child": import_checks.content_digest(source, "child")}
    assert set(states(target)) == {"room old", "session child", "navigation child"}
    path = write_export(source, tmp_path / "r.jsonl", room="old")
    assert len(sessions_in(path)) == 1
    sessions = {json.loads(line).get("session") for line in path.read_bytes().splitlines()}
    assert sessions == {None, "child", "late"}


def told_by(lines: Iterable[bytes]) -> list[Any]:
    """What an export says in any store: all but the place of each event in the log."""
    told = [json.loads(line) for line in lines]
    for line in told:
        line.pop("stream_id", None)
    return told


def test_an_export_of_a_copy_is_the_same(make_client: MakeClient, tmp_path: Path) -> None:
    source, target, third = (make_client(name) for name in ("source", "target", "third"))
    fill(source)
    path = write_export(source, tmp_path / "e.jsonl")
    assert restore_all(target, path).problems == []
    copy = write_export(target, tmp_path / "copy.jsonl")
    wanted = told_by(path.read_bytes().splitlines())
    assert told_by(copy.read_bytes().splitlines()) == wanted
    assert restore_all(third, copy).problems == []
    assert told_by(lines_of(third)) == wanted


def test_an_export_adds_nothing_to_its_own_store(make_client: MakeClient, tmp_path: Path) -> None:
    source = make_client("source")
    fill(source)
    before = list(lines_of(source))
    names = [each.session for each in all_pages(source, lambda after: conversation.navigation(None, after))]
    rooms = [each.id for each in all_pages(source, conversation.rooms)]
    chosen: list[dict[str, str]] = [
        {},
        *({"session": name} for name in names),
        *({"room": name} for name in rooms),
    ]
    assert len(chosen) > 9
    for options in chosen:
        done = restore_all(source, write_export(source, tmp_path / "e.jsonl", **options))
        assert (done.problems, done.failure, done.added, done.known) == ([], None, 0, done.sessions), options
        assert list(lines_of(source)) == before, options


def test_parts_make_the_whole(make_client: MakeClient, tmp_path: Path) -> None:
    """Sessions one by one lack what stands in others until that comes."""
    source, target = make_client("source"), make_client("target")
    fill(source)
    names = [each.session for each in all_pages(source, lambda after: conversation.navigation(None, after))]
    problems = []
    for name in names:
        done = restore_all(target, write_export(source, tmp_path / f"{name}.jsonl", session=name))
        assert (done.failure, done.known) == (None, 0)
        problems += done.problems
    assert {each.reason.rpartition("; ")[2] for each in problems} == {"the message is, without its thread"}
    roots = {place: (said and said[1]) for place, said in places(target).items()}
    assert sum(root is not None for root in roots.values()) < sum(
        said is not None and said[1] is not None for said in places(source).values()
    )
    done = restore_all(target, write_export(source, tmp_path / "all.jsonl"))
    assert (done.problems, done.added) == ([], 0)
    assert digests(target) == digests(source)
    assert {name: each for name, each in states(target).items() if not name.startswith("room")} == {
        name: each for name, each in states(source).items() if not name.startswith("room")
    }


def test_rooms_one_by_one_make_the_whole(make_client: MakeClient, tmp_path: Path) -> None:
    """A session that has events in several rooms gets them in another order."""
    source, target = make_client("source"), make_client("target")
    fill(source)
    for room in sorted(all_pages(source, conversation.rooms), key=lambda room: room.is_default):
        path = write_export(source, tmp_path / "room.jsonl", room=room.id)
        for added in (True, False):
            done = restore_all(target, path)
            assert (done.problems, bool(done.added)) == ([], added and room.id != "empty")
    done = restore_all(target, write_export(source, tmp_path / "all.jsonl"))
    assert (done.problems, done.added) == ([], 0)
    assert states(target) == states(source)
    sequences = {
        (each.event.event_id, each.event.type): each.event.sequence
        for each in import_checks.events_of(target, "late")
    }
    assert sequences["l2", "message_started"] < sequences["l1", "assistant_message"]


def test_a_thread_that_begins_elsewhere_is_told_with_its_place(
    make_client: MakeClient, tmp_path: Path
) -> None:
    source, target = make_client("source"), make_client("target")
    root = source.call(conversation.admit("other", "root", event_id="r"))
    source.call(conversation.admit("s", "reply", thread_root=root.message_number, event_id="e"))
    path = write_export(source, tmp_path / "s.jsonl", session="s")
    kinds = [json.loads(line)["kind"] for line in path.read_bytes().splitlines()]
    for _ in range(2):
        done = restore_all(target, path)
        assert [(each.path, each.line) for each in done.problems] == [(str(path), kinds.index("event") + 1)]
        assert root.message_id in done.problems[0].reason
    [stored] = target.call(conversation.messages("s")).items
    assert (stored.text, stored.thread_root) == ("reply", None)
    assert restore_all(target, write_export(source, tmp_path / "all.jsonl")).problems == []
    [stored] = target.call(conversation.messages("s")).items
    assert stored.thread_root == 2


def test_a_number_that_no_message_had_begins_no_other_ones_thread(
    make_client: MakeClient, tmp_path: Path
) -> None:
    source, target = make_client("source"), make_client("target")
    source.call(conversation.create_room("r"))
    source.call(conversation.admit("s", "reply", room="r", thread_root=2, event_id="e"))
    target.call(conversation.create_room("r"))
    for number in range(3):
        target.call(conversation.admit("there", str(number), room="r"))
    [problem] = restore_all(target, write_export(source, tmp_path / "e.jsonl")).problems
    assert "begins with the message 2 of the room 'r', which is not stored" in problem.reason


class TestALiveStore:
    """What happens in a store while it is exported."""

    @staticmethod
    def before(client: sw.Client) -> None:
        client.call(conversation.create_room("r"))
        client.call(conversation.admit("s", "hello", room="r", event_id="1"))
        client.call(conversation.ingest_output("t", {"type": "message_started", "event_id": "2"}))
        client.call(conversation.append("u", "note", event_id="3", created_ms=17))

    @staticmethod
    def meanwhile(client: sw.Client) -> None:
        named = {"type": "assistant_message", "text": "hi", "event_id": "4"}
        client.call(conversation.ingest_output("s", named, room="r", runtime_binding="bound"))
        client.call(conversation.ingest_output("s", {"type": "message_finished", "event_id": "5"}))
        client.call(conversation.ingest_output("t", {**named, "event_id": "6"}, room="r"))
        client.call(conversation.upsert_session("t", parent="s", status="waiting"))
        client.call(conversation.append("new", "note", event_id="7"))
        client.call(conversation.set_session_status("u", "closed"))

    @pytest.mark.parametrize("lines_first", range(1, 12))
    def test_a_later_export_makes_it_whole(
        self, make_client: MakeClient, tmp_path: Path, lines_first: int
    ) -> None:
        source, target = make_client("source"), make_client("target")
        self.before(source)
        lines = lines_of(source)
        first = [next(lines) for _ in range(lines_first)]
        self.meanwhile(source)
        path = tmp_path / "live.jsonl"
        path.write_bytes(b"".join([*first, *lines]))
        assert restore_all(target, path).problems == []
        later = write_export(source, tmp_path / "later.jsonl")
        assert restore_all(target, later).problems == []
        assert digests(target) == digests(source)
        assert states(target) == states(source)
        again = restore_all(target, path)
        assert (again.problems, again.added, again.known) == ([], 0, again.sessions)
        assert states(target) == states(source)

    def test_what_came_before_its_events_were_read_is_in_it(
        self, make_client: MakeClient, tmp_path: Path
    ) -> None:
        source, target = make_client("source"), make_client("target")
        self.before(source)
        lines = lines_of(source)
        first = [next(lines) for _ in range(2)]
        self.meanwhile(source)
        path = tmp_path / "live.jsonl"
        path.write_bytes(b"".join([*first, *lines]))
        assert restore_all(target, path).problems == []
        assert digests(target) == digests(source)
        assert states(target) == states(source)


def broken_off(client: sw.Client, monkeypatch: pytest.MonkeyPatch, calls: int, *, is_done: bool) -> None:
    """Have a client fail from a call on, after that call was done or before it."""
    call, left = client.call, calls

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and is_done:
            call(*arguments, **options)
        if left <= 0:
            raise sw.StorageCorruptError("no more")
        return call(*arguments, **options)

    monkeypatch.setattr(client, "call", failing)


@pytest.mark.parametrize("is_done", [False, True])
def test_an_import_that_was_broken_off_anywhere_goes_on(
    make_client: MakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    source = make_client("source")
    source.call(conversation.admit("s", "hello", event_id="1"))
    for text in ("x", "x"):
        output = {"type": "assistant_message", "text": text}
        source.call(conversation.ingest_output("s", output, created_ms=5))
    source.call(conversation.upsert_session("s", status="waiting", runtime_binding="bound"))
    path = write_export(source, tmp_path / "e.jsonl")
    for calls in itertools.count(1):
        target = make_client(f"target {calls}")
        with monkeypatch.context() as patched:
            broken_off(target, patched, calls, is_done=is_done)
            is_whole = restore_all(target, path).failure is None
        assert restore_all(target, path).failure is None
        assert states(target) == states(source)
        assert digests(target) == digests(source)
        if is_whole:
            assert calls > 5
            return


def test_the_same_collision_is_told_once_in_a_copy(make_client: MakeClient, tmp_path: Path) -> None:
    source, target = make_client("source"), make_client("target")
    # Other events first: in the copy each has another place in the log.
    target.call(conversation.append("there", "note"))
    event = {"type": "assistant_message", "event_id": "e", "text": "x"}
    source.call(conversation.ingest_output("s", event))
    found = []
    for client in (source, target, target):
        with pytest.raises(conversation.OutputIdentityCollisionError) as caught:
            client.call(conversation.ingest_output("s", {**event, "text": "y"}))
        found.append(caught.value.details["diagnostic_stream_id"])
        done = restore_all(target, write_export(source, tmp_path / "e.jsonl"))
        assert done.problems == []
    assert found == [2, 3, 3]
    assert len(list(import_checks.events_of(target, "s"))) == 2


def test_a_diagnostic_that_others_wrote_takes_no_key(make_client: MakeClient, tmp_path: Path) -> None:
    source, target = make_client("source"), make_client("target")
    event = {"type": "assistant_message", "event_id": "e", "text": "x"}
    source.call(conversation.ingest_output("s", event))
    with pytest.raises(conversation.OutputIdentityCollisionError):
        source.call(conversation.ingest_output("s", {**event, "text": "y"}))
    lines = list(told_by(lines_of(source)))
    [key] = [line["idempotency_key"] for line in lines if line.get("type") == "assistant_message"]
    path = tmp_path / "e.jsonl"
    with path.open("w") as file:
        for line in lines:
            if line.get("type") == "output_identity_collision":
                line["idempotency_key"] = key
            elif line.get("type") == "assistant_message":
                continue
            file.write(json.dumps({**line, "stream_id": 1}) + "\n")
    restore_all(target, path)
    assert not target.call(conversation.ingest_output("s", event)).duplicate


def test_a_session_that_only_output_without_a_room_named(make_client: MakeClient, tmp_path: Path) -> None:
    source, target = make_client("source"), make_client("target")
    source.call(conversation.ingest_output("s", {"type": "message_started"}))
    path = write_export(source, tmp_path / "e.jsonl", session="s")
    assert restore_all(target, path).problems == []
    assert states(target) == states(source)
    assert target.call(conversation.session("s")) is None
    assert {name for name in states(target) if name.startswith("navigation")} == {"navigation s"}


def test_an_event_behind_others_that_came_between_is_known(make_client: MakeClient, tmp_path: Path) -> None:
    source, target = make_client("source"), make_client("target")
    source.call(conversation.append("s", "note", event_id="1"))
    source.call(conversation.append("s", "note", body="no id"))
    restore_all(target, write_export(source, tmp_path / "1.jsonl"))
    target.call(conversation.append("s", "note", body="a live one"))
    source.call(conversation.append("s", "note", body="another"))
    path = write_export(source, tmp_path / "2.jsonl")
    assert (restore_all(target, path).added, restore_all(target, path).added) == (1, 0)
    bodies = [each.event.body for each in import_checks.events_of(target, "s")]
    assert bodies == [None, "no id", "a live one", "another"]


class TestADamagedPayload:
    @pytest.fixture(params=itertools.product((60_000, 600_000), ("gone", "cut", "other bytes")))
    def source(self, make_client: MakeClient, tmp_path: Path, request: pytest.FixtureRequest) -> sw.Client:
        """A store with a sound payload of two parts and a damaged one, packed or not, each of two events."""
        size, damage = request.param
        source = make_client("source")
        refs = [payload_client.put(source, os.urandom(each)) for each in (600_000, size)]
        for number, ref in enumerate(refs * 2):
            source.call(conversation.append("s", "file", body=ref, event_id=f"{number}"))
        source.call(conversation.append("s", "note", body="no id"))
        [file] = (tmp_path / "source.db-sw" / "payloads").rglob(f"*{refs[1].sha256}*")
        if damage == "gone":
            file.unlink()
        elif damage == "cut":
            os.truncate(file, 1_000)
        else:
            with file.open("r+b") as opened:
                opened.seek(-1_000, os.SEEK_END)
                opened.write(b"damage")
        return source

    def test_everything_else_is_exported_and_imported(
        self, source: sw.Client, make_client: MakeClient, tmp_path: Path
    ) -> None:
        problems: list[Problem] = []
        path = tmp_path / "e.jsonl"
        path.write_bytes(b"".join(export_lines(source, on_problem=problems.append)))
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        [missing] = [number for number, line in enumerate(lines) if line["kind"] == "missing"]
        assert [each.line for each in problems] == [missing + 1]
        assert lines[missing]["sha256"] in problems[0].reason
        assert "event 2 of the session 's'" in problems[0].reason
        target = make_client("target")
        for added in (3, 0):
            done = restore_all(target, path)
            events = [number for number, line in enumerate(lines, 1) if line.get("event_id") in ("1", "3")]
            assert [each.line for each in done.problems] == events
            assert all(lines[missing]["sha256"] in each.reason for each in done.problems)
            assert all("missing when this was exported" in each.reason for each in done.problems)
            assert (done.failure, done.added) == (None, added)
        # Its own events are there: nothing of them is missing.
        own = restore_all(source, path)
        assert (own.problems, own.failure, own.added) == ([], None, 0)


def test_what_is_not_there(make_client: MakeClient) -> None:
    client = make_client("source")
    with pytest.raises(conversation.SessionNotFoundError):
        next(lines_of(client, session="nothing"))
    with pytest.raises(conversation.RoomNotFoundError):
        next(lines_of(client, room="nothing"))
    with pytest.raises(sw.InvalidRequestError):
        next(lines_of(client, session="a", room="b"))
    assert [json.loads(line) for line in lines_of(client)][1:] == [{"kind": "end", "events": 0}]


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
    assert "nothing of it stands before its event" in reasons
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
    before = states(target)
    again = restore_all(target, path)
    assert (again.problems, again.added) == ([], 0)
    assert states(target) == before


def test_events_without_ids_are_known_by_their_place(make_client: MakeClient, tmp_path: Path) -> None:
    source, target = make_client("source"), make_client("target")
    for _ in range(3):
        source.call(conversation.append("s", "note", {"n": 1}, "the same", created_ms=5))
    path = write_export(source, tmp_path / "e.jsonl")
    assert restore_all(target, path).added == 3
    # An export of a copy is another file, so that no request key is known any more.
    assert restore_all(target, write_export(target, tmp_path / "copy.jsonl")).added == 0
    assert len(list(import_checks.events_of(target))) == 3


def test_equal_events_around_one_that_was_there_before_are_two(
    make_client: MakeClient, tmp_path: Path
) -> None:
    source, copy = make_client("source"), make_client("copy")
    for event_id in (None, "known", None):
        source.call(conversation.append("s", "note", event_id=event_id, created_ms=5))
    copy.call(conversation.append("s", "note", event_id="known", created_ms=5))
    path = write_export(source, tmp_path / "export.jsonl")
    for added in (2, 0):
        assert restore_all(copy, path).added == added
    kept = copy.call(conversation.events("s")).items
    assert [event.event_id for event in kept] == ["known", None, None]


def test_an_event_of_another_room_behind_many_is_known(make_client: MakeClient, tmp_path: Path) -> None:
    source = make_client("source")
    for room in ("a", "b"):
        source.call(conversation.create_room(room))
    for number in range(LOOK_AHEAD_COUNT_MAX + 1):
        source.call(conversation.append("s", "x", {"n": number}, room="a"))
    source.call(conversation.append("s", "note", room="b"))
    path = write_export(source, tmp_path / "e.jsonl", room="b")
    assert [restore_all(source, path).added for _ in range(2)] == [0, 0]


def test_a_session_that_an_edited_export_moves_stays_in_its_room(
    make_client: MakeClient, tmp_path: Path
) -> None:
    source, target = make_client("source"), make_client("target")
    for client in (source, target):
        client.call(conversation.create_room("a"))
        client.call(conversation.create_room("b"))
    source.call(conversation.admit("s", "x", room="a"))
    path = write_export(source, tmp_path / "e.jsonl")
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    [state] = [number for number, line in enumerate(lines) if line["kind"] == "session_state"]
    lines[state]["room"] = "b"
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    [problem] = restore_all(target, path).problems
    assert (problem.line, "cannot leave" in problem.reason) == (state + 1, True)
    found = target.call(conversation.session("s"))
    assert found is not None
    assert (found.room, found.activity_ms) == ("a", next(import_checks.events_of(target)).event.created_ms)


def test_a_session_that_is_given_something_was_not_there_before(
    make_client: MakeClient, tmp_path: Path
) -> None:
    source, target = make_client("source"), make_client("target")
    source.call(conversation.admit("s", "one"))
    assert restore_all(target, write_export(source, tmp_path / "one.jsonl")).added == 1
    source.call(conversation.admit("s", "two"))
    done = restore_all(target, write_export(source, tmp_path / "two.jsonl"))
    assert (done.added, done.sessions, done.known) == (1, 1, 0)


@pytest.mark.parametrize("keyed", [True, False])
def test_what_is_nested_as_deep_as_it_may_be(make_client: MakeClient, tmp_path: Path, keyed: bool) -> None:
    source, target = make_client("source"), make_client("target")
    deep: Any = "bottom"
    for _ in range(62):
        deep = {"a": deep} if keyed else [deep]
    source.call(conversation.ingest_output("s", {"type": "t", "event_id": "1", "more": deep}))
    source.call(conversation.ingest_output("s", {"type": "t", "event_id": "2", "body": deep}))
    source.call(conversation.append("s", "note", {"more": deep}))
    source.call(conversation.ingest_user("s", "x", attributes={"more": deep}))
    path = write_export(source, tmp_path / "e.jsonl")
    assert restore_all(target, path).problems == []
    assert digests(target) == digests(source)
    assert restore_all(source, path).added == 0


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

    def test_what_is_not_whole_takes_no_files_place(self, database: Path, tmp_path: Path) -> None:
        target, beside = tmp_path / "e.jsonl", tmp_path / "e.jsonl.incomplete"
        for line in (b"first", b"second", b"third"):
            written = write_lines([line], str(target), str(database), is_whole=lambda: False)
            assert Path(written) == (target if line == b"first" else beside)
        assert (target.read_bytes(), beside.read_bytes()) == (b"first", b"third")
        assert write_lines([b"whole"], str(target), str(database), is_whole=lambda: True) == str(target)
        assert target.read_bytes() == b"whole"

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

"""Every format on a small sample with the traps of the real data: what is read, and that nothing is lost."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from storage_worker.conversation.vocabulary import USER_MESSAGE
from storage_worker.transcripts import files, formats
from storage_worker.transcripts.agent_logs import time_of
from storage_worker.transcripts.formats import Skipped
from storage_worker.transcripts.records import (
    ATTACHMENT,
    RECORD,
    BinaryBody,
    PlannedEvent,
    Problem,
    Record,
    events_of,
)

from . import originals, samples
from .originals import problems_in, rebuilt, records_in, sessions_in
from .samples import write, write_lines


def planned(records: list[Record]) -> list[PlannedEvent]:
    return [event for record in records for event in events_of(record)]


class TestChats:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write(tmp_path, "a.json", json.dumps(samples.SESSIONS))

    def test_nothing_is_lost(self, path: Path) -> None:
        found = [originals.chat(rebuilt(records_in(each))) for each in sessions_in(path)]
        assert found == samples.SESSIONS

    def test_equal_sessions_stay_two(self, path: Path) -> None:
        assert len({each.session for each in sessions_in(path)}) == 3

    def test_tool_calls_are_told_apart_although_their_ids_repeat(self, path: Path) -> None:
        events = planned(records_in(sessions_in(path)[0]))
        calls = [event for event in events if event.type == "tool_call"]
        assert [event.fields["tool_call_id"] for event in calls] == ["c1", "c2", "c1"]
        assert len({event.id for event in events}) == len(events)
        assert {event.body for event in calls} == {'{"a":  1}'}

    def test_null_and_empty_contents_are_messages_and_differ(self, path: Path) -> None:
        records = records_in(sessions_in(path)[0])
        null, empty = (next(iter(events_of(record))) for record in (records[3], records[6]))
        assert (null.type, null.body, empty.type, empty.body) == (
            "assistant_message",
            None,
            "assistant_message",
            "",
        )

    def test_a_bare_list_of_messages_is_one_session(self, tmp_path: Path) -> None:
        [session] = sessions_in(write(tmp_path, "a.json", json.dumps(samples.CHAT)))
        assert rebuilt(records_in(session)) == samples.CHAT

    def test_a_list_of_messages_in_each_line(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path, "a.jsonl", [samples.CHAT, samples.CHAT[:2]])
        assert [rebuilt(records_in(each)) for each in sessions_in(path)] == [samples.CHAT, samples.CHAT[:2]]

    def test_a_message_that_is_none_is_told_and_the_others_are_read(self, tmp_path: Path) -> None:
        chat = [{"role": "user", "content": "a"}, {"content": "no role"}, 7, {"role": "user", "content": "b"}]
        path = write_lines(
            tmp_path, "a.jsonl", [{"messages": [{"role": "user", "content": "x"}]}, {"messages": chat}]
        )
        assert [(each.line, each.reason) for each in problems_in(path)] == [
            (2, "message 1 is no object with a role"),
            (2, "message 2 is no object with a role"),
        ]
        assert len(records_in(sessions_in(path)[1])) == 3

    def test_a_line_that_is_cut_is_told_with_its_place(self, tmp_path: Path) -> None:
        good = json.dumps({"messages": samples.CHAT})
        path = write(tmp_path, "a.jsonl", f"{good}\n{good[:-9]}\n\n{good}\n")
        [problem] = problems_in(path)
        assert (problem.path, problem.line) == (str(path), 2)
        assert [len(records_in(each)) for each in sessions_in(path)] == [10, 0, 10]


def test_blank_lines_are_none_whatever_ends_them(tmp_path: Path) -> None:
    line = json.dumps({"messages": samples.CHAT})
    path = write(tmp_path, "a.jsonl", f"{line}\r\n\r\n \n{line}\r\n")
    assert (problems_in(path), len(sessions_in(path))) == ([], 2)


def test_what_stands_between_the_sessions_of_a_list_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, "a.json", json.dumps([*samples.SESSIONS, "lost", 7], indent=0))
    assert [each.reason for each in problems_in(path)] == ["no object or list"]
    assert len(sessions_in(path)) == len(samples.SESSIONS)


def test_dialogues(tmp_path: Path) -> None:
    sessions = sessions_in(write_lines(tmp_path, "a.jsonl", samples.DIALOGUES))
    assert [originals.dialogue(rebuilt(records_in(each))) for each in sessions] == samples.DIALOGUES
    said = [(event.type, event.body) for event in planned(records_in(sessions[0]))][1:]
    assert said == [
        ("user_message", "hi"),
        ("assistant_message", "a list:\n- user: not a turn\n"),
        ("tool_execution_finished", "{}"),
        ("assistant_message", "None"),
    ]


class TestTrees:
    def test_nothing_is_lost(self, tmp_path: Path) -> None:
        sessions = sessions_in(write_lines(tmp_path, "a.jsonl", samples.TREES))
        assert [originals.tree(rebuilt(records_in(each))) for each in sessions] == samples.TREES

    def test_replies_follow_their_parents_and_name_them(self, tmp_path: Path) -> None:
        [session, _] = sessions_in(write_lines(tmp_path, "a.jsonl", samples.TREES))
        events = planned(records_in(session))[1:]
        assert [(event.body, event.fields.get("answers")) for event in events] == [
            ("a", None),
            ("b", ["0"]),
            ("c", ["1"]),
            ("d", ["0"]),
        ]

    def test_a_deep_tree(self, tmp_path: Path) -> None:
        text = '{"message_id": "x", "text": "x", "role": "r", "replies": []}'
        for _ in range(300):
            text = '{"message_id": "x", "text": "x", "role": "r", "replies": [' + text + "]}"
        [session] = sessions_in(write(tmp_path, "a.jsonl", text))
        records = records_in(session)
        assert len(records) == 301
        assert originals.tree(rebuilt(records)) == json.loads(text)


class TestLinked:
    def test_messages_gather_under_the_first_one(self, tmp_path: Path) -> None:
        sessions = sessions_in(write(tmp_path, "a.json", json.dumps(samples.LINKED)))
        found = [rebuilt(records_in(each)) for each in sessions]
        assert [[message["user_message_id"] for message in each] for each in found] == [
            ["a", "b", "c"],
            ["x"],
        ]
        assert sorted((m for each in found for m in each), key=str) == sorted(samples.LINKED, key=str)
        answers = [event.fields.get("answers") for event in planned(records_in(sessions[0]))]
        assert answers == [None, ["0"], ["1"]]

    def test_a_message_that_is_none_is_told(self, tmp_path: Path) -> None:
        path = write(tmp_path, "a.jsonl", json.dumps(samples.LINKED[0]) + '\n{"text": 1}\n{"broken\n')
        assert [each.line for each in problems_in(path)] == [2, 3]


class TestRoomLogs:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        write(tmp_path, "x.annotation.txt", "\n".join(samples.LINKS) + "\n")
        return write(tmp_path, "x.raw.txt", "".join(f"{line}\n" for line in samples.LOG_LINES))

    def test_nothing_is_lost_and_no_link_shifts(self, path: Path) -> None:
        [session] = sessions_in(path)
        text, links = originals.room_log(rebuilt(records_in(session)))
        assert text == path.read_bytes().decode()
        assert links == sorted(samples.LINKS)

    def test_who_says_what(self, path: Path) -> None:
        records = records_in(sessions_in(path)[0])[:6]
        assert [(record.actor, record.parts[0].role) for record in records] == [
            ("", "system"),
            ("a", "user"),
            ("b", "action"),
            ("", "line"),
            ("c", "user"),
            ("", "line"),
        ]
        assert records[4].parts[0].fields == {"answers": ["1", "2"]}
        assert (records[2].thread, records[4].thread, records[5].thread) == ("1", "1", None)

    def test_other_links_make_another_session(self, path: Path) -> None:
        [before] = sessions_in(path)
        write(path.parent, "x.annotation.txt", "1 2 -\n")
        [after] = sessions_in(path)
        assert before.session != after.session

    def test_links_are_skipped_where_they_are_found_and_told_where_they_are_none(self, path: Path) -> None:
        write(path.parent, "x.annotation.txt", "1 2 -\nx\n" + "1 2 -\n" * 50)
        assert [each.line for each in problems_in(path)] == [2]
        skipped = [each for each in formats.transcripts(str(path.parent)) if isinstance(each, Skipped)]
        assert [Path(each.path).name for each in skipped] == ["x.annotation.txt"]

    def test_a_line_over_the_bound_is_one_line(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "RECORD_BYTES_MAX", 40)
        path.write_text("".join(f"{line}\n" for line in [*samples.LOG_LINES[4:], "x" * 95, "the end"]))
        number = len(samples.LOG_LINES) - 3
        assert [each.line for each in problems_in(path)] == [number]
        assert records_in(sessions_in(path)[0])[-1].id == str(number)

    def test_times_with_dates_only(self, tmp_path: Path) -> None:
        lines = [
            "rust 2018-05-29 === u1 has joined",
            "rust 2018-05-29 [21:20:37] <u1> but I don't know ",
            "rust 2018-05-29 [21:20] <u2> minutes",
            "rust 2018-05-29 === u1 has left",
            "rust 2018-05-29 [29:99] <u2> no time",
            "[21:20] <u1> no date",
        ]
        records = records_in(sessions_in(write(tmp_path, "x.txt", "\n".join(lines)))[0])
        day = 1_527_552_000_000
        seconds = (21 * 60 + 20) * 60
        assert [record.created_ms for record in records] == [
            day,
            day + (seconds + 37) * 1000,
            day + seconds * 1000,
            day + seconds * 1000,
            None,
            None,
        ]

    def test_a_line_that_is_no_text_is_told_and_counted(self, tmp_path: Path) -> None:
        path = tmp_path / "x.txt"
        path.write_bytes(b"[12:18] <a> hi\n" * 20 + b"[12:18] <a> \xff\n" + b"[12:18] <a> hi\n")
        assert [each.line for each in problems_in(path)] == [21]
        assert records_in(sessions_in(path)[0])[-1].id == "21"


class TestAgentLogs:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write_lines(tmp_path, "a.jsonl", samples.AGENT_LOG)

    def test_nothing_is_lost(self, path: Path) -> None:
        [session] = sessions_in(path)
        assert session.session == "session-1"
        assert rebuilt(records_in(session)) == samples.AGENT_LOG

    def test_what_each_part_becomes(self, path: Path) -> None:
        events = [(event.id, event.type) for event in planned(records_in(sessions_in(path)[0])[1:6])]
        assert events == [
            ("u1/0", USER_MESSAGE),
            ("u2/0", USER_MESSAGE),
            ("u2/1", ATTACHMENT),
            ("u3/0", "reasoning"),
            ("u3/1", "assistant_message"),
            ("u3/2", "tool_call"),
            ("u3/3", "tool_call"),
            ("u3/4", "assistant_usage"),
            ("u4/0", RECORD),
            ("u4/1", "tool_execution_finished"),
            ("u4/2", "tool_execution_finished"),
            ("u4/3", ATTACHMENT),
            ("u5/0", RECORD),
        ]

    def test_an_image_is_its_bytes(self, path: Path) -> None:
        images = [
            event.body for event in planned(records_in(sessions_in(path)[0])) if event.type == ATTACHMENT
        ]
        assert images == [BinaryBody(samples.PNG, "image/png")] * 2

    def test_ids_stay_when_the_log_grows(self, path: Path) -> None:
        [session] = sessions_in(path)
        before = [event.id for event in planned(records_in(session))]
        more = samples.agent_record("u6", "u5", {"role": "user", "content": "more"})
        write_lines(path.parent, path.name, [*samples.AGENT_LOG, more, samples.AGENT_LOG[0]])
        [session] = sessions_in(path)
        after = [event.id for event in planned(records_in(session))]
        assert after[: len(before)] == before
        assert len(set(after)) == len(after) == len(before) + 2

    def test_lines_of_two_sessions(self, tmp_path: Path) -> None:
        other = [{**record, "sessionId": "session-2"} for record in samples.AGENT_LOG[1:3]]
        records = [samples.AGENT_LOG[1], other[0], samples.AGENT_LOG[2], other[1]]
        sessions = sessions_in(write_lines(tmp_path, "a.jsonl", records))
        assert [(each.session, rebuilt(records_in(each))) for each in sessions] == [
            ("session-1", [records[0], records[2]]),
            ("session-2", other),
        ]

    def test_a_broken_line_is_told_and_the_others_are_read(self, tmp_path: Path) -> None:
        lines = [json.dumps(record) for record in samples.AGENT_LOG]
        lines[3] = lines[3][:40]
        path = write(tmp_path, "a.jsonl", "\n".join([*lines, "[]", "", '{"type": "user"']))
        assert [each.line for each in problems_in(path)] == [4, 8, 10]
        [session] = sessions_in(path)
        assert rebuilt(records_in(session)) == samples.AGENT_LOG[:3] + samples.AGENT_LOG[4:]

    def test_a_first_line_that_is_broken_hides_nothing(self, tmp_path: Path) -> None:
        lines = [json.dumps(record) for record in samples.AGENT_LOG[1:]]
        path = write(tmp_path, "a.jsonl", "\n".join([lines[0][20:], *lines]))
        assert [each.line for each in problems_in(path)] == [1]
        assert rebuilt(records_in(sessions_in(path)[0])) == samples.AGENT_LOG[1:]

    @pytest.mark.parametrize(
        "content",
        [None, 7, {}, [], [7, None, "x"], [{"type": "text"}], [{"type": "tool_use"}], [{"type": "image"}],
         [{"type": "image", "source": {"type": "base64", "data": "no base64!"}}],
         [{"type": "tool_result", "content": 3}], [{"type": "thinking", "thinking": None}]],
    )  # fmt: skip
    def test_odd_contents_are_kept(self, tmp_path: Path, content: Any) -> None:
        records = [samples.agent_record("u1", None, {"role": "assistant", "content": content})]
        assert rebuilt(records_in(sessions_in(write_lines(tmp_path, "a.jsonl", records))[0])) == records

    @pytest.mark.parametrize(
        ("text", "milliseconds"),
        [
            ("1970-01-01T00:00:01.5Z", 1_500),
            ("1970-01-01T01:00:00+01:00", 0),
            ("1970-01-01T00:00:01", 1_000),
            ("1960-01-01T00:00:01Z", 0),
            ("yesterday", None),
            (12, None),
        ],
    )
    def test_times(self, text: Any, milliseconds: int | None) -> None:
        assert time_of(text) == milliseconds


class TestPaths:
    def test_a_file_of_no_format_is_a_problem_where_it_was_named_and_skipped_in_a_folder(
        self, tmp_path: Path
    ) -> None:
        odd = write(tmp_path, "LICENSE", "do what you like")
        write(tmp_path, "x.txt", "[12:18] <a> hi\n")
        assert [type(each) for each in formats.transcripts(str(odd))] == [Problem]
        found = list(formats.transcripts(str(tmp_path)))
        assert [each.path for each in found if isinstance(each, Skipped)] == [str(odd)]
        assert len(sessions_in(tmp_path)) == 1

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        assert [type(each) for each in formats.transcripts(str(tmp_path / "nothing"))] == [Problem]

    def test_a_name_that_is_no_text(self, tmp_path: Path) -> None:
        path = os.fsencode(tmp_path) + b"/a\xff.txt"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        [problem] = formats.transcripts(str(tmp_path))
        assert isinstance(problem, Problem)
        assert problem.path.endswith("a\\xff.txt")

    def test_a_session_is_known_by_its_content_wherever_it_lies(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            samples.write_all(tmp_path / name)
        one, other = ([each.session for each in sessions_in(tmp_path / name)] for name in ("a", "b"))
        assert one == other
        assert len(set(one)) == len(one)


class TestFiles:
    def test_what_is_no_regular_file_is_never_opened(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        (tmp_path / "dangling").symlink_to("nowhere")
        (tmp_path / "again").symlink_to(tmp_path)
        device = Path(os.devnull)
        for path in (pipe, device):
            assert list(formats.transcripts(str(path))) == [Problem(str(path), 0, "no regular file")]
        found = list(formats.transcripts(str(tmp_path)))
        assert found == [
            Skipped(str(tmp_path / "again"), "a link to a folder"),
            Problem(str(tmp_path / "dangling"), 0, "No such file or directory"),
            Skipped(str(pipe), "no regular file"),
        ]
        assert list(formats.files_of(str(tmp_path / "nothing"))) == [
            Problem(str(tmp_path / "nothing"), 0, "No such file or directory")
        ]

    def test_a_folder_that_cannot_be_read_is_told_and_the_others_are_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("a", "b", "c"):
            (tmp_path / name).mkdir()
            write_lines(tmp_path / name, "x.jsonl", [samples.CHAT])
        scandir = os.scandir

        def refused(path: str) -> Any:
            # Whoever runs the tests may read every folder.
            if path.endswith("b"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return scandir(path)

        monkeypatch.setattr(os, "scandir", refused)
        found = list(formats.files_of(str(tmp_path)))
        assert found == [
            str(tmp_path / "a" / "x.jsonl"),
            str(tmp_path / "c" / "x.jsonl"),
            Problem(str(tmp_path / "b"), 0, "Permission denied"),
        ]

    def test_what_belongs_to_a_database_is_not_looked_into(self, tmp_path: Path) -> None:
        for name in ("app.db-sw", "notes-sw"):
            (tmp_path / name / "payloads").mkdir(parents=True)
            write_lines(tmp_path / name / "payloads", "0123", [samples.CHAT])
        database = write(tmp_path, "app.db", "a database")
        assert list(formats.files_of(str(tmp_path))) == [
            Skipped(str(tmp_path / "app.db-sw"), "the directory of a database"),
            str(database),
            str(tmp_path / "notes-sw" / "payloads" / "0123"),
        ]

    def test_only_what_needs_it_is_hashed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hashed: list[str] = []

        def content_mark(*paths: str) -> str:
            hashed.extend(paths)
            return "mark"

        monkeypatch.setattr(files, "content_mark", content_mark)
        write(tmp_path, "a.bin", "neither this nor that")
        write_lines(tmp_path, "agent.jsonl", samples.AGENT_LOG)
        chats = write_lines(tmp_path, "chats.jsonl", [samples.CHAT, samples.CHAT])
        assert len(sessions_in(tmp_path)) == 3
        assert hashed == [str(chats)]

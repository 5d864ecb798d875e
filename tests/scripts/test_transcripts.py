"""Every transcript format on small samples with the traps of the real data, and the real data's own counts."""

import json
import os
from pathlib import Path

import pytest

import transcripts
from transcripts import Message, TranscriptError, digest, read

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir() and not os.environ.get("CI"), reason="the shared data sets are not beside the project"
)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def one(path: Path) -> transcripts.Conversation:
    [conversation] = read([path]).conversations
    return conversation


class TestSessions:
    def test_a_session_keeps_tool_calls_and_tells_null_from_empty(self, tmp_path: Path) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
        trajectory = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "", "tool_call_id": "c1", "name": "find"},
        ]
        path = write(tmp_path, "a.json", json.dumps([{"task_id": 0, "trial": 0, "traj": trajectory}]))
        user, assistant, tool = one(path).messages
        assert user == Message("user", "", "hello")
        assert json.loads(assistant.details) == {"content": None, "tool_calls": [call]}
        assert (tool.author, tool.text, json.loads(tool.details)) == ("find", "", {"tool_call_id": "c1"})

    def test_equal_tool_call_ids_do_not_merge_sessions(self, tmp_path: Path) -> None:
        session = {"traj": [{"role": "tool", "content": "x", "tool_call_id": "same", "name": "f"}] * 2}
        found = read([write(tmp_path, "a.json", json.dumps([session, session]))]).conversations
        assert [(c.name, len(c.messages)) for c in found] == [("a.json#0", 2), ("a.json#1", 2)]

    def test_a_record_that_is_not_whole_is_named(self, tmp_path: Path) -> None:
        path = write(tmp_path, "a.json", json.dumps([{"traj": [{"content": "no role"}]}]))
        with pytest.raises(TranscriptError, match=r"a\.json: it looks like tau-bench"):
            read([path])


class TestDialogues:
    def test_only_a_role_at_the_start_of_a_line_starts_a_message(self, tmp_path: Path) -> None:
        text = "user: hi\nassistant: a list:\n- user: not a turn\n\ntool: {}"
        path = write(tmp_path, "a.jsonl", json.dumps({"messages_display": text}) + "\n")
        assert [(m.role, m.text) for m in one(path).messages] == [
            ("user", "hi"),
            ("assistant", "a list:\n- user: not a turn\n"),
            ("tool", "{}"),
        ]


class TestTrees:
    def test_replies_follow_their_parents_in_order(self, tmp_path: Path) -> None:
        def node(name: str, *replies: object) -> dict[str, object]:
            return {"message_id": name, "text": name, "role": "prompter", "replies": list(replies)}

        tree = {"message_tree_id": "t", "prompt": node("a", node("b", node("c")), node("d"))}
        conversation = one(write(tmp_path, "a.jsonl", json.dumps(tree) + "\n"))
        assert [m.text for m in conversation.messages] == ["a", "b", "c", "d"]

    def test_a_tree_a_thousand_deep(self, tmp_path: Path) -> None:
        text = '{"message_id": "x", "text": "x", "role": "r", "replies": []}'
        for _ in range(300):
            text = '{"message_id": "x", "text": "x", "role": "r", "replies": [' + text + "]}"
        assert len(one(write(tmp_path, "a.jsonl", text)).messages) == 301

    def test_linked_messages_gather_under_their_root(self, tmp_path: Path) -> None:
        links = [("a", None), ("b", "a"), ("x", None), ("c", "b")]
        rows = [
            {"user_message_id": own, "parent_message_id": parent, "text": own, "role": "prompter"}
            for own, parent in links
        ]
        found = read([write(tmp_path, "a.json", json.dumps(rows))]).conversations
        assert [[m.text for m in c.messages] for c in found] == [["a", "b", "c"], ["x"]]


class TestRoomLogs:
    LINES = (
        "=== a has joined",
        "[12:18] <a> form\x0cfeed, \x85 and \u2028 are no line ends",
        "[12:18]  * b nods",
        "[12:19] <c> ",
    )

    def test_lines_end_at_newlines_only_so_links_do_not_shift(self, tmp_path: Path) -> None:
        path = write(tmp_path, "x.raw.txt", "\n".join(self.LINES) + "\n")
        write(tmp_path, "x.annotation.txt", "1 2 - \n1 3 -\n2 3 -\n")
        messages = one(path).messages
        assert [(m.role, m.author) for m in messages] == [
            ("system", ""),
            ("message", "a"),
            ("action", "b"),
            ("message", "c"),
        ]
        assert messages[1].text == "form\x0cfeed, \x85 and \u2028 are no line ends"
        assert [json.loads(m.details or "{}").get("answers") for m in messages] == [None, None, [1], [1, 2]]

    def test_a_line_with_room_and_date(self, tmp_path: Path) -> None:
        line = "rust 2018-05-29 [21:20:37] <u1> but I don't know "
        [message] = one(write(tmp_path, "x.txt", line)).messages
        assert (message.author, message.text) == ("u1", "but I don't know ")
        assert json.loads(message.details) == {"room": "rust", "date": "2018-05-29", "time": "21:20:37"}

    def test_an_odd_line_is_kept_whole(self, tmp_path: Path) -> None:
        lines = ["[12:18] <a> hi"] * 20 + ["no log line"]
        assert one(write(tmp_path, "x.txt", "\n".join(lines))).messages[-1] == Message(
            "line", "", "no log line"
        )


class TestChatterbot:
    def test_scalars_stay_text(self, tmp_path: Path) -> None:
        pytest.importorskip("yaml")
        text = "categories:\n- x\nconversations:\n- - no\n  - 1.0\n- 'alone'\n"
        found = read([write(tmp_path, "x.yml", text)]).conversations
        assert [[(m.role, m.text) for m in c.messages] for c in found] == [
            [("user", "no"), ("assistant", "1.0")],
            [("user", "alone")],
        ]


class TestPaths:
    def test_a_named_file_of_no_format_is_an_error_and_in_a_folder_is_skipped(self, tmp_path: Path) -> None:
        odd = write(tmp_path, "LICENSE", "do what you like")
        write(tmp_path, "x.txt", "[12:18] <a> hi\n")
        with pytest.raises(TranscriptError, match="LICENSE: no known"):
            read([odd])
        found = read([tmp_path])
        assert (len(found.conversations), [name for name, _ in found.skipped]) == (
            1,
            [f"{tmp_path.name}/LICENSE"],
        )

    def test_what_is_missing_or_empty_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(TranscriptError, match="does not exist"):
            read([tmp_path / "nothing"])
        with pytest.raises(TranscriptError, match="no transcripts found"):
            read([tmp_path])

    def test_bytes_that_are_no_text_are_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(TranscriptError, match="no UTF-8"):
            read([path])

    def test_files_of_one_name_keep_their_conversations_apart(self, tmp_path: Path) -> None:
        paths = []
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
            paths.append(write(tmp_path / folder, "x.txt", "[12:18] <a> hi\n"))
        assert [c.name for c in read(paths).conversations] == ["x.txt", "x.txt (2)"]

    def test_sources_hold_the_whole_file_in_bounded_parts(self, tmp_path: Path) -> None:
        text = "[12:18] <a> hé\n" * 20_000
        found = read([write(tmp_path, "x.txt", text)], sources=True).conversations[-1]
        assert "".join(m.text for m in found.messages) == text
        assert max(len(m.text) for m in found.messages) <= transcripts.SOURCE_PART_CHARS


class TestDigest:
    def test_a_shifted_field_changes_it(self) -> None:
        assert digest([Message("a", "b", "c")]) != digest([Message("ab", "", "c")])
        assert digest([Message("a", "", "x"), Message("a", "", "y")]) != digest(
            [Message("a", "", "y"), Message("a", "", "x")]
        )


@needs_shared
@pytest.mark.parametrize(
    ("path", "conversations", "messages"),
    [
        ("tau-bench/gpt-4o-airline.json", 200, 5_308),
        ("tau-bench/MockAirlineDomainEnv-few_shot.jsonl", 19, 463),
        ("oasst/en_100_tree.jsonl", 100, 1_167),
        ("oasst/realistic_seed_data.json", 74, 444),
        ("irc/rust.0.ascii.txt", 1, 1_200),
        ("irc/2004-11-15_03.raw.txt", 1, 1_250),
    ],
)
def test_the_real_data_is_read_whole(path: str, conversations: int, messages: int) -> None:
    found = read([SHARED / path])
    assert (len(found.conversations), found.message_count) == (conversations, messages)


@needs_shared
def test_reply_links_land_on_the_annotated_lines() -> None:
    [log] = read([SHARED / "irc" / "rust.0.ascii.txt"]).conversations
    assert json.loads(log.messages[1000].details)["answers"] == [998]

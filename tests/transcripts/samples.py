"""A small file of each format, with the traps of the real data."""

import json
from pathlib import Path
from typing import Any

from .originals import encoded

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 100
LARGE = "a long text, é and \U0001f600. " * 2_000


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def write_lines(folder: Path, name: str, records: list[Any]) -> Path:
    return write(folder, name, "".join(json.dumps(record) + "\n" for record in records))


CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"a":  1}'}}
CHAT = [
    {"role": "system", "content": LARGE},
    {"role": "user", "content": "hello", "name": "ann"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "c2"}]},
    {"role": "tool", "content": "", "tool_call_id": "c1", "name": "find"},
    {"role": "tool", "content": "found", "tool_call_id": "c2", "name": "find"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "again", "tool_call_id": "c1", "name": "find"},
    {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": "done \x00\x1b[31m"},
]
SESSIONS = [
    {"task_id": 0, "trial": 1, "reward": 0.0, "info": {"big": 2**70, "deep": {"a": [[[1]]]}}, "traj": CHAT},
    {"task_id": 0, "trial": 1, "reward": 0.0, "info": {}, "traj": CHAT},
    {"task_id": 1, "trial": 1, "traj": []},
]
DIALOGUES = [
    {
        "messages_display": "user: hi\nassistant: a list:\n- user: not a turn\n\ntool: {}\nassistant: None",
        "n": 1,
    },
    {"messages_display": ""},
]


def node(name: str, *replies: object, **more: object) -> dict[str, Any]:
    return {"message_id": name, "text": name, "role": "prompter", "replies": list(replies), **more}


TREES = [
    {
        "message_tree_id": "t",
        "tree_state": "ready",
        "prompt": node("a", node("b", node("c")), node("d", lang="en")),
    },
    {"message_tree_id": "u", "tree_state": "ready", "prompt": node("a")},
]
LINKED = [
    {"user_message_id": own, "parent_message_id": parent, "text": text, "role": role}
    for own, parent, text, role in (
        ("a", None, "one", "prompter"),
        ("b", "a", "two", "assistant"),
        ("x", None, "other", "prompter"),
        ("c", "b", "", "prompter"),
    )
]
LOG_LINES = [
    "=== a has joined",
    "[12:18] <a> form\x0cfeed, \x85 and \u2028 are no line ends",
    "[12:18]  * b nods",
    "",
    "[12:19] <c> ",
    "no line of a log",
    *(f"[12:19] <a> again {number}" for number in range(60)),
]
LINKS = ["1 1 -", "1 2 -", "1 4 -", "2 4 -"]


def agent_record(own: str, parent: str | None, message: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    record = {
        "parentUuid": parent,
        "sessionId": "session-1",
        "uuid": own,
        "timestamp": "2026-01-02T03:04:05.678Z",
        "type": "user" if message is None else message["role"],
        **more,
    }
    return record if message is None else {**record, "message": message}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(PNG)}}
AGENT_LOG: list[dict[str, Any]] = [
    {"type": "summary", "summary": "what it was about", "leafUuid": "u4"},
    agent_record("u1", None, {"role": "user", "content": "look at this"}, cwd="/home/ann"),
    agent_record("u2", "u1", {"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]}),
    agent_record(
        "u3",
        "u2",
        {
            "role": "assistant",
            "model": "m",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I read it."},
                {"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": "/x", "n": 2**80}},
                {"type": "tool_use", "id": "t1", "name": "Read", "input": {}},
            ],
            "usage": {"input_tokens": 3, "output_tokens": 4},
        },
    ),
    agent_record(
        "u4",
        "u3",
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": LARGE, "is_error": True},
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "x"}, IMAGE],
                },
            ],
        },
        toolUseResult={"file": LARGE},
    ),
    agent_record("u5", "u4", None, type="system", content="compacted"),
    {"type": "summary", "summary": "what it was about", "leafUuid": "u4"},
]


def write_all(folder: Path) -> list[Path]:
    """A file of each format in the folder."""
    write(folder, "x.annotation.txt", "\n".join(LINKS) + "\n")
    return [
        write(folder, "sessions.json", json.dumps(SESSIONS, indent=1)),
        write_lines(folder, "dialogues.jsonl", DIALOGUES),
        write_lines(folder, "trees.jsonl", TREES),
        write(folder, "linked.json", json.dumps(LINKED)),
        write(folder, "x.ascii.txt", "".join(f"{line}\n" for line in LOG_LINES)),
        write_lines(folder, "agent.jsonl", AGENT_LOG),
    ]

"""Chat-completions messages with tool calls: a list of them, or sessions that hold one under `messages` or `traj`.

Tool-call ids repeat, also within a session: only a message's place in its session tells it apart.
"""

from collections.abc import Iterator
from typing import Any, Final

from .contents import message_parts
from .files import SourceFile, item_spans, read_values
from .records import RECORD, Part, Problem, Record, Span, Transcript, body_path, name_in, names

NAME: Final = "chat"

_LISTS: Final = ("traj", "messages")
"""The members that hold a session's messages."""


def recognises(source: SourceFile) -> bool:
    """Whether a file's first record is a message, a list of messages or a session with such a list."""
    first = source.first
    if isinstance(first, list):
        return bool(first) and _is_message(first[0])
    if isinstance(first, dict):
        key = _list_of(first)
        return _is_message(first) if key is None else all(map(_is_message, first[key][:1]))
    return False


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and ("content" in value or "tool_calls" in value)
    )


def _list_of(session: dict[str, Any]) -> str | None:
    return next((key for key in _LISTS if isinstance(session.get(key), list)), None)


def sessions(source: SourceFile) -> Iterator[Transcript | Problem]:
    """One session for each record; a file whose records are messages is one session."""
    if isinstance(source.first, dict) and _list_of(source.first) is None:
        found = list(item_spans(source))
        yield from (each for each in found if isinstance(each, Problem))
        yield source.transcript(NAME, [each for each in found if isinstance(each, Span)])
        return
    for place, span in enumerate(item_spans(source)):
        yield span if isinstance(span, Problem) else source.transcript(NAME, [span], place)


def read(transcript: Transcript) -> Iterator[Record | Problem]:
    """The records of a session: what is said of the session itself, then its messages."""
    number = 0
    for line, value in read_values(transcript.path, transcript.spans):
        if isinstance(value, Problem):
            yield value
            continue
        messages = value if isinstance(value, list) else [value]
        if isinstance(value, dict) and (key := _list_of(value)) is not None:
            rest = {name: member for name, member in value.items() if name != key}
            about = {"messages": key, "session": rest}
            yield Record(id="session", line=line, value=about, parts=[Part(type=RECORD)])
            messages = value[key]
        for message in messages:
            yield _record(transcript, str(number), line, message)
            number += 1


def _record(transcript: Transcript, own: str, line: int, message: Any) -> Record | Problem:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return Problem(transcript.path, line, f"message {own} is no object with a role")
    role, content = message["role"], message.get("content")
    if role == "tool":
        fields = names(message, tool_call_id="tool_call_id", name="name")
        path = body_path(content, "content")
        return Record(
            id=own,
            line=line,
            value=message,
            parts=[Part(type="tool_execution_finished", path=path, fields=fields)],
        )
    parts = message_parts(content, ("content",), role, {})
    if isinstance(message.get("reasoning_content"), str):
        parts.insert(0, Part(type="reasoning", path=("reasoning_content",)))
    calls = message.get("tool_calls")
    for place, call in enumerate(calls if isinstance(calls, list) else ()):
        parts += _call(call, place)
    actor = name_in(message.get("name")) or name_in(role) or ""
    return Record(id=own, line=line, value=message, parts=parts, actor=actor)


def _call(call: Any, place: int) -> list[Part]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return []
    path = body_path(function.get("arguments"), "tool_calls", place, "function", "arguments")
    fields = names(call, tool_call_id="id") | names(function, name="name")
    return [Part(type="tool_call", path=path, fields=fields)]

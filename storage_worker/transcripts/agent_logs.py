"""Session logs of coding agents: a JSON record a line, with its id, that of its parent, its session and its time.

A record's message holds a text, or blocks: text, thinking, tool uses, tool results and images. Such a log grows while
its session goes on: records are known by their ids, so that importing it again adds what has come. A session may have
several files: one that was resumed, and those of its sub-agents.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from ..conversation.bounds import NAME_CHARS_MAX, TIME_MS_MAX
from .contents import attachments, message_parts
from .files import LINES_TRIED, SourceFile, add_span, read_lines, value_or_problem
from .records import (
    RECORD,
    FilePart,
    Part,
    Path,
    Problem,
    Record,
    Span,
    Transcript,
    body_path,
    canonical,
    name_in,
    names,
)

NAME: Final = "agent-log"
ROOM: Final = "agent-logs"
TITLE: Final = "Coding-agent sessions"

CONTENT_CHARS: Final = 32
"""How much of the hash of a line tells it from any other, where it has no id."""


class _Head(msgspec.Struct):
    """What of a line says where it belongs; the names are the format's."""

    sessionId: Any = None  # noqa: N815
    uuid: Any = None
    type: Any = None
    timestamp: Any = None


_head: Final = msgspec.json.Decoder(_Head).decode


def recognises(source: SourceFile) -> bool:
    """Whether one of a file's first lines is a record of such a log."""
    if source.layout != "lines":
        return False
    first = (head for _, head in itertools.islice(_lines(source.path), LINES_TRIED))
    return any(name_in(head.sessionId) and name_in(head.uuid) and name_in(head.type) for head in first)


def sessions(source: SourceFile) -> Iterator[Transcript | Problem]:
    """A session for each session id; a line without one belongs to the session of the line before it."""
    spans: dict[str, list[Span]] = {}
    began: dict[str, int] = {}
    current: str | None = None
    early: list[Span] = []
    for span, head in _lines(source.path):
        if isinstance(span, Problem):
            yield span
            continue
        current = name_in(head.sessionId) or current
        if current is None:
            early.append(span)
            continue
        add_span(spans.setdefault(current, early), span)
        early = []
        if current not in began and (at := time_of(head.timestamp)) is not None:
            began[current] = at
    for session, found in spans.items():
        yield Transcript(
            format=NAME,
            path=source.path,
            session=session,
            room=ROOM,
            title=TITLE,
            spans=found,
            began_ms=began.get(session),
        )


def join_files(found: list[Transcript]) -> Transcript:
    """One session of what several files hold of it: the file that began first comes first, whatever was named first."""
    first, *others = sorted(found, key=lambda each: (each.began_ms or 0, each.path))
    return msgspec.structs.replace(first, beside=[FilePart(each.path, each.spans) for each in others])


def _lines(path: str) -> Iterator[tuple[Span | Problem, _Head]]:
    """The lines of a log, each with what says where it belongs; one that cannot be read says nothing."""
    for line in read_lines(path):
        if isinstance(line, Problem):
            yield line, _Head()
            continue
        try:
            found = _head(line.raw)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            found = _Head()
        yield line.span, found


def read(transcript: Transcript) -> Iterator[Record | Problem]:
    """The records of a session, as they stand in its logs, each once; blank lines are none."""
    met: dict[str, bytes] = {}
    for part in transcript.parts:
        for found in _records(part):
            if isinstance(found, Problem):
                yield found
                continue
            content = _content_of(found.value)
            if found.id not in met:
                met[found.id] = content
                yield found
            elif met[found.id] != content:
                yield Problem(part.path, found.line, f"record {found.id} was there before with other content")


def _content_of(record: dict[str, Any]) -> bytes:
    try:
        return hashlib.sha256(canonical(record)).digest()
    except RecursionError:
        # Nobody can store it, which is told where that is tried.
        return b""


def _records(part: FilePart) -> Iterator[Record | Problem]:
    """The records of one file.

    One without an id is known by what it says and by the record with an id that it follows, and in front of these by
    the first id of the file: so it stays the same when the log grows or is copied, and an equal line that another
    file has elsewhere is another record.
    """
    behind = _first_id(part.path)
    met: Counter[str] = Counter()
    for found in read_lines(part.path, part.spans):
        if isinstance(found, Problem):
            yield found
            continue
        line, raw = found.span.line, found.raw
        if not raw.strip():
            continue
        value = value_or_problem(part.path, line, raw, dict)
        if isinstance(value, Problem):
            yield value
            continue
        own = _id_of(value.get("uuid"))
        if own is None:
            mark = hashlib.sha256(f"{behind}\n".encode() + raw).hexdigest()[:CONTENT_CHARS]
            met[mark] += 1
            own = f"{mark}.{met[mark]}"
        else:
            behind = own
        yield Record(
            id=own,
            line=line,
            value=value,
            parts=_parts(value),
            actor=name_in(value.get("type")) or "",
            created_ms=time_of(value.get("timestamp")),
            path=part.path,
        )


def _id_of(uuid: Any) -> str | None:
    """The id that a record has itself, None where it has none that can stand in those of its events."""
    own = name_in(uuid)
    return None if own is None or len(own) > NAME_CHARS_MAX // 2 else own


def _first_id(path: str) -> str:
    """The first id in a file, of whatever session: it stays when the file grows."""
    return next((own for _, head in _lines(path) if (own := _id_of(head.uuid)) is not None), "")


def time_of(timestamp: Any) -> int | None:
    """Milliseconds since 1970 in UTC of a time in ISO 8601, UTC where it names no zone; None for anything else.

    One that the store cannot hold is the first or the last one that it can.
    """
    if not isinstance(timestamp, str):
        return None
    try:
        found = datetime.fromisoformat(timestamp)
        found = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
        return min(TIME_MS_MAX, max(0, round(found.timestamp() * 1000)))
    except (ValueError, OverflowError):
        return None


def _parts(record: dict[str, Any]) -> list[Part]:
    message = record.get("message")
    parent = name_in(record.get("parentUuid"))
    links: dict[str, Any] = {} if parent is None else {"answers": [parent]}
    if not isinstance(message, dict):
        kind = names(record, record_type="type")
        return [Part(type=RECORD, path=body_path(record.get("content"), "content"), fields=kind | links)]
    role = message.get("role", record.get("type"))
    content, path = message.get("content"), ("message", "content")
    parts = _blocks(content, path, links) if isinstance(content, list) else []
    said = message_parts(content, path, role, links)
    if parts and all(part.path is None for part in said):
        # Nothing is said beside the tools.
        said = []
    attached = {part.path for part in parts}
    parts += [part for part in said if part.path not in attached]
    parts.sort(key=_place)
    if isinstance(message.get("usage"), dict):
        model = names(message, model="model")
        parts.append(Part(type="assistant_usage", path=("message", "usage"), fields=model | links))
    return parts


def _place(part: Part) -> int:
    """The block of a message's content that a part stands in."""
    return (
        part.path[2] if part.path is not None and len(part.path) > 2 and isinstance(part.path[2], int) else -1
    )


def _blocks(content: list[Any], path: Path, links: dict[str, Any]) -> list[Part]:
    """What stands in the blocks beside texts."""
    parts: list[Part] = []
    for place, block in enumerate(content):
        if not isinstance(block, dict):
            continue
        kind, at = block.get("type"), (*path, place)
        if kind == "thinking" and isinstance(block.get("thinking"), str):
            parts.append(Part(type="reasoning", path=(*at, "thinking"), fields=links))
        elif kind == "tool_use":
            fields = names(block, tool_call_id="id", name="name")
            parts.append(
                Part(
                    type="tool_call", path=body_path(block.get("input"), *at, "input"), fields=fields | links
                )
            )
        elif kind == "tool_result":
            parts += _result(block, at, links)
        else:
            parts += attachments(block, at)
    return parts


def _result(block: dict[str, Any], at: Path, links: dict[str, Any]) -> list[Part]:
    fields = names(block, tool_call_id="tool_use_id") | links
    if block.get("is_error") is True:
        fields["is_error"] = True
    said = block.get("content")
    parts = [
        Part(type="tool_execution_finished", path=body_path(said, *at, "content"), fields=fields),
    ]
    for place, inner in enumerate(said if isinstance(said, list) else ()):
        parts += attachments(inner, (*at, "content", place))
    return parts

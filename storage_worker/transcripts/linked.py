"""Messages that each name the one they answer, in one file; those under the same first message are one session."""

from collections.abc import Iterator
from typing import Any, Final

from .contents import message_role, message_type
from .files import SourceFile, item_spans, read_values
from .records import Part, Problem, Record, Span, Transcript

NAME: Final = "linked"

_IDS: Final = (("user_message_id", "parent_message_id"), ("message_id", "parent_id"))
"""The members with a message's own id and with that of the message it answers."""


def recognises(source: SourceFile) -> bool:
    """Whether a file's first record is such a message."""
    first = source.first
    return isinstance(first, dict) and {"text", "role"} <= first.keys() and _ids(first) is not None


def _ids(message: Any) -> tuple[str, str | None] | None:
    """The id of a message and of the one that it answers, or None where it has none."""
    if not isinstance(message, dict):
        return None
    for own, parent in _IDS:
        if isinstance(message.get(own), str):
            above = message.get(parent)
            return message[own], above if isinstance(above, str) and above else None
    return None


def sessions(source: SourceFile) -> Iterator[Transcript | Problem]:
    """A session for each first message. Of the file only ids and places are kept."""
    roots: dict[str, str] = {}
    spans: dict[str, list[Span]] = {}
    for span in item_spans(source):
        if isinstance(span, Problem):
            yield span
            continue
        [(line, message)] = read_values(source.path, [span])
        if isinstance(message, Problem):
            yield message
            continue
        ids = _ids(message)
        if ids is None:
            yield Problem(source.path, line, "no message with an id")
            continue
        own, parent = ids
        root = own if parent is None else roots.get(parent, parent)
        roots.setdefault(own, root)
        spans.setdefault(root, []).append(span)
    for place, found in enumerate(spans.values()):
        yield source.transcript(NAME, found, place)


def read(transcript: Transcript) -> Iterator[Record | Problem]:
    """The messages of a session in the order of the file."""
    places: dict[str, str] = {}
    for number, (line, message) in enumerate(read_values(transcript.path, transcript.spans)):
        if isinstance(message, Problem):
            yield message
            continue
        ids = _ids(message)
        if ids is None:
            yield Problem(transcript.path, line, "no message with an id any more")
            continue
        own, parent = ids
        answers = places.get(parent or "")
        places.setdefault(own, str(number))
        role = message.get("role")
        part = Part(
            type=message_type(role),
            path=("text",) if isinstance(message.get("text"), str) else None,
            fields={} if answers is None else {"answers": [answers]},
            role=message_role(role),
        )
        yield Record(
            id=str(number), line=line, value=message, parts=[part], actor=message_role(role), thread="0"
        )

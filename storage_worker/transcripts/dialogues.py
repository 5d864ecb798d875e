"""Dialogues written as one text, each turn behind its role at the start of a line (`messages_display`)."""

import re
from collections.abc import Iterator
from typing import Final

from .contents import message_role, message_type
from .files import SourceFile, item_spans, read_values
from .records import RECORD, Part, Problem, Record, Transcript

NAME: Final = "dialogue"

_TURN: Final = re.compile(r"((?:\A|\n)(user|assistant|tool|system): )")


def recognises(source: SourceFile) -> bool:
    """Whether a file's first record holds a dialogue."""
    return isinstance(source.first, dict) and isinstance(source.first.get("messages_display"), str)


def sessions(source: SourceFile) -> Iterator[Transcript | Problem]:
    """One session for each record."""
    for place, span in enumerate(item_spans(source)):
        yield span if isinstance(span, Problem) else source.transcript(NAME, [span], place)


def read(transcript: Transcript) -> Iterator[Record | Problem]:
    """What is said beside the dialogue, then each turn: its beginning as it stands there, and its text."""
    for line, value in read_values(transcript.path, transcript.spans, dict):
        if isinstance(value, Problem):
            yield value
            continue
        if not isinstance(value.get("messages_display"), str):
            yield Problem(transcript.path, line, "no object with `messages_display`")
            continue
        text = value.pop("messages_display")
        yield Record(id="session", line=line, value=value, parts=[Part(type=RECORD)])
        before, *found = _TURN.split(text)
        turns = list(zip(found[::3], found[1::3], found[2::3], strict=True))
        if before or not turns:
            turns.insert(0, ("", "user", before))
        for number, (head, role, said) in enumerate(turns):
            kind = "tool_execution_finished" if role == "tool" else message_type(role)
            part = Part(type=kind, path=("text",), role=message_role(role))
            yield Record(
                id=str(number), line=line, value={"head": head, "text": said}, parts=[part], actor=role
            )

"""Logs of chat rooms, a line for each message, with the links between them in a file beside the log.

A link `a b -` says that line b, counted from 0, answers line a; a line may answer several, and one that answers
itself starts a conversation. Every line is a record, blank and odd ones too, since links count lines.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path as FilePath
from typing import Any, Final

import msgspec

from ..conversation.bounds import NAME_CHARS_MAX
from ..conversation.vocabulary import USER_MESSAGE
from .files import SourceFile, UnreadableError, content_mark, read_lines, text_of, whole_span
from .records import Part, Problem, Record, Transcript

NAME: Final = "room-log"

ANSWERS_SHOWN_MAX: Final = 64
"""How many answered lines an event names among its fields; all of them stand in its source."""

_LINE: Final = re.compile(
    r"(?P<head>(?:\S+ (?P<date>\d{4}-\d\d-\d\d) )?"
    r"(?:(?P<system>===)|\[(?P<time>\d\d:\d\d(?::\d\d)?)\] +"
    r"(?:<(?P<nick>[^>]*)>|\* ?(?P<actor>\S+)|-(?P<notice>[^-\s]+)-))"
    r"[ \t]?)(?P<text>.*)",
    re.DOTALL,
)
_LINK: Final = re.compile(r"(\d{1,9}) (\d{1,9}) -\s*")
_LINKS_END: Final = ".annotation.txt"
_LOG_KINDS: Final = ("ascii", "raw")
"""How the name of a log's links ends, and what stands there instead in the name of the log: `x.ascii.txt`."""

_SAMPLE_LINES: Final = 50
_MOSTLY: Final = 0.9

_ROLES: Final = (("system", "system"), ("nick", "user"), ("actor", "action"), ("notice", "notice"))


def recognises(source: SourceFile) -> bool:
    """Whether most of a file's first lines are a log's."""
    return _mostly(_LINE, source)


def is_links(source: SourceFile) -> bool:
    """Whether a file holds the links of a log, which are read with it."""
    return _mostly(_LINK, source)


def has_log(path: str) -> bool:
    """Whether the log of some links stands beside them."""
    stem = path.removesuffix(_LINKS_END)
    return any(FilePath(f"{stem}.{kind}.txt").is_file() for kind in _LOG_KINDS)


def _mostly(pattern: re.Pattern[str], source: SourceFile) -> bool:
    lines = source.head.decode(errors="replace").split("\n")[:_SAMPLE_LINES]
    if len(lines) > 1:
        # The last one is cut off, or nothing.
        del lines[-1]
    return sum(pattern.fullmatch(line) is not None for line in lines) >= max(1.0, _MOSTLY * len(lines))


def _links_path(path: str) -> str | None:
    """The file with the links of a log, None where there is none."""
    stem = re.sub(rf"\.({'|'.join(_LOG_KINDS)})\.txt$", "", path)
    beside = stem + _LINKS_END
    return beside if stem != path and FilePath(beside).is_file() else None


def sessions(source: SourceFile) -> Iterator[Transcript | Problem]:
    """The whole log is one session; its links are part of its identity."""
    links = _links_path(source.path)
    mark = source.mark if links is None else content_mark(source.path, links)
    yield source.transcript(NAME, [whole_span(source.path)], mark=mark)
    if links is not None:
        yield from _read_links(links)[1]


def _read_links(path: str | None) -> tuple[dict[int, list[int]], list[Problem]]:
    """Which lines each line answers, counted from 0, and the lines of the links that are none."""
    links: dict[int, list[int]] = {}
    problems: list[Problem] = []
    for line in read_lines(path) if path is not None else ():
        if isinstance(line, Problem):
            problems.append(line)
            continue
        match = _LINK.fullmatch(line.raw.decode(errors="replace"))
        if match is not None:
            links.setdefault(int(match[2]), []).append(int(match[1]))
        elif line.raw.strip():
            problems.append(Problem(path or "", line.span.line, "no link of the form `a b -`"))
    return links, problems


class _Clock(msgspec.Struct):
    """Gives times to lines: a line without one has that of the line before it on the same day."""

    date: str = ""
    time: str = ""

    def at(self, date: str | None, time: str | None) -> int | None:
        """Milliseconds since 1970 in UTC; None without a date."""
        if date is None:
            return None
        if time is not None:
            self.time = time
        elif date != self.date:
            self.time = "00:00"
        self.date = date
        try:
            found = datetime.fromisoformat(f"{date}T{self.time}").replace(tzinfo=UTC)
        except ValueError:
            return None
        return max(0, round(found.timestamp() * 1000))


def read(transcript: Transcript) -> Iterator[Record | Problem]:
    """A record for each line: its `head` up to the text, its `text`, and the lines that it `answers`."""
    links, _ = _read_links(_links_path(transcript.path))
    clock = _Clock()
    roots: dict[int, int] = {}
    for found_line in read_lines(transcript.path, transcript.spans):
        if isinstance(found_line, Problem):
            yield found_line
            continue
        number = found_line.span.line
        place = number - 1
        try:
            line = text_of(found_line.raw)
        except UnreadableError as error:
            yield Problem(transcript.path, number, str(error))
            continue
        answers = links.get(place, [])
        roots[place] = min((roots[each] for each in answers if each in roots), default=place)
        match = _LINE.fullmatch(line)
        found = {} if match is None else match.groupdict()
        value: dict[str, Any] = {"head": found.get("head", ""), "text": found.get("text", line)}
        if answers:
            value["answers"] = answers
        role = next((role for group, role in _ROLES if found.get(group) is not None), "line")
        actor = found.get("nick") or found.get("actor") or found.get("notice") or ""
        shown = {"answers": [str(each) for each in answers[:ANSWERS_SHOWN_MAX]]} if answers else {}
        yield Record(
            id=str(place),
            line=number,
            value=value,
            parts=[Part(type=USER_MESSAGE, path=("text",), fields=shown, role=role)],
            actor=actor[:NAME_CHARS_MAX],
            created_ms=clock.at(found.get("date"), found.get("time")),
            thread=str(roots[place]) if answers else None,
        )

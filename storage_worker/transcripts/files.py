"""Files of records, taken apart in bounded memory: lines, or the items of one JSON list."""

import hashlib
import itertools
import os
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, BinaryIO, Final, Literal, NamedTuple

import msgspec

from ..conversation.bounds import NAME_CHARS_MAX
from ..protocol.limits import KIB, MIB
from .records import Problem, Span, Transcript

RECORD_BYTES_MAX: Final = 64 * MIB
"""The largest line or list item that is read."""

HEAD_BYTES: Final = 256 * KIB
"""How much of a file is looked at to know what it is."""

CHUNK_BYTES: Final = 1 * MIB

LINES_TRIED: Final = 20
"""In how many lines the first record is looked for."""

MARK_CHARS: Final = 16
"""How much of the hash of a file's content tells it from any other, in the names of its rooms and sessions."""

Layout = Literal["list", "lines", "one value", "no JSON"]

_STRUCTURE: Final = re.compile(rb'["\[\]{}]')
_STRING_END: Final = re.compile(rb'["\\]')
_SPACE: Final = b" \t\r\n"
_BETWEEN_ITEMS: Final = _SPACE + b","
_FILE_END: Final = b"\0"
"""Stands between files where they are hashed: no JSON has this byte."""
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
"""What some programs put in front of a text in UTF-8; it is no part of that."""
_STRAY: Final = 0
"""Stands for what is neither a bracket nor inside an item."""


class UnreadableError(Exception):
    """A record cannot be read; the text says why."""


class Line(NamedTuple):
    """A line of a file: where it stands, its newline included, and its bytes without that."""

    span: Span
    raw: bytes


class SourceFile(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A file to import; `first` is its first record, None without JSON."""

    path: str
    layout: Layout
    first: Any
    head: bytes

    @cached_property
    def mark(self) -> str:
        """What tells its content from any other. Raises `OSError`: the file is read whole when this is first asked."""
        return content_mark(self.path)

    @property
    def title(self) -> str:
        """Its name, as a title."""
        return os.path.basename(self.path).encode(errors="replace").decode()[:NAME_CHARS_MAX]

    def transcript(
        self, format_: str, spans: list[Span], place: int | None = None, mark: str | None = None
    ) -> Transcript:
        """The session at a place in the file, or the one that the whole file is."""
        room = f"{format_}-{mark or self.mark}"
        session = room if place is None else f"{room}-{place}"
        return Transcript(
            format=format_, path=self.path, session=session, room=room, title=self.title, spans=spans
        )


def open_source(path: str) -> SourceFile:
    """Look at a file's beginning. Raises `OSError`."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES).removeprefix(_BYTE_ORDER_MARK)
    layout, first = _layout(path, head)
    return SourceFile(path=path, layout=layout, first=first, head=head)


def content_mark(*paths: str) -> str:
    """What tells the content of files from any other."""
    whole = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:MARK_CHARS]


def _layout(path: str, head: bytes) -> tuple[Layout, Any]:
    """How a file of JSON is laid out, and its first record; a first line may be one that cannot be read."""
    lines = _first_lines(path)
    first = next(lines, None)
    if isinstance(first, dict):
        return "lines", first
    second = next(lines, None)
    # A whole file of one line is one list of records; with others behind it, it is one record.
    if first and isinstance(first, list) and second is not None:
        return "lines", first
    beginning = head.lstrip(_SPACE)[:1]
    if beginning == b"[":
        items = (_record_at(path, item) for item in list_spans(path) if isinstance(item, Span))
        found = next((item for item in items if item is not None), None)
        if found is not None:
            return "list", found
    if beginning == b"{" and os.path.getsize(path) <= RECORD_BYTES_MAX:
        value = _record_at(path, whole_span(path))
        if isinstance(value, dict):
            return "one value", value
    later = next((each for each in itertools.chain((second,), lines) if isinstance(each, dict)), None)
    return ("no JSON", None) if later is None else ("lines", later)


def _first_lines(path: str) -> Iterator[Any]:
    """The records in the first lines that are not blank; False for a line that holds none."""
    tried = 0
    for line in read_lines(path):
        if isinstance(line, Problem):
            continue
        if line.raw.strip():
            found = _decoded_or_none(line.raw)
            yield found if isinstance(found, dict | list) else False
            tried += 1
        if tried == LINES_TRIED:
            return


def _record_at(path: str, span: Span) -> Any:
    return _decoded_or_none(next(read_spans(path, [span]))[1])


def _decoded_or_none(raw: bytes) -> Any:
    try:
        return decoded(raw)
    except UnreadableError:
        return None


def decoded(raw: bytes) -> Any:
    """The JSON value of some bytes; `UnreadableError` where they are none, or one that cannot be kept exactly."""
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise UnreadableError("JSON that is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise UnreadableError(f"no JSON that can be kept: {error}") from None


def value_or_problem(path: str, line: int, raw: bytes, kind: type = object) -> Any | Problem:
    """The JSON value of some bytes, or the problem where they hold none that is of a kind, as `dict`."""
    try:
        value = decoded(raw)
    except UnreadableError as error:
        return Problem(path, line, str(error))
    return value if isinstance(value, kind) else Problem(path, line, "no object")


def read_values(path: str, spans: list[Span], kind: type = object) -> Iterator[tuple[int, Any | Problem]]:
    """The JSON value of each span, with the line that it begins in, or what is wrong with it. Raises `OSError`."""
    for line, raw in read_spans(path, spans):
        yield line, value_or_problem(path, line, raw, kind)


def text_of(raw: bytes) -> str:
    """The text of some bytes; `UnreadableError` where they are no UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"no UTF-8: {error.reason} at byte {error.start}") from None


def item_spans(source: SourceFile) -> Iterator[Span | Problem]:
    """The records of a file of JSON, whatever its layout; what is too large, or cut off, is a problem."""
    if source.layout == "list":
        return list_spans(source.path)
    if source.layout == "lines":
        return (
            line if isinstance(line, Problem) else line.span
            for line in read_lines(source.path)
            if isinstance(line, Problem) or line.raw.strip()
        )
    return iter([whole_span(source.path)])


def whole_span(path: str) -> Span:
    """All of a file."""
    return Span(0, os.path.getsize(path), 1)


def add_span(spans: list[Span], span: Span) -> None:
    """Add a part of a file to others, to the last of them where it follows that."""
    last = spans[-1] if spans else None
    if last is not None and last.offset + last.length == span.offset:
        spans[-1] = Span(last.offset, last.length + span.length, last.line)
    else:
        spans.append(span)


def list_spans(path: str) -> Iterator[Span | Problem]:
    """The items of the JSON list that a file holds."""
    with open(path, "rb") as file:
        yield from _ListScanner(path, file).items()


class _ListScanner:
    """Finds where the items of a JSON list begin and end, without decoding them.

    Items are its lists and objects. What else stands between them is one problem until the next item, and so is what
    stands behind the list.
    """

    def __init__(self, path: str, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._line = 1
        self._item: tuple[int, int] | None = None
        self._is_stray = False

    def items(self) -> Iterator[Span | Problem]:
        """Each item as it ends; a last one that does not end is a problem."""
        base = 0
        while chunk := self._file.read(CHUNK_BYTES):
            counted = 0
            for at, mark in self._marks(chunk):
                self._line += chunk.count(b"\n", counted, at)
                counted = at
                if mark == _STRAY:
                    if not self._is_stray:
                        yield Problem(self._path, self._line, "no object or list")
                    self._is_stray = True
                elif mark in b"[{":
                    self._depth += 1
                    if self._depth == 2:
                        self._item = (base + at, self._line)
                        self._is_stray = False
                else:
                    self._depth -= 1
                    if self._depth == 1 and self._item is not None:
                        yield self._ended(base + at + 1)
                    if self._depth <= 0:
                        yield from self._behind(chunk[at + 1 :])
                        return
            self._line += chunk.count(b"\n", counted)
            base += len(chunk)
        place = self._item[1] if self._item else self._line
        yield Problem(self._path, place, "the list is cut off here")

    def _behind(self, chunk: bytes) -> Iterator[Problem]:
        """What stands behind the list is a problem; from the rest of its last chunk on."""
        while not (rest := chunk.lstrip(_SPACE)):
            self._line += chunk.count(b"\n")
            chunk = self._file.read(CHUNK_BYTES)
            if not chunk:
                return
        self._line += chunk.count(b"\n", 0, len(chunk) - len(rest))
        yield Problem(self._path, self._line, "the list has ended before this")

    def _ended(self, end: int) -> Span | Problem:
        assert self._item is not None
        start, line = self._item
        self._item = None
        if end - start > RECORD_BYTES_MAX:
            return Problem(self._path, line, f"an item of over {RECORD_BYTES_MAX} bytes")
        return Span(start, end - start, line)

    def _marks(self, chunk: bytes) -> Iterator[tuple[int, int]]:
        """Places and bytes of the brackets in a chunk that stand outside of strings, and of what is stray."""
        at, end = 0, len(chunk)
        if self._is_escaped:
            at, self._is_escaped = 1, False
        while at < end:
            found = (_STRING_END if self._in_string else _STRUCTURE).search(chunk, at)
            stop = end if found is None else found.start()
            if self._depth == 1 and not self._in_string:
                between = chunk[at:stop].lstrip(_BETWEEN_ITEMS)
                if between:
                    yield stop - len(between), _STRAY
            if found is None:
                return
            mark, at = chunk[stop], found.end()
            if mark == 0x22:
                if self._depth == 1 and not self._in_string:
                    yield stop, _STRAY
                self._in_string = not self._in_string
            elif mark == 0x5C:
                self._is_escaped = at >= end
                at += 1
            else:
                yield stop, mark


def read_spans(path: str, spans: list[Span]) -> Iterator[tuple[int, bytes]]:
    """The bytes of each span, with the line that it begins in. Raises `OSError`."""
    with open(path, "rb") as file:
        for span in spans:
            file.seek(span.offset)
            yield span.line, _without_mark(span, file.read(span.length))


def _without_mark(span: Span, raw: bytes) -> bytes:
    """The bytes of a span, without the mark that a file may begin with."""
    return raw if span.offset else raw.removeprefix(_BYTE_ORDER_MARK)


def read_lines(path: str, spans: list[Span] | None = None) -> Iterator[Line | Problem]:
    """The lines in some spans of whole lines, or of the whole file, split at newlines only. Raises `OSError`.

    A line that is too large is one line, and one problem, and not held in memory.
    """
    with open(path, "rb") as file:
        for span in [whole_span(path)] if spans is None else spans:
            file.seek(span.offset)
            offset, end, number = span.offset, span.offset + span.length, span.line
            while offset < end and (raw := file.readline(min(RECORD_BYTES_MAX, end - offset))):
                length = len(raw)
                if length == RECORD_BYTES_MAX and not raw.endswith(b"\n"):
                    length += _skip_line(file, end - offset - length)
                if length > RECORD_BYTES_MAX:
                    yield Problem(path, number, f"a line of over {RECORD_BYTES_MAX} bytes")
                else:
                    found = Span(offset, length, number)
                    yield Line(found, _without_mark(found, raw.removesuffix(b"\n")))
                offset += length
                number += 1


def _skip_line(file: BinaryIO, left: int) -> int:
    """Go on behind the next newline, at most `left` bytes; how many they were."""
    length = 0
    while length < left and (more := file.readline(min(CHUNK_BYTES, left - length))):
        length += len(more)
        if more.endswith(b"\n"):
            break
    return length


def content_of(transcript: Transcript) -> str:
    """What tells the content of a transcript from any other: the SHA-256 of its parts of files, in hex."""
    whole = hashlib.sha256()
    for number, part in enumerate(transcript.parts):
        if number:
            whole.update(_FILE_END)
        with open(part.path, "rb") as file:
            for span in part.spans:
                file.seek(span.offset)
                left = span.length
                while left and (chunk := file.read(min(left, CHUNK_BYTES))):
                    whole.update(chunk)
                    left -= len(chunk)
    return whole.hexdigest()

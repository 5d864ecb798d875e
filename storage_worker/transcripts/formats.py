"""All formats: which one a file has, found by its content, and the sessions and records in it."""

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

import msgspec

from ..ownership import SidePaths
from . import agent_logs, chats, dialogues, exports, linked, room_logs, trees
from .files import SourceFile, open_source
from .records import Problem, Record, Transcript

T = TypeVar("T")


class Format(msgspec.Struct, frozen=True):
    """A format: whether a file has it, the sessions in a file, and the records of a session."""

    name: str
    recognises: Callable[[SourceFile], bool]
    sessions: Callable[[SourceFile], Iterator[Transcript | Problem]]
    read: Callable[[Transcript], Iterator[Record | Problem]]


FORMATS: Final = tuple(
    Format(module.NAME, module.recognises, module.sessions, module.read)
    for module in (agent_logs, chats, dialogues, trees, linked, room_logs)
)
"""The formats of records, in the order in which they are tried: the ones that are surer first."""

_KINDS: Final = (
    (exports.recognises, exports.sessions),
    *((format_.recognises, format_.sessions) for format_ in FORMATS),
)

_BY_NAME: Final = {format_.name: format_ for format_ in FORMATS}


_IRREGULAR: Final = "no regular file"
_DATABASES: Final = "the directory of a database"
_UNKNOWN: Final = "no known format of transcripts"
WITH_ITS_LOG: Final = "links, which are read with their log"
"""Why a file is skipped that is no transcript by itself and still read."""


class Skipped(msgspec.Struct, frozen=True):
    """A file that was found in a folder and is no transcript, with the reason."""

    path: str
    reason: str


def files_of(path: str) -> Iterator[str | Problem | Skipped]:
    """The file at a path, or all files in the folder there and below it, each folder's sorted by name.

    What cannot be looked at is a problem, and so is a named path that is no regular file, such as a pipe: to read it
    could wait for ever. In a folder such a file is skipped.
    """
    if os.path.isdir(path):
        yield from _files_below(path)
        return
    found = _regular(path)
    yield Problem(shown(path), 0, _IRREGULAR) if found is None else found


def _regular(path: str) -> str | Problem | None:
    """A path that is a regular file's, None for any other, or the problem with it."""
    try:
        return path if stat.S_ISREG(os.stat(path).st_mode) else None
    except OSError as error:
        return _problem(path, error)


def _files_below(folder: str) -> Iterator[str | Problem | Skipped]:
    unreadable: list[OSError] = []
    for above, folders, files in os.walk(folder, onerror=unreadable.append):
        folders.sort()
        for path in [os.path.join(above, name) for name in folders]:
            if os.path.islink(path):
                # Not followed: it may lead back.
                yield Skipped(shown(path), "a link to a folder")
            elif _is_of_database(path, files):
                # A payload may be a transcript itself, and would be imported out of the store that holds it.
                folders.remove(os.path.basename(path))
                yield Skipped(shown(path), _DATABASES)
        for path in [os.path.join(above, name) for name in sorted(files)]:
            found = _regular(path)
            yield Skipped(shown(path), _IRREGULAR) if found is None else found
    yield from (_problem(error.filename, error) for error in unreadable)


def _is_of_database(folder: str, beside: list[str]) -> bool:
    """Whether a folder is what a worker keeps beside one of the files that stand there, too."""
    above = os.path.dirname(folder)
    return any(SidePaths.of(os.path.join(above, name)).directory == folder for name in beside)


def _problem(path: str, error: OSError) -> Problem:
    return Problem(shown(path), 0, error.strerror or str(error))


def shown(path: str) -> str:
    """A path as a text that every terminal and JSON can hold."""
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")


def transcripts(*paths: str) -> Iterator[Transcript | Problem | Skipped]:
    """The sessions of files, and of all files in folders and below them, each session once."""
    return join_sessions(each for path in paths for each in _transcripts_at(path))


def _transcripts_at(path: str) -> Iterator[Transcript | Problem | Skipped]:
    for found in files_of(path):
        if isinstance(found, str):
            yield from transcripts_in(found, is_named=found == path)
        else:
            yield found


def join_sessions(found: Iterable[T]) -> Iterator[T | Transcript]:
    """What was found, with what several files hold of one session put together behind all else.

    Only agents name their sessions themselves. All other sessions are named by the content of their file, and stand
    in one.
    """
    held: dict[str, list[Transcript]] = {}
    for each in found:
        if isinstance(each, Transcript) and each.format == agent_logs.NAME:
            held.setdefault(each.session, []).append(each)
        else:
            yield each
    yield from map(agent_logs.join_files, held.values())


def transcripts_in(path: str, *, is_named: bool) -> Iterator[Transcript | Problem | Skipped]:
    """The sessions of a file. One that has none of the formats is a problem where it was named itself, else skipped."""
    if shown(path) != path:
        yield Problem(shown(path), 0, "the name of the file is no UTF-8")
        return
    try:
        source = open_source(path)
        for recognises, sessions in _KINDS:
            if recognises(source):
                yield from sessions(source)
                return
    except OSError as error:
        yield _problem(path, error)
        return
    if room_logs.is_links(source):
        yield Skipped(path, WITH_ITS_LOG if room_logs.has_log(path) else "links without their log")
    elif is_named:
        yield Problem(path, 0, _UNKNOWN)
    else:
        yield Skipped(path, _UNKNOWN)


def read(transcript: Transcript) -> Iterator[Record | Problem]:
    """The records of a session in their order, and what of it cannot be read. Raises `OSError`."""
    return _BY_NAME[transcript.format].read(transcript)

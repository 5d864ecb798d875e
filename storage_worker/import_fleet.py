"""Imports transcripts with many client processes: each takes a few sessions at a time and stores them.

A process that ends before it has answered is replaced, and its sessions are given out again, one by one: what it had
stored is found and not stored twice, and what ends processes is found without its neighbours.
"""

import itertools
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
from multiprocess.connection import wait as wait_for_any
from multiprocess.context import SpawnContext

from . import conversation_client
from .client.client import Client
from .import_export_file import import_export
from .import_session import Imported, Patience, import_transcript
from .protocol.limits import KIB
from .transcripts import exports, formats
from .transcripts.formats import Skipped
from .transcripts.records import Problem, Transcript


def processes_for(cores: int | None) -> int:
    """How many client processes suit a machine: one for each core, and always two, since they wait for answers."""
    return min(8, max(2, cores or 2))


PROCESSES_DEFAULT: Final = processes_for(os.cpu_count())
PROCESSES_MAX: Final = 256

ATTEMPTS_MAX: Final = 5
"""How often a session is given out whose process ends before it answers."""

SHARE_BYTES: Final = 16 * KIB
SHARE_SESSIONS_MAX: Final = 32
"""How much a process is given at a time: one session, and more where they are small."""

CONNECT_SECONDS_MAX: Final = 60.0

PROBLEMS_COUNT_MAX: Final = 10_000
"""How many problems of one import are kept; the others are counted."""


class FormatCount(msgspec.Struct):
    """What was imported of one format: `sessions` stand in the store now, `known` of them were left alone."""

    sessions: int = 0
    known: int = 0
    records: int = 0
    events: int = 0
    added: int = 0
    size_bytes: int = 0


class Summary(msgspec.Struct):
    """What became of an import: counts by format, and what could not be read, was skipped or failed.

    `latencies_s` has for each transcript the seconds of the calls that stored it, as the bytes of an array of
    doubles, where they were asked for.
    """

    formats: dict[str, FormatCount] = {}
    problems: list[Problem] = []
    problem_count: int = 0
    skipped: list[Skipped] = []
    failures: list[str] = []
    errors: dict[str, int] = {}
    latencies_s: list[bytes] = []

    @property
    def total(self) -> FormatCount:
        """The counts of all formats together."""
        whole = FormatCount()
        for count in self.formats.values():
            for name in count.__struct_fields__:
                setattr(whole, name, getattr(whole, name) + getattr(count, name))
        return whole


def import_paths(
    target: str | os.PathLike[str],
    paths: Sequence[str | os.PathLike[str]],
    *,
    processes: int = PROCESSES_DEFAULT,
    on_progress: Callable[[int], None] | None = None,
    with_latencies: bool = False,
) -> Summary:
    """Import files and folders of transcripts into the conversation store.

    Arguments: `target`, the database, whose worker is started where none runs, or a worker's address; `processes`,
    how many client processes work at once, by default one for each core, 2 to 8; `on_progress`, called with the bytes
    of the input that were done since the last time: all of `input_bytes` in the end.

    What is stored already is left as it is: an import that was broken off goes on where it was. Raises what `connect`
    raises; what goes wrong later is told in the summary.
    """
    summary = Summary()
    progress = on_progress or _nobody
    fleet = _Fleet(os.fspath(target), processes)
    try:
        fleet.check()
        found = formats.join_sessions(_transcripts(paths, summary, progress))
        for _, each in itertools.groupby(found, _own_turn):
            for done in fleet.run(each):
                _add(summary, done, with_latencies=with_latencies)
                progress(done.size_bytes)
    finally:
        fleet.close()
    return summary


def _nobody(_: int) -> None:
    """Takes the progress that nobody asked for."""


def input_bytes(paths: Sequence[str | os.PathLike[str]]) -> int:
    """The size of all files that are named, or in the folders that are; what cannot be looked at counts nothing."""
    found = (each for path in paths for each in formats.files_of(os.path.abspath(path)))
    return sum(_size_of(each) for each in found if isinstance(each, str))


def _size_of(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        # It has just gone; who reads it will tell.
        return 0


def _transcripts(
    paths: Sequence[str | os.PathLike[str]], summary: Summary, progress: Callable[[int], None]
) -> Iterator[Transcript]:
    """What there is to import; what is none of it goes into the summary, and counts as done."""
    for path in (os.path.abspath(each) for each in paths):
        for file in formats.files_of(path):
            if not isinstance(file, str):
                _put_aside(summary, file)
                continue
            left = _size_of(file)
            for found in formats.transcripts_in(file, is_named=file == path):
                if isinstance(found, Transcript):
                    left -= found.size_bytes
                    yield found
                else:
                    _put_aside(summary, found)
            if left > 0:
                progress(left)


def _own_turn(transcript: Transcript) -> str:
    """What is imported at the same time: each export alone, since two may hold the same events without an id."""
    return transcript.path if transcript.format == exports.NAME else ""


def _put_aside(summary: Summary, found: Problem | Skipped) -> None:
    if isinstance(found, Skipped):
        summary.skipped.append(found)
    else:
        _add_problems(summary, [found], 1)


def _add_problems(summary: Summary, problems: list[Problem], count: int) -> None:
    summary.problem_count += count
    summary.problems += problems[: max(0, PROBLEMS_COUNT_MAX - len(summary.problems))]


def _add(summary: Summary, done: Imported, *, with_latencies: bool) -> None:
    count = summary.formats.setdefault(done.format, FormatCount())
    count.sessions += done.sessions
    count.known += done.known
    count.records += done.records
    count.events += done.events
    count.added += done.added
    count.size_bytes += done.size_bytes
    _add_problems(summary, done.problems, done.problem_count)
    if done.failure is not None:
        summary.failures.append(f"{done.session}: {done.failure}")
    summary.errors = dict(Counter(summary.errors) + Counter(done.errors))
    if with_latencies:
        summary.latencies_s.append(done.latencies_s)


Share = list[Transcript]
"""What a process is given at a time."""


def _shares(transcripts: Iterator[Transcript]) -> Iterator[Share]:
    share: Share = []
    size = 0
    for transcript in transcripts:
        share.append(transcript)
        size += transcript.size_bytes
        if size >= SHARE_BYTES or len(share) >= SHARE_SESSIONS_MAX:
            yield share
            share, size = [], 0
    if share:
        yield share


class _Fleet:
    """The client processes of an import, and what each of them works on."""

    def __init__(self, target: str, processes: int) -> None:
        self._target = target
        self._processes = processes
        # A forked child would share what this process has open, and its threads' locks.
        self._context = SpawnContext()
        self._running: dict[Any, Any] = {}
        self._work: dict[Any, Share] = {}
        self._again: deque[Share] = deque()
        self._attempts: Counter[tuple[str, str]] = Counter()

    def check(self) -> None:
        """Raise what is wrong with the target before any process is started."""
        _connect(self._target).close()

    def run(self, transcripts: Iterator[Transcript]) -> Iterator[Imported]:
        """What became of each transcript, as they are done."""
        shares = _shares(transcripts)
        is_more = True
        while True:
            while is_more or self._again:
                link = self._free()
                if link is None:
                    break
                share = self._again.popleft() if self._again else next(shares, None)
                if share is None:
                    is_more = False
                    break
                self._give(link, share)
            busy = [link for link, work in self._work.items() if work]
            if not busy:
                return
            ready: list[Any] = wait_for_any(busy)
            for link in ready:
                yield from self._take(link)

    def close(self) -> None:
        """End all processes: what they store is stored as far as it is."""
        for link in list(self._running):
            self._end(link)

    def _free(self) -> Any | None:
        """A process that waits for work; one more is started where fewer run than may."""
        for link, work in self._work.items():
            if not work:
                return link
        if len(self._running) >= self._processes:
            return None
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=run_client, args=(self._target, theirs), daemon=True)
        process.start()
        theirs.close()
        self._running[ours] = process
        self._work[ours] = []
        return ours

    def _give(self, link: Any, share: Share) -> None:
        self._work[link] = share
        try:
            link.send_bytes(msgspec.msgpack.encode(share))
        except OSError:
            # It has ended; the wait tells so, too.
            return

    def _take(self, link: Any) -> list[Imported]:
        """The answers of a process; none where it has ended without any, then its work is given out again."""
        share = self._work[link]
        try:
            done = msgspec.msgpack.decode(link.recv_bytes(), type=list[Imported])
        except (EOFError, OSError):
            self._end(link)
            return self._put_back(share)
        self._work[link] = []
        return done

    def _put_back(self, share: Share) -> list[Imported]:
        """Give sessions out again, each alone, so that one that ends processes ends no others; those given up."""
        given_up: list[Imported] = []
        for transcript in share:
            place = (transcript.path, transcript.session)
            self._attempts[place] += len(share) == 1
            if self._attempts[place] < ATTEMPTS_MAX:
                self._again.append([transcript])
            else:
                given_up.append(_failed(transcript, f"{ATTEMPTS_MAX} processes ended while they imported it"))
        return given_up

    def _end(self, link: Any) -> None:
        process = self._running.pop(link)
        del self._work[link]
        link.close()
        process.kill()
        process.join()
        process.close()


def _failed(transcript: Transcript, failure: str) -> Imported:
    return Imported(
        format=transcript.format,
        session=transcript.session,
        size_bytes=transcript.size_bytes,
        failure=failure,
    )


def run_client(target: str, link: Any) -> None:
    """What a process does: import one share after the other, until its parent is gone or has no more."""
    # Whoever interrupts the command ends the processes himself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    patience = Patience()
    with _connect(target) as client:
        while True:
            try:
                share = msgspec.msgpack.decode(link.recv_bytes(), type=Share)
                done = [_import(client, each, patience) for each in share]
                link.send_bytes(msgspec.msgpack.encode(done))
            except (EOFError, ConnectionError):
                return


def _connect(target: str) -> Client:
    return conversation_client.connect(target, role="write", name="import", timeout=CONNECT_SECONDS_MAX)


def _import(client: Client, transcript: Transcript, patience: Patience) -> Imported:
    if transcript.format == exports.NAME:
        return import_export(client, transcript, patience)
    return import_transcript(client, transcript, patience)

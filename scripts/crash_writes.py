"""The life of one write in the crash test: sent, repeated or asked for, until its fate is known. Without I/O."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import NamedTuple

import msgspec

import ledger
import storage_worker as sw
from ledger import Fate

WRITE_SECONDS_MAX = 10.0
SHORT_SECONDS = 0.15
"""The deadline of some writes, shorter than a stop of the worker."""

ANSWER_SECONDS_MAX = 30.0
CANCEL_SECONDS = 0.002
REPEATS_MAX = 20

_FATES = {"committed": Fate.ACKNOWLEDGED, "unknown": Fate.UNKNOWN, "not_committed": Fate.NOT_COMMITTED}


class Insert(NamedTuple):
    """Send the write; `is_cancelled` says that an asynchronous client cancels it soon."""

    row: tuple[int, int, int, bytes]
    key: str | None
    timeout: float
    retries: int | None
    is_cancelled: bool


class Ask(NamedTuple):
    """Ask what became of a key, and forbid it where it was not committed."""

    key: str


Step = Insert | Ask
Answer = sw.Rows | sw.KnownOutcome | None
Life = Generator[Step, Answer, Fate]
Perform = Callable[[Step], Answer]
PerformAsync = Callable[[Step], Awaitable[Answer]]


class Note(msgspec.Struct):
    """One line of a diary: when a write in flight was told of its worker's death, or what is wrong."""

    told_s: float = 0.0
    wrong: str = ""


Tell = Callable[[Note], None]


class Diary:
    """What a client saw beside its writes' fates, kept where no kill takes it away."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, note: Note) -> None:
        """Append a line."""
        os.write(self._descriptor, msgspec.json.encode(note) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read_diaries(folder: Path) -> list[Note]:
    """All lines of all diaries; one that a kill cut off is left out."""
    notes = []
    for path in sorted(folder.glob("*.diary")):
        *lines, _ = path.read_bytes().split(b"\n")
        notes += [msgspec.json.decode(line, type=Note) for line in lines]
    return notes


def is_asked(number: int) -> bool:
    """Whether a write with a key is sent once, and then asked for where its end is unknown."""
    return number % 4 == 2


def is_doubled(number: int) -> bool:
    """Whether a write with a key is sent again although it was acknowledged."""
    return number % 10 == 0


def insert_of(own: int, number: int) -> Insert:
    """The first step of a write's life."""
    keyed = ledger.is_keyed(number)
    return Insert(
        (own, number, int(keyed), ledger.body_of(own, number)),
        ledger.key_of(own, number) if keyed else None,
        SHORT_SECONDS if number % 5 == 0 else WRITE_SECONDS_MAX,
        0 if keyed and is_asked(number) else None,
        number % 3 == 0,
    )


def life(own: int, number: int, tell: Tell, now: Callable[[], float]) -> Life:
    """What to do for one write, step by step; its fate.

    Writes without a key are sent once, those with one repeated until they are acknowledged, or sent once and asked
    for. `tell` gets what is wrong, and the time `now` at which a write without a key lost its worker.
    """
    insert = insert_of(own, number)
    key = insert.key
    what = f"client {own}, write {number}"
    for _ in range(REPEATS_MAX):
        try:
            result = yield insert
        except sw.StorageError as error:
            if not error.retryable:
                tell(Note(wrong=f"{what}: {type(error).__name__}: {error}"))
            if key is None and isinstance(error, sw.WorkerUnavailableError) and error.outcome == "unknown":
                tell(Note(told_s=now()))
            if key is None or error.outcome != "unknown":
                return _FATES[error.outcome]
            if is_asked(number):
                return (yield from _asked(insert, key, what, tell))
            insert = insert._replace(timeout=WRITE_SECONDS_MAX, is_cancelled=False)
        else:
            if key is not None and is_doubled(number):
                yield from _doubled(insert, result, what, tell)
            return Fate.ACKNOWLEDGED
    tell(Note(wrong=f"{what}: no answer to {REPEATS_MAX} attempts"))
    return Fate.UNKNOWN


def _asked(insert: Insert, key: str, what: str, tell: Tell) -> Generator[Step, Answer, Fate]:
    """Ask what became of it; what is forbidden from then on must be refused."""
    for _ in range(REPEATS_MAX):
        try:
            known = yield Ask(key)
        except sw.StorageError:
            continue
        assert isinstance(known, sw.KnownOutcome)
        if known.state == "committed":
            return Fate.ACKNOWLEDGED
        try:
            yield insert._replace(timeout=WRITE_SECONDS_MAX, is_cancelled=False)
        except sw.StorageError as error:
            if not error.retryable and not isinstance(error, sw.RequestConflictError):
                tell(Note(wrong=f"{what}, fenced: {type(error).__name__}: {error}"))
        else:
            tell(Note(wrong=f"{what}: it was done although its key was fenced"))
        return Fate.NOT_COMMITTED
    tell(Note(wrong=f"{what}: its outcome was asked for {REPEATS_MAX} times in vain"))
    return Fate.UNKNOWN


def _doubled(insert: Insert, first: Answer, what: str, tell: Tell) -> Generator[Step, Answer, None]:
    """Repeat what was acknowledged: it must answer the same."""
    try:
        again = yield insert
    except sw.StorageError as error:
        # A deadline or a lost worker says nothing of the first one, which is acknowledged.
        if not error.retryable:
            tell(Note(wrong=f"{what}, repeated: {type(error).__name__}: {error}"))
        return
    if _row(first) != _row(again):
        tell(Note(wrong=f"{what}: its repeat gave another result"))


def _row(answer: Answer) -> int | None:
    """The row of an insert; None where it was done by a transaction, whose answer is none."""
    return answer.last_insert_rowid if isinstance(answer, sw.Rows) else None


def live(steps: Life, perform: Perform, first: Callable[[], Answer] | None = None) -> Fate:
    """Carry a life out; `first` stands for its first step where that was begun already."""
    try:
        step = next(steps)
        while True:
            try:
                answer = perform(step) if first is None else first()
            except sw.StorageError as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
            first = None
    except StopIteration as end:
        fate: Fate = end.value
        return fate


async def live_async(steps: Life, perform: PerformAsync) -> Fate:
    """The same in an event loop."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await perform(step)
            except sw.StorageError as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        fate: Fate = end.value
        return fate


def client_performer(client: sw.Client) -> Perform:
    """Carries steps out by a synchronous client."""

    def perform(step: Step) -> Answer:
        if isinstance(step, Ask):
            return client.outcome(step.key, fence=True, timeout=ANSWER_SECONDS_MAX)
        return client.execute(
            ledger.INSERT, step.row, timeout=step.timeout, request_key=step.key, retries=step.retries
        )

    return perform


def transaction_performer(client: sw.Client) -> Perform:
    """Carries inserts out in two steps of an interactive transaction, neither of which may stand alone."""

    def perform(step: Step) -> Answer:
        if isinstance(step, Ask):
            return client.outcome(step.key, fence=True, timeout=ANSWER_SECONDS_MAX)
        own, number, keyed, body = step.row
        with client.transaction(ledger.LEASE_SECONDS, timeout=step.timeout, request_key=step.key) as tx:
            tx.execute(ledger.INSERT, (own, number, keyed, b""), timeout=step.timeout)
            tx.execute(ledger.FILL, (body, own, number), timeout=step.timeout)
        return None

    return perform


def async_performer(client: sw.AsyncClient) -> PerformAsync:
    """Carries steps out by an asynchronous client; some inserts are cancelled in flight."""

    async def perform(step: Step) -> Answer:
        if isinstance(step, Ask):
            return await client.outcome(step.key, fence=True, timeout=ANSWER_SECONDS_MAX)
        call = client.execute(
            ledger.INSERT, step.row, timeout=step.timeout, request_key=step.key, retries=step.retries
        )
        if not step.is_cancelled:
            return await call
        task = asyncio.ensure_future(call)
        done, _ = await asyncio.wait({task}, timeout=CANCEL_SECONDS)
        if not done:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            raise sw.RequestCancelledError("cancelled by the test", outcome="unknown") from None

    return perform

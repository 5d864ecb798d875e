"""What a load test's clients do: statements, rows, and the loops on a storage worker.

The row is the one of every reference measurement: about 220 bytes with its key and time stamp.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

import corpus
import storage_worker as sw
from load_store import add
from measuring import Recorder, Sample
from storage_worker.transcripts import formats
from storage_worker.transcripts.records import Problem, Record, Transcript, canonical, events_of

Workload = Literal["insert", "read", "mixed", "pipelined", "ingest"]
Durability = Literal["full", "normal"]

CREATE = "create table if not exists t(id integer primary key, k text, v blob, ts integer)"
INSERT = "insert into t(k,v,ts) values(?,?,?)"
SELECT = "select k,v,ts from t where id=?"
CREATE_INGEST = (
    "create table if not exists m(conversation text, position integer, role text, author text, body text,"
    " details text, primary key (conversation, position)) without rowid"
)
INSERT_INGEST = "insert into m(conversation,position,role,author,body,details) values(?,?,?,?,?,?)"
VALUE = b"x" * 200
ROWS_PREPARED = 10_000
READS_PER_WRITE = 4
TIMEOUT_SECONDS = 5.0

INGEST_MESSAGES_MAX = 5_000

IngestRow = tuple[str, int, str, str, str, str]


def key_of(number: int) -> int:
    """The row that the `number`th read of a client asks for: spread over the prepared rows, the same each time."""
    return number * 7919 % ROWS_PREPARED + 1


def is_read(workload: Workload, number: int) -> bool:
    """Whether the `number`th operation of a client is a read."""
    return workload == "read" or (workload == "mixed" and number % (READS_PER_WRITE + 1) != 0)


class Message(msgspec.Struct, frozen=True):
    """One message; `details` is JSON text of whatever its source says beyond role, author and text."""

    role: str
    author: str
    text: str
    details: str


def ingest_messages(path: Path | None) -> list[Message]:
    """Real messages for the ingest workload, from transcripts or the installed corpus; `CorpusError` where none are."""
    if path is not None:
        found = list(itertools.islice(_messages(path), INGEST_MESSAGES_MAX))
    else:
        with tempfile.TemporaryDirectory(prefix="load-test-") as name:
            corpus.write_as_chats(corpus.default_path(), Path(name))
            found = list(itertools.islice(_messages(Path(name)), INGEST_MESSAGES_MAX))
    if not found:
        raise corpus.CorpusError(f"no messages were found in {path}")
    return found


def _messages(path: Path) -> Iterator[Message]:
    for transcript in formats.transcripts(str(path)):
        for record in formats.read(transcript) if isinstance(transcript, Transcript) else ():
            if not isinstance(record, Problem):
                yield from _messages_of(record)


def _messages_of(record: Record) -> Iterator[Message]:
    for event in events_of(record):
        if isinstance(event.body, str):
            yield Message(event.role, record.actor, event.body, canonical(event.fields).decode())


def ingest_row(client: int, number: int, messages: list[Message]) -> IngestRow:
    """The `number`th message of a client: a conversation of its own, real texts again and again."""
    message = messages[number % len(messages)]
    return f"client {client}", number, message.role, message.author, message.text, message.details


def prepare(client: sw.Client, workload: Workload) -> None:
    """Make the table that the workload needs, and for reads its rows."""
    client.execute(CREATE)
    if workload in ("read", "mixed"):
        with client.pipeline() as pipeline:
            for number in range(ROWS_PREPARED):
                pipeline.execute(INSERT, (f"key{number}", VALUE, number))


def worker_loop(
    start: Callable[[], None],
    pipe: sw.Pipe,
    own: int,
    workload: Workload,
    seconds: float,
    depth: int,
    messages: list[Message],
) -> Sample:
    """One client of a storage worker."""
    client = pipe.connect()
    client.query("select 1")
    loop = _pipelined if workload == "pipelined" else _one_at_a_time
    operation = _operation(client, own, workload, messages)
    start()
    recorder = Recorder()
    loop(client, operation, recorder, time.perf_counter() + seconds, depth)
    sample = recorder.sample()
    client.close()
    return sample


def _operation(
    client: sw.Client, own: int, workload: Workload, messages: list[Message]
) -> Callable[[int], Any]:
    execute, query, call = client.execute, client.query, client.call

    def insert(number: int) -> None:
        execute(INSERT, (f"key{number}", VALUE, number), timeout=TIMEOUT_SECONDS)

    def read(number: int) -> None:
        query(SELECT, (key_of(number),), timeout=TIMEOUT_SECONDS)

    def mixed(number: int) -> None:
        (read if is_read("mixed", number) else insert)(number)

    def ingest(number: int) -> None:
        call(add(*ingest_row(own, number, messages)), timeout=TIMEOUT_SECONDS)

    return {"insert": insert, "read": read, "mixed": mixed, "ingest": ingest, "pipelined": insert}[workload]


def _one_at_a_time(
    _client: sw.Client, operation: Callable[[int], Any], recorder: Recorder, end: float, _depth: int
) -> None:
    clock, done = time.perf_counter, recorder.latencies_s.append
    number = 0
    while (began := clock()) < end:
        try:
            operation(number)
        except sw.StorageError as error:
            recorder.error(error.code)
        else:
            done(clock() - began)
        number += 1


def _pipelined(
    client: sw.Client, _operation: Callable[[int], Any], recorder: Recorder, end: float, depth: int
) -> None:
    """Sends `depth` inserts, waits for all their answers, and begins again; the latency is that of the batch."""
    clock = time.perf_counter
    number = 0
    with client.pipeline() as pipeline:
        execute = pipeline.execute
        while (began := clock()) < end:
            futures = [
                execute(INSERT, (f"key{place}", VALUE, place), timeout=TIMEOUT_SECONDS)
                for place in range(number, number + depth)
            ]
            answered = 0
            for future in futures:
                try:
                    future.result()
                except sw.StorageError as error:
                    recorder.error(error.code)
                else:
                    answered += 1
            recorder.latencies_s.extend([clock() - began] * answered)
            number += depth

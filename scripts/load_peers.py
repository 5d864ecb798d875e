"""What the storage worker is measured against: the least that does the same work, and what a user would do instead.

bare    one process, one SQLite connection, a poll loop over socket pairs, one transaction per wake-up. No admission,
        fairness, deadlines kept while running, limits, savepoints or error handling: the floor of the product's cost.
frames  the same without SQL: request in, reply out. The floor for reads.
direct  every client opens the same file with the standard sqlite3 module: WAL, BEGIN IMMEDIATE, busy timeout of 5 s.
"""

import os
import select
import socket
import sqlite3
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import msgspec

from load_workloads import (
    CREATE,
    CREATE_INGEST,
    INSERT,
    INSERT_INGEST,
    ROWS_PREPARED,
    SELECT,
    TIMEOUT_SECONDS,
    VALUE,
    Durability,
    Message,
    Workload,
    ingest_row,
    is_read,
    key_of,
)
from measuring import Recorder, Sample

READ_BYTES = 65_536
RESULT_BYTES_MAX = 1 << 20


class Row(msgspec.Struct, array_like=True, tag=0):
    """The arguments of an insert."""

    k: str
    v: bytes
    ts: int


class Point(msgspec.Struct, array_like=True, tag=1):
    """The arguments of a point read."""

    id: int


class Transcript(msgspec.Struct, array_like=True, tag=2):
    """The arguments of one message's insert."""

    conversation: str
    position: int
    role: str
    author: str
    body: str
    details: str


class Request(msgspec.Struct, array_like=True):
    """One request of a bare client."""

    id: int
    op: str
    deadline: int
    limit: int
    body: Row | Point | Transcript


class Reply(msgspec.Struct, array_like=True):
    """Its answer: a row id, or a row."""

    id: int
    result: Any


def prepare_file(path: Path, workload: Workload) -> None:
    """Make the file, its tables and for reads its rows, with the standard sqlite3 module."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("pragma journal_mode=wal")
    connection.execute(CREATE)
    connection.execute(CREATE_INGEST)
    if workload in ("read", "mixed"):
        connection.execute("begin immediate")
        connection.executemany(INSERT, ((f"key{number}", VALUE, number) for number in range(ROWS_PREPARED)))
        connection.execute("commit")
    connection.close()


# --- bare and frames --------------------------------------------------------------------------------------------


def bare_worker(pipes: list[socket.socket], path: Path, durability: Durability, sql: bool) -> None:
    """Serve the pipes until the last one ends."""
    connection = apsw.Connection(str(path))
    for pragma in ("journal_mode=wal", f"synchronous={durability}", "wal_autocheckpoint=4000"):
        connection.execute("pragma " + pragma)
    serve = _server(connection, sql)
    decode = msgspec.msgpack.Decoder(Request).decode
    poll: Any = select.epoll() if hasattr(select, "epoll") else select.poll()
    for pipe in pipes:
        pipe.setblocking(False)
        poll.register(pipe.fileno(), select.POLLIN)
    open_pipes = len(pipes)
    kept: dict[int, bytes] = {}
    while open_pipes:
        batch: list[tuple[int, Request]] = []
        for fd, _ in poll.poll():
            data = os.read(fd, READ_BYTES)
            if data:
                data = kept.pop(fd, b"") + data
                taken = _cut(data, fd, decode, batch)
                if taken < len(data):
                    kept[fd] = data[taken:]
            else:
                poll.unregister(fd)
                open_pipes -= 1
        if batch:
            serve(batch)


def _cut(data: bytes, fd: int, decode: Callable[[bytes], Request], batch: list[tuple[int, Request]]) -> int:
    """Put every whole request of `data` into the batch; return how many bytes they took."""
    offset, end = 0, len(data)
    while offset + 4 <= end:
        stop = offset + 4 + int.from_bytes(data[offset : offset + 4], "big")
        if stop > end:
            break
        batch.append((fd, decode(data[offset + 4 : stop])))
        offset = stop
    return offset


def _server(connection: apsw.Connection, sql: bool) -> Callable[[list[tuple[int, Request]]], None]:
    """What runs a batch in one transaction, and then writes once to each client."""
    execute = connection.cursor().execute
    run = _runner(execute, connection.last_insert_rowid)
    encode = msgspec.msgpack.Encoder().encode

    def serve(batch: list[tuple[int, Request]]) -> None:
        now = time.monotonic_ns()
        replies: dict[int, list[bytes]] = {}
        if sql:
            execute("begin immediate")
        for fd, request in batch:
            if request.deadline < now:
                continue
            body = encode(Reply(request.id, run(request.body) if sql else request.id))
            replies.setdefault(fd, []).append(len(body).to_bytes(4, "big") + body)
        if sql:
            execute("commit")
        for fd, parts in replies.items():
            os.write(fd, b"".join(parts))

    return serve


def _runner(execute: Any, last_insert_rowid: Callable[[], int]) -> Callable[[Row | Point | Transcript], Any]:
    def run(body: Row | Point | Transcript) -> Any:
        if type(body) is Row:
            execute(INSERT, (body.k, body.v, body.ts))
            return last_insert_rowid()
        if type(body) is Point:
            return next(execute(SELECT, (body.id,)))
        assert type(body) is Transcript
        execute(
            INSERT_INGEST, (body.conversation, body.position, body.role, body.author, body.body, body.details)
        )
        return last_insert_rowid()

    return run


def bare_loop(
    start: Callable[[], None],
    pipe: socket.socket,
    own: int,
    workload: Workload,
    seconds: float,
    depth: int,
    messages: list[Message],
) -> Sample:
    """One client of the bare worker: sends `depth` requests, waits for all their answers, and begins again."""
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(Reply).decode
    body_of = _bodies(own, workload, messages)
    fd, clock = pipe.fileno(), time.perf_counter
    start()
    recorder = Recorder()
    end = clock() + seconds
    number = 0
    while (began := clock()) < end:
        deadline = time.monotonic_ns() + int(TIMEOUT_SECONDS * 1e9)
        frames = []
        for _ in range(depth):
            body = encode(Request(number, "sql.execute", deadline, RESULT_BYTES_MAX, body_of(number)))
            frames.append(len(body).to_bytes(4, "big") + body)
            number += 1
        os.write(fd, b"".join(frames))
        answered, data = 0, b""
        while answered < depth:
            data += os.read(fd, READ_BYTES)
            while len(data) >= 4 and len(data) >= 4 + (size := int.from_bytes(data[:4], "big")):
                decode(data[4 : 4 + size])
                data = data[4 + size :]
                answered += 1
        recorder.latencies_s.extend(array("d", [clock() - began] * depth))
    return recorder.sample()


def _bodies(
    own: int, workload: Workload, messages: list[Message]
) -> Callable[[int], Row | Point | Transcript]:
    def insert(number: int) -> Row | Point | Transcript:
        return Row(f"key{number}", VALUE, number)

    def read(number: int) -> Row | Point | Transcript:
        return Point(key_of(number))

    def mixed(number: int) -> Row | Point | Transcript:
        return read(number) if is_read("mixed", number) else insert(number)

    def ingest(number: int) -> Row | Point | Transcript:
        return Transcript(*ingest_row(own, number, messages))

    return {"insert": insert, "pipelined": insert, "read": read, "mixed": mixed, "ingest": ingest}[workload]


# --- direct -----------------------------------------------------------------------------------------------------


def direct_loop(
    start: Callable[[], None],
    path: Path,
    own: int,
    workload: Workload,
    seconds: float,
    durability: Durability,
    messages: list[Message],
) -> Sample:
    """One client with the file open itself: a transaction for each write, a statement for each read."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=TIMEOUT_SECONDS)
    connection.execute(f"pragma synchronous={durability}")
    execute = connection.execute
    sql = INSERT_INGEST if workload == "ingest" else INSERT
    clock = time.perf_counter
    start()
    recorder = Recorder()
    done = recorder.latencies_s.append
    end = clock() + seconds
    number = 0
    while (began := clock()) < end:
        try:
            if is_read(workload, number):
                execute(SELECT, (key_of(number),)).fetchone()
            else:
                row = (
                    ingest_row(own, number, messages)
                    if workload == "ingest"
                    else (f"key{number}", VALUE, number)
                )
                execute("begin immediate")
                execute(sql, row)
                execute("commit")
        except sqlite3.OperationalError as error:
            recorder.error(error.sqlite_errorname)
            if connection.in_transaction:
                execute("rollback")
        else:
            done(clock() - began)
        number += 1
    sample = recorder.sample()
    connection.close()
    return sample

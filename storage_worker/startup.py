"""What a worker is told at its start and what it answers, over the two pipes to whoever started it."""

import contextlib
import hashlib
import hmac
import io
import os
import select
import signal
import sys
from typing import Literal

import msgspec

from .ownership import Record
from .protocol.envelope import Failure, Role, encode
from .protocol.errors import ProtocolError, RequestTooLargeError
from .protocol.framing import FrameReader, frame
from .protocol.limits import MIB, READ_BYTES, Limits

STARTUP_BYTES_MAX = 64 * MIB
"""Bound on a `Startup`, most of which are shipped stores."""

ANSWER_BYTES_MAX = 1 * MIB

SILENCE_MS_MAX = 10_000
"""How long whoever starts a worker may say nothing before it is taken for dead."""

STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR = range(3)


class Startup(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs to know.

    `path` is the real path of the database, `address` where to listen, `durability` the level of an
    acknowledgement, `stores` the import strings of stores, `shipped` pickled ones, `sql` whether clients
    may send SQL, `secret` what grants roles, `sys_path` where the host finds its modules. A worker with an
    `owner_pid` ends with that process (created at `owner_started`, seconds since the epoch); one without
    is shared and ends after its last client.
    """

    path: str
    address: str
    durability: Literal["full", "normal"]
    limits: Limits
    stores: list[str]
    shipped: bytes
    sql: bool
    owner_pid: int | None
    owner_started: float | None
    secret: bytes
    sys_path: list[str]


class Started(msgspec.Struct, frozen=True, array_like=True, tag=101):
    """The answer of a worker that listens."""

    record: Record


Answer = Started | Failure

_startup_decoder = msgspec.msgpack.Decoder(Startup)
_answer_decoder = msgspec.msgpack.Decoder(Answer)


def grant_for(secret: bytes, role: Role) -> bytes:
    """What a Hello carries to prove that the host gave its client a role."""
    return hmac.digest(secret, role.encode(), hashlib.sha256)


def granted_role(secret: bytes, asked: Role, grant: bytes) -> Role:
    """The role a client gets: the one it asked for where its grant proves it, else `write` at the most."""
    if asked != "admin" or hmac.compare_digest(grant, grant_for(secret, asked)):
        return asked
    return "write"


def encode_startup(startup: Startup) -> bytes:
    """The frame that a worker reads first; `RequestTooLargeError` where its stores are too large."""
    body = encode(startup)
    if len(body) > STARTUP_BYTES_MAX:
        raise RequestTooLargeError(
            f"the worker's start message has {len(body)} bytes; the limit is {STARTUP_BYTES_MAX}. Name the stores"
            " by import strings instead of shipping them",
            details={"startup_bytes": len(body), "startup_bytes_max": STARTUP_BYTES_MAX},
        )
    return frame(body)


def decode_answer(body: bytes) -> Answer:
    """A worker's answer; `ProtocolError` where it is none."""
    try:
        return _answer_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"the worker's answer to its start does not decode: {error}") from error


def enter_process() -> tuple[int, int]:
    """Leave behind what the process inherited, as the worker's first act.

    Returns the descriptors for `read_startup` and `answer`, taken away from standard input and output: a
    store's `print` goes to the worker's log from here on, and never into the answer. Files are made for
    this user only, and no signal stays blocked because the thread that started the worker had it blocked.
    """
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    reading, writing = os.dup(STANDARD_INPUT), os.dup(STANDARD_OUTPUT)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, STANDARD_INPUT)
    os.close(nothing)
    os.dup2(STANDARD_ERROR, STANDARD_OUTPUT)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return reading, writing


def read_startup(descriptor: int) -> Startup:
    """Read what the starter says, and close the descriptor.

    Raises `ProtocolError` where the starter ended in the middle of it or says something else.
    """
    try:
        reader = FrameReader(STARTUP_BYTES_MAX)
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        # A process that was forked from the starter may keep the pipe open beyond the starter's death.
        while poller.poll(SILENCE_MS_MAX) and (data := os.read(descriptor, READ_BYTES)):
            bodies = reader.feed(data)
            if bodies:
                return _startup_decoder.decode(bodies[0])
        raise ProtocolError("whoever started the worker ended before it had said how")
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the start message does not decode: {error}") from error
    finally:
        os.close(descriptor)


def answer(descriptor: int, outcome: Answer) -> None:
    """Tell the starter that the worker listens, or why it does not, and close the descriptor."""
    rest = memoryview(frame(encode(outcome)))
    # A starter that has gone needs no answer; the worker sees that by other means.
    with contextlib.suppress(BrokenPipeError):
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    os.close(descriptor)

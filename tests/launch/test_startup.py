import os
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from storage_worker import startup as startups
from storage_worker.protocol.envelope import Failure, Role, encode, failure_of
from storage_worker.protocol.errors import ProtocolError, RequestTooLargeError, SchemaError
from storage_worker.protocol.framing import FrameReader, frame
from storage_worker.protocol.limits import DEFAULT_LIMITS, Limits
from storage_worker.startup import (
    Answer,
    Started,
    Startup,
    answer,
    decode_answer,
    encode_startup,
    grant_for,
    granted_role,
    read_startup,
)

from .programs import start_program
from .test_ownership import record_of

STARTUP = Startup(
    path="/data/資料.db",
    address="unix:///run/x.sock",
    durability="normal",
    limits=Limits(busy_ms=11),
    stores=["myapp.storage:notes"],
    shipped=b"\x80\x04",
    sql=False,
    owner_pid=1,
    owner_started=1.5,
    secret=b"s" * 32,
    sys_path=["/a", "/b"],
)


def said(message: bytes) -> int:
    """The reading end of a pipe that ends behind a message."""
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as file:
            file.write(message)

    threading.Thread(target=write).start()
    return reading


@pytest.mark.parametrize("startup", [STARTUP, msgspec.structs.replace(STARTUP, shipped=b"x" * 300_000)])
def test_a_startup_is_read_as_it_was_said(startup: Startup) -> None:
    reading = said(encode_startup(startup))
    assert read_startup(reading) == startup
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)


@pytest.mark.parametrize(
    "message",
    [b"", b"\0\0", encode_startup(STARTUP)[:-1], frame(b""), frame(b"\x93"), b"\xff" * 9, frame(encode([1]))],
)
def test_a_startup_that_is_none_is_a_protocol_error(message: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_startup(said(message))


def test_a_starter_that_says_nothing_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startups, "SILENCE_MS_MAX", 1)
    reading, writing = os.pipe()
    os.write(writing, encode_startup(STARTUP)[:-1])
    with pytest.raises(ProtocolError, match="before it had said how"):
        read_startup(reading)
    os.close(writing)


def test_too_large_a_startup_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startups, "STARTUP_BYTES_MAX", 100)
    with pytest.raises(RequestTooLargeError, match="the limit is 100"):
        encode_startup(STARTUP)


OUTCOMES: list[Answer] = [
    Started(record_of(os.getpid())),
    failure_of(0, SchemaError("newer", details={"version": 7}), 100),
]


@pytest.mark.parametrize("outcome", OUTCOMES, ids=["started", "failure"])
def test_an_answer_is_heard_as_it_was_given(outcome: Started | Failure) -> None:
    reading, writing = os.pipe()
    answer(writing, outcome)
    with os.fdopen(reading, "rb") as file:
        (body,) = FrameReader(DEFAULT_LIMITS.request_bytes_max).feed(file.read())
    assert decode_answer(body) == outcome


def test_an_answer_that_nobody_hears_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    answer(writing, OUTCOMES[0])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writing)


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", encode([101]), encode([5, 0]), encode({}), b"\x91" * 5_000]
)
def test_an_answer_that_is_none_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_answer(body)


def test_a_grant_proves_one_role_of_one_secret() -> None:
    secret = b"s" * 32
    roles: list[Role] = ["read", "write", "admin"]
    assert len({grant_for(secret, role) for role in roles}) == 3
    assert granted_role(secret, "admin", grant_for(secret, "admin")) == "admin"
    forged: list[bytes] = [b"", grant_for(secret, "write"), grant_for(b"t" * 32, "admin"), b"x" * 32]
    for grant in forged:
        assert granted_role(secret, "admin", grant) == "write"
        for role in roles[:2]:
            assert granted_role(secret, role, grant) == role


def test_a_worker_leaves_behind_what_it_inherited(tmp_path: Path) -> None:
    made = tmp_path / "made"
    program = start_program(
        f"""
import os, signal, sys
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.umask(0)
from storage_worker.startup import enter_process
reading, writing = enter_process()
print("for the log")
print(repr(sys.stdin.read()), file=sys.stderr)
Path({str(made)!r}).touch()
os.write(writing, os.read(reading, 100))
os.close(writing)
assert not os.get_inheritable(reading)
assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    heard, log = program.communicate("hello")
    assert heard == "hello"
    assert sorted(log.splitlines()) == ["''", "for the log"]
    assert made.stat().st_mode & 0o777 == 0o600
    assert sys.stdin is not None

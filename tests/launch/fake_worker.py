"""A worker without a database: real start, lock, record, socket and hand-shake, and faults on request.

`SW_FAKE` in its environment names the fault; nothing sends requests to it but "exit", which it obeys.
"""

import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path

from storage_worker import exits
from storage_worker.address import inode_of, listen, withdraw
from storage_worker.ownership import Ownership, Record
from storage_worker.processes import boot_id, open_pidfd, started_of
from storage_worker.protocol.envelope import (
    PROTOCOL_VERSION,
    Hello,
    Request,
    Welcome,
    decode_from_client,
    encode,
    failure_of,
)
from storage_worker.protocol.errors import SchemaError, StorageError
from storage_worker.protocol.framing import FrameReader, frame
from storage_worker.protocol.limits import READ_BYTES
from storage_worker.startup import (
    Started,
    Startup,
    answer,
    enter_process,
    granted_role,
    read_startup,
)


class FakeWorker:
    def __init__(self, startup: Startup, listener: socket.socket) -> None:
        self.startup = startup
        self.worker = os.urandom(8).hex()
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.peers: dict[socket.socket, FrameReader] = {}
        self.running = True

    def record(self) -> Record:
        started = started_of(os.getpid())
        assert started is not None
        return Record(
            worker=self.worker,
            pid=os.getpid(),
            pid_started=started,
            boot=boot_id(),
            host=socket.gethostname(),
            address=self.startup.address,
            started_ms=time.time_ns() // 1_000_000,
            secret=self.startup.secret,
            owner_pid=self.startup.owner_pid,
            version="fake",
        )

    def serve(self, owner: int | None, wakeup: int) -> None:
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(wakeup, selectors.EVENT_READ)
        if owner is not None:
            self.selector.register(owner, selectors.EVENT_READ)
        idle = None if self.startup.owner_pid is not None else self.startup.limits.shared_idle_ms / 1000
        while self.running:
            events = self.selector.select(None if self.peers else idle)
            if not events:
                return
            for key, _ in events:
                if key.fileobj is self.listener:
                    peer, _ = self.listener.accept()
                    self.peers[peer] = FrameReader(READ_BYTES)
                    self.selector.register(peer, selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    self.read(key.fileobj)
                else:
                    return

    def read(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(READ_BYTES)
            self.answer(peer, data)
        except ConnectionError:
            # A client whose time was over has closed.
            data = b""
        if not data:
            self.selector.unregister(peer)
            del self.peers[peer]
            peer.close()

    def answer(self, peer: socket.socket, data: bytes) -> None:
        for body in self.peers[peer].feed(data):
            envelope = decode_from_client(body)
            if isinstance(envelope, Hello):
                peer.sendall(frame(encode(self.welcome(envelope))))
            elif isinstance(envelope, Request) and envelope.operation == "fake.exit":
                os._exit(exits.STOPPED)

    def welcome(self, hello: Hello) -> Welcome:
        return Welcome(
            version=PROTOCOL_VERSION,
            worker=self.worker,
            pid=os.getpid(),
            role=granted_role(self.startup.secret, hello.role, hello.grant),
            limits=self.startup.limits,
            sqlite_version="0",
            journal_mode="wal",
            synchronous=self.startup.durability,
            clock_ns=time.monotonic_ns(),
        )


def main() -> None:
    reading, writing = enter_process()
    fault = os.environ.get("SW_FAKE", "")
    if fault == "exit at once":
        sys.stderr.write("these are my last words")
        sys.exit(3)
    startup = read_startup(reading)
    sys.path[:] = startup.sys_path
    wakeup, signalled = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(signalled, b"!"))
    fail_before_start(fault, writing)
    try:
        if fault == "refuse":
            raise SchemaError("the schema is newer", details={"version": 7})
        ownership = Ownership.take(startup.path)
    except StorageError as error:
        answer(writing, failure_of(0, error, startup.limits.message_chars_max))
        sys.exit(1)
    owner = None
    if startup.owner_pid is not None:
        assert startup.owner_started is not None
        owner = open_pidfd(startup.owner_pid, startup.owner_started)
    # What the worker makes through SQLite gets its mode from the process's mask.
    Path(startup.path).touch()
    listener = listen(startup.address, 64)
    inode = inode_of(startup.address)
    worker = FakeWorker(startup, listener)
    record = worker.record()
    ownership.write_record(record)
    with Path(f"{startup.path}.starts").open("ab") as file:
        file.write(b".")  # one byte for each worker that has listened
    answer(writing, Started(record))
    fail_after_start(fault, startup.path)
    worker.serve(owner, wakeup)
    withdraw(startup.address, inode)
    ownership.release()


def fail_before_start(fault: str, writing: int) -> None:
    if fault == "never answer":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()
    if fault == "speak nonsense":
        os.write(writing, frame(b"nonsense"))
        signal.pause()
    if fault == "die by a signal":
        os.kill(os.getpid(), signal.SIGABRT)
    if fault == "ignore SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def fail_after_start(fault: str, path: str) -> None:
    if fault == "die after its start":
        os._exit(5)
    if fault == "die once":
        died = Path(f"{path}.died")
        if not died.exists():
            died.touch()
            os._exit(5)


if __name__ == "__main__":
    main()

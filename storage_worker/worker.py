"""The worker's process: `python -m storage_worker.worker`, started by `launch`. Wires the parts together."""

import gc
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import time

from . import exits
from .address import inode_of, listen, withdraw
from .admission import Lane
from .background import Background, CopyDatabase, Optimize, TrimReceipts
from .checkpoints import Checkpoints
from .database.connection import Database
from .database.files import OpenFiles
from .database.opening import (
    OPTIMIZE_AT_OPEN,
    has_wal_reset_fault,
    open_copy,
    open_reader,
    open_writer,
    sqlite_version,
)
from .execution import as_typed, decode, fail, succeed
from .gate import Gate
from .intake import Intake
from .interactive import without_number
from .migrations import migrate
from .operations import served_operations
from .ownership import Ownership, Record
from .peer import Job, Peer
from .pipes import Pipes
from .processes import boot_id, open_pidfd, process_is, started_of
from .protocol.envelope import CONNECTION_ID, PROTOCOL_VERSION, Welcome, failure_of
from .protocol.errors import OperationFailedError, StorageError
from .protocol.limits import DEFAULT_LIMITS
from .protocol.statements import BACKUP, HEALTH, HEARTBEAT, SNAPSHOT, SNAPSHOT_END, STATUS, STOP
from .readers import Readers
from .receipts import Receipts
from .registry import load
from .schema import Migrating, prepare_own_tables
from .serving import Serving
from .snapshots import Snapshots
from .spool import Spools
from .startup import Started, Startup, answer, enter_process, granted_role, read_startup
from .status import Reporter
from .store import Store
from .store_work import StoreWork
from .version import VERSION
from .watch import FatalError
from .writer import Writer

OWNER_LOOKS_NS = 500_000_000
"""How often the owner is looked for where the system cannot tell of its end."""

log = logging.getLogger(__name__)

READERS_END_NS = 200_000_000
"""How long a read that was told to end is waited for."""

SPARE_DESCRIPTORS = 64


class Worker:
    """One database's worker, from its opening to its end."""

    def __init__(self, startup: Startup, ownership: Ownership) -> None:
        self.startup = startup
        self.ownership = ownership
        self.limits = limits = startup.limits
        self.id = secrets.token_hex(8)
        self.gate = Gate()
        stores = load(startup.stores, startup.shipped)
        self.intake = Intake(Pipes(limits), Spools(startup.path, limits), limits, self.gate)
        self.writer = Writer(self.intake.writes, self._open, self._prepare(stores), limits)
        self.intake.operations.update(served_operations(stores, self.writer, limits, sql=startup.sql))
        self.readers = Readers(
            self.intake.reads, lambda: open_reader(startup.path, limits), limits, self.intake.finished.hand_in
        )
        self.intake.lanes += [self.readers.pooled, self.writer.interactive.lane]
        self.checkpoints = Checkpoints(self.writer, self.readers, limits)
        self.background = Background(limits)
        self.background.add(TrimReceipts(self.writer, limits))
        self.background.add(Optimize(self.writer))
        for store in stores:
            for work in store.background_work.values():
                self.background.check_room()
                self.background.add(StoreWork(work, self.writer, limits))
        self.writer.special[BACKUP.name] = self._start_backup
        self.serving = Serving(
            self.intake, self.writer, self.readers, self.checkpoints, self.background, limits
        )
        self.snapshots = Snapshots(startup.path, lambda: self.writer.files, limits)
        self.checkpoints.snapshot_before = self.snapshots.oldest_before
        self.reporter = Reporter(startup, self.id, self.serving, self.snapshots, limits)
        self._owner_seen_ns = 0
        self._set_gate()

    def _open(self) -> tuple[Database, OpenFiles]:
        database = open_writer(self.startup.path, self.startup.durability, self.limits)
        return database, OpenFiles(self.startup.path)

    def _prepare(self, stores: list[Store]) -> "Prepare":
        return Prepare(stores, self.startup)

    def _set_gate(self) -> None:
        gate = self.gate
        gate.refuse_writes = self._refuse_writes
        self.writer.runner.refusal = lambda: self.checkpoints.refuse
        gate.place_in_transaction = self._place_in_transaction
        gate.control = self._control
        gate.granted = lambda asked, grant: granted_role(self.startup.secret, asked, grant)
        gate.welcome = self._welcome
        gate.writer_is_blocked = lambda: self.writer.blocked
        gate.wake_readers = self.readers.wake
        self.serving.look_around = self._look_around
        self.serving.leave_place = lambda: withdraw(self.startup.address, self._inode)

    # What the pipes ask

    def _refuse_writes(self, now_ns: int) -> StorageError | None:
        self.checkpoints.look(now_ns)
        return self.writer.refuse or self.checkpoints.refuse

    def _place_in_transaction(self, job: Job) -> Lane | None:
        interactive = self.writer.interactive
        if job.transaction:
            interactive.check(job.peer, job.transaction)
            return interactive.lane
        if interactive.peer is job.peer and job.served.kind == "write":
            raise without_number()
        return None

    def _welcome(self, peer: Peer) -> Welcome:
        return Welcome(
            PROTOCOL_VERSION,
            self.id,
            os.getpid(),
            peer.role,
            self.limits,
            sqlite_version(),
            "wal",
            self.startup.durability,
            time.monotonic_ns(),
        )

    def _control(self, job: Job) -> None:
        name = job.served.name
        try:
            arguments = decode(job, self.limits)
            if name == STATUS.name:
                succeed(job, self.reporter.status())
            elif name == HEALTH.name:
                succeed(job, self.reporter.health())
            elif name == STOP.name:
                succeed(job, None)
                self.serving.stop("a client asked for it", self.limits.stop_grace_ms, exits.STOPPED)
            elif name == SNAPSHOT.name:
                succeed(job, self.snapshots.take(job.peer, arguments))
            elif name == SNAPSHOT_END.name:
                self.snapshots.end(arguments.number)
                succeed(job, None)
            elif name == HEARTBEAT.name:
                succeed(job, None)
        except Exception as error:  # noqa: BLE001 - a figure that cannot be had is no reason to end
            fail(job, as_typed(error, name), self.limits)

    def _start_backup(self, job: Job) -> list[Job]:
        self.writer.database.rollback()
        try:
            self.background.check_room()
            self.background.add(
                CopyDatabase(
                    job,
                    self.writer,
                    self.intake.copies,
                    lambda path: open_copy(path, self.limits),
                    self.limits,
                )
            )
        except StorageError as error:
            fail(job, error, self.limits)
            return [job]
        return []

    # Reasons to end

    def _look_around(self, now_ns: int) -> int:
        """End where there is a reason to; when to look again, 0 where only the pipes can tell."""
        if self.intake.pipes.signals:
            self.intake.pipes.signals.clear()
            self.serving.stop("SIGTERM", self.limits.stop_grace_ms)
        if self.startup.owner_pid is None:
            return self._look_at_clients(now_ns)
        if not self._owner_seen_ns:
            return 0
        if now_ns - self._owner_seen_ns >= OWNER_LOOKS_NS:
            self._owner_seen_ns = now_ns
            if not process_is(self.startup.owner_pid, self.startup.owner_started or 0.0):
                self._owner_gone()
        return self._owner_seen_ns + OWNER_LOOKS_NS

    def _look_at_clients(self, now_ns: int) -> int:
        if self.intake.pipes.peers or self.serving.stop_by_ns:
            return 0
        end_ns = self.intake.pipes.emptied_ns + self.limits.shared_idle_ms * 1_000_000
        if now_ns >= end_ns:
            self.serving.stop("its last client has left", self.limits.stop_grace_ms)
        return end_ns

    def _owner_gone(self) -> None:
        self.serving.stop("the process that owns it has ended", self.limits.orphan_grace_ms)

    def _watch_owner(self) -> None:
        if self.startup.owner_pid is None:
            return
        try:
            fd = open_pidfd(self.startup.owner_pid, self.startup.owner_started or 0.0)
        except ProcessLookupError:
            self._owner_gone()
            return
        if fd is None:
            self._owner_seen_ns = time.monotonic_ns()
        else:
            self.intake.pipes.watch_readable(fd, self._owner_gone)

    # Life

    def start(self) -> Record:
        """Listen, and say where."""
        startup = self.startup
        self.intake.pipes.listen_on(listen(startup.address, self.limits.connections_max))
        # In this order: a signal from here on is heard, and one before has ended the process.
        signal.set_wakeup_fd(self.intake.pipes.signal_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _note_signal)
        self._watch_owner()
        record = Record(
            worker=self.id,
            pid=os.getpid(),
            pid_started=started_of(os.getpid()) or 0.0,
            boot=boot_id(),
            host=socket.gethostname(),
            address=startup.address,
            started_ms=time.time_ns() // 1_000_000,
            secret=startup.secret,
            owner_pid=startup.owner_pid,
            version=VERSION,
        )
        self.ownership.write_record(record)
        self._inode = inode_of(startup.address)
        return record

    def run(self) -> int:
        """Serve until the end, then leave the database tidy; the exit status."""
        try:
            self.serving.run()
        finally:
            self._end()
        return self.serving.exit_status

    def _end(self) -> None:
        self.serving.end()
        self.readers.stop(time.monotonic_ns() + READERS_END_NS)
        self.background.abandon()
        # Whoever waits for an answer need not wait for the checkpoint too.
        self.intake.pipes.close()
        withdraw(self.startup.address, self._inode)
        database = self.writer.database
        try:
            database.rollback()
            database.checkpoint("truncate")
        except StorageError as error:
            log.warning("the WAL is left as it is: %s", error.message)
        database.close()
        self.ownership.release()


class Prepare:
    """Makes the worker's own tables and brings the stores' up to date, once; then the receipts."""

    def __init__(self, stores: list[Store], startup: Startup) -> None:
        self._stores = stores
        self._startup = startup

    def __call__(self, database: Database) -> Receipts:
        """The receipts of a freshly opened database."""
        prepare_own_tables(database)
        migrate(Migrating(database, self._startup.limits), self._stores)
        try:
            # Not before: a database that is refused stays as it is.
            database.own(OPTIMIZE_AT_OPEN)
        except StorageError as error:
            # Statistics can wait, and a damaged file may still be read.
            log.warning("the planner's statistics stay as they are: %s", error.message)
        return Receipts(database, self._startup.limits)


def _raise_descriptor_limit(descriptors: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = descriptors + SPARE_DESCRIPTORS
    if soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _note_signal(_: int, __: object) -> None:
    """The interpreter has written the signal's number to the pipes' wake-up; the loop does the rest."""


def _start(startup: Startup) -> tuple[Worker, Record]:
    if has_wal_reset_fault(sqlite_version()):
        raise OperationFailedError(
            f"SQLite {sqlite_version()} can corrupt a database when its WAL is reset; install a newer apsw"
        )
    startup.limits.check()
    _raise_descriptor_limit(startup.limits.connections_max + startup.limits.spools_max)
    ownership = Ownership.take(startup.path)
    try:
        worker = Worker(startup, ownership)
        return worker, worker.start()
    except BaseException:
        ownership.release()
        raise


def main() -> None:
    """Serve one database, as told on standard input."""
    reading, writing = enter_process()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        startup = read_startup(reading)
        sys.path[:] = startup.sys_path or sys.path
        worker, record = _start(startup)
    except Exception as error:
        log.exception("the worker cannot start")
        typed = as_typed(error, "the start of the worker")
        answer(writing, failure_of(CONNECTION_ID, typed, DEFAULT_LIMITS.message_chars_max))
        sys.exit(exits.FATAL)
    answer(writing, Started(record))
    gc.freeze()
    # A request of many values makes as many objects at once, and hardly ever one that refers to itself.
    gc.set_threshold(50_000, 20, 20)
    try:
        status = worker.run()
    except FatalError as fatal:
        log.critical("the worker ends: %s", fatal)
        status = fatal.status
    sys.exit(status)


if __name__ == "__main__":
    main()

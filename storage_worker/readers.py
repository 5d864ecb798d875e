"""Reads: at once on the serving thread where a statement has proved quick, else in a small pool of threads.

A read that overruns its time on the serving thread is ended there and starts anew in the pool, which is
safe since it changes nothing.
"""

import logging
import threading
import time
from collections.abc import Callable

from .admission import Lane
from .database.connection import Database
from .database.faults import Aborted
from .execution import as_typed, decode, fail, succeed
from .peer import Job
from .protocol.errors import StorageError
from .protocol.limits import KIB, Limits
from .protocol.status import ReaderStatus
from .transaction import Transaction
from .watch import Watch, cancelled, deadline_exceeded

log = logging.getLogger(__name__)

QUICK_BYTES_MAX = 16 * KIB
"""The largest request that the serving thread decodes only to see whether it is a quick one."""


class Reader:
    """One read-only connection and what watches its running request."""

    def __init__(self, database: Database, limits: Limits) -> None:
        self.database = database
        self.watch = Watch()
        self.is_busy = False
        self._limits = limits
        database.set_progress(self.watch.stop)

    def run(self, job: Job, now_ns: int, hostage_ns: int = 0) -> bool:
        """Run a read to its answer; false where it was ended at `hostage_ns` and must run elsewhere."""
        limits = self._limits
        if now_ns >= job.deadline_ns or job.cancelled:
            fail(job, cancelled() if job.cancelled else deadline_exceeded("waiting"), limits)
            return True
        database, plain = self.database, job.served.plain
        self.watch.start(job, now_ns, hostage_ns)
        try:
            arguments = decode(job, limits)
            if plain is not None:
                succeed(job, database.run(arguments.sql, plain(arguments), job.result_bytes_max, True))
            else:
                self._run_handler(job)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises becomes its client's typed error
            if isinstance(error, Aborted):
                if self.watch.hostage:
                    return False
                error = self.watch.end_reason()
            fail(job, as_typed(error, job.served.name), limits, "not_committed")
        finally:
            self.watch.job = None
            if database.in_transaction:
                database.rollback()
        return True

    def _run_handler(self, job: Job) -> None:
        """Run a handler in a transaction: its statements see one state of the database, as a single one does anyway."""
        database = self.database
        tx = Transaction(database, job.result_bytes_max, reads=True, calls_max=0)
        error: BaseException | None = None
        try:
            database.own("begin")
            succeed(job, job.served.run(tx, job.arguments))
        except BaseException as raised:  # noqa: BLE001 - raised again below
            error = raised
        # A handler may have swallowed what ended its transaction; that still is what happened.
        error = tx.ended_by or error
        tx.end()
        if error is not None:
            raise error

    def close(self) -> None:
        """Close the connection."""
        self.database.close()


class Readers:
    """Takes reads from the lane, runs the quick ones and hands the others to its threads."""

    def __init__(
        self, lane: Lane, open_reader: Callable[[], Database], limits: Limits, finished: Callable[[Job], None]
    ) -> None:
        self.lane = lane
        self.pooled = Lane()
        self.status = ReaderStatus(threads=limits.reader_threads)
        self._limits = limits
        self._finished = finished
        self._lock = threading.Lock()
        self._quick: dict[int, None] = {}
        """Hashes of what proved quick, the oldest first; a text itself may be long."""
        self._here = Reader(open_reader(), limits)
        self._offered = False
        self._wanted = threading.Event()
        self._free = threading.Event()
        self._free.set()
        self._ended = threading.Event()
        self._stopped = False
        self._pool: list[Reader] = [Reader(open_reader(), limits) for _ in range(limits.reader_threads)]
        self.watches = [reader.watch for reader in (self._here, *self._pool)]
        self._threads = [
            threading.Thread(target=self._serve, args=(reader,), name="reader", daemon=True)
            for reader in self._pool
        ]
        for thread in self._threads:
            thread.start()

    def _run_here(self, job: Job, key: int, now_ns: int) -> bool:
        """Run a quick read on the calling thread; false where it overran and must run elsewhere."""
        limit_ns = self._limits.quick_read_us_max * 1000
        answered = self._here.run(job, now_ns, now_ns + limit_ns)
        if time.monotonic_ns() - now_ns > limit_ns:
            with self._lock:
                self._quick.pop(key, None)
        if answered:
            self.status.quick_reads += 1
        return answered

    def run_quick(self, until_ns: int) -> list[Job]:
        """On the serving thread: run waiting reads that proved quick, hand on the others; the answered ones."""
        done: list[Job] = []
        limits = self._limits
        self._offered = False
        now = time.monotonic_ns()
        size = 0
        # As of a group, their answers are bounded too: only afterwards it shows who does not read them.
        while now < until_ns and size < limits.group_bytes_max and (job := self.lane.take()) is not None:
            key = self._key(job)
            if key is None or key not in self._quick:
                self.pooled.add(job)
                self._wanted.set()
                continue
            if self._run_here(job, key, now):
                done.append(job)
                size += len(job.frame)
            else:
                # Its handler may have changed them.
                job.arguments = None
                self.pooled.put_back([job])
                self._wanted.set()
            now = time.monotonic_ns()
        return done

    def offer(self) -> None:
        """Have the threads take quick reads too, since the serving thread is busy."""
        self._offered = True
        if self.lane.is_ready:
            self._wanted.set()

    def wake(self) -> None:
        """Have the threads look for reads again."""
        self._wanted.set()

    def hold(self, until_ns: int) -> None:
        """Start no more reads until `resume`, and wait for the end of those that run, until then at most."""
        self._free.clear()
        while self._runs() and (left_ns := until_ns - time.monotonic_ns()) > 0:
            self._ended.clear()
            if self._runs():
                self._ended.wait(left_ns / 1e9)

    def _runs(self) -> bool:
        return any(reader.is_busy for reader in self._pool)

    def resume(self) -> None:
        """Start reads again."""
        self._free.set()

    def busy(self) -> list[Watch]:
        """The watches of reads that run in threads now."""
        return [reader.watch for reader in self._pool if reader.watch.job is not None]

    def _serve(self, reader: Reader) -> None:
        while not self._stopped:
            self._free.wait()
            # Before the look at `_free`: whoever holds the reads back waits for this one then.
            reader.is_busy = True
            job = self._take() if self._free.is_set() else None
            if job is not None:
                self._run(reader, job)
            reader.is_busy = False
            if not self._free.is_set():
                self._ended.set()
            elif job is None:
                self._wanted.clear()
                if not (self._is_wanted() or self._stopped):
                    self._wanted.wait()
        reader.close()

    def _take(self) -> Job | None:
        return self.pooled.take() or (self.lane.take() if self._offered else None)

    def _is_wanted(self) -> bool:
        return self.pooled.is_ready or (self._offered and self.lane.is_ready)

    def _run(self, reader: Reader, job: Job) -> None:
        started = time.monotonic_ns()
        try:
            reader.run(job, started)
        except Exception as error:
            # What `run` does not turn into an answer is no handler's fault; the thread must outlive it.
            log.exception("a read of %s failed outside of its handler", job.served.name)
            fail(job, as_typed(error, job.served.name), self._limits)
        self._note(job, (time.monotonic_ns() - started) // 1000)
        # They may be fifty times as large as they came; the answer may wait long for a busy serving thread.
        job.arguments = None
        self._finished(job)

    def _note(self, job: Job, took_us: int) -> None:
        is_quick = took_us <= self._limits.quick_read_us_max // 2 and not job.code
        key = self._key(job) if is_quick else None
        with self._lock:
            self.status.pooled_reads += 1
            if key is not None and key not in self._quick:
                if len(self._quick) >= self._limits.quick_reads_remembered:
                    del self._quick[next(iter(self._quick))]
                self._quick[key] = None

    def _key(self, job: Job) -> int | None:
        """What a read is remembered by; None for one that is never quick."""
        if job.served.operation.pooled or job.large is not None:
            return None
        if job.served.plain is None:
            return hash(job.served.name)
        if job.size > QUICK_BYTES_MAX:
            # Decoded, its arguments may take fifty times its size, for as long as it waits.
            return None
        try:
            return hash((job.served.name, decode(job, self._limits).sql))
        except StorageError:
            return None  # its arguments do not decode

    def stop(self, until_ns: int) -> None:
        """End what still runs and the threads, and close the connections; a handler that goes on is left behind.

        `until_ns` says until when a handler in Python is waited for.
        """
        self._stopped = True
        for reader in self._pool:
            reader.watch.until_ns = 1
        self._free.set()
        self._wanted.set()
        for thread in self._threads:
            thread.join(max(0, until_ns - time.monotonic_ns()) / 1e9)
        self._here.close()

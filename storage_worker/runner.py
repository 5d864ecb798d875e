"""One request inside the open transaction: in a savepoint of its own, or without where that is safe."""

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from .database.connection import Database
from .database.faults import Aborted, is_disk_fault
from .execution import Check, as_typed, decode, fail, succeed
from .growth import Growth
from .peer import Job
from .protocol.envelope import Failure, encode
from .protocol.errors import OperationFailedError, ResultNotKeptError, ResultTooLargeError, StorageError
from .protocol.framing import frame
from .protocol.limits import Limits
from .protocol.statements import Statement
from .receipts import FAILURE, Receipts, fingerprint
from .transaction import KeptFailure, Transaction
from .watch import TransactionGoneError, UndoneError, Watch, cancelled, deadline_exceeded

SAVEPOINT, RELEASE, ROLLBACK_TO = "savepoint _sw_r", "release _sw_r", "rollback to _sw_r"


class Receipt(NamedTuple):
    """What is to be stored under a request's key."""

    key: str
    operation: str
    fingerprint: bytes
    outcome: object


class Runner:
    """Runs requests on the writer's connection. `watch` is asked whether the running one must end."""

    def __init__(self, database: Database, receipts: Receipts, limits: Limits) -> None:
        self.watch = Watch()
        self.refusal: Callable[[], StorageError | None] = lambda: None
        """Why nothing new is written now, if that is so; asked of what has a key and was not written before."""
        self.growth = Growth(database.path, limits)
        self.watch.look = self.growth.refusal
        self._limits = limits
        self._receipts = receipts
        self.use(database)

    def use(self, database: Database) -> None:
        """Go on with a fresh connection."""
        self._database = database
        database.set_progress(self.watch.stop)

    def run(self, job: Job, now_ns: int, calls_max: int, mates: bool) -> bool:
        """Run one request to its answer; false where it ran too long beside `mates` and must run alone.

        It may leave `calls_max` calls for after the commit. Raises `TransactionGoneError` or `UndoneError`
        where the whole transaction has to be run again.
        """
        limits = self._limits
        hostage_ns = now_ns + limits.group_work_ms_max * 1_000_000 if mates else 0
        plain = job.served.plain
        self.growth.begin()
        try:
            arguments = decode(job, limits)
            if (
                plain is not None
                and job.key is None
                and not job.needs_savepoint
                and self._database.is_plain(arguments.sql)
            ):
                self.watch.start(job, now_ns, hostage_ns)
                self._run_plain(job, arguments, plain)
            else:
                self._open_savepoint()
                self.watch.start(job, now_ns, hostage_ns)
                self._run_in_savepoint(job, calls_max)
        except Aborted:
            if self.watch.hostage:
                return False
            fail(job, self.watch.end_reason(), limits)
        except StorageError as error:
            fail(job, self.growth.explained(error), limits, "not_committed")
        finally:
            self.watch.job = None
        return True

    def _run_plain(self, job: Job, statement: Statement, check: Check) -> None:
        """Run one statement that returns nothing without a savepoint of its own."""
        database = self._database
        try:
            result = database.run(statement.sql, check(statement), job.result_bytes_max)
        except StorageError as error:
            self._check_alive(error)
            if error.details.get("sqlite_code"):
                # SQLite ran it. What OR FAIL leaves behind it counts as changes, but not what REPLACE deleted
                # before a trigger failed, so that no count tells whether anything is left.
                database.forget_plain(job.arguments.sql)
                raise UndoneError from error
            raise
        except Aborted as error:
            self._check_alive(error)
            # SQLite asks once more when a statement has ended: it may have taken effect.
            raise UndoneError from error
        if database.deferred_violations():
            raise UndoneError
        try:
            succeed(job, result)
        except StorageError as error:
            # The statement has taken effect; a change of the schema is not among the counted ones.
            raise UndoneError from error

    def _open_savepoint(self) -> None:
        # Not under watch: it is the worker's own and must not be ended when it has taken effect.
        try:
            self._database.own(SAVEPOINT)
        except StorageError as error:
            self._check_alive(error)
            raise

    def _run_in_savepoint(self, job: Job, calls_max: int) -> None:
        """Run any request; it leaves nothing behind where it fails."""
        database = self._database
        unsettled = self._receipts.unsettled
        tx = Transaction(database, job.result_bytes_max, reads=job.served.kind == "read", calls_max=calls_max)
        try:
            receipt = self._run_keyed(job, tx)
            # What follows is the worker's own and must not be ended half-way.
            self.watch.job = None
            if tx.ended_by is not None:
                raise tx.ended_by
            self._check_time(job)
            # Inside an interactive transaction they may be mended until its COMMIT.
            if not job.transaction and database.deferred_violations():
                raise OperationFailedError(
                    "a foreign key constraint is violated at the end of the request",
                    details={"sqlite_name": "SQLITE_CONSTRAINT_FOREIGNKEY"},
                )
            if receipt is not None:
                self._receipts.store(*receipt)
            database.own(RELEASE)
        except BaseException as raised:
            self.watch.job = None
            # A handler may have swallowed what ended its transaction; that still is what happened.
            error = tx.ended_by or raised
            self._undo_savepoint(error)
            self._receipts.unsettled = unsettled
            if job.served.plain is not None:
                database.forget_plain(job.arguments.sql)
            if isinstance(error, Aborted):
                raise error from None
            raise as_typed(error, job.served.name) from raised
        finally:
            tx.end()
        job.after_commit = tx.calls

    def _undo_savepoint(self, error: BaseException) -> None:
        self._check_alive(error)
        try:
            self._database.own(ROLLBACK_TO)
            self._database.own(RELEASE)
        except StorageError as failed:
            raise TransactionGoneError(error) from failed

    def _run_keyed(self, job: Job, tx: Transaction) -> Receipt | None:
        """Run a request, or answer it from an earlier run; what has to be stored, if anything."""
        key = job.key
        if key is None:
            self._run_handler(job, tx)
            return None
        print_ = fingerprint(job.served.name, job.arguments)
        try:
            found = self._receipts.find(key, print_)
            if found is not None:
                self._answer_again(job, *found)
                return None
            refusal = self.refusal()
            if refusal is not None and job.served.adds:
                raise refusal
        except (ResultNotKeptError, ResultTooLargeError) as error:
            fail(job, error, self._limits, "committed")
            return None
        return Receipt(key, job.served.name, print_, self._run_handler(job, tx))

    def _run_handler(self, job: Job, tx: Transaction) -> object:
        """Run a request's handler to its answer: the result, or a failure that keeps what it wrote."""
        try:
            result = job.served.run(tx, job.arguments)
        except KeptFailure as kept:
            failure = fail(job, kept.error, self._limits, "committed")
            if job.transaction:
                # It is kept only once its client commits, which nobody knows yet.
                fail(job, kept.error, self._limits, "not_committed")
            return failure
        succeed(job, result)
        return result

    def _answer_again(self, job: Job, state: str, kept: bytes) -> None:
        if state == FAILURE:
            failure = msgspec.structs.replace(msgspec.msgpack.decode(kept, type=Failure), id=job.id)
            job.frame, job.code = frame(encode(failure)), failure.code
        else:
            succeed(job, msgspec.Raw(kept))

    def _check_time(self, job: Job) -> None:
        """Raise where a request that has run may not be committed any more."""
        if job.cancelled:
            self.watch.reason = cancelled()
        elif time.monotonic_ns() >= job.deadline_ns:
            self.watch.reason = deadline_exceeded("execution")
        else:
            return
        raise self.watch.reason

    def _check_alive(self, error: BaseException) -> None:
        """Raise `TransactionGoneError` where the transaction has ended, or cannot be trusted any more."""
        if not self._database.in_transaction or is_disk_fault(error):
            raise TransactionGoneError(error) from error

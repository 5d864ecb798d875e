"""Interactive transactions: one client owns the writer until it commits, rolls back or its lease ends."""

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from .admission import Lane
from .database.faults import Aborted, is_disk_fault
from .execution import as_typed, decode, fail, succeed
from .peer import Job, Peer
from .protocol.envelope import encode
from .protocol.errors import InvalidRequestError, StorageError, TransactionExpiredError
from .protocol.framing import frame
from .protocol.limits import Limits
from .protocol.statements import COMMIT, ROLLBACK, SAVEPOINT
from .receipts import Unsettled, fingerprint
from .watch import FatalError, TransactionGoneError, cancelled, deadline_exceeded

if TYPE_CHECKING:
    from .writer import Writer

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}\Z")
_STEPS = {"open": "savepoint", "release": "release", "rollback": "rollback to"}


class OpenSavepoint(NamedTuple):
    """A savepoint of the client, and what had been done when it was set, to go back to."""

    name: str
    calls: int
    receipts: Unsettled


class Interactive:
    """The interactive transaction that is open, if one is. `calls` are for after its COMMIT."""

    def __init__(self, writer: "Writer", limits: Limits) -> None:
        self._writer = writer
        self._limits = limits
        self.lane = Lane()
        self.peer: Peer | None = None
        self.number = 0
        self.end_ns = 0
        self.calls: list[Callable[[], None]] = []
        self._savepoints: list[OpenSavepoint] = []
        self._ended_by = ""

    @property
    def is_open(self) -> bool:
        """Whether a client owns the writer."""
        return self.peer is not None

    def open(self, job: Job) -> list[Job]:
        """Give the begun transaction to its client."""
        limits = self._limits
        try:
            lease_ms = decode(job, limits).lease_ms or limits.lease_ms_default
            if not 0 < lease_ms <= limits.lease_ms_max:
                raise InvalidRequestError(
                    f"a lease of {lease_ms} ms; the longest is {limits.lease_ms_max} ms",
                    details={"lease_ms_max": limits.lease_ms_max},
                )
        except StorageError as error:
            self._writer.database.rollback()
            fail(job, error, limits)
            return [job]
        self.number += 1
        self.peer = job.peer
        self.end_ns = time.monotonic_ns() + lease_ms * 1_000_000
        self._savepoints = []
        self.calls = []
        succeed(job, self.number)
        return [job, *self._refuse_behind(job.peer)]

    def _refuse_behind(self, peer: Peer) -> list[Job]:
        """Refuse what the client sent behind its BEGIN without the transaction's number: it would wait for itself."""
        waiting = self._writer.lane.remove_where(lambda job: job.peer is peer)
        for job in waiting:
            fail(job, without_number(), self._limits)
        return waiting

    def check(self, peer: Peer, number: int) -> None:
        """Raise `TransactionExpiredError` where this is not the client's open transaction."""
        if self.peer is not peer or number != self.number:
            why = self._ended_by if number == self.number else ""
            raise TransactionExpiredError(
                f"the interactive transaction has ended{why}; begin a new one",
                details={"transaction": number},
            )

    def end_if_lost(self, now_ns: int) -> list[Job]:
        """Roll back where the client is gone or the lease is over; its waiting requests are answered so."""
        if self.peer is None or (now_ns < self.end_ns and not self.peer.closed):
            return []
        why = "its client is gone" if self.peer.closed else "its lease ran out"
        return self.end(f": {why}, and it was rolled back")

    def run_next(self) -> list[Job]:
        """Run the owner's next request; it has its answer then."""
        job = self.lane.take()
        if job is None:
            return []
        try:
            self.check(job.peer, job.transaction)
            if job.cancelled or time.monotonic_ns() >= job.deadline_ns:
                raise cancelled() if job.cancelled else deadline_exceeded("waiting")
            decode(job, self._limits)
            if job.served.name in self._writer.special:
                raise InvalidRequestError(f"{job.served.name} is not for the inside of a transaction")
            if job.served.name == COMMIT.name:
                return self._commit(job)
            if job.served.name == ROLLBACK.name:
                succeed(job, None)
                return [job, *self.end(": it was rolled back")]
            if job.served.name == SAVEPOINT.name:
                self._savepoint(job)
                return [job]
        except StorageError as error:
            if self.peer is not None and (not self._writer.database.in_transaction or is_disk_fault(error)):
                return self._end_with(job, error)
            fail(job, error, self._limits)
            return [job]
        return self._run(job)

    def _run(self, job: Job) -> list[Job]:
        writer = self._writer
        calls_left = self._limits.after_commit_calls_max - len(self.calls)
        job.needs_savepoint = True
        writer.watch.lease_ns, writer.watch.reason = self.end_ns, None
        try:
            writer.runner.run(job, time.monotonic_ns(), calls_left, mates=False)
        except TransactionGoneError as gone:
            error = writer.watch.end_reason() if isinstance(gone.error, Aborted) else gone.error
            return self._end_with(job, as_typed(error, job.served.name))
        finally:
            writer.watch.lease_ns = 0
        if writer.watch.reason is not None:
            # What a deadline or a cancel cut off cannot be repeated in here: the transaction goes with it.
            return self._end_with(job, writer.watch.reason)
        self.calls += job.after_commit
        return [job]

    def _end_with(self, job: Job, error: StorageError) -> list[Job]:
        """Roll back with the request that took the transaction along, and say so."""
        failure = fail(job, error, self._limits, "not_committed")
        failure.message += "; the interactive transaction was rolled back with it"
        failure.details["transaction_ended"] = True
        job.frame = frame(encode(failure))
        done = [job, *self.end(f": {job.served.name} took it along, and it was rolled back")]
        try:
            self._writer.recovery.after(error)
        except FatalError as fatal:
            fatal.done += done
            raise
        return done

    def _commit(self, job: Job) -> list[Job]:
        writer = self._writer
        if writer.database.deferred_violations():
            raise InvalidRequestError(
                "a deferred foreign key constraint is violated; mend it and commit again, or roll back",
                details={"sqlite_name": "SQLITE_CONSTRAINT_FOREIGNKEY"},
            )
        succeed(job, None)
        if job.key is not None:
            print_ = fingerprint(job.served.name, decode(job, self._limits))
            if writer.receipts.find(job.key, print_) is not None:
                # The client repeats a whole transaction whose first COMMIT it did not hear of.
                return [job, *self.end(": it was rolled back, since its request key was committed before")]
            writer.receipts.store(job.key, job.served.name, print_, None)
        self.peer = None
        self._ended_by = ": a COMMIT ended it"
        job.after_commit, self.calls = self.calls, []
        try:
            return [*writer.commit([job]), *self._fail_waiting()]
        except FatalError as fatal:
            fatal.done += self._fail_waiting()
            raise

    def _savepoint(self, job: Job) -> None:
        arguments = decode(job, self._limits)
        if not _NAME.match(arguments.name):
            raise InvalidRequestError(
                "a savepoint's name is a letter and up to 62 letters, digits or underscores"
            )
        # SQLite tells no difference between capital and small letters in it.
        name, action, receipts = arguments.name.lower(), arguments.action, self._writer.receipts
        savepoints = self._savepoints
        places = [place for place, found in enumerate(savepoints) if found.name == name]
        if action == "open" and len(savepoints) >= self._limits.savepoints_max:
            raise InvalidRequestError(
                f"{self._limits.savepoints_max} savepoints are open, which is the limit"
            )
        if action != "open" and not places:
            raise InvalidRequestError(f"no savepoint {arguments.name} is open")
        self._writer.database.own(f"{_STEPS[action]} u_{name}")
        if action == "open":
            savepoints.append(OpenSavepoint(name, len(self.calls), receipts.unsettled))
        elif action == "release":
            del savepoints[places[-1] :]
        else:
            found = savepoints[places[-1]]
            del savepoints[places[-1] + 1 :]
            del self.calls[found.calls :]
            receipts.unsettled = found.receipts
        succeed(job, None)

    def end(self, why: str) -> list[Job]:
        """Roll back; its waiting requests are answered with `why`."""
        self._writer.database.rollback()
        self._writer.receipts.settle(committed=False)
        self.peer = None
        self.calls = []
        self._ended_by = why
        return self._fail_waiting()

    def _fail_waiting(self) -> list[Job]:
        waiting = self.lane.remove_where(lambda _: True)
        for job in waiting:
            try:
                self.check(job.peer, job.transaction)
            except TransactionExpiredError as error:
                fail(job, error, self._limits)
        return waiting


def without_number() -> InvalidRequestError:
    """The answer to the owner's write that does not name its transaction: it would wait for itself."""
    return InvalidRequestError(
        "this connection has an interactive transaction open; send its requests through that, or end it first"
    )

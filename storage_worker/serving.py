"""The serving thread's loop, and its deputy.

One thread does everything between two group commits, so that a request costs no hand-over between
threads. While a group takes long (a statement of seconds, a slow sync) the deputy takes over the pipes,
so that refusals, deadlines, status and cancels are answered meanwhile.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from . import exits
from .admission import NEVER_NS
from .background import Background
from .checkpoints import Checkpoints
from .intake import Intake
from .peer import Job
from .protocol.errors import WorkerUnavailableError
from .protocol.limits import Limits
from .readers import Readers
from .watch import FatalError
from .writer import Writer

log = logging.getLogger(__name__)

NS = 1_000_000

HUNG_LOOK_NS = 250 * NS
"""How often it is looked whether a handler does not return."""

BACKGROUND_LOOK_NS = NS
"""How often it is looked whether background work is due while somebody waits for an answer."""

PARTING_NS = 100 * NS
"""How long what clients sent before a worker's end is refused, and what they were not sent yet is written."""

OVERDUE_NS = 500 * NS
"""How long beyond the grace of a stop something that cannot be interrupted may go on."""


class Serving:
    """Runs the parts of a worker until it is to end."""

    def __init__(
        self,
        intake: Intake,
        writer: Writer,
        readers: Readers,
        checkpoints: Checkpoints,
        background: Background,
        limits: Limits,
    ) -> None:
        self.intake = intake
        self.writer = writer
        self.readers = readers
        self.checkpoints = checkpoints
        self.background = background
        self._limits = limits
        self._busy_since_ns = 0
        self._deputy_serves = False
        self._deputy_sleeps = False
        self._rouse = threading.Semaphore(0)
        self._ended = False
        self._hung_look_ns = 0
        self.stop_by_ns = 0
        self.exit_status = 0
        self.look_around: Callable[[int], int] = lambda _: 0
        self.leave_place: Callable[[], None] = lambda: None
        self._next_look_ns = 0
        self._background_look_ns = 0
        self._deputy = threading.Thread(target=self._stand_by, name="deputy", daemon=True)

    def run(self) -> None:
        """Serve until `stop` was asked for and its grace is over or nothing is left to do."""
        self._deputy.start()
        done: list[Job] = []
        intake = self.intake
        while True:
            with intake.pipes.role:
                if done:
                    intake.deliver(done)
                    done.clear()
                intake.turn(self._until_ns())
                now = time.monotonic_ns()
                self._next_look_ns = self.look_around(now)
                self._check_hung(now)
                if self._is_over(now):
                    return
            self._enter()
            try:
                self._work(done)
            except FatalError as fatal:
                self._leave()
                with intake.pipes.role:
                    # Before the answers: whoever reads one must not ask this worker again.
                    intake.drain(f"it ended: {fatal}")
                    intake.deliver([*done, *fatal.done])
                    self._part_with_clients(f"the worker ended: {fatal}")
                raise
            finally:
                self._leave()

    def stop(self, reason: str, grace_ms: int, exit_status: int = 0) -> None:
        """Take nothing new; end when what was admitted is done, or after the grace."""
        if self.stop_by_ns:
            return
        self.exit_status = exit_status
        self.stop_by_ns = time.monotonic_ns() + grace_ms * NS
        for watch in (self.writer.watch, *self.readers.watches):
            watch.until_ns = self.stop_by_ns
        self.intake.drain(reason)

    def _is_over(self, now_ns: int) -> bool:
        if not self.stop_by_ns:
            return False
        intake = self.intake
        if now_ns < self.stop_by_ns and self._is_in_flight():
            return False
        intake.deliver(self.background.abandon())
        self._part_with_clients(f"the worker stopped: {intake.draining}")
        return True

    def _part_with_clients(self, why: str) -> None:
        """Answer what is in flight, and refuse what clients have sent since; who has its answers can send nothing more.

        What a worker leaves unread its client cannot tell from what was carried out.
        """
        intake = self.intake
        intake.drain(why)
        intake.fail_all(why)
        peers = intake.pipes.peers
        for peer in list(peers.values()):
            intake.transfers.break_off(peer, WorkerUnavailableError(why))
        intake.pipes.flush()
        until_ns = time.monotonic_ns() + PARTING_NS
        while peers and time.monotonic_ns() < until_ns:
            for peer in peers.values():
                # Where the end of what it sends is read it is dropped, with whatever was not written to it by then.
                if not peer.unread:
                    with suppress(OSError):  # the client is gone
                        peer.socket.shutdown(socket.SHUT_RD)
            intake.turn(until_ns)

    def _is_in_flight(self) -> bool:
        return bool(self.intake.admission.requests) or self.intake.pipes.has_unread

    def _until_ns(self) -> int:
        """Until when the pipes may be waited for."""
        intake, writer = self.intake, self.writer
        interactive = writer.interactive
        if intake.reads.is_ready or interactive.lane.is_ready:
            return 0
        if self.stop_by_ns and not self._is_in_flight():
            return 0
        if writer.blocked:
            return writer.blocked_until_ns
        if interactive.is_open:
            # Nothing else is written meanwhile, by the worker neither.
            wanted = [0 if self.stop_by_ns else interactive.end_ns]
        elif intake.writes.is_ready:
            return 0
        else:
            due = self.background.due_ns(), self.checkpoints.idle_ns(), self.stop_by_ns
            wanted = [at for at in due if at]
        if self._next_look_ns:
            wanted.append(self._next_look_ns)
        if intake.admission.requests:
            wanted.append(self._hung_look_ns)
        return min(wanted, default=NEVER_NS)

    def _work(self, done: list[Job]) -> None:
        """One round of whatever is ready: quick reads, a group, a slice of background work.

        Adds to `done` what has an answer then; also where it ends with an error.
        """
        intake, writer, limits = self.intake, self.writer, self._limits
        now = time.monotonic_ns()
        if intake.reads.is_ready:
            done += self.readers.run_quick(now + limits.group_work_ms_max * NS)
            if done and intake.writes.is_ready:
                # Their clients need not wait for the others' commit.
                self._deliver(done)
        interactive = writer.interactive
        wrote = True
        if interactive.is_open:
            done += self._go_on(now)
        elif interactive.lane.is_ready:
            done += interactive.run_next()
        elif intake.writes.is_ready and now >= writer.blocked_until_ns:
            done += writer.run_group()
        else:
            wrote = False
            if not intake.writes.is_ready:
                writer.blocked_until_ns = 0
        if interactive.is_open:
            return
        if wrote and self.checkpoints.note_commit():
            self._deliver(done)
            self.checkpoints.run()
        self._between_groups(done)

    def _go_on(self, now_ns: int) -> list[Job]:
        """Go on with the interactive transaction; a worker that stops takes no more requests for it."""
        interactive = self.writer.interactive
        if self.stop_by_ns and not interactive.lane.is_ready:
            return interactive.end(": the worker is stopping, and it was rolled back")
        return interactive.end_if_lost(now_ns) or interactive.run_next()

    def _deliver(self, done: list[Job]) -> None:
        """Send answers before more is done; nothing is left of them then."""
        self._leave()
        with self.intake.pipes.role:
            self.intake.deliver(done)
        done.clear()
        self._enter()

    def _between_groups(self, done: list[Job]) -> None:
        intake = self.intake
        # Who has an answer comes first, too.
        waits = bool(done) or intake.writes.is_ready or intake.reads.is_ready
        now = time.monotonic_ns()
        if waits:
            if now < self._background_look_ns:
                return
            self._background_look_ns = now + BACKGROUND_LOOK_NS
        due = self.background.due_ns()
        if due and due <= now:
            frames = self.writer.database.wal_frames
            done += self.background.run(now, foreground_waits=waits)
            if self.writer.database.wal_frames != frames:
                self.checkpoints.note_commit()
        idle = self.checkpoints.idle_ns()
        if idle and idle <= now and not waits:
            self.checkpoints.truncate()

    # The deputy

    def _enter(self) -> None:
        self._busy_since_ns = time.monotonic_ns()
        if self._deputy_sleeps:
            self._deputy_sleeps = False
            self._rouse.release()

    def _leave(self) -> None:
        self._busy_since_ns = 0
        if self._deputy_serves:
            self.intake.pipes.wake()

    def _stand_by(self) -> None:
        try:
            self._look_after()
        except BaseException as error:
            # Without a deputy a long statement would leave everybody without an answer.
            log.critical("the deputy failed: the worker ends", exc_info=error)
            os._exit(exits.FATAL)

    def _look_after(self) -> None:
        """The deputy's life: look from time to time whether the serving thread is away for long."""
        patience_ns = self._limits.takeover_ms * NS
        idle = 0
        while not self._ended:
            self._rouse.acquire(timeout=patience_ns / 1e9)
            since = self._busy_since_ns
            if since and time.monotonic_ns() - since >= patience_ns:
                self._serve_meanwhile()
            idle = 0 if since else idle + 1
            if idle > DEPUTY_IDLE_LOOKS:
                self._deputy_sleeps = True
                # Looked at after the flag is set: whoever changes either of them sees it, and rouses.
                if not (self._busy_since_ns or self._ended):
                    self._rouse.acquire()
                self._deputy_sleeps = False
                idle = 0

    def _serve_meanwhile(self) -> None:
        with self.intake.pipes.role:
            self._deputy_serves = True
            try:
                while self._busy_since_ns and not self._ended:
                    self.intake.turn(time.monotonic_ns() + DEPUTY_TURN_NS)
                    now = time.monotonic_ns()
                    self.look_around(now)
                    self.readers.offer()
                    self._check_hung(now)
                    self._check_overdue(now)
            finally:
                self._deputy_serves = False

    def _check_hung(self, now_ns: int) -> None:
        """A handler in Python cannot be interrupted; one that does not return takes the worker with it."""
        if now_ns < self._hung_look_ns:
            return
        self._hung_look_ns = now_ns + HUNG_LOOK_NS
        overrun_ns = self._limits.handler_overrun_ms_max * NS
        for watch in (self.writer.watch, *self.readers.watches):
            job = watch.job
            if watch.own_end_ns and now_ns > watch.own_end_ns + overrun_ns:
                log.critical("background work did not return: the worker ends")
                self._leave_hung("background work")
            if job is not None and now_ns > job.deadline_ns + overrun_ns:
                log.critical(
                    "%s of client %r (pid %d) did not return %d ms after its deadline: the worker ends",
                    job.served.name,
                    job.peer.name,
                    job.peer.pid,
                    self._limits.handler_overrun_ms_max,
                )
                self._leave_hung(job.served.name)

    def _leave_hung(self, what: str) -> NoReturn:
        try:
            self._part_with_clients(f"the worker ended: {what} did not return")
        finally:
            os._exit(exits.HUNG)

    def _check_overdue(self, now_ns: int) -> None:
        """End a worker that is to stop, although the serving thread does not come back from what it runs."""
        if not self.stop_by_ns or now_ns < self.stop_by_ns + OVERDUE_NS:
            return
        job = self.writer.watch.job
        log.critical("%s goes on beyond the end of the worker", "a step" if job is None else job.served.name)
        try:
            self._part_with_clients(f"the worker stopped: {self.intake.draining}")
            self.leave_place()
        finally:
            os._exit(self.exit_status or exits.HUNG)

    def end(self) -> None:
        """Let the deputy end."""
        self._ended = True
        self._rouse.release()
        if self._deputy.is_alive():
            self._deputy.join()


DEPUTY_IDLE_LOOKS = 50
"""So many looks at an idle serving thread, and the deputy sleeps until it is roused."""

DEPUTY_TURN_NS = 100 * NS
"""How long one turn of the deputy waits for the pipes before it looks around again."""

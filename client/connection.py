"""One socket to a worker: many requests in flight, any number of threads, no thread of its own."""

import socket
import threading
import time
from contextlib import suppress
from typing import Any

from ..protocol.envelope import Cancel, Credit, Failure, Goodbye, Reply, Welcome, decode_from_worker, encode
from ..protocol.errors import ForkedClientError, StorageError
from ..protocol.framing import frame
from ..protocol.limits import READ_BYTES
from ..protocol.operation import Call
from .chunks import Upload
from .endings import LAST_WORDS_SECONDS, gone, lost_by
from .exchange import Exchange, frame_of, request_of, settled
from .forks import tell_after_fork
from .outgoing import BUFFER_BYTES, Outgoing
from .readership import Readership, has_unread, poll_of
from .terms import NS_PER_MS, NS_PER_SECOND, Terms, milliseconds_left
from .uploading import send_arguments
from .waiter import Waiter

_LEADER_NS = 100 * NS_PER_MS
"""How long a thread whose time is over still waits until what has come is read, by itself or by the one that leads."""


class Connection:
    """A connection whose Welcome was received.

    Arguments: `sock`, a connected stream socket, which the connection owns from now on;
    `welcome`, what the worker said. `is_open` is true until the connection broke or the worker began
    to drain it; then new requests need another one.
    """

    def __init__(self, sock: socket.socket, welcome: Welcome) -> None:
        limits = welcome.limits
        self.welcome = welcome
        self.limits = limits
        self.is_open = True
        self.grace_ns = limits.reply_grace_ms * NS_PER_MS
        sock.setblocking(False)
        self._sock = sock
        self._poll = poll_of(sock.fileno())
        self._exchange: Exchange[Waiter] = Exchange(limits)
        self._waiting = self._exchange.waiting
        self._cause: StorageError | None = None
        self._retired = False
        self._owner = 0
        self._readers = Readership()
        self._outgoing = Outgoing(sock, self._readers)
        tell_after_fork(self)

    def __del__(self) -> None:
        # An interrupt may have come in the middle of its making.
        for part in ("_sock", "_readers"):
            if hasattr(self, part):
                getattr(self, part).close()

    def request(self, call: Call[Any], terms: Terms, transaction: int = 0) -> Reply | Failure | None:
        """Send a call and wait for the worker's answer; None where another thread reserved the connection.

        Raises `DeadlineExceededError` where nothing was heard within the grace beyond the deadline,
        `WorkerUnavailableError` where the connection was lost
        (`details["sent"]` says whether the worker can have the request), `RequestTooLargeError` and
        `InvalidRequestError` where the call cannot be sent, `ProtocolError` where the worker sent garbage.
        """
        waiter = Waiter()
        try:
            if not self.submit(waiter, call, terms, transaction):
                return None
            self.wait(waiter, terms.deadline_ns + self.grace_ns)
        except BaseException as error:
            self.interrupt(waiter, error)
            self.abandon(waiter)
            raise
        answer = waiter.answer
        if type(answer) is Reply:
            return answer
        return self.answer_of(waiter, call)

    def submit(
        self, waiter: Waiter, call: Call[Any], terms: Terms, transaction: int = 0, *, later: bool = False
    ) -> bool:
        """Write a request, or `later` leave it to the next write or `flush`; `waiter` gets its answer.

        Arguments that are too large for one frame are written before it returns, as the worker takes them.
        Returns False where another thread reserved the connection. Raises as `request` does; a connection
        that is lost ends the waiter instead.
        """
        outgoing, upload = self._outgoing, None
        outgoing.enter(terms.deadline_ns)
        try:
            if self._owner and not transaction and self._owner != threading.get_ident():
                return False
            left = outgoing.left
            if left and (not later or len(left) >= BUFFER_BYTES):
                outgoing.drain(terms.deadline_ns, self._read)
            data, upload = self._enter(waiter, call, terms, transaction)
            # Before the last part of its arguments is out the worker cannot have begun it.
            written = waiter if upload is None else Waiter()
            if later:
                outgoing.keep(written, data)
            elif not outgoing.write(written, data):
                outgoing.drain(terms.deadline_ns, self._read)
        except OSError as error:
            self._lose(error)
            if waiter.answer is None:
                waiter.answer = self._cause  # it broke before the request had its place
        finally:
            outgoing.leave()
            if outgoing.posted or not self.is_open:
                self._tidy()
        if upload is not None:
            send_arguments(self, upload, waiter, terms.deadline_ns)
        return True

    def write(self, data: bytes, deadline_ns: int) -> int:
        """Write a frame behind what was left for later; `DeadlineExceededError` where there is no room until then.

        Other threads may write theirs before and after it. Returns its place, as of `Waiter.end`.
        """
        outgoing, waiter = self._outgoing, Waiter()
        outgoing.enter(deadline_ns)
        try:
            outgoing.send(waiter, data, deadline_ns, self._read)
        except OSError as error:
            self._lose(error)
        finally:
            outgoing.leave()
            self._tidy()
        return waiter.end

    def cancel(self, request_id: int) -> None:
        """Tell the worker that a request is not wanted, or nothing more of it comes; its answer is still waited for."""
        if self._cause is None:
            self._post(Cancel(request_id))

    def flush(self, deadline_ns: int) -> None:
        """Write what was left for later; `DeadlineExceededError` where there is no room for it until then."""
        if self._outgoing.left:
            self.write(b"", deadline_ns)

    def wait(self, waiter: Waiter, limit_ns: int) -> None:
        """Return when the waiter has its answer, or at `limit_ns` on the monotonic clock without one."""
        readers = self._readers
        lead = readers.lock
        waiter.asleep = False
        try:
            while waiter.answer is None:
                if lead.acquire(False):
                    try:
                        is_late = self._lead(waiter, limit_ns)
                    finally:
                        readers.leader = 0
                        lead.release()
                else:
                    is_late = readers.follow(waiter, limit_ns)
                    if is_late and limit_ns and has_unread(self._sock):
                        # The leader has to come to it. Who only asks, at 0, does not wait.
                        is_late = readers.follow(waiter, time.monotonic_ns() + _LEADER_NS)
                if is_late:
                    return
        finally:
            if readers.followers or readers.writer_waits:
                readers.hand_on()
            if not self.is_open:
                self._leave()

    def answer_of(self, waiter: Waiter, call: Call[Any]) -> Reply | Failure:
        """The worker's answer after `wait`; raises why there is none, with what is known of the outcome."""
        # Before it is abandoned, which writes: what was not written by now comes after the deadline.
        written = waiter.end <= self._outgoing.written
        if waiter.answer is None:
            self.abandon(waiter)
        return settled(waiter.answer, call, self.limits, written=written)

    def abandon(self, waiter: Waiter) -> None:
        """Wait for a request no longer: it is cancelled, and its answer dropped if one still comes."""
        request_id, waiter.id = waiter.id, 0
        if not request_id:
            return
        abandoned = self._exchange.abandoned
        abandoned[request_id] = waiter
        if self._waiting.pop(request_id, None) is None:
            abandoned.pop(request_id, None)
        else:
            self._exchange.forget(request_id)
            self.cancel(request_id)

    def interrupt(self, waiter: Waiter, error: BaseException) -> None:
        """Give the connection up where `error` came from outside while bytes were moved.

        A KeyboardInterrupt may, or what a signal's handler raises: it leaves unknown how far they were.
        While a thread does nothing but wait it does no harm.
        """
        if not waiter.asleep and (self._outgoing.is_torn or not isinstance(error, StorageError)):
            self._break(gone("a call was interrupted while it sent or read"))
            self._outgoing.let_go()
            self._tidy()

    def reserve(self, deadline_ns: int) -> None:
        """Keep the connection for the calling thread: an interactive transaction runs on it."""
        try:
            self._outgoing.enter(deadline_ns)
            self._owner = threading.get_ident()
            self._outgoing.leave()
        except BaseException as error:
            self.interrupt(Waiter(), error)
            raise

    def share(self) -> None:
        """End what `reserve` began."""
        self._owner = 0

    def retire(self) -> None:
        """Close as soon as nobody waits for an answer any more."""
        self.is_open = False
        self._retired = True
        if not self._waiting:
            self.close()

    def close(self) -> None:
        """Say goodbye and close; whoever still waits, and whose answer has not come, gets a `WorkerUnavailableError`."""
        if self._cause is None:
            if self._waiting and self._readers.lock.acquire(blocking=False):
                self._hear(to_the_end=False)
            self._post(Goodbye("closed"))
        self._break(gone("the client was closed"))
        self._tidy()

    def hand_over(self) -> socket.socket:
        """Give a connection that was not used yet, with nothing in flight, away as its socket."""
        self.is_open = False
        self._cause = gone("the connection was handed over")
        return socket.socket(fileno=self._sock.detach())

    def after_fork(self) -> None:
        """Let go of the parent's socket without touching what it leads to."""
        self.is_open = False
        self._cause = ForkedClientError(
            "the connection belongs to the parent of this process; a client connects anew at its next call"
        )
        self._sock.close()
        self._readers.close()
        self._readers = Readership()
        self._outgoing = Outgoing(self._sock, self._readers)
        while self._waiting:
            self._waiting.popitem()[1].answer = self._cause
        self._exchange.end_transfers()

    def _enter(
        self, waiter: Waiter, call: Call[Any], terms: Terms, transaction: int
    ) -> tuple[bytes, Upload | None]:
        """Register a request and encode its frame. Ids increase in the order in which frames are written."""
        request_id = self._exchange.last_id + 1
        data, upload = frame_of(request_of(request_id, call, terms, transaction), self.limits)
        self._exchange.last_id = waiter.id = request_id
        self._waiting[request_id] = waiter
        if upload is not None:
            self._exchange.uploads[request_id] = upload
        if self._cause is not None:
            # It broke before it could see this waiter.
            waiter.answer = self._cause
            self._waiting.pop(request_id, None)
        return data, upload

    def _grant(self) -> None:
        """Send what was granted of results that come in chunks."""
        while self._exchange.credits:
            self._post(self._exchange.credits.popleft())
        try:
            # A worker that waits for it sends nothing that would bring another occasion.
            self._outgoing.push()
        except OSError as error:
            self._lose(error)

    def _post(self, envelope: Cancel | Credit | Goodbye) -> None:
        try:
            self._outgoing.post(frame(encode(envelope)))
        except OSError as error:
            self._lose(error)

    def _tidy(self) -> None:
        """Do what whoever lets go of the right to write must see to: posted envelopes, and closing."""
        if self._outgoing.posted:
            try:
                self._outgoing.write_posted()
            except OSError as error:
                self._lose(error)
        if self._cause is not None:
            self._close_when_left()

    def _lead(self, waiter: Waiter, limit_ns: int) -> bool:
        """Read for everybody until `waiter` has its answer; true where its time was over first."""
        poll = self._poll
        self._readers.leader = threading.get_ident()
        now_ns = time.monotonic_ns()
        last_ns = max(limit_ns, now_ns) + _LEADER_NS
        while True:
            left_ns = limit_ns - now_ns
            waiter.asleep = True
            # A wait in the receive itself would begin anew after each signal, and with a timer's never end.
            ready = poll(left_ns // NS_PER_MS + 1 if left_ns > 0 else 0)
            waiter.asleep = False
            came = bool(ready) and self._read()
            if waiter.answer is not None:
                return False
            # One read does not take all that has come in time; others' answers may go on to come.
            if left_ns <= 0 and not (came and now_ns < last_ns):
                return True
            now_ns = time.monotonic_ns()

    def _read(self) -> bool:
        """Read once, as the leader, and hand the answers to their waiters; whether something came."""
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._break(lost_by(error))
            return False
        exchange = self._exchange
        if not data:
            where = " in the middle of an answer" if exchange.frames.bytes_kept else ""
            self._break(gone(f"the worker closed the connection{where}"))
            return False
        try:
            for body in exchange.frames.feed(data):
                if exchange.take(decode_from_worker(body)) is None and exchange.is_draining:
                    self.is_open = False  # the worker answers what it has and takes nothing new
            if exchange.downloads:
                self._grant()
            if exchange.frames.error is not None:
                raise exchange.frames.error
        except StorageError as error:
            self._break(error)
        return True

    def _leave(self) -> None:
        if self._cause is not None:
            self._close_when_left()
        elif self._retired and not self._waiting:
            self.close()

    def _lose(self, error: OSError) -> None:
        """The socket takes nothing more; what the worker said before its end is still read, and then it is over."""
        cause = lost_by(error)
        self.is_open = False
        self._outgoing.is_over = True
        if self._readers.leader == threading.get_ident():
            self._hear_out(to_the_end=True)
        # A leader in another thread comes to the end of the bytes as well.
        elif self._readers.lock.acquire(timeout=LAST_WORDS_SECONDS):
            self._hear(to_the_end=True)
        self._break(cause)

    def _hear(self, *, to_the_end: bool) -> None:
        """Read as `_hear_out` does, where the lead was just taken for it, and give that up."""
        self._readers.leader = threading.get_ident()
        try:
            self._hear_out(to_the_end=to_the_end)
        finally:
            self._readers.leave()

    def _hear_out(self, *, to_the_end: bool) -> None:
        """Read what is there, or all that comes to the end of the connection; for a bounded time, both."""
        until_ns = time.monotonic_ns() + int(LAST_WORDS_SECONDS * NS_PER_SECOND)
        while self._cause is None and time.monotonic_ns() < until_ns:
            if not self._read() and not (to_the_end and has_unread(self._sock, milliseconds_left(until_ns))):
                return

    def _break(self, cause: StorageError) -> None:
        """End the connection: every waiter hears of it at once, and every thread leaves its system call."""
        if self._cause is None:
            self._cause = cause
            self.is_open = False
            self._outgoing.is_over = True
        with suppress(OSError):  # the other side was faster
            self._sock.shutdown(socket.SHUT_RDWR)
        while self._waiting:
            with suppress(KeyError):
                self._waiting.popitem()[1].finish(self._cause)
        self._exchange.end_transfers()

    def _close_when_left(self) -> None:
        """Close the socket unless another thread is inside: the last one to leave sees to it."""
        outgoing, reading = self._outgoing, self._readers.lock
        while self._sock.fileno() >= 0 and outgoing.try_enter():
            is_free = reading.acquire(blocking=False)
            try:
                if is_free:
                    self._sock.close()
                    self._readers.close()
            finally:
                if is_free:
                    reading.release()
                outgoing.leave()
            if not is_free and reading.locked():
                return

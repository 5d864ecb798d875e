"""One socket to a worker for one event loop: many requests in flight, any number of tasks, no thread."""

import asyncio
import socket
import time
from collections import OrderedDict
from functools import partial
from typing import Any, Final

import msgspec

from ..protocol.envelope import (
    Cancel,
    Credit,
    Failure,
    Goodbye,
    OutgoingRequest,
    Reply,
    Welcome,
    decode_from_worker,
    encode,
)
from ..protocol.errors import ForkedClientError, StorageError
from ..protocol.framing import frame
from ..protocol.limits import READ_BYTES
from ..protocol.operation import Call
from .aio_outgoing import AsyncOutgoing
from .aio_waiter import AsyncWaiter
from .chunks import Upload
from .endings import LAST_WORDS_SECONDS, gone, lost, other_loop
from .exchange import Exchange, frame_of, request_of, settled
from .forks import tell_after_fork
from .terms import NS_PER_MS, NS_PER_SECOND, Terms

_NEVER_NS: Final = 2**63

_ALARM_SECONDS_MIN: Final = 0.005
"""Deadlines that are this close together are looked at together, as an alarm looks at all requests."""


class AsyncConnection:
    """A connection whose Welcome was received, used by the event loop that runs when it is made.

    The worker refuses a client that has more than a number of requests or bytes in flight. So a request
    beyond that is held here, in its turn, until answers came; only control requests, which the worker does
    not count, pass by. One whose arguments are too large for a frame waits apart until there is room for those,
    and they go in chunks, between which the others go on.

    Arguments: `sock`, a connected non-blocking stream socket, which the connection owns from now on;
    `welcome`, what the worker said. `is_open` is true until the connection broke or the worker began to
    drain it; then new requests need another one.
    """

    def __init__(self, sock: socket.socket, welcome: Welcome) -> None:
        limits = welcome.limits
        self._sock = sock
        self.welcome = welcome
        self.limits = limits
        self.is_open = True
        self.loop = asyncio.get_running_loop()
        self._grace_ns = limits.reply_grace_ms * NS_PER_MS
        self._exchange: Exchange[AsyncWaiter] = Exchange(limits)
        self._outgoing = AsyncOutgoing(self.loop, sock, self._lose)
        self._held: OrderedDict[AsyncWaiter, None] = OrderedDict()
        self._held_uploads: OrderedDict[AsyncWaiter, None] = OrderedDict()
        self._upload_bytes = self._requests = self._bytes = 0
        # With one more request of any size it is still no more than the worker takes.
        self._bytes_max = limits.client_bytes_max - limits.request_bytes_max
        self._cause: StorageError | None = None
        self._retired = False
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ns = _NEVER_NS
        self._fd = sock.fileno()
        self.loop.add_reader(self._fd, self._read)
        tell_after_fork(self)

    def __del__(self) -> None:
        # The loop knows an open connection: without one the loop is gone, and has forgotten it.
        self._sock.close()

    async def request(self, call: Call[Any], terms: Terms, transaction: int = 0) -> Reply | Failure | None:
        """Send a call and wait for the worker's answer; None where the connection takes nothing new.

        A task that is cancelled meanwhile leaves nothing behind: what was not sent is not sent any more,
        the rest is cancelled at the worker, and its answer dropped. Raises as `Connection.request` does.
        """
        waiter = AsyncWaiter(self.loop.create_future())
        if not self.submit(waiter, call, terms, transaction):
            return None
        assert waiter.gate is not None, "made with one"
        try:
            await waiter.gate
        except BaseException:
            self.abandon(waiter)
            raise
        answer = waiter.answer
        return answer if type(answer) is Reply else self.answer_of(waiter, call)

    def submit(
        self, waiter: AsyncWaiter, call: Call[Any], terms: Terms, transaction: int = 0, *, later: bool = False
    ) -> bool:
        """Send a request, or `later` with the next ones; `waiter` gets its answer.

        Returns False where the connection takes nothing new; a request of a `transaction` has no other one.
        Raises `RequestTooLargeError` and `InvalidRequestError` where the call cannot be sent; a connection
        that is lost ends the waiter.
        """
        if not self.is_open:
            if not transaction:
                return False
            if self._outgoing.is_over:
                raise lost(self._cause or gone("the connection was lost"), "not_committed", sent=False)
        if asyncio.get_running_loop() is not self.loop:
            raise other_loop()
        exchange = self._exchange
        request = request_of(exchange.last_id + 1, call, terms, transaction)
        data, upload = frame_of(request, self.limits)
        if upload is not None:
            waiter.upload = upload
            self._hold(waiter, request, self._held_uploads)
            self._place_held()
        elif call.operation.kind == "control":
            self._place(waiter, request, data, counts=False, later=False)
        elif self._held or not self._has_room:
            # What is sent must not change while it waits.
            request.arguments = msgspec.Raw(encode(call.arguments))
            self._hold(waiter, request, self._held)
        else:
            self._place(waiter, request, data, counts=True, later=later)
        return True

    def flush(self) -> None:
        """Write now what was left for later, as far as there is room."""
        self._outgoing.flush()

    def answer_of(self, waiter: AsyncWaiter, call: Call[Any]) -> Reply | Failure:
        """The answer of a request that has ended; raises why there is none, with what is known of the outcome."""
        return settled(waiter.answer, call, self.limits, written=self.has_written(waiter))

    def has_written(self, waiter: AsyncWaiter) -> bool:
        """Whether the system took the whole request."""
        return waiter.end <= self._outgoing.written

    def abandon(self, waiter: AsyncWaiter) -> bool:
        """Wait for a request no longer: it is not sent, or cancelled and its answer dropped.

        Returns whether the worker may know of it.
        """
        if waiter.held is not None:
            waiter.held = None
            (self._held if waiter.upload is None else self._held_uploads).pop(waiter)
            return False
        if self._exchange.waiting.pop(waiter.id, None) is None:
            return True
        self._exchange.forget(waiter.id)
        if waiter.frame and waiter.upload is None:
            waiter.frame = b""
            if waiter.size:
                self._free(waiter)
            return False
        # It keeps its place at the worker until the answer is there.
        self._exchange.abandoned[waiter.id] = waiter
        self._post(Cancel(waiter.id))
        return True

    def retire(self) -> None:
        """Close as soon as nobody waits for an answer any more."""
        self.is_open = False
        self._retired = True
        self._close_if_done()

    def close(self) -> None:
        """Say goodbye and close; whoever still waits, and whose answer has not come, gets a `WorkerUnavailableError`."""
        self._hear()
        if self._cause is None:
            self._post(Goodbye("closed"))
            self._outgoing.flush()
        self._break(gone("the client was closed"))

    def let_go(self) -> None:
        """Close a connection that nobody uses, from any thread."""
        try:
            self.loop.call_soon_threadsafe(self.close)
        except RuntimeError:  # the loop is closed
            self._sock.close()

    def after_fork(self) -> None:
        """Let go of the parent's socket without touching what it leads to, nor the parent's loop."""
        self.is_open = False
        self._cause = ForkedClientError(
            "the connection belongs to the parent of this process; a client connects anew at its next call"
        )
        self._outgoing.let_go()
        self._sock.close()
        for waiter in (*self._exchange.waiting.values(), *self._held, *self._held_uploads):
            waiter.answer, waiter.held = self._cause, None
        for each in (self._exchange.waiting, self._exchange.uploads, self._held, self._held_uploads):
            each.clear()

    @property
    def _has_room(self) -> bool:
        return self._requests < self.limits.client_requests_max and self._bytes <= self._bytes_max

    def _hold(
        self, waiter: AsyncWaiter, request: OutgoingRequest, held: OrderedDict[AsyncWaiter, None]
    ) -> None:
        waiter.held = request
        # Beyond its deadline it need not be sent any more.
        self._expect(waiter, request.deadline_ns)
        held[waiter] = None

    def _place(
        self, waiter: AsyncWaiter, request: OutgoingRequest, data: bytes, *, counts: bool, later: bool
    ) -> None:
        """Give a request its place. Ids increase in the order in which frames are written."""
        exchange = self._exchange
        exchange.last_id = waiter.id = request.id
        exchange.waiting[waiter.id] = waiter
        if counts:
            waiter.size = len(data)
            self._requests += 1
            self._bytes += waiter.size
        self._expect(waiter, request.deadline_ns + self._grace_ns)
        # Where others are in flight, more of them are likely to come in this turn of the loop.
        at_once = not later and len(exchange.waiting) == 1
        self._outgoing.add(waiter if waiter.upload is None else AsyncWaiter(), data, at_once=at_once)

    def _place_held(self) -> None:
        """Send what was held, as far as there is room now."""
        uploads, bytes_max = self._held_uploads, self.limits.client_spool_bytes_max
        while uploads and self._has_room and self.is_open:
            waiter = next(iter(uploads))
            assert waiter.upload is not None, "it was held for it"
            if self._upload_bytes + waiter.upload.flow.size > bytes_max:
                break
            del uploads[waiter]
            self._upload_bytes += waiter.upload.flow.size
            self._exchange.uploads[self._exchange.last_id + 1] = waiter.upload
            waiter.upload.wake = partial(self._send_parts, waiter, waiter.upload)
            self._place_next(waiter)
        held = self._held
        while held and self._has_room and self.is_open:
            waiter, _ = held.popitem(last=False)
            self._place_next(waiter)
            waiter.placed()

    def _place_next(self, waiter: AsyncWaiter) -> None:
        request, waiter.held = waiter.held, None
        assert request is not None, "it is held"
        request.id = self._exchange.last_id + 1
        self._place(waiter, request, frame(encode(request)), counts=True, later=True)

    def _send_parts(self, waiter: AsyncWaiter, upload: Upload) -> None:
        """Send of the arguments that follow a request what the worker has granted."""
        if upload.is_ended:
            if not upload.is_whole:
                # The worker must know that no more of them comes.
                self._post(Cancel(upload.request_id))
            return
        while data := upload.next_frame():
            # Not before the last part is out the worker can have begun the request.
            self._outgoing.add(waiter if upload.is_whole else AsyncWaiter(), data, at_once=False)
        if upload.is_whole:
            del self._exchange.uploads[waiter.id]
            waiter.placed()

    def _free(self, waiter: AsyncWaiter) -> None:
        """Give the place of a request that has one to the next."""
        self._requests -= 1
        self._bytes -= waiter.size
        waiter.size = 0
        if waiter.upload is not None:
            self._upload_bytes -= waiter.upload.flow.size
        if self._held or self._held_uploads:
            self._place_held()

    def _post(self, envelope: Cancel | Credit | Goodbye) -> None:
        if self._cause is None:
            self._outgoing.add(AsyncWaiter(), frame(encode(envelope)), at_once=False)

    def _read(self) -> bool:
        """Read once and hand the answers to their waiters; whether something came."""
        try:
            data = self._sock.recv(READ_BYTES)
            if data:
                self._take(data)
                return True
            where = " in the middle of an answer" if self._exchange.frames.bytes_kept else ""
            self._break(gone(f"the worker closed the connection{where}"))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._break(gone(f"the connection was lost: {error.strerror}"))
        except BaseException as error:
            # A KeyboardInterrupt, say, leaves unknown what was taken in.
            self._break(gone(f"a read was interrupted: {error!r}"))
            raise
        return False

    def _take(self, data: bytes) -> None:
        exchange = self._exchange
        try:
            for body in exchange.frames.feed(data):
                waiter = exchange.take(decode_from_worker(body))
                if waiter is None:
                    self._take_other()
                elif waiter.size:
                    self._free(waiter)
            if exchange.frames.error is not None:
                raise exchange.frames.error
        except StorageError as error:
            self._break(error)
        self._close_if_done()

    def _take_other(self) -> None:
        """See to what came and ended no request: credits to send, or the worker's goodbye."""
        exchange = self._exchange
        while exchange.credits:
            self._post(exchange.credits.popleft())
        if exchange.is_draining and self.is_open:
            self._drain()

    def _drain(self) -> None:
        """The worker answers what it has and takes nothing new; what was not sent goes elsewhere."""
        self.is_open = False
        self._end_held(gone("the worker takes nothing new"))

    def _end_held(self, cause: StorageError) -> None:
        for held in (self._held, self._held_uploads):
            while held:
                waiter, _ = held.popitem(last=False)
                waiter.held = None
                waiter.finish(cause)

    def _close_if_done(self) -> None:
        is_retired = self._retired and self._cause is None
        if is_retired and not (self._exchange.waiting or self._held or self._held_uploads):
            self.close()

    def _expect(self, waiter: AsyncWaiter, limit_ns: int) -> None:
        """Wait for an answer until then; one alarm serves all, set for the earliest."""
        waiter.limit_ns = limit_ns
        if limit_ns < self._alarm_ns:
            self._set_alarm(limit_ns)

    def _set_alarm(self, at_ns: int) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_ns = at_ns
        seconds = (at_ns - time.monotonic_ns()) / NS_PER_SECOND
        self._alarm = self.loop.call_later(max(seconds, _ALARM_SECONDS_MIN), self._ring)

    def _ring(self) -> None:
        """End the requests whose time is over."""
        self._alarm, self._alarm_ns = None, _NEVER_NS
        waiting = self._exchange.waiting
        now = time.monotonic_ns()
        # Where the loop was busy their answers may be there.
        while any(waiter.limit_ns <= now for waiter in waiting.values()) and self._read():
            continue
        earliest = _NEVER_NS
        for waiter in (*waiting.values(), *self._held, *self._held_uploads):
            if waiter.limit_ns > now:
                earliest = min(earliest, waiter.limit_ns)
            elif waiter.id in waiting or waiter.held is not None:
                self.abandon(waiter)
                waiter.give_up(was_written=self.has_written(waiter))
        if earliest < self._alarm_ns:
            self._set_alarm(earliest)
        self._close_if_done()

    def _lose(self, why: str) -> None:
        """The socket takes nothing more; what the worker said before its end is still to be read."""
        self.is_open = False
        self._hear()
        if self._cause is None:
            self._outgoing.stop()
            self._end_held(cause := gone(why))
            self.loop.call_later(LAST_WORDS_SECONDS, self._break, cause)

    def _hear(self) -> None:
        """Hand out the answers that have come."""
        while self._exchange.waiting and self._read():
            continue

    def _break(self, cause: StorageError) -> None:
        """End the connection: every waiter hears of it at once."""
        if self._cause is not None:
            return
        self._cause = cause
        self.is_open = False
        self._exchange.end_transfers()
        if self._alarm is not None:
            self._alarm.cancel()
        self._outgoing.stop()
        self.loop.remove_reader(self._fd)
        self._sock.close()
        while waiting := self._exchange.waiting:
            waiting.pop(next(iter(waiting))).finish(cause)
        self._end_held(cause)

"""Large values between the worker and its clients, in chunks: arguments on their way in, results on their way out.

What is on its way waits in a spool. Used by whoever serves the pipes.
"""

from typing import cast

import msgspec

from .admission import Lane
from .execution import fail
from .peer import Job, Peer
from .pipes import Pipes
from .protocol.chunks import Inflow, Outflow
from .protocol.envelope import Chunk, Credit, OutgoingChunk, Request, encode, failure_of
from .protocol.errors import (
    InvalidRequestError,
    Outcome,
    OverloadedError,
    ProtocolError,
    RequestTooLargeError,
    StorageError,
)
from .protocol.framing import frame
from .protocol.limits import Limits
from .spool import Large, Spool, Spools
from .watch import cancelled


class Upload:
    """The arguments of one request on their way in. `spool` is None once the request has ended without them."""

    __slots__ = ("flow", "spool")

    def __init__(self, flow: Inflow, spool: Spool) -> None:
        self.flow = flow
        self.spool: Spool | None = spool


class Download:
    """One result on its way out; `end` is the frame that follows its last part."""

    __slots__ = ("end", "flow", "outcome", "request_id", "spool")

    def __init__(self, request_id: int, flow: Outflow, spool: Spool, end: bytes, outcome: Outcome) -> None:
        self.request_id = request_id
        self.flow = flow
        self.spool = spool
        self.end = end
        self.outcome: Outcome = outcome


class Transfers:
    """All uploads and downloads of a worker.

    Arguments: `pipes`, which write the chunks; `spools`, where they wait; `limits`.
    """

    def __init__(self, pipes: Pipes, spools: Spools, limits: Limits) -> None:
        self.spools = spools
        self.arriving = Lane()
        """Requests whose arguments are not whole yet; nobody takes one to run it."""
        self._pipes = pipes
        self._limits = limits

    # Arguments

    def expect(self, job: Job, request: Request) -> None:
        """Make ready for the arguments of a request, whose size stands in their place.

        Raises `InvalidRequestError` where it is no size, `RequestTooLargeError`, and `OverloadedError` or what
        `Spools.open` raises where there is no room.
        """
        peer, limits = job.peer, self._limits
        try:
            size = msgspec.msgpack.decode(request.arguments, type=int)
        except msgspec.MsgspecError as error:
            raise InvalidRequestError(
                "arguments that follow in chunks are announced by their size"
            ) from error
        if size < 1:
            raise InvalidRequestError(f"arguments of {size} bytes cannot follow in chunks")
        if size > limits.chunked_bytes_max:
            raise RequestTooLargeError(
                f"arguments of {size} bytes are over the limit of {limits.chunked_bytes_max}",
                details={"argument_bytes": size, "chunked_bytes_max": limits.chunked_bytes_max},
            )
        self._check_room(peer, size)
        assert job.large is not None, "made for it"
        job.large.arguments = spool = self.spools.open(size)
        peer.argument_spools += 1
        peer.argument_bytes += size
        peer.uploads[job.id] = Upload(Inflow(limits, size, 0), spool)
        self.spools.status.uploads += 1
        self.arriving.add(job)
        self._grant(peer, job.id)

    def _check_room(self, peer: Peer, size: int) -> None:
        limits = self._limits
        for bound, most, wanted in (
            ("client_spool_bytes", limits.client_spool_bytes_max, peer.argument_bytes + size),
            # Those of ended requests count until the client has said that no more of them comes.
            ("client_spools", limits.client_spools_max, max(len(peer.uploads), peer.argument_spools) + 1),
        ):
            if wanted > most:
                raise OverloadedError(
                    f"large arguments of the client come to {most} {bound}, which is the limit; repeat later",
                    retry_after=limits.retry_after_ms_max / 1000,
                    details={"bound": bound},
                )

    def _grant(self, peer: Peer, request_id: int) -> None:
        """Allow the client as many chunks of a request as it may send now."""
        count = peer.uploads[request_id].flow.to_grant()
        if count:
            self._pipes.queue(peer, frame(encode(Credit(request_id, count))))

    def take_chunk(self, peer: Peer, chunk: Chunk) -> Job | None:
        """Spool the next part of a request's arguments; the request where they are whole now, or where that failed.

        Raises `ProtocolError` where the part may not come.
        """
        upload = peer.uploads.get(chunk.id)
        if upload is None:
            raise ProtocolError(f"a chunk for request {chunk.id}, which has none to come")
        flow = upload.flow
        flow.take(chunk)
        if upload.spool is None:
            if not flow.outstanding:
                del peer.uploads[chunk.id]
            return None
        job = peer.jobs[chunk.id]
        try:
            upload.spool.write(chunk.part)
        except StorageError as error:
            fail(job, error, self._limits, "not_committed")
        else:
            if not flow.is_over:
                self._grant(peer, chunk.id)
                return None
            del peer.uploads[chunk.id]
            self.spools.status.uploads -= 1
        self.arriving.remove(job)
        return job

    def no_more(self, peer: Peer, request_id: int) -> None:
        """The client has cancelled a request: nothing more of its arguments comes."""
        upload = peer.uploads.get(request_id)
        if upload is not None and upload.spool is None:
            del peer.uploads[request_id]

    # Results

    def answered(self, job: Job) -> None:
        """Send the answer of a request that has spools, and let go of its arguments."""
        peer = job.peer
        large = cast(Large, job.large)
        if large.arguments is not None:
            peer.argument_spools -= 1
            peer.argument_bytes -= large.arguments.size
            self._stop_upload(peer, job.id)
        result, large.result = large.result, None
        large.close()
        if result is None:
            if not peer.closed:
                self._pipes.queue(peer, job.frame)
        elif peer.closed:
            result.close()
        else:
            self._send(job, result)

    def _stop_upload(self, peer: Peer, request_id: int) -> None:
        upload = peer.uploads.get(request_id)
        if upload is not None:
            # What was granted may be on its way already.
            upload.spool = None
            self.spools.status.uploads -= 1
            if not upload.flow.outstanding:
                del peer.uploads[request_id]

    def _send(self, job: Job, result: Spool) -> None:
        peer = job.peer
        is_kept = job.served.kind == "write" and not job.transaction
        flow = Outflow(result.size, self._limits, self._limits.chunks_ahead_max)
        outcome: Outcome = "committed" if is_kept else "not_committed"
        peer.downloads[job.id] = Download(job.id, flow, result, job.frame, outcome)
        peer.spooled_bytes += result.size
        self.spools.status.downloads += 1
        if job.cancelled:
            # It had run already when that came; who does not want it grants nothing.
            self.cancel(peer, job.id)
        else:
            self._pipes.go_on(peer)

    def send_next(self, peer: Peer) -> None:
        """Queue the next part of one of a client's results, where the credit of one of them allows it."""
        for download in peer.downloads.values():
            flow = download.flow
            count = flow.next_bytes
            if count:
                break
        else:
            return
        request_id = download.request_id
        try:
            part = download.spool.read(flow.offset, count)
        except StorageError as error:
            self._break_off(peer, request_id, error)
            return
        self._pipes.queue(peer, frame(encode(OutgoingChunk(request_id, flow.sequence, part))))
        flow.sent(count)
        peer.spooled_bytes -= count
        del peer.downloads[request_id]
        if flow.is_over:
            download.spool.close()
            self.spools.status.downloads -= 1
            self._pipes.queue(peer, download.end)
        else:
            # Its next turn comes behind the others.
            peer.downloads[request_id] = download

    def take_credit(self, peer: Peer, credit: Credit) -> None:
        """The client takes more parts of a result; those of one that has ended meanwhile are no fault."""
        if credit.id > peer.last_id:
            raise ProtocolError(f"a credit for request {credit.id}, which was not made yet")
        download = peer.downloads.get(credit.id)
        if download is not None:
            download.flow.grant(credit.count)
            self._pipes.go_on(peer)

    def cancel(self, peer: Peer, request_id: int) -> None:
        """The client does not want a result any more."""
        if request_id in peer.downloads:
            self._break_off(peer, request_id, cancelled())

    def _break_off(self, peer: Peer, request_id: int, error: StorageError) -> None:
        download = self._drop(peer, request_id)
        failure = failure_of(request_id, error, self._limits.message_chars_max)
        failure.outcome = download.outcome
        self._pipes.queue(peer, frame(encode(failure)))

    def _drop(self, peer: Peer, request_id: int) -> Download:
        download = peer.downloads.pop(request_id)
        peer.spooled_bytes -= download.flow.size - download.flow.offset
        download.spool.close()
        self.spools.status.downloads -= 1
        return download

    def break_off(self, peer: Peer, error: StorageError) -> None:
        """Tell a client that no more of its results comes, each with what became of the request that had it."""
        for request_id in list(peer.downloads):
            self._break_off(peer, request_id, error)

    def forget(self, peer: Peer) -> None:
        """A connection was closed: nothing more goes or comes."""
        for request_id in list(peer.downloads):
            self._drop(peer, request_id)
        peer.uploads.clear()

"""The hand-shake with a worker, without I/O: Hello, and what the worker says to it."""

import os
import time
from typing import Final

from ..protocol.envelope import (
    PROTOCOL_VERSION,
    Failure,
    FromWorker,
    Hello,
    Role,
    Welcome,
    decode_from_worker,
    encode,
    error_of,
)
from ..protocol.errors import WorkerUnavailableError
from ..protocol.framing import FrameReader, frame
from ..protocol.limits import KIB
from ..protocol.session import Session, check_welcome

_ANSWER_BYTES_MAX: Final = 64 * KIB


class NotNowError(Exception):
    """An attempt failed for a reason that may pass: nobody listens, the backlog is full, the worker ends."""


class HandShake:
    """One hand-shake that begins now.

    `hello` is what to write. Then bytes are read, never more than `wanted`, since what follows the answer
    is the connection's, and given to `feed`.

    Arguments: `role`, the role to ask for; `grant`, the proof that the host allows it, or b""; `name`, the
    client's name.
    """

    def __init__(self, role: Role, grant: bytes, name: str) -> None:
        self._sent_ns = time.monotonic_ns()
        hello = Hello(PROTOCOL_VERSION, name, os.getpid(), role, self._sent_ns, grant)
        self._session = Session()
        self._session.from_client(hello)
        self._frames = FrameReader(_ANSWER_BYTES_MAX)
        self.hello = frame(encode(hello))

    @property
    def wanted(self) -> int:
        """How many bytes may be read next."""
        return self._frames.bytes_missing

    def feed(self, data: bytes) -> Welcome | None:
        """Take what was read; the worker's Welcome once it is whole.

        Raises `NotNowError` where the worker ends or is ending, its own refusal, and `ProtocolError` where
        it is no worker that this client understands.
        """
        if not data:
            raise NotNowError("the worker ended during the hand-shake")
        bodies = self._frames.feed(data)
        return self._judged(decode_from_worker(bodies[0])) if bodies else None

    def _judged(self, answer: FromWorker) -> Welcome:
        received_ns = time.monotonic_ns()
        self._session.from_worker(answer)
        if isinstance(answer, Welcome):
            check_welcome(answer, self._sent_ns, received_ns)
            return answer
        if isinstance(answer, Failure):
            error = error_of(answer)
            if not isinstance(error, WorkerUnavailableError):
                raise error
            raise NotNowError(error.message) from error
        raise NotNowError("the worker is ending")

"""Pipelined calls without I/O: their ends, and the errors of a pipeline, the same for every kind of client."""

from typing import Any, Final, Generic, Self, TypeVar

from ..protocol.envelope import Failure, Reply, error_of
from ..protocol.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    Outcome,
    RequestCancelledError,
    StorageError,
)
from ..protocol.limits import Limits
from ..protocol.operation import Call
from .endings import result_of

R = TypeVar("R")

WRITES_PER_WINDOW: Final = 4
"""A part of a window is written while the worker still has the others to do."""


class CallEnd(Generic[R]):
    """What one pipelined call ended with: its result or its error."""

    __slots__ = ("_error", "_is_told", "_value")

    def __init__(self, value: Any = None, error: StorageError | None = None) -> None:
        self._value = value
        self._error = error
        self._is_told = False

    @classmethod
    def of(cls, call: Call[R], answer: Reply | Failure) -> Self:
        """The end that an answer is."""
        if isinstance(answer, Failure):
            return cls(error=error_of(answer))
        try:
            return cls(result_of(call, answer))
        except StorageError as error:
            return cls(error=error)

    @property
    def has_untold_error(self) -> bool:
        """Whether it is an error that `tell` has not raised."""
        return self._error is not None and not self._is_told

    def tell(self) -> R:
        """The result; raises the error."""
        if self._error is not None:
            self._is_told = True
            raise self._error
        value: R = self._value
        return value


class Failures:
    """The first errors of a pipeline's calls. Arguments: `count_max`, how many are kept."""

    def __init__(self, count_max: int) -> None:
        self._kept: list[CallEnd[Any]] = []
        self._count_max = count_max

    def __len__(self) -> int:
        return len(self._kept)

    def note(self, end: CallEnd[Any]) -> None:
        """Keep the end of a call, where it is an error: enough to have the first one in the end."""
        if end.has_untold_error:
            if len(self._kept) >= self._count_max:
                self._kept = [kept for kept in self._kept if kept.has_untold_error]
            if len(self._kept) < self._count_max:
                self._kept.append(end)

    def tell(self) -> None:
        """Raise the first one that its call's result has not raised."""
        for end in self._kept:
            if end.has_untold_error:
                end.tell()


def checked_window(window: int | None, limits: Limits) -> int:
    """The window that was asked for, None for the default; `InvalidRequestError` where it cannot be."""
    size = limits.pipeline_window if window is None else window
    if type(size) is not int or not 1 <= size <= limits.client_requests_max:
        raise InvalidRequestError(
            f"a pipeline's window of {window!r}; it takes 1 to {limits.client_requests_max}",
            details={"client_requests_max": limits.client_requests_max},
        )
    return size


def no_result_yet(timeout: float | None) -> DeadlineExceededError:
    """The error of waiting for a result for a shorter time than the call may take."""
    return DeadlineExceededError(
        f"no result within {timeout} s; the call goes on", outcome="unknown", details={"stage": "wait"}
    )


def no_room() -> DeadlineExceededError:
    """The error of a call that found no room in the window until its deadline."""
    return DeadlineExceededError(
        "the deadline passed while the pipeline's window was full; nothing was sent",
        details={"stage": "window"},
    )


def left_early(outcome: Outcome) -> RequestCancelledError:
    """The error of a call that had no answer when its pipeline was left."""
    return RequestCancelledError("the pipeline was left before its answer", outcome=outcome)


def ended() -> InvalidRequestError:
    """The error of a call after the end of the block."""
    return InvalidRequestError("the pipeline's block has ended")

"""The terms of a call: its deadline, request key, size of result and repeats, checked before anything is sent."""

import time
from typing import Final

import msgspec

from ..protocol.errors import DeadlineExceededError, InvalidRequestError
from ..protocol.limits import Limits

NS_PER_MS: Final = 1_000_000
NS_PER_SECOND: Final = 1_000_000_000


class Terms(msgspec.Struct, frozen=True, gc=False):
    """The terms of one call, checked.

    `deadline_ns` is on the monotonic clock; `result_bytes` 0 for the default; `retries` None for the
    default.
    """

    deadline_ns: int
    key: str | None = None
    result_bytes: int = 0
    retries: int | None = None


def agree(
    limits: Limits,
    timeout: float | None,
    key: str | None = None,
    result_bytes: int | None = None,
    retries: int | None = None,
) -> Terms:
    """The terms of a call that begins now and may take `timeout` seconds.

    Raises `InvalidRequestError` where one of them cannot be, `DeadlineExceededError` where no time is left.
    """
    deadline_ns = deadline_after(timeout, limits)
    if key is None and result_bytes is None and retries is None:
        return Terms(deadline_ns)
    if key is not None:
        check_key(key, limits)
    if result_bytes is not None:
        _check_result_bytes(result_bytes, limits)
    if retries is not None and (type(retries) is not int or retries < 0):
        raise InvalidRequestError(f"retries is {retries!r}; it takes a whole number from 0")
    return Terms(deadline_ns, key, result_bytes or 0, retries)


def deadline_after(timeout: float | None, limits: Limits) -> int:
    """The deadline on the monotonic clock in ns, `timeout` seconds from now; None for the default.

    Raises `InvalidRequestError` where it is no number or over the longest deadline, and
    `DeadlineExceededError` where no time is left at all.
    """
    now = time.monotonic_ns()
    if timeout is None:
        return now + limits.deadline_ms_default * NS_PER_MS
    try:
        # The sum refuses a text, which a product would repeat a thousand million times.
        length = int((timeout + 0.0) * NS_PER_SECOND)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"the timeout {timeout!r} is no number of seconds") from error
    if length > limits.deadline_ms_max * NS_PER_MS:
        raise InvalidRequestError(
            f"a timeout of {timeout} s; the longest deadline is {limits.deadline_ms_max / 1000:g} s",
            details={"deadline_ms_max": limits.deadline_ms_max},
        )
    if length <= 0:
        raise DeadlineExceededError(
            f"a timeout of {timeout} s leaves no time for the call; nothing was sent",
            details={"stage": "client"},
        )
    return now + length


def seconds_left(deadline_ns: int) -> float:
    """Seconds until a deadline, at least 0."""
    return max(0, deadline_ns - time.monotonic_ns()) / NS_PER_SECOND


def milliseconds_left(deadline_ns: int) -> int:
    """Whole milliseconds for `poll` until a deadline, rounded up, at least 0."""
    return max(0, -((time.monotonic_ns() - deadline_ns) // NS_PER_MS))


def check_key(key: str, limits: Limits) -> None:
    """Raise `InvalidRequestError` where `key` cannot be a request key."""
    if type(key) is not str:
        raise InvalidRequestError(f"a request key is a str, not a {type(key).__name__}")
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            "the request key holds a lone surrogate, which UTF-8 cannot carry"
        ) from error
    if not 1 <= size <= limits.request_key_bytes_max:
        raise InvalidRequestError(
            f"a request key of {size} bytes; it takes 1 to {limits.request_key_bytes_max}",
            details={"key_bytes": size, "request_key_bytes_max": limits.request_key_bytes_max},
        )


def _check_result_bytes(result_bytes: int, limits: Limits) -> None:
    if type(result_bytes) is not int or not 1 <= result_bytes <= limits.chunked_bytes_max:
        raise InvalidRequestError(
            f"max_result_bytes is {result_bytes!r}; it takes 1 to {limits.chunked_bytes_max}",
            details={"chunked_bytes_max": limits.chunked_bytes_max},
        )

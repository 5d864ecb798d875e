"""When a call that failed is sent again, and how long before: decided without I/O, for every kind of client."""

import random
import time
from typing import Any

from ..protocol.errors import (
    DeadlineExceededError,
    RequestCancelledError,
    StorageError,
    StorageFullError,
)
from ..protocol.limits import Limits
from ..protocol.operation import Call
from ..protocol.statements import BEGIN, OUTCOME
from .terms import NS_PER_SECOND, Terms

_NEVER_REPEATED = (StorageFullError, RequestCancelledError, DeadlineExceededError)

# Writes that change nothing when they come twice: a begun transaction whose client is gone is rolled
# back, and an outcome asked for again is the same one.
_HARMLESS = frozenset((BEGIN.name, OUTCOME.name))


def is_safe_to_repeat(call: Call[Any], key: str | None) -> bool:
    """Whether sending a call again does no harm, even where it was carried out before."""
    operation = call.operation
    if key is not None or operation.kind == "read":
        return True
    return (operation.kind == "control" and not operation.admin) or operation.name in _HARMLESS


class Attempts:
    """The failures of one call so far.

    Arguments: `call` and its `terms`; `limits`, the worker's. By default a call that is safe to repeat and
    whose worker was lost is sent again as often as its deadline allows; every other failure counts.
    """

    def __init__(self, call: Call[Any], terms: Terms, limits: Limits) -> None:
        retries = terms.retries
        self._safe = is_safe_to_repeat(call, terms.key)
        self._retries = limits.retries_default if retries is None else retries
        self._counts_losses = retries is not None
        self._limits = limits
        self._deadline_ns = terms.deadline_ns
        self._failures = 0
        self._losses = 0
        self._doubtful = False

    def seconds_before_next(self, error: StorageError, *, answered: bool) -> float:
        """Seconds to wait before the call is sent again; raises `error` where it is not.

        `answered` says whether the worker sent the error. Its outcome becomes `unknown` where an earlier
        attempt may have been committed and the error does not speak of that one.
        """
        if error.outcome == "unknown":
            self._doubtful = True
        elif self._doubtful and error.outcome == "not_committed" and (error.retryable or not answered):
            error.outcome = "unknown"
        if not self._may_repeat(error):
            raise error
        if not self._counts_losses and not answered and self._safe and error.details.get("sent") is True:
            self._losses += 1
        else:
            self._failures += 1
            if self._failures > self._retries:
                raise error
        wait = self._back_off(error.retry_after)
        if time.monotonic_ns() + wait * NS_PER_SECOND >= self._deadline_ns:
            raise error
        return wait

    def _may_repeat(self, error: StorageError) -> bool:
        if not error.retryable or isinstance(error, _NEVER_REPEATED):
            return False
        return error.outcome == "not_committed" or (error.outcome == "unknown" and self._safe)

    def _back_off(self, retry_after: float | None) -> float:
        wait = back_off_seconds(self._failures + self._losses, self._limits)
        # A little more than was asked for, and not the same for all who were refused together.
        return wait if retry_after is None else max(wait, retry_after * random.uniform(1.0, 1.25))


def back_off_seconds(number: int, limits: Limits) -> float:
    """Jittered seconds to wait before the repeat with that number, counted from 1."""
    longest = limits.retry_backoff_ms_max
    # The shift is bounded: nothing grows any more beyond the longest wait.
    wait_ms = min(longest, limits.retry_backoff_ms_min << min(number - 1, 20))
    return random.uniform(0.5, 1.0) * wait_ms / 1000

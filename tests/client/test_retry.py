"""Which failures are repeated, how often, and what becomes of the outcome: without any connection."""

import time

import pytest

from storage_worker.client import calls
from storage_worker.client.retry import Attempts, back_off_seconds, is_safe_to_repeat
from storage_worker.client.terms import Terms
from storage_worker.protocol.errors import (
    AlreadyOwnedError,
    BusyError,
    CrashLoopError,
    DeadlineExceededError,
    InvalidRequestError,
    OperationFailedError,
    OverloadedError,
    RequestCancelledError,
    StorageError,
    StorageFullError,
    WorkerUnavailableError,
)
from storage_worker.protocol.limits import DEFAULT_LIMITS
from tests.client.fake import limits_with

WRITE = calls.execute("insert into t values (1)", (), DEFAULT_LIMITS)
READ = calls.query("select 1", (), DEFAULT_LIMITS)
FAR_NS = 3600 * 10**9


def attempts(
    call: object = WRITE, *, key: str | None = None, retries: int | None = None, left_ns: int = FAR_NS
) -> Attempts:
    deadline_ns = time.monotonic_ns() + left_ns
    return Attempts(call, Terms(deadline_ns, key, 0, retries), DEFAULT_LIMITS)  # type: ignore[arg-type]


def lost(outcome: str) -> WorkerUnavailableError:
    return WorkerUnavailableError("gone", outcome=outcome, details={"sent": True})  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [OverloadedError("x"), BusyError("x"), AlreadyOwnedError("x")])
def test_refusals_that_promise_nothing_was_committed_are_repeated(error: StorageError) -> None:
    some = attempts()
    for _ in range(DEFAULT_LIMITS.retries_default):
        assert some.seconds_before_next(error, answered=True) > 0
    with pytest.raises(type(error)):
        some.seconds_before_next(error, answered=True)


@pytest.mark.parametrize(
    "error",
    [
        StorageFullError("x"),
        RequestCancelledError("x"),
        DeadlineExceededError("x"),
        OperationFailedError("x"),
        CrashLoopError("x"),
        BusyError("x", outcome="unknown"),
        lost("unknown"),
    ],
)
@pytest.mark.parametrize("retries", [None, 5])
def test_other_failures_of_a_write_are_not(error: StorageError, retries: int | None) -> None:
    with pytest.raises(type(error)):
        attempts(retries=retries).seconds_before_next(error, answered=False)


def test_none_are_repeated_where_the_caller_says_so() -> None:
    for call, error in ((WRITE, OverloadedError("x")), (READ, lost("not_committed"))):
        with pytest.raises(type(error)):
            attempts(call, retries=0).seconds_before_next(error, answered=False)


def test_the_caller_may_ask_for_more() -> None:
    some = attempts(retries=20)
    for _ in range(20):
        some.seconds_before_next(OverloadedError("x"), answered=True)
    with pytest.raises(OverloadedError):
        some.seconds_before_next(OverloadedError("x"), answered=True)


@pytest.mark.parametrize(("call", "key"), [(READ, None), (WRITE, "k")])
def test_a_lost_worker_is_outlived_as_often_as_it_takes(call: object, key: str | None) -> None:
    some = attempts(call, key=key)
    for _ in range(100):
        some.seconds_before_next(lost("unknown" if key else "not_committed"), answered=False)


def test_a_given_number_of_repeats_counts_losses_too() -> None:
    some = attempts(key="k", retries=2)
    for _ in range(2):
        some.seconds_before_next(lost("unknown"), answered=False)
    with pytest.raises(WorkerUnavailableError):
        some.seconds_before_next(lost("unknown"), answered=False)


def test_what_was_asked_for_is_waited_for() -> None:
    wait = attempts().seconds_before_next(OverloadedError("x", retry_after=7.0), answered=True)
    assert 7.0 <= wait <= 8.75


def test_no_repeat_is_begun_that_could_not_end_in_time() -> None:
    with pytest.raises(OverloadedError):
        attempts(left_ns=10**9).seconds_before_next(OverloadedError("x", retry_after=2.0), answered=True)
    with pytest.raises(OverloadedError):
        attempts(left_ns=0).seconds_before_next(OverloadedError("x"), answered=True)


def test_the_back_off_grows_to_its_longest() -> None:
    for number in (1, 2, 5, 8, 9, 50, 10_000):
        longest_ms = min(1000, 5 * 2 ** (min(number, 30) - 1))
        for _ in range(20):
            assert longest_ms / 2000 <= back_off_seconds(number, limits_with()) <= longest_ms / 1000


@pytest.mark.parametrize(
    ("second", "answered", "outcome"),
    [
        (OverloadedError("x"), True, "unknown"),
        (DeadlineExceededError("x"), True, "unknown"),
        (DeadlineExceededError("x"), False, "unknown"),
        (InvalidRequestError("the client was closed"), False, "unknown"),
        (CrashLoopError("x"), False, "unknown"),
        # The worker looked the key up and ran the write: the first one was not committed.
        (OperationFailedError("x"), True, "not_committed"),
    ],
)
def test_a_doubt_remains_until_somebody_knows(second: StorageError, answered: bool, outcome: str) -> None:
    some = attempts(key="k", retries=1)
    some.seconds_before_next(lost("unknown"), answered=False)
    with pytest.raises(type(second)) as caught:
        some.seconds_before_next(second, answered=answered)
    assert caught.value.outcome == outcome


def test_what_is_safe_to_send_twice() -> None:
    assert is_safe_to_repeat(READ, None)
    assert is_safe_to_repeat(WRITE, "k")
    assert is_safe_to_repeat(calls.STATUS_CALL, None)
    assert is_safe_to_repeat(calls.outcome("k", fence=True, limits=DEFAULT_LIMITS), None)
    assert is_safe_to_repeat(calls.begin(0), None)
    assert not is_safe_to_repeat(WRITE, None)
    assert not is_safe_to_repeat(calls.STOP_CALL, None)
    assert not is_safe_to_repeat(calls.COMMIT_CALL, None)
    assert not is_safe_to_repeat(calls.backup("x"), None)

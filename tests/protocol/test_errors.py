"""The error tree: the promises of section by section, and nothing lost on the way to the client."""

import copy
import pickle
from typing import Any

import dill
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_worker.protocol import errors
from storage_worker.protocol.envelope import decode_from_worker, encode, error_of, failure_of
from storage_worker.protocol.errors import (
    CrashLoopError,
    DeadlineExceededError,
    DeclaredError,
    Detail,
    NotPermittedError,
    StorageError,
    WorkerUnavailableError,
    error_class,
)

from .strategies import failures

CHARS_MAX = 2_000

# code: (retryable, outcome), the table of the protocol's description.
PROMISES = {
    "storage_overloaded": (True, "not_committed"),
    "storage_busy": (True, "not_committed"),
    "storage_deadline": (True, "not_committed"),
    "storage_cancelled": (True, "not_committed"),
    "storage_request_too_large": (False, "not_committed"),
    "storage_result_too_large": (False, "not_committed"),
    "storage_invalid_request": (False, "not_committed"),
    "storage_protocol": (False, "unknown"),
    "storage_not_permitted": (False, "not_committed"),
    "storage_request_conflict": (False, "not_committed"),
    "storage_unavailable": (True, "unknown"),
    "storage_crash_loop": (False, "not_committed"),
    "storage_already_owned": (True, "not_committed"),
    "storage_path": (False, "not_committed"),
    "storage_result_not_kept": (False, "committed"),
    "storage_snapshot_expired": (True, "not_committed"),
    "storage_forked_client": (False, "not_committed"),
    "storage_transaction_expired": (True, "not_committed"),
    "storage_full": (True, "not_committed"),
    "storage_corrupt": (False, "not_committed"),
    "storage_replaced": (False, "unknown"),
    "storage_schema": (False, "not_committed"),
    "storage_operation_failed": (False, "not_committed"),
}

OURS: list[type[StorageError]] = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, StorageError)
]


class NotFreeError(DeclaredError):
    """A store's own error, with arguments of its own."""

    code = "room_not_free"

    def __init__(self, room: str, guests: int) -> None:
        super().__init__(f"{room} is taken by {guests}", details={"room": room, "guests": guests})
        self.room = room


def sent(error: StorageError) -> StorageError:
    """The error as it arrives at the client."""
    failure = decode_from_worker(encode(failure_of(9, error, CHARS_MAX)))
    assert failure.id == 9  # type: ignore[union-attr]
    return error_of(failure)  # type: ignore[arg-type]


def told(error: StorageError) -> dict[str, Any]:
    names = ("message", "retryable", "outcome", "retry_after", "details")
    return {name: getattr(error, name) for name in names} | {"kind": type(error), "text": str(error)}


def test_codes_are_unique_and_found() -> None:
    codes = [kind.code for kind in OURS]
    assert len(set(codes)) == len(codes)
    assert [error_class(code) for code in codes] == OURS
    assert error_class("storage_no_such") is None


def test_promises_are_those_of_the_table() -> None:
    found = {kind.code: (kind("").retryable, kind("").outcome) for kind in OURS}
    assert {code: found[code] for code in PROMISES} == PROMISES
    assert found.keys() - PROMISES.keys() == {"storage_error", "storage_declared"}


def test_pythons_own_classes_catch_ours() -> None:
    assert issubclass(DeadlineExceededError, TimeoutError)
    assert issubclass(WorkerUnavailableError, ConnectionError)
    assert issubclass(CrashLoopError, WorkerUnavailableError)
    assert issubclass(NotPermittedError, PermissionError)
    with pytest.raises(TimeoutError, match="too late"):
        raise DeadlineExceededError("too late")


@pytest.mark.parametrize("kind", OURS)
class TestEveryClass:
    def test_arrives_as_itself_with_everything(self, kind: type[StorageError]) -> None:
        for given_error in (
            kind("what happened"),
            kind(
                "why",
                outcome="unknown",
                retry_after=0.25,
                details={"a": 1, "b": None, "c": "d", "e": 1.5, "f": True},
            ),
        ):
            assert told(sent(given_error)) == told(given_error)

    def test_survives_pickling_and_copying(self, kind: type[StorageError]) -> None:
        error = kind("why", outcome="unknown", retry_after=0.25, details={"a": 1})
        error.retryable = not error.retryable
        for copied in (pickle.loads(pickle.dumps(error)), dill.loads(dill.dumps(error)), copy.copy(error)):
            assert told(copied) == told(error)

    def test_shows_its_message(self, kind: type[StorageError]) -> None:
        assert str(kind("what happened")) == "what happened"

    def test_says_when_it_is_raised(self, kind: type[StorageError]) -> None:
        assert kind.__doc__


class TestDeclared:
    def test_a_client_that_knows_the_class_raises_it(self) -> None:
        error = NotFreeError("blue", 2)
        arrived = sent(error)
        assert told(arrived) == told(error)
        assert isinstance(arrived, NotFreeError)
        assert arrived.wire_code == "room_not_free"

    def test_another_client_keeps_its_code(self) -> None:
        error = DeclaredError("gone", details={"room": "blue"})
        error.wire_code = "room_gone"
        arrived = sent(error)
        assert isinstance(arrived, DeclaredError)
        assert arrived.wire_code == "room_gone"
        # It can be passed on once more without loss.
        assert failure_of(9, arrived, CHARS_MAX) == failure_of(9, error, CHARS_MAX)

    def test_survives_pickling_with_arguments_of_its_own(self) -> None:
        error = NotFreeError("blue", 2)
        copied = pickle.loads(pickle.dumps(error))
        assert (told(copied), copied.room) == (told(error), "blue")


class TestWhatCannotBeSent:
    """A failure always leaves: what it quotes must not make its own encoding fail."""

    @given(
        st.text(st.characters(), max_size=50),
        st.dictionaries(
            st.text(st.characters(), max_size=5),
            st.one_of(
                st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(), max_size=10)
            ),
            max_size=4,
        ),
        st.none() | st.floats(-10, 1e9),
    )
    def test_any_text_and_details_arrive(
        self, message: str, details: dict[str, Detail], retry_after: float | None
    ) -> None:
        arrived = sent(StorageError(message, details=details, retry_after=retry_after))
        assert arrived.message == message.encode("utf-8", "backslashreplace").decode()
        assert len(arrived.details) <= len(details)

    def test_lone_surrogates_are_shown_escaped(self) -> None:
        arrived = sent(StorageError("no \ud800 here", details={"key\udfff": "\udc80"}))
        assert arrived.message == r"no \ud800 here"
        assert arrived.details == {r"key\udfff": r"\udc80"}

    def test_integers_beyond_64_bit_are_shown_as_text(self) -> None:
        arrived = sent(StorageError("", details={"small": -(2**63), "large": 2**63, "huge": 10**10_000}))
        assert arrived.details["small"] == -(2**63)
        assert arrived.details["large"] == hex(2**63)
        assert str(arrived.details["huge"]).startswith("0x")

    def test_long_texts_are_cut(self) -> None:
        failure = failure_of(1, StorageError("x" * 10_000, details={"y" * 10_000: "z" * 10_000}), 100)
        assert failure.message == "x" * 100
        assert failure.details == {"y" * 100: "z" * 100}

    def test_values_of_other_types_are_shown_as_text(self) -> None:
        details: Any = {"path": ["a", "b"]}
        assert sent(StorageError("", details=details)).details == {"path": "['a', 'b']"}

    def test_a_wait_is_never_negative(self) -> None:
        assert failure_of(1, StorageError("", retry_after=-3.0), CHARS_MAX).retry_after_ms == 0


@given(failures)
def test_every_failure_becomes_an_error_and_the_same_failure_again(failure: Any) -> None:
    again = failure_of(failure.id, error_of(failure), CHARS_MAX)
    assert again == failure

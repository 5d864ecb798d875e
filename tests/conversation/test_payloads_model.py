"""A random run of puts, references, releases, damage and sweeps against a plain model of what must be there."""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from storage_worker.conversation import PayloadNotFoundError
from storage_worker.conversation import payload_client as client_side
from storage_worker.conversation.payload_files import GZIP_BYTES_MAX
from storage_worker.conversation.records import PayloadRef
from tests.conversation.payload_places import Payloads, age, serving
from tests.conversation.payload_store import drop, hold

BODIES = (b"", b"one", b"two" * 9_000, bytes(GZIP_BYTES_MAX + 1))
CLASSES = ("short", "long")

numbers = itertools.count()
keys = st.tuples(st.integers(0, len(BODIES) - 1), st.sampled_from(CLASSES))


class Store(RuleBasedStateMachine):
    """The model: how often each payload is held, which have a file, and which rows and files are old."""

    payloads: Payloads

    @initialize()
    def begin(self) -> None:
        # Classes of its own, so that no run sees another one's payloads.
        self.run = next(numbers)
        self.refs: dict[tuple[int, str], PayloadRef] = {}
        self.held: Counter[tuple[int, str]] = Counter()
        self.rows: set[tuple[int, str]] = set()
        self.files: set[tuple[int, str]] = set()
        self.old_rows: set[tuple[int, str]] = set()
        self.old_files: set[tuple[int, str]] = set()

    @rule(key=keys)
    def put(self, key: tuple[int, str]) -> None:
        number, kind = key
        ref = self.payloads.put(BODIES[number], f"{kind} {self.run}")
        assert self.refs.setdefault(key, ref) == ref
        self.files.add(key)
        self.old_files.discard(key)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.refs)))
        try:
            count = self.payloads.client.call(hold(self.refs[key]))
        except PayloadNotFoundError:
            assert key not in self.files
            return
        assert key in self.files
        self.held[key] += 1
        assert count == self.held[key]
        self.rows.add(key)
        self.old_rows.discard(key)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.refs)))
        if not self.held[key]:
            with pytest.raises(PayloadNotFoundError):
                self.payloads.client.call(drop(self.refs[key]))
            return
        self.payloads.client.call(drop(self.refs[key]))
        self.held[key] -= 1
        self.old_rows.discard(key)

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), row=st.booleans(), file=st.booleans())
    def grow_old(self, data: st.DataObject, row: bool, file: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.refs)))
        if row:
            self.payloads.client.execute(
                "update conversation_payloads set changed_ms = 0 where sha256 = ? and retention_class = ?",
                (self.refs[key].sha256, self.refs[key].retention_class),
            )
            self.old_rows |= {key} & self.rows
        if file:
            age(self.payloads.file(self.refs[key]))
            self.old_files |= {key} & self.files

    @rule()
    def sweep(self) -> None:
        self.payloads.sweep()
        # Files that the deletion of their row makes new are swept no sooner than a grace time later.
        gone = {key for key in self.rows & self.old_rows if not self.held[key]}
        self.rows -= gone
        self.old_files -= gone
        removed = {key for key in self.files & self.old_files if key not in self.rows}
        self.files -= removed
        self.old_files -= removed
        self.old_rows -= gone

    @invariant()
    def is_as_it_should_be(self) -> None:
        for key, ref in getattr(self, "refs", {}).items():
            state = "committed" if self.held[key] else "released"
            assert self.payloads.row(ref) == ((state, self.held[key]) if key in self.rows else None)
            assert self.payloads.file(ref).exists() == (key in self.files)
            assert key in self.files or key not in self.rows

    def teardown(self) -> None:
        assert self.payloads.findings() == []
        for key, ref in getattr(self, "refs", {}).items():
            if key in self.rows:
                assert client_side.read(self.payloads.client, ref) == BODIES[key[0]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Payloads]:
    with serving(tmp_path / "app.db") as found:
        yield found


def test_the_store_keeps_to_the_model(store: Payloads) -> None:
    class Served(Store):
        payloads = store

    run_state_machine_as_test(
        Served,
        settings=settings(
            max_examples=15, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
        ),
    )

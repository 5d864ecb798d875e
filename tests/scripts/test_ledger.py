"""The judge of the crash test must be able to find each thing it looks for."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

import ledger
import storage_worker as sw
from ledger import Checked, Fate, Ledger, LedgerWriter, Seen


class StoredWrites:
    """Stands in for a client: the same statements on a database in memory."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.connection.execute(ledger.CREATE)
        self.states: dict[str, str] = {}

    def store(self, number: int, *, client: int = 0, body: bytes | None = None) -> None:
        row = (
            client,
            number,
            ledger.is_keyed(number),
            ledger.body_of(client, number) if body is None else body,
        )
        self.connection.execute(ledger.INSERT, row)

    def query(self, sql: str, parameters: tuple[Any, ...], *, timeout: float) -> sw.Rows:
        assert timeout > 0
        return sw.Rows(rows=self.connection.execute(sql, parameters).fetchall())

    def outcome(self, key: str, *, timeout: float) -> sw.KnownOutcome:
        assert timeout > 0
        return msgspec.convert([self.states[key]], sw.KnownOutcome)

    def check(self, notes: Ledger, **kwargs: Any) -> list[str]:
        notes.read()
        return ledger.check(cast("sw.Client", self), notes, **{"bodies": True, **kwargs}).wrong


@pytest.fixture
def stored() -> Iterator[StoredWrites]:
    with closing(sqlite3.connect(":memory:")) as connection:
        yield StoredWrites(connection)


def noted(folder: Path, *fates: Fate, client: int = 0) -> Ledger:
    notes = Ledger(folder)
    writer = LedgerWriter(notes.path(client))
    for number, fate in enumerate(fates):
        writer.note(number, Fate.SENT)
        if fate is not Fate.SENT:
            writer.note(number, fate)
    writer.close()
    return notes


def test_all_is_well(tmp_path: Path, stored: StoredWrites) -> None:
    notes = noted(tmp_path, Fate.ACKNOWLEDGED, Fate.UNKNOWN, Fate.UNKNOWN, Fate.NOT_COMMITTED, Fate.SENT)
    for number in (0, 1):
        stored.store(number)
    assert stored.check(notes) == []


@pytest.mark.parametrize(
    ("fate", "times", "complaint"),
    [
        (Fate.ACKNOWLEDGED, 0, "acknowledged and is missing"),
        (Fate.ACKNOWLEDGED, 2, "stands 2 times"),
        (Fate.UNKNOWN, 2, "stands 2 times"),
        (Fate.SENT, 3, "stands 3 times"),
        (Fate.NOT_COMMITTED, 1, "called not committed and stands there"),
    ],
)
def test_each_wrong_is_found(
    tmp_path: Path, stored: StoredWrites, fate: Fate, times: int, complaint: str
) -> None:
    notes = noted(tmp_path, fate)
    for _ in range(times):
        stored.store(0)
    [found] = stored.check(notes)
    assert complaint in found


def test_another_content_is_found(tmp_path: Path, stored: StoredWrites) -> None:
    stored.store(0, body=b"other")
    assert "another content" in stored.check(noted(tmp_path, Fate.ACKNOWLEDGED))[0]
    assert stored.check(Ledger(tmp_path), bodies=False) == []


def test_a_write_that_nobody_sent_is_found(tmp_path: Path, stored: StoredWrites) -> None:
    notes = noted(tmp_path, Fate.ACKNOWLEDGED)
    stored.store(0)
    stored.store(-5)
    assert stored.check(notes) == []  # before the first one looked at
    assert "never sent" in stored.check(notes, after={0: -10})[0]


def test_more_rows_than_a_page(tmp_path: Path, stored: StoredWrites) -> None:
    count = ledger.PAGE_ROWS * 2 + 1
    notes = noted(tmp_path, *[Fate.ACKNOWLEDGED] * count)
    for number in range(count):
        stored.store(number)
    stored.store(ledger.PAGE_ROWS)
    assert [found.split(" (")[0] for found in stored.check(notes)] == [f"client 0, write {ledger.PAGE_ROWS}"]


def test_entries_are_read_once_and_only_whole(tmp_path: Path) -> None:
    notes = noted(tmp_path, Fate.ACKNOWLEDGED)
    with notes.path(0).open("ab") as file:
        file.write(b"\0\0")
    notes.read()
    assert notes.fates == {0: {0: Fate.ACKNOWLEDGED}}
    with notes.path(0).open("ab") as file:
        file.write((1).to_bytes(ledger.ENTRY_BYTES - 1, "big")[2:] + Fate.UNKNOWN.value)
    notes.read()
    assert notes.fates == {0: {0: Fate.ACKNOWLEDGED, 1: Fate.UNKNOWN}}
    assert notes.count(Fate.UNKNOWN) == 1


def test_bodies_can_be_made_again_and_differ() -> None:
    assert ledger.body_of(1, 2) == ledger.body_of(1, 2)
    bodies = [ledger.body_of(1, number) for number in range(500)]
    assert len(set(bodies)) == len(bodies)
    assert min(map(len, bodies)) == 32
    assert 4_000 < max(map(len, bodies)) <= 8_192


def test_a_look_finds_what_is_new_and_keeps_what_it_saw(tmp_path: Path, stored: StoredWrites) -> None:
    notes = noted(tmp_path, Fate.ACKNOWLEDGED, Fate.SENT, Fate.NOT_COMMITTED, Fate.ACKNOWLEDGED)
    client, seen = cast("sw.Client", stored), Seen()
    stored.store(0)
    assert [each.split(" (")[0] for each in seen.look(client, notes).wrong] == ["client 0, write 3"]
    assert seen.look(client, notes).wrong == []
    # Late: a write that was only sent may still come, one that was called not committed may not.
    stored.store(1)
    stored.store(2)
    assert [each.split(" (")[0] for each in seen.look(client, notes).wrong] == ["client 0, write 2"]
    # Twice, though long after the first one was seen.
    stored.store(1)
    [found] = seen.look(client, notes).wrong
    assert "it stands 2 times" in found


def test_a_look_waits_for_the_fate_of_what_was_sent_after_the_ledger_was_read(
    tmp_path: Path, stored: StoredWrites
) -> None:
    client, seen, notes = cast("sw.Client", stored), Seen(), Ledger(tmp_path)
    stored.store(0)
    assert seen.look(client, notes).wrong == []
    writer = LedgerWriter(notes.path(0))
    writer.note(0, Fate.NOT_COMMITTED)
    writer.close()
    [found] = seen.look(client, notes).wrong
    assert "called not committed and stands there" in found


def test_a_look_at_more_rows_than_a_page(tmp_path: Path, stored: StoredWrites) -> None:
    count = ledger.SEEN_PAGE_ROWS + 1
    notes = noted(tmp_path, *[Fate.ACKNOWLEDGED] * count)
    for number in range(count):
        stored.store(number)
    seen = Seen()
    assert seen.look(cast("sw.Client", stored), notes) == Checked(count, [])


@pytest.mark.parametrize(
    ("state", "times", "is_wrong"),
    [("committed", 1, False), ("not_found", 0, False), ("committed", 0, True), ("not_found", 1, True)],
)
def test_what_the_worker_says_of_a_key_is_held_against_what_is_stored(
    tmp_path: Path, stored: StoredWrites, state: str, times: int, is_wrong: bool
) -> None:
    # Number 1 has no key; the end of number 2 is known.
    notes = noted(tmp_path, Fate.UNKNOWN, Fate.UNKNOWN, Fate.ACKNOWLEDGED)
    notes.read()
    for _ in range(times):
        stored.store(0)
    stored.states = {"0/0": state}
    checked = ledger.check_outcomes(cast("sw.Client", stored), notes)
    assert (checked.writes, bool(checked.wrong)) == (1, is_wrong)

"""Stores for the tests of what a real worker does with stores; workers import them by name."""

import msgspec

from storage_worker.protocol.errors import DeclaredError, StorageError
from storage_worker.store import Store
from storage_worker.transaction import Transaction

NOTES = f"{__name__}:notes"
NEWER = f"{__name__}:newer"
CHANGED = f"{__name__}:changed"
BROKEN = f"{__name__}:broken"
SWALLOWING = f"{__name__}:swallowing"


class Note(msgspec.Struct):
    id: int
    text: str


class EmptyNoteError(DeclaredError):
    code = "notes_empty"


def make_table(tx: Transaction) -> None:
    tx.execute("create table notes(id integer primary key, text unique not null)")


def add_pinned(tx: Transaction) -> None:
    tx.execute("alter table notes add column pinned integer not null default 0")


notes = Store("notes", version=1, migrations=[make_table])

calls: list[str] = []
"""What was called after commits, in the worker's process."""


@notes.write
def add(tx: Transaction, text: str, tags: tuple[str, ...] = ()) -> int:
    if not text:
        tx.fail(EmptyNoteError("a note must have a text", details={"tags": len(tags)}))
    tx.after_commit(lambda: calls.append(text))
    return int(tx.execute("insert into notes(text) values(?) returning id", (text,)).scalar())


@notes.write
def add_all(tx: Transaction, texts: list[str]) -> list[int]:
    """Composed of another handler; what fails is taken back alone or takes everything with it."""
    return [add.handler(tx, text) for text in texts]


@notes.write
def try_add(tx: Transaction, text: str) -> str:
    """Adds a note and keeps a mark of it where that fails."""
    try:
        add.handler(tx, text)
    except StorageError as error:
        tx.execute("insert into notes(text) values(?)", (f"not added: {text}",))
        tx.fail(EmptyNoteError("it was there", details={"why": error.code}), keep=True)
    return "added"


@notes.read
def recent(tx: Transaction, limit: int = 20) -> list[Note]:
    rows = tx.query("select id, text from notes order by id desc limit ?", (limit,))
    return rows.into(Note)


@notes.read
def twice(tx: Transaction) -> tuple[int, int]:
    """Two statements that must see one state."""
    first = tx.scalar("select count(*) from notes")
    tx.scalar(
        "with recursive c(n) as (values(1) union all select n + 1 from c where n < 200000) select max(n) from c"
    )
    return first, tx.scalar("select count(*) from notes")


@notes.read
def write_in_a_read(tx: Transaction) -> None:
    tx.execute("insert into notes(text) values('written by a read')")


@notes.read
def called_after_commits(tx: Transaction) -> list[str]:
    return calls


@notes.write
def leave_the_process(tx: Transaction) -> None:
    tx.execute("insert into notes(text) values('left')")
    raise SystemExit(3)


newer = Store("notes", version=2, migrations=[make_table, add_pinned])


def make_another_table(tx: Transaction) -> None:
    tx.execute("create table other(id integer primary key)")


changed = Store("notes", version=1, migrations=[make_another_table])


def fail_half_way(tx: Transaction) -> None:
    tx.execute("create table half(a)")
    tx.execute("insert into nowhere values(1)")


broken = Store("notes", version=2, migrations=[make_table, fail_half_way])


def swallow_a_rollback(tx: Transaction) -> None:
    tx.execute("create table half(a unique)")
    tx.execute("insert into half values(1)")
    try:
        tx.execute("insert or rollback into half values(1)")
    except StorageError as error:
        calls.append(error.code)


swallowing = Store("notes", version=2, migrations=[make_table, swallow_a_rollback])

"""What type checkers know of operations; mypy and pyright read it, nobody runs it."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, TypeVar, assert_type

import msgspec

from storage_worker.protocol.operation import Call
from storage_worker.store import Store, StoreOperation
from storage_worker.transaction import Transaction

R = TypeVar("R")


class Note(msgspec.Struct):
    id: int
    text: str


notes = Store("notes")


@notes.write
def add(tx: Transaction, text: str, tags: tuple[str, ...] = ()) -> int:
    return len(text) + len(tags)


@notes.write(solo=True)
def replace(tx: Transaction, note: Note, *, strict: bool = False) -> Note | None:
    return note if strict else None


@notes.read
def recent(tx: Transaction, limit: int = 20) -> list[Note]:
    return []


@notes.read(admin=True)
def audit(tx: Transaction) -> None: ...


def call(call: Call[R], *, timeout: float = 1.0) -> R:
    """As `Client.call` is typed."""
    raise NotImplementedError


def results(tx: Transaction) -> None:
    assert_type(add("hello"), Call[int])
    assert_type(call(add("hello", tags=("a",))), int)
    assert_type(call(replace(Note(1, "a"), strict=True)), Note | None)
    assert_type(call(recent()), list[Note])
    assert_type(add.handler(tx, "hello"), int)
    assert_type(recent.handler(tx, limit=3), list[Note])
    found: StoreOperation[..., Any] = notes.operations["notes.add"]
    found("anything")


def refused(tx: Transaction) -> None:
    # Each of these is an error that both checkers must see; one that is not is an unused comment.
    add(1)  # type: ignore[arg-type]
    add()  # type: ignore[call-arg]
    add("a", (), 3)  # type: ignore[call-arg]
    add("a", tag=())  # type: ignore[call-arg]
    replace(Note(1, "a"), True)  # type: ignore[call-arg]
    add.handler("a")  # type: ignore[call-arg, arg-type]
    _: str = call(add("a"))  # type: ignore[assignment]


def no_transaction(text: str) -> int:
    return len(text)


notes.write(no_transaction)  # type: ignore[arg-type]

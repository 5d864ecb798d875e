"""A program that defines a store in `__main__` and writes it, packed, to standard output."""

from __future__ import annotations

import enum
import json
import math
import sys
import threading
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgspec

from storage_worker import transaction as sw
from storage_worker.protocol.errors import DeclaredError
from storage_worker.shipping import ship
from storage_worker.store import Store

T = TypeVar("T")


class Color(enum.Enum):
    """Made in `__main__`."""

    RED = "red"
    BLUE = "blue"

    @property
    def title(self) -> str:
        return self.value.title()


class Base(msgspec.Struct, frozen=True, rename="camel"):
    """A base with a check and methods."""

    my_id: int
    KIND: ClassVar[str] = "base"

    def __post_init__(self) -> None:
        if self.my_id < 0:
            raise ValueError("negative")

    @property
    def double(self) -> int:
        return self.my_id * 2

    @classmethod
    def make(cls, number: int) -> Base:
        return Base(number)


class Node(Base, frozen=True, kw_only=True):
    """It refers to itself, in its types and in its methods."""

    name: str
    kids: list[Node] = []
    color: Color = Color.RED

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name == "bad":
            raise ValueError("bad name")

    def __len__(self) -> int:
        return sum(isinstance(kid, Node) for kid in self.kids)

    def names(self) -> list[str]:
        return [self.name, *(name for kid in self.kids for name in kid.names())]


class Cat(msgspec.Struct, tag="cat"):
    lives: int


class Dog(msgspec.Struct, tag="dog", array_like=False, forbid_unknown_fields=True):
    tricks: int


class Short(msgspec.Struct, array_like=True, frozen=True):
    number: int
    text: Annotated[str, msgspec.Meta(max_length=3)] = "x"


class Page(msgspec.Struct, Generic[T]):
    items: list[T]
    more: bool = False


class NoteMissingError(DeclaredError):
    """An error of the store's own."""

    code = "note_missing"


def create(tx: sw.Transaction) -> None:
    tx.execute("create table notes(text)")


def rooted(number: int) -> int:
    return int(math.sqrt(number))


LOCK = threading.Lock()
SHAPES: list[Any] = [Node, Base]
TABLE = {"rooted": rooted}

notes = Store("notes", 1, [create])


@notes.write
def add(tx: sw.Transaction, text: str, tags: tuple[str, ...] = (), *, color: Color = Color.BLUE) -> str:
    """Add a note."""
    tx.execute("insert into notes values (?)", (text,))
    return f"{text} {'/'.join(tags)} {color.title} {TABLE['rooted'](16)}"


@notes.write(solo=True)
def add_both(tx: sw.Transaction, text: str) -> list[str]:
    with LOCK:
        return [add.handler(tx, text), add.handler(tx, text.upper()), ",".join(sorted(notes.operations))]


@notes.read
def grow(tx: sw.Transaction, node: Node, depth: int = 0) -> Node:
    if depth == 2:
        return node
    return grow.handler(tx, Node(my_id=node.my_id + 1, name=f"d{depth}", kids=[node]), depth + 1)


@notes.read
def look(tx: sw.Transaction, node: Node) -> dict[str, Any]:
    made = Base.make(7)
    return {
        "names": node.names(),
        "kids": len(node),
        "double": node.double,
        "kind": node.KIND,
        "is": [isinstance(node, shape) for shape in SHAPES],
        "equal": made == Base(7),
        "qualname": type(node).__qualname__,
        "json": json.dumps([made.my_id]),
    }


@notes.read
def keep(tx: sw.Transaction, pet: Cat | Dog, short: Short = Short(1)) -> str:  # noqa: B008 - it is frozen
    return f"{type(pet).__name__} {short.text}"


@notes.read
def page(tx: sw.Transaction, count: int) -> Page[int]:
    return Page(list(range(count)), more=True)


@notes.read
def missing(tx: sw.Transaction) -> None:
    tx.fail(NoteMissingError("no such note"))


def write_shipment() -> None:
    """What the host of these stores hands to a worker."""
    sys.stdout.buffer.write(ship([notes])[1])


def main() -> None:
    if "--spawned" in sys.argv:
        import multiprocessing

        child = multiprocessing.get_context("spawn").Process(target=write_shipment)
        child.start()
        child.join()
    else:
        write_shipment()


if __name__ == "__main__":
    main()

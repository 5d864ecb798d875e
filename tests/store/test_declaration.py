import enum
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Optional

import msgspec
import pytest

import storage_worker as sw
from storage_worker.protocol.errors import InvalidRequestError, OperationFailedError
from storage_worker.store import Store
from storage_worker.transaction import Transaction

from .doubles import noting

if TYPE_CHECKING:
    from storage_worker.transaction import Transaction as Hidden

DEPTH = 64


class Note(msgspec.Struct, frozen=True):
    id: int
    text: str


class Loose(msgspec.Struct):
    text: str


class Cat(msgspec.Struct, tag="cat"):
    lives: int


class Dog(msgspec.Struct, tag="dog"):
    tricks: list[str]


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Plain:
    pass


def encoded(store: Store, name: str, values: list[Any]) -> Any:
    """The arguments' struct of an operation as a worker decodes it."""
    return store.operations[name].decode_arguments(msgspec.msgpack.encode(values), DEPTH)


class TestWhatTravels:
    def test_arguments_are_one_full_positional_array(self) -> None:
        notes = Store("notes")

        @notes.write
        def add(tx: Transaction, text: str, tags: tuple[str, ...] = ()) -> int:
            return len(text) + len(tags)

        assert msgspec.msgpack.encode(add("hello").arguments) == msgspec.msgpack.encode(["hello", []])
        assert add("hello").operation is add
        assert (add.name, add.kind, add.solo, add.admin) == ("notes.add", "write", False, False)
        assert notes.operations["notes.add"] is add
        arguments = encoded(notes, "notes.add", ["hi", ["a", "b"]])
        assert (arguments.text, arguments.tags) == ("hi", ("a", "b"))
        assert add.run(noting()[0], arguments) == 4

    def test_keyword_only_parameters_are_positional_on_the_wire_behind_the_others(self) -> None:
        notes = Store("notes")

        @notes.read
        def find(
            tx: Transaction, text: str, limit: int = 20, *, exact: bool, author: str = "any"
        ) -> list[str]:
            return [text, str(limit), str(exact), author]

        call = find("x", exact=True)
        assert msgspec.msgpack.encode(call.arguments) == msgspec.msgpack.encode(["x", 20, True, "any"])
        arguments = encoded(notes, "notes.find", ["x", 5, False])
        assert find.run(noting()[0], arguments) == ["x", "5", "False", "any"]
        with pytest.raises(InvalidRequestError, match=r"notes\.find"):
            find("x", 20, True, exact=True)  # type: ignore[misc]

    def test_its_signature_is_that_of_the_handler_without_the_transaction(self) -> None:
        notes = Store("notes")

        @notes.read
        def find(tx: Transaction, text: str, limit: int = 20, *, exact: bool) -> list[str]:
            return [text, str(limit), str(exact)]

        assert str(inspect.signature(find)) == "(text: str, limit: int = 20, *, exact: bool) -> list[str]"

    def test_an_argument_that_does_not_decode_is_named(self) -> None:
        notes = Store("notes")

        @notes.read
        def find(tx: Transaction, text: str, tags: list[str], *, limit: int = 20) -> list[str]:
            return [text, *tags, str(limit)]

        for values, place in (
            ([5, []], "`text`"),
            (["x", ["a", 5]], r"`tags\[1\]`"),
            (["x", [], "many"], "`limit`"),
        ):
            with pytest.raises(InvalidRequestError, match=f"- at {place}$"):
                encoded(notes, "notes.find", values)

    def test_defaults_travel_with_the_call(self) -> None:
        notes = Store("notes")

        @notes.write
        def put(
            tx: Transaction,
            color: Color = Color.RED,
            note: Note = Note(1, "a"),  # noqa: B008 - a frozen struct is what this test is about
            extra: Optional[int] = None,  # noqa: UP045 - the old spelling must work too
            few: Annotated[int, msgspec.Meta(ge=0)] = 0,
            more: dict[str, Any] | None = None,
        ) -> Note:
            return note

        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(put().arguments))
        assert sent == ["red", {"id": 1, "text": "a"}, None, 0, None]
        assert encoded(notes, "notes.put", ["blue"]).color is Color.BLUE
        with pytest.raises(InvalidRequestError, match=r"notes\.put"):
            encoded(notes, "notes.put", ["blue", {"id": 1, "text": "a"}, None, -1])

    def test_results_are_decoded_to_the_annotation(self) -> None:
        notes = Store("notes")

        @notes.read
        def recent(tx: Transaction, limit: int = 20) -> list[Note]:
            return [Note(1, "a")][:limit]

        @notes.write
        def forget(tx: Transaction) -> None:
            tx.execute("delete from notes")

        assert recent.decode_result(msgspec.msgpack.encode([{"id": 1, "text": "a"}])) == [Note(1, "a")]
        assert forget.decode_result(msgspec.msgpack.encode(None)) is None

    @pytest.mark.parametrize(
        "result",
        ["1", None, [1], 2**64, Plain(), "\ud800"],
        ids=["text", "none", "list", "huge", "object", "surrogate"],
    )
    def test_a_write_that_returns_something_else_fails_before_its_commit(self, result: Any) -> None:
        notes = Store("notes")

        @notes.write
        def add(tx: Transaction) -> int:
            return result  # type: ignore[no-any-return]

        with pytest.raises(OperationFailedError, match=r"notes\.add returned"):
            add.run(noting()[0], add().arguments)

    def test_tagged_unions_structs_and_any_travel(self) -> None:
        notes = Store("notes")

        @notes.write
        def keep(tx: Transaction, pet: Cat | Dog, where: tuple[int, str], extra: dict[str, Any]) -> str:
            return type(pet).__name__

        arguments = encoded(notes, "notes.keep", [{"type": "dog", "tricks": ["sit"]}, [1, "a"], {"x": [1]}])
        assert keep.run(noting()[0], arguments) == "Dog"

    def test_open_arguments_are_bounded_in_depth(self) -> None:
        notes = Store("notes")

        @notes.write
        def keep(tx: Transaction, extra: dict[str, Any]) -> None: ...

        deep: Any = {}
        for _ in range(DEPTH):
            deep = {"in": deep}
        with pytest.raises(InvalidRequestError, match="nested"):
            encoded(notes, "notes.keep", [deep])

    def test_annotations_may_name_local_types_and_types_known_to_checkers_only(self) -> None:
        class Local(msgspec.Struct):
            text: str

        notes = Store("notes")

        @notes.read
        def first(tx: "Hidden", given: "Local", others: "list[Local]") -> "Local | None":
            return given

        @notes.write(solo=True)
        def second(tx: "Transaction", given: "Local") -> "list[Local]":
            return [given]

        assert encoded(notes, "notes.first", [{"text": "a"}, []]).given == Local("a")
        assert encoded(notes, "notes.second", [{"text": "a"}]).given == Local("a")
        assert second.solo

    def test_a_wrapped_handler_keeps_its_signature(self) -> None:
        def doubled(handler: Callable[[Transaction, int], int]) -> Callable[[Transaction, int], int]:
            @functools.wraps(handler)
            def both(tx: Transaction, number: int) -> int:
                return 2 * handler(tx, number)

            return both

        notes = Store("notes")

        @notes.read
        @doubled
        def count(tx: Transaction, number: int) -> int:
            """Count."""
            return number

        assert count.run(noting()[0], encoded(notes, "notes.count", [4])) == 8
        assert (count.__name__, count.__doc__) == ("count", "Count.")


class TestWhatACallRefuses:
    @pytest.fixture
    def add(self) -> Any:
        notes = Store("notes")

        @notes.write
        def add(tx: Transaction, text: str, tags: tuple[str, ...] = ()) -> int:
            return 1

        return add

    @pytest.mark.parametrize(
        ("positional", "named"),
        [((), {}), (("a", (), 3), {}), (("a",), {"tag": ()}), (("a",), {"text": "b"})],
        ids=["missing", "surplus", "unknown", "twice"],
    )
    def test_wrong_arguments_at_the_call(
        self, add: Any, positional: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        with pytest.raises(InvalidRequestError, match=r"notes\.add"):
            add(*positional, **named)

    @pytest.mark.parametrize(
        "values", [[], ["a", [], 1], [1], ["a", "b"], {"text": "a"}, "a", None], ids=repr
    )
    def test_wrong_arguments_on_the_wire(self, add: Any, values: Any) -> None:
        with pytest.raises(InvalidRequestError, match=r"notes\.add"):
            add.decode_arguments(msgspec.msgpack.encode(values), DEPTH)


def either(tx: Transaction, value: str | bytes) -> None: ...
def untagged(tx: Transaction, value: Note | Loose) -> None: ...
def lists(tx: Transaction, value: list[int] | tuple[int, ...]) -> None: ...
def deep_down(tx: Transaction, value: dict[str, list[str | bytes]]) -> None: ...
def foreign(tx: Transaction, value: Plain) -> None: ...
def foreign_inside(tx: Transaction, value: list[dict[str, Plain | None]]) -> None: ...
def anything(tx: Transaction, value: object) -> None: ...
def with_list(tx: Transaction, value: list[int] = []) -> None: ...  # noqa: B006
def with_dict(tx: Transaction, value: dict[str, int] = {}) -> None: ...  # noqa: B006
def with_loose(tx: Transaction, value: Loose = Loose("a")) -> None: ...  # noqa: B008
def with_list_inside(tx: Transaction, value: tuple[list[int], ...] = ([],)) -> None: ...
def unfit(tx: Transaction, value: int = "a") -> None: ...  # type: ignore[assignment]
def unfit_none(tx: Transaction, value: int = None) -> None: ...  # type: ignore[assignment] # noqa: RUF013
def many(tx: Transaction, *value: int) -> None: ...
def named(tx: Transaction, **value: int) -> None: ...
def bare(tx: Transaction, value) -> None: ...  # type: ignore[no-untyped-def]
def by_place(tx: Transaction, value: int, /) -> None: ...
def unknown(tx: Transaction, value: "Nowhere") -> None: ...  # type: ignore[name-defined] # noqa: F821
def misspelt(tx: Transaction, value: "int |") -> None: ...  # type: ignore[valid-type] # noqa: F722


def no_result(tx: Transaction): ...  # type: ignore[no-untyped-def]
def either_result(tx: Transaction) -> str | bytes: ...  # type: ignore[empty-body]
def foreign_result(tx: Transaction) -> list[Plain]: ...  # type: ignore[empty-body]
def generator(tx: Transaction) -> Iterator[int]:
    yield 1


async def later(tx: Transaction) -> int:
    return 1


async def later_each(tx: Transaction) -> AsyncIterator[int]:
    yield 1


def nothing() -> int: ...  # type: ignore[empty-body]
def unannotated(tx, value: int) -> int: ...  # type: ignore[no-untyped-def, empty-body]
def mistaken(tx: "msgspec.Transaction") -> int: ...  # type: ignore[name-defined, empty-body]
def forgotten(value: str) -> int: ...  # type: ignore[empty-body]
def defaulted(tx: Transaction | None = None) -> int: ...  # type: ignore[empty-body]
def named_only(*, tx: Transaction) -> int: ...  # type: ignore[empty-body]


class TestWhatADeclarationRefuses:
    @pytest.mark.parametrize(
        "handler",
        [
            either, untagged, lists, deep_down, foreign, foreign_inside, anything, with_list, with_dict, with_loose,
            with_list_inside, unfit, unfit_none, many, named, bare, by_place, unknown, misspelt,
        ],
        ids=lambda handler: str(handler.__name__),
    )  # fmt: skip
    def test_a_parameter_that_could_not_be_decoded_without_doubt(self, handler: Any) -> None:
        notes = Store("notes")
        with pytest.raises(TypeError, match=rf"notes\.{handler.__name__}: the parameter value"):
            notes.write(handler)
        assert notes.operations == {}

    @pytest.mark.parametrize("handler", [no_result, either_result, foreign_result])
    def test_a_result_that_could_not_be_decoded_without_doubt(self, handler: Any) -> None:
        with pytest.raises(TypeError, match=rf"notes\.{handler.__name__}: the result"):
            Store("notes").read(handler)

    @pytest.mark.parametrize("handler", [generator, later, later_each])
    def test_what_does_not_return_its_result(self, handler: Any) -> None:
        with pytest.raises(TypeError, match="returns its result"):
            Store("notes").read(handler)

    @pytest.mark.parametrize("handler", [nothing, mistaken, forgotten, defaulted, named_only, unannotated])
    def test_a_handler_without_a_transaction(self, handler: Any) -> None:
        with pytest.raises(TypeError, match=rf"notes\.{handler.__name__}: .*([Tt]ransaction|tx)"):
            Store("notes").write(handler)

    def test_a_method(self) -> None:
        notes = Store("notes")
        with pytest.raises(TypeError, match="annotation"):

            class Handlers:
                @notes.write  # type: ignore[arg-type]
                def add(self, tx: Transaction) -> None: ...

    def test_a_parameter_named_self(self) -> None:
        def add(tx: Transaction, self: int) -> None: ...

        with pytest.raises(TypeError, match="the parameter self"):
            Store("notes").write(add)

    def test_what_is_no_function(self) -> None:
        class Callable_:  # noqa: N801
            __name__ = "add"

            def __call__(self, tx: Transaction) -> int:
                return 1

        with pytest.raises(TypeError, match="plain function"):
            Store("notes").write(Callable_())

    def test_an_operation_declared_twice(self) -> None:
        notes = Store("notes")

        def add(tx: Transaction) -> int:
            return 1

        first = notes.write(add)
        with pytest.raises(TypeError, match=r"notes\.add is declared twice"):
            notes.read(add)
        assert notes.operations == {"notes.add": first}

    def test_a_lambda(self) -> None:
        with pytest.raises(TypeError, match="operation's name"):
            Store("notes").write(lambda tx: 1)

    @pytest.mark.parametrize(
        "name", ["", "1a", "a.b", "a b", "_sw", "über", "a" * 65, "sql", "worker", None, 3, "a\n"]
    )
    def test_a_store_with_such_a_name(self, name: Any) -> None:
        with pytest.raises(TypeError, match="name"):
            Store(name)

    @pytest.mark.parametrize("version", [-1, 1.0, "1", True, None])
    def test_a_store_with_such_a_version(self, version: Any) -> None:
        with pytest.raises(TypeError, match="version"):
            Store("notes", version, [])

    def test_a_version_that_is_not_the_number_of_listed_migrations(self) -> None:
        def first(tx: Transaction) -> None: ...

        with pytest.raises(TypeError, match="declares version 2 and has 1 migrations"):
            Store("notes", 2, [first])
        with pytest.raises(TypeError, match="declares version 1 and has 0 migrations"):
            Store("notes", 1)


class TestOptions:
    def test_decorators_work_bare_and_with_options(self) -> None:
        notes = Store("notes")

        @notes.write
        def a(tx: Transaction) -> int:
            return 1

        @notes.write()
        def b(tx: Transaction) -> int:
            return 1

        @notes.write(solo=True, admin=True)
        def c(tx: Transaction) -> int:
            return 1

        @notes.read
        def d(tx: Transaction) -> int:
            return 1

        @notes.read(admin=True)
        def e(tx: Transaction) -> int:
            return 1

        found = [(each.name, each.kind, each.solo, each.admin) for each in (a, b, c, d, e)]
        assert found == [
            ("notes.a", "write", False, False),
            ("notes.b", "write", False, False),
            ("notes.c", "write", True, True),
            ("notes.d", "read", False, False),
            ("notes.e", "read", False, True),
        ]

    def test_handlers_compose_and_are_tested_directly(self) -> None:
        notes = Store("notes")

        @notes.write
        def add(tx: Transaction, text: str) -> int:
            return int(tx.execute("insert into notes(text) values (?) returning id", (text,)).scalar())

        @notes.write
        def add_both(tx: Transaction, one: str, two: str) -> tuple[int, int]:
            return add.handler(tx, one), add.handler(tx, two)

        tx, statements = noting()
        assert add_both.handler(tx, "a", "b") == (1, 1)
        assert [parameters for _, parameters in statements.noted] == [("a",), ("b",)]


def test_a_declared_error_has_a_code_of_its_own() -> None:
    with pytest.raises(TypeError, match="code of its own"):

        class EmptyError(sw.DeclaredError):
            pass

    class FullError(sw.DeclaredError):
        code = "notes_full"

    class VeryFullError(FullError):
        """One below another may share its code."""

    assert VeryFullError.code == "notes_full"

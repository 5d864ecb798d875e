"""How a store declares its operations and migrations, and how a call reaches its handler."""

import inspect
import os
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from types import FrameType, MappingProxyType
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar, cast, overload

import msgspec

from .migrations import Migration, MigrationSource, Origin, origin_of, read_migrations
from .protocol.errors import OperationFailedError
from .protocol.operation import Operation
from .signature import Signature, arguments_struct, read_signature
from .transaction import Transaction

P = ParamSpec("P")
R = TypeVar("R")

Handler = Callable[Concatenate[Transaction, P], R]
"""A function of the transaction and its arguments, without effects outside: it may run more than once."""

T = TypeVar("T")

Slice = Callable[[Transaction, T | None], T | None]
"""One slice of background work: takes where to go on, None at the beginning, and returns it, None at the end."""

_encode = msgspec.msgpack.Encoder().encode

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")

# The operations of these are the worker's own (protocol.statements).
_RESERVED = ("sql", "worker")

# What `python` and a spawned child of multiprocessing run as their program; no worker can import them.
MAIN_MODULES = ("__main__", "__mp_main__")


class StoreOperation(Operation[P, R]):
    """An operation that a store declares.

    Calling it with the arguments behind the transaction gives the `Call` that a client takes; `handler`
    is the function itself, to compose it with others and to test it. Made by `Store.write` and
    `Store.read`.
    """

    def __init__(
        self,
        store: "Store",
        kind: Literal["read", "write"],
        handler: Handler[P, R],
        signature: Signature,
        *,
        solo: bool,
        admin: bool,
        pooled: bool = False,
        for_writers: bool = False,
    ) -> None:
        name = str(cast(Any, handler).__name__)
        self.__name__ = name
        self.__qualname__ = str(cast(Any, handler).__qualname__)
        self.__module__ = handler.__module__
        self.__doc__ = handler.__doc__
        self.store = store
        self.handler = handler
        self.signature = signature
        found = inspect.signature(handler)
        self.__signature__ = found.replace(parameters=list(found.parameters.values())[1:])
        struct = arguments_struct(name, handler.__module__, signature)
        super().__init__(
            f"{store.name}.{name}",
            kind,
            struct,
            signature.result,
            solo=solo,
            admin=admin,
            pooled=pooled,
            for_writers=for_writers,
        )

    def run(self, tx: Transaction, arguments: msgspec.Struct) -> R:
        """Run the handler with the decoded arguments of a call.

        Raises `OperationFailedError` where a write returns what is not its declared result, since a client
        could not decode the answer to what was committed by then.
        """
        handler: Callable[..., R] = self.handler  # its parameters are the struct's fields, and taken by name
        result = handler(tx, **msgspec.structs.asdict(arguments))
        if self.kind == "write":
            self._check_result(result)
        return result

    def _check_result(self, result: R) -> None:
        try:
            self._decode_result(_encode(result))
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise OperationFailedError(
                f"{self.name} returned what is not its declared result: {error}",
                details={"exception": type(error).__name__, "operation": self.name},
            ) from error

    def __reduce__(self) -> str:
        # The function below the decorator is not found under its name; the operation is.
        return self.__qualname__


class BackgroundWork(NamedTuple):
    """Work that a store has the worker do by itself, from time to time and in slices."""

    name: str
    every_s: float
    handler: Callable[[Transaction, Any], Any]


class Store:
    """A named set of operations and the migrations of the tables they use.

    Arguments: `name`, which begins the names of its operations; `version`, the number of its last
    migration, 0 without any; `migrations`, a folder of `.sql` files named `0001_what_it_does.sql` and so
    on, or a list of such files and of functions of the transaction. A relative folder is looked for beside
    the module that makes the store, then as a path whose first part is an import package.

    Raises `TypeError` where the declaration is wrong. What is wrong with the migrations themselves is a
    `SchemaError` when a worker starts with the store.
    """

    def __init__(self, name: str, version: int = 0, migrations: MigrationSource | None = None) -> None:
        _check_name(name, "a store's name")
        if name in _RESERVED:
            raise TypeError(f"the store name {name} is the worker's own")
        if type(version) is not int or version < 0:
            raise TypeError(f"store {name}: the version is {version!r}, not the number of its last migration")
        module = _scope(inspect.currentframe()).f_globals
        file = module.get("__file__")
        origin = origin_of(migrations, None if file is None else os.path.abspath(file))
        if not isinstance(origin.given, str) and len(origin.given) != version:
            raise TypeError(
                f"store {name}: it declares version {version} and has {len(origin.given)} migrations"
            )
        self.name = name
        self.version = version
        self.__module__ = str(module.get("__name__", "__main__"))
        self._migrations: Origin | tuple[Migration, ...] = origin
        self._operations: dict[str, StoreOperation[Any, Any]] = {}
        self._background: dict[str, BackgroundWork] = {}

    def __repr__(self) -> str:
        return f"<store {self.name}, version {self.version}>"

    @property
    def operations(self) -> Mapping[str, StoreOperation[Any, Any]]:
        """The operations by their full names, as in `notes.add`."""
        return MappingProxyType(self._operations)

    @property
    def background_work(self) -> Mapping[str, BackgroundWork]:
        """What the worker does for the store by itself, by its full names, as in `notes.tidy`."""
        return MappingProxyType(self._background)

    @property
    def import_string(self) -> str | None:
        """`module:attribute` under which an importing process finds this store, or None."""
        modules = [self.__module__, *(each.__module__ for each in self._operations.values())]
        for name in dict.fromkeys(modules):
            attribute = self._attribute(name)
            if attribute is not None and name not in MAIN_MODULES and sys.modules[name].__spec__ is not None:
                return f"{name}:{attribute}"
        return None

    def migrations(self) -> tuple[Migration, ...]:
        """All migrations, read from their files; `SchemaError` where one is missing or misnamed."""
        if isinstance(self._migrations, Origin):
            return read_migrations(self._migrations, self.name)
        return self._migrations

    @overload
    def write(self, handler: Handler[P, R], /) -> StoreOperation[P, R]: ...

    @overload
    def write(
        self, /, *, solo: bool = False, admin: bool = False
    ) -> Callable[[Handler[P, R]], StoreOperation[P, R]]: ...

    def write(self, handler: Any = None, /, *, solo: bool = False, admin: bool = False) -> Any:
        """Declare an operation that changes the database: `@store.write` or `@store.write(solo=True)`.

        The handler's first parameter is the `Transaction`; the others, each annotated with a type that
        msgspec takes, are the arguments that travel; its return annotation is the type of the result. A
        `solo` operation never shares its transaction with other requests; an `admin` one asks for that
        role. Raises `TypeError` where the name is taken, or the signature could not be decoded without
        doubt: `str | bytes`, unions that msgspec cannot tell apart, mutable defaults, missing annotations.
        """
        scope = _scope(inspect.currentframe()).f_locals
        if handler is not None:
            return self._declare("write", handler, scope, solo=solo, admin=admin)
        return lambda given: self._declare("write", given, scope, solo=solo, admin=admin)

    @overload
    def read(self, handler: Handler[P, R], /) -> StoreOperation[P, R]: ...

    @overload
    def read(
        self, /, *, admin: bool = False, pooled: bool = False, for_writers: bool = False
    ) -> Callable[[Handler[P, R]], StoreOperation[P, R]]: ...

    def read(
        self,
        handler: Any = None,
        /,
        *,
        admin: bool = False,
        pooled: bool = False,
        for_writers: bool = False,
    ) -> Any:
        """Declare an operation that only reads: `@store.read` or `@store.read(admin=True)`.

        It runs on a read-only connection. A `pooled` one always runs on a thread of the reader pool, however
        quick it has been: for what works outside of SQLite, where nothing could end it. One `for_writers` asks for
        the role `write` although it changes no row: for what writes files. The rest is as for `write`.
        """
        scope = _scope(inspect.currentframe()).f_locals

        def declare(given: Any) -> Any:
            return self._declare(
                "read", given, scope, solo=False, admin=admin, pooled=pooled, for_writers=for_writers
            )

        return declare if handler is None else declare(handler)

    def background(self, *, every: float) -> Callable[[Slice[T]], Slice[T]]:
        """Declare work that the worker does by itself, in slices: `@store.background(every=60.0)`.

        The handler takes the `Transaction` and where to go on, None at the beginning. It does a part that takes
        a few milliseconds, since nothing ends it and all writes wait for it, and returns where the next slice
        goes on, or None when all is done. Then, or after an error, it begins anew `every` seconds later (and at
        most 60 s after the start of a worker). Each slice is a transaction of its own and runs while no request
        waits, or after 250 ms all the same. Where it stands is not kept across workers. Status shows it among
        the background tasks.

        Raises `TypeError` where the name is taken or `every` is no number of seconds above 0.
        """
        if type(every) not in (int, float) or not 0 < every < float("inf"):
            raise TypeError(f"store {self.name}: every={every!r} is no number of seconds above 0")

        def declare(handler: Slice[T]) -> Slice[T]:
            name = str(getattr(handler, "__name__", type(handler).__name__))
            label = f"{self.name}.{name}"
            _check_name(name, f"store {self.name}: the name of its background work")
            if label in self._operations or label in self._background:
                raise TypeError(f"{label} is declared twice")
            self._background[label] = BackgroundWork(label, float(every), handler)
            return handler

        return declare

    def _declare(
        self,
        kind: Literal["read", "write"],
        handler: Callable[..., Any],
        scope: Mapping[str, Any],
        *,
        solo: bool,
        admin: bool,
        pooled: bool = False,
        for_writers: bool = False,
    ) -> StoreOperation[Any, Any]:
        name = str(getattr(handler, "__name__", type(handler).__name__))
        label = f"{self.name}.{name}"
        _check_name(name, f"store {self.name}: the operation's name")
        if label in self._operations or label in self._background:
            raise TypeError(f"{label} is declared twice")
        signature = read_signature(handler, label, scope)
        operation = StoreOperation[Any, Any](
            self, kind, handler, signature, solo=solo, admin=admin, pooled=pooled, for_writers=for_writers
        )
        self._operations[label] = operation
        return operation

    def _attribute(self, module: str) -> str | None:
        names = list(vars(sys.modules[module]).items()) if module in sys.modules else []
        return next((name for name, value in names if value is self), None)

    def __reduce__(self) -> str:
        attribute = self._attribute(self.__module__)
        if attribute is None:
            raise pickle.PicklingError(f"{self!r} is no attribute of its module, {self.__module__}")
        return attribute


def _scope(frame: FrameType | None) -> FrameType:
    """The frame that called the function of `frame`."""
    if frame is None or frame.f_back is None:
        raise TypeError("a store is declared by Python code")
    return frame.f_back


def _check_name(name: object, what: str) -> None:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise TypeError(
            f"{what} is {name!r}; it takes 1 to 64 letters, digits and underscores, a letter first"
        )

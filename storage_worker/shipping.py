"""How a host hands its stores to the worker: by name where they can be imported, else by value."""

from collections.abc import Sequence
from types import ModuleType
from typing import cast

import msgspec

from .protocol.errors import InvalidRequestError, OperationFailedError, StorageError
from .store import Store, StoreOperation


class _Shipment(msgspec.Struct, array_like=True, frozen=True):
    names: list[str]
    pickled: bytes


def ship(stores: Sequence[Store | str]) -> tuple[list[str], bytes]:
    """What a worker needs to serve these stores: import strings, and the others packed, or `b""`.

    A store that is an attribute of an importable module is named by it. One that is defined in
    `__main__`, in a notebook or in a local scope is packed by value, its migrations with it. Raises
    `InvalidRequestError` that names what can be neither, `SchemaError` where packed migrations are wrong.
    """
    names: list[str] = []
    packed: list[Store] = []
    for store in stores:
        if isinstance(store, str):
            check_import_string(store)
            names.append(store)
        elif not isinstance(store, Store):
            raise InvalidRequestError(f"{store!r} is neither a Store nor an import string")
        elif (found := store.import_string) is not None:
            names.append(found)
        else:
            packed.append(store)
    if not packed:
        return names, b""
    shipment = _Shipment([store.name for store in packed], _pickled(packed))
    return names, msgspec.msgpack.encode(shipment)


def unship(data: bytes) -> list[Store]:
    """In the worker: the stores that `ship` packed.

    Raises `OperationFailedError` that names them where they cannot be made anew.
    """
    shipment = msgspec.msgpack.decode(data, type=_Shipment)
    try:
        stores = cast(list[Store], _pickling().loads(shipment.pickled))
        for store in stores:
            for operation in store.operations.values():
                # Its decoders are made only now that every type they decode to is complete.
                StoreOperation.__init__(
                    operation,
                    store,
                    "read" if operation.kind == "read" else "write",
                    operation.handler,
                    operation.signature,
                    solo=operation.solo,
                    admin=operation.admin,
                    pooled=operation.pooled,
                )
    except Exception as error:
        names = ", ".join(shipment.names)
        raise OperationFailedError(
            f"the shipped stores ({names}) cannot be made in the worker: {type(error).__name__}: {error}; "
            "define them in a module that it can import",
            details={"store": names, "exception": type(error).__name__},
        ) from error
    return stores


def check_import_string(text: str) -> tuple[str, str]:
    """Module and attribute of an import string; `InvalidRequestError` where it is none."""
    module, colon, attribute = text.partition(":")
    if (
        not colon
        or not attribute.isidentifier()
        or not all(part.isidentifier() for part in module.split("."))
    ):
        raise InvalidRequestError(
            f"{text!r} names no store; write module:attribute, as in myapp.storage:notes",
            details={"store": text},
        )
    return module, attribute


def _pickling() -> ModuleType:
    # dill takes 70 ms and 4 MiB that only a worker with shipped stores should pay.
    from . import pickling  # noqa: PLC0415

    return pickling


def _pickled(stores: Sequence[Store]) -> bytes:
    dumps = _pickling().dumps
    try:
        return cast(bytes, dumps(stores))
    except StorageError:
        raise
    except Exception as error:
        culprit = next(
            (name for store in stores for name, part in _parts(store) if not _is_picklable(part)), None
        )
        name = culprit or ", ".join(store.name for store in stores)
        raise InvalidRequestError(
            f"{name} cannot be shipped to the worker: {type(error).__name__}: {error}; "
            "define the store in a module that the worker can import, or keep such objects out of it",
            details={"store": name, "exception": type(error).__name__},
        ) from error


def _parts(store: Store) -> list[tuple[str, object]]:
    parts: list[tuple[str, object]] = [
        (name, (operation.handler, operation.signature)) for name, operation in store.operations.items()
    ]
    parts += list(store.background_work.items())
    parts += [(f"{store.name}: migration {each.number}", each) for each in store.migrations()]
    return parts


def _is_picklable(part: object) -> bool:
    try:
        _pickling().dumps(part)
    except Exception:  # noqa: BLE001 - whatever it is, it is reported by the caller
        return False
    return True

"""The stores of one worker: found by their import strings, and their operations by name."""

import importlib
from collections.abc import Iterable, Mapping, Sequence

from .protocol.errors import InvalidRequestError, OperationFailedError
from .shipping import check_import_string, unship
from .store import Store, StoreOperation


class Stores:
    """The stores that a worker serves; `InvalidRequestError` where two have the same name."""

    def __init__(self, stores: Iterable[Store]) -> None:
        found: dict[str, Store] = {}
        for store in stores:
            if found.setdefault(store.name, store) is not store:
                raise InvalidRequestError(f"two stores are named {store.name}", details={"store": store.name})
        self.stores: Sequence[Store] = tuple(found.values())
        self.operations: Mapping[str, StoreOperation[..., object]] = {
            name: operation for store in self.stores for name, operation in store.operations.items()
        }


def load(import_strings: Iterable[str], shipped: bytes = b"") -> list[Store]:
    """Import the stores that are named and unpack those that were shipped, each once.

    Arguments: `import_strings`, each `module:attribute`; `shipped`, what `ship` made, or nothing. Raises
    `InvalidRequestError` that names the store where there is none under that name or two have the same
    one, and `OperationFailedError` where its module raises while it is imported.
    """
    stores = [_imported(each) for each in import_strings]
    if shipped:
        stores += unship(shipped)
    return list(Stores(stores).stores)


def _imported(text: str) -> Store:
    name, attribute = check_import_string(text)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _import_failure(text, error) from error
        raise InvalidRequestError(
            f"the store {text}: there is no module {error.name} on the path of the worker",
            details={"store": text, "module": error.name},
        ) from error
    except (Exception, SystemExit) as error:
        raise _import_failure(text, error) from error
    store = getattr(module, attribute, None)
    if not isinstance(store, Store):
        what = (
            "has no such attribute" if store is None else f"has a {type(store).__name__} there, not a Store"
        )
        raise InvalidRequestError(f"the store {text}: the module {what}", details={"store": text})
    return store


def _import_failure(text: str, error: BaseException) -> OperationFailedError:
    return OperationFailedError(
        f"the store {text}: its module raises while it is imported: {type(error).__name__}: {error}",
        details={"store": text, "exception": type(error).__name__},
    )

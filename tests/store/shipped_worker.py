"""Unpacks stores from standard input, runs the calls of its argument and prints what came of them."""

import json
import sys
from typing import Any

import msgspec

from storage_worker.protocol.errors import StorageError
from storage_worker.registry import Stores, load
from tests.store.doubles import noting


def outcome(stores: Stores, name: str, values: list[Any]) -> list[Any]:
    operation = stores.operations[name]
    tx, statements = noting()
    try:
        result = operation.run(tx, operation.decode_arguments(msgspec.msgpack.encode(values), 64))
        encoded = msgspec.msgpack.encode(result)
        assert operation.decode_result(encoded) == result
    except StorageError as error:
        return [error.code, error.message]
    return ["done", msgspec.msgpack.decode(encoded), len(statements.noted)]


def main() -> None:
    stores = Stores(load([], sys.stdin.buffer.read()))
    migrations = [
        [each.number, each.name, each.checksum] for store in stores.stores for each in store.migrations()
    ]
    tx, statements = noting()
    for store in stores.stores:
        for migration in store.migrations():
            migration.function(tx)
    outcomes = [outcome(stores, name, values) for name, values in json.loads(sys.argv[1])]
    sql = [text for text, _ in statements.noted]
    print(json.dumps({"migrations": migrations, "sql": sql, "outcomes": outcomes}))  # noqa: T201


if __name__ == "__main__":
    main()

"""What SQL of clients and stores may do: SQLite's authorizer, and what it cannot see.

Refused is whatever leaves the database or undermines the worker. The authorizer runs when a statement is
prepared, and prepared statements are kept; so what is prepared under guard never shares a cache entry
with the worker's own (see `connection.GUARDED`).
"""

import apsw

from ..protocol.sql_rules import (
    FUNCTIONS_REFUSED,
    OWN_PREFIX,
    PRAGMAS_READ,
    PRAGMAS_TELLING,
    PRAGMAS_WRITTEN,
)

_REFUSED = {
    apsw.SQLITE_ATTACH: "ATTACH leaves the database",
    apsw.SQLITE_DETACH: "DETACH leaves the database",
    apsw.SQLITE_TRANSACTION: "transactions are begun and ended by the client's own calls, not by SQL text",
    apsw.SQLITE_SAVEPOINT: "savepoints are set by the client's own calls, not by SQL text",
    apsw.SQLITE_CREATE_TEMP_INDEX: "TEMP objects would divert others' statements",
    apsw.SQLITE_CREATE_TEMP_TABLE: "TEMP objects would divert others' statements",
    apsw.SQLITE_CREATE_TEMP_TRIGGER: "TEMP objects would divert others' statements",
    apsw.SQLITE_CREATE_TEMP_VIEW: "TEMP objects would divert others' statements",
    apsw.SQLITE_DROP_TEMP_INDEX: "TEMP objects would divert others' statements",
    apsw.SQLITE_DROP_TEMP_TABLE: "TEMP objects would divert others' statements",
    apsw.SQLITE_DROP_TEMP_TRIGGER: "TEMP objects would divert others' statements",
    apsw.SQLITE_DROP_TEMP_VIEW: "TEMP objects would divert others' statements",
}
_CHANGES = frozenset(
    (
        apsw.SQLITE_INSERT,
        apsw.SQLITE_UPDATE,
        apsw.SQLITE_DELETE,
        apsw.SQLITE_CREATE_INDEX,
        apsw.SQLITE_CREATE_TABLE,
        apsw.SQLITE_CREATE_TRIGGER,
        apsw.SQLITE_CREATE_VIEW,
        apsw.SQLITE_CREATE_VTABLE,
        apsw.SQLITE_DROP_INDEX,
        apsw.SQLITE_DROP_TABLE,
        apsw.SQLITE_DROP_TRIGGER,
        apsw.SQLITE_DROP_VIEW,
        apsw.SQLITE_DROP_VTABLE,
        apsw.SQLITE_ALTER_TABLE,
    )
)


class Guard:
    """The authorizer of one connection. `on` says whether what is prepared now is guarded.

    `refusal` is the reason of the last refusal; whoever maps the driver's error reads it.
    """

    __slots__ = ("on", "refusal")

    def __init__(self) -> None:
        self.on = False
        self.refusal = ""

    def authorize(
        self, action: int, first: str | None, second: str | None, schema: str | None, _: str | None
    ) -> int:
        """SQLite's authorizer callback; the arguments are SQLite's."""
        if not self.on:
            return apsw.SQLITE_OK
        reason = _reason(action, first, second, schema)
        if reason is None:
            return apsw.SQLITE_OK
        self.refusal = reason
        return apsw.SQLITE_DENY


def _reason(action: int, first: str | None, second: str | None, schema: str | None) -> str | None:
    if action in _REFUSED:
        return _REFUSED[action]
    if action == apsw.SQLITE_PRAGMA:
        return _pragma_reason((first or "").lower(), second)
    if action == apsw.SQLITE_FUNCTION:
        name = (second or "").lower()
        return f"the function {name} leaves the database" if name in FUNCTIONS_REFUSED else None
    if action in _CHANGES:
        if schema == "temp" or (action == apsw.SQLITE_ALTER_TABLE and first == "temp"):
            return "TEMP objects would divert others' statements"
        # Of an UPDATE the second name is a column's, which may be called anything.
        names = (first,) if action == apsw.SQLITE_UPDATE else (first, second)
        for found in names:
            if found is not None and found.lower().startswith(OWN_PREFIX):
                return f"{found} belongs to the worker: names that begin with {OWN_PREFIX} are its own"
    return None


def _pragma_reason(name: str, value: str | None) -> str | None:
    if name in PRAGMAS_TELLING or name in PRAGMAS_WRITTEN or (name in PRAGMAS_READ and value is None):
        return None
    return f"PRAGMA {name} is not one that a client may use so"

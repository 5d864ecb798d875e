"""Request keys: a write that carries one happens once, however often it is sent.

A receipt is stored in the same transaction as the work. All methods run on the writer's connection,
inside its transaction.
"""

import dataclasses
import hashlib
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import msgspec

from .database.connection import Database
from .protocol.envelope import Failure, encode
from .protocol.errors import InvalidRequestError, RequestConflictError, ResultNotKeptError
from .protocol.limits import Limits
from .protocol.statements import KnownOutcome
from .protocol.status import ReceiptStatus

SCHEMA = (
    """create table if not exists _sw_receipts(
    key text primary key,
    operation text not null,
    fingerprint blob not null,
    state text not null,
    result blob,
    created_ms integer not null
) without rowid""",
    "create index if not exists _sw_receipts_age on _sw_receipts(created_ms)",
)

# The order of a mapping or a set is its sender's accident and changes nothing of what it says.
_canonical = msgspec.msgpack.Encoder(order="deterministic")

RESULT, FAILURE, NOT_KEPT, FENCE = "result", "failure", "not_kept", "fence"


def checked_key(key: str, bytes_max: int) -> str:
    """A request key as it is, or `InvalidRequestError` where it is empty or over its size."""
    size = len(key.encode())
    if not 0 < size <= bytes_max:
        raise InvalidRequestError(f"a request key of {size} bytes; it takes 1 to {bytes_max}")
    return key


def fingerprint(operation: str, arguments: object) -> bytes:
    """What a request does, in 32 bytes: its operation and its decoded arguments, bound to their positions."""
    try:
        text = _canonical.encode((operation, arguments))
    except TypeError:
        # It orders no other keys than texts, and no set of unlike items.
        text = encode((operation, _ordered(arguments)))
    return hashlib.sha256(text).digest()


def _ordered(value: object) -> object:
    """A value with its mappings and sets as arrays, in the order of their encoded items."""
    if isinstance(value, Mapping):
        return sorted((encode(_ordered(key)), encode(_ordered(item))) for key, item in value.items())
    if isinstance(value, AbstractSet):
        return sorted(encode(_ordered(item)) for item in value)
    if isinstance(value, list | tuple):
        return [_ordered(item) for item in value]
    if isinstance(value, msgspec.Struct):
        return [_ordered(item) for item in msgspec.structs.astuple(value)]
    if dataclasses.is_dataclass(value):
        return [_ordered(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return value


class Unsettled(NamedTuple):
    """How many receipts a transaction has added, less what it has trimmed, and how many of them are fences."""

    receipts: int
    fences: int


NOTHING = Unsettled(0, 0)


class Receipts:
    """The table of receipts."""

    def __init__(self, database: Database, limits: Limits) -> None:
        self.database = database
        self._limits = limits
        self.status = ReceiptStatus()
        self.unsettled = NOTHING
        """What the open transaction has done; who undoes a part of it puts back what stood here before that."""
        self.status.kept = int(database.own("select count(*) from _sw_receipts")[0][0])

    def find(self, key: str, print_: bytes) -> tuple[str, bytes] | None:
        """The state and encoded result of an earlier request with this key, or None.

        Raises `RequestConflictError` where the key was used with other content or was fenced.
        """
        rows = self.database.own("select fingerprint, state, result from _sw_receipts where key = ?", (key,))
        if not rows:
            return None
        kept, state, result = rows[0]
        if state == FENCE:
            self.status.conflicts += 1
            raise RequestConflictError(
                f"the request key {key!r} was fenced by outcome(): it was not committed and never will be",
                details={"key": key, "fenced": True},
            )
        if kept != print_:
            self.status.conflicts += 1
            raise RequestConflictError(
                f"the request key {key!r} was used before with other content; use a key of its own for each request",
                details={"key": key},
            )
        self.status.answered_again += 1
        if state == NOT_KEPT:
            raise ResultNotKeptError(
                f"the request with key {key!r} was committed, but its result was too large to keep",
                details={"key": key},
            )
        return state, result

    def store(self, key: str, operation: str, print_: bytes, outcome: object) -> None:
        """Store what became of a request: its result, or its declared `Failure`."""
        state = FAILURE if isinstance(outcome, Failure) else RESULT
        result: bytes | None = encode(outcome)
        if result is not None and len(result) > self._limits.receipt_result_bytes_max:
            state, result = NOT_KEPT, None
        self._insert(key, operation, print_, state, result)

    def outcome(self, key: str, *, fence: bool) -> KnownOutcome:
        """What is known of a key; with `fence` and nothing known, it can never be committed from now on."""
        checked_key(key, self._limits.request_key_bytes_max)
        rows = self.database.own("select operation, state, result from _sw_receipts where key = ?", (key,))
        if rows:
            operation, state, result = rows[0]
            if state == FENCE:
                return KnownOutcome("fenced")
            return KnownOutcome("committed", operation, result if state == RESULT else None)
        if not fence:
            return KnownOutcome("not_found")
        self._insert(key, "", b"", FENCE, None)
        self._note(fences=1)
        return KnownOutcome("fenced")

    def _insert(self, key: str, operation: str, print_: bytes, state: str, result: bytes | None) -> None:
        self.database.own(
            "insert into _sw_receipts(key, operation, fingerprint, state, result, created_ms) values(?,?,?,?,?,?)",
            (key, operation, print_, state, result, time.time_ns() // 1_000_000),
        )
        self._note(receipts=1)

    def _note(self, *, receipts: int = 0, fences: int = 0) -> None:
        before = self.unsettled
        self.unsettled = Unsettled(before.receipts + receipts, before.fences + fences)

    def settle(self, *, committed: bool) -> None:
        """Note whether what was stored since the last call was committed or rolled back."""
        if committed:
            self.status.kept += self.unsettled.receipts
            self.status.fenced += self.unsettled.fences
        self.unsettled = NOTHING

    def trim(self, rows_max: int) -> int:
        """Delete at most so many receipts that are over the age or the count; how many it deleted."""
        oldest_ms = time.time_ns() // 1_000_000 - self._limits.receipts_age_ms_max
        surplus = max(0, self.status.kept + self.unsettled.receipts - self._limits.receipts_count_max)
        rows = self.database.own(
            "select key, created_ms from _sw_receipts order by created_ms limit ?", (rows_max,)
        )
        old = [key for place, (key, created) in enumerate(rows) if place < surplus or created < oldest_ms]
        for key in old:
            self.database.own("delete from _sw_receipts where key = ?", (key,))
        self._note(receipts=-len(old))
        self.status.trimmed += len(old)
        return len(old)

    def needs_trim(self) -> bool:
        """Whether there is one over the age or the count."""
        if self.status.kept > self._limits.receipts_count_max:
            return True
        oldest_ms = time.time_ns() // 1_000_000 - self._limits.receipts_age_ms_max
        rows = self.database.own("select min(created_ms) from _sw_receipts")
        return rows[0][0] is not None and rows[0][0] < oldest_ms

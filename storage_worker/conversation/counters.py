"""Sequences that are assigned inside the writer, in its transaction, and so have no gaps."""

from typing import Literal

from ..transaction import Transaction

_NEXT = "update conversation_counters set value = value + 1 where name = ? returning value"


def next_number(tx: Transaction, name: Literal["events", "rooms", "sessions", "navigation"]) -> int:
    """Take the next number of a sequence, from 1."""
    return int(tx.execute(_NEXT, (name,)).scalar())

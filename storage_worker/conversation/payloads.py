"""The payload store's part of a transaction (placeholder for local runs of C1; helper C2 replaces this file)."""

from ..transaction import Transaction
from .records import PayloadRef


def commit(tx: Transaction, ref: PayloadRef) -> None:
    """Count one more reference to a payload."""


def release(tx: Transaction, ref: PayloadRef) -> None:
    """Count one reference less to a payload."""

"""A host's store whose operations are those of the conversation store, and after whose commit the worker dies."""

import os
import signal
from typing import Any

from storage_worker import conversation
from storage_worker.store import Store
from storage_worker.transaction import Transaction

STORES = ["storage_worker.conversation:store", "tests.conversation.mortal_store:mortal"]

mortal = Store("mortal")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@mortal.write
def admit_and_die(tx: Transaction, session: str, text: str, client_transaction_id: str) -> None:
    """The commit is done, the answer never leaves."""
    conversation.admit.handler(tx, session, text, client_transaction_id=client_transaction_id)
    tx.after_commit(_die)


@mortal.write
def ingest_and_die(tx: Transaction, session: str, event: dict[str, Any], room: str) -> None:
    """The same for an output."""
    conversation.ingest_output.handler(tx, session, event, room=room)
    tx.after_commit(_die)

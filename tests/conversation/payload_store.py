"""A host's store that refers to payloads, and a plan for where its worker is killed."""

import os
import signal
from pathlib import Path

from storage_worker.conversation import payload_placing as placing
from storage_worker.conversation import payloads
from storage_worker.conversation.payloads import folder_of
from storage_worker.conversation.records import PayloadRef
from storage_worker.store import Store
from storage_worker.transaction import Transaction

STORES = ["storage_worker.conversation:store", "tests.conversation.payload_store:holdings"]
PLAN = "kill-at"


def make(tx: Transaction) -> None:
    tx.execute(
        "create table holdings(id integer primary key, payload_sha256 text not null, content_type text not null,"
        " retention_class text not null)"
    )


holdings = Store("holdings", version=1, migrations=[make])
payloads.refer_from("holdings")

_PARTS = "payload_sha256 = ? and content_type = ? and retention_class = ?"


@holdings.write
def hold(tx: Transaction, ref: PayloadRef) -> int:
    """Refer to a payload once more; how often it is held now."""
    payloads.commit(tx, ref)
    identity = (ref.sha256, ref.content_type, ref.retention_class)
    tx.execute(
        "insert into holdings(payload_sha256, content_type, retention_class) values (?, ?, ?)", identity
    )
    folder = folder_of(tx).path
    kill_if_planned(folder, "counted")
    tx.after_commit(lambda: kill_if_planned(folder, "committed"))
    return int(tx.scalar(f"select count(*) from holdings where {_PARTS}", identity))


@holdings.write
def drop(tx: Transaction, ref: PayloadRef) -> None:
    """Refer to a payload once less."""
    identity = (ref.sha256, ref.content_type, ref.retention_class)
    tx.execute(f"delete from holdings where id = (select min(id) from holdings where {_PARTS})", identity)
    payloads.release(tx, ref)


def kill_if_planned(folder: str, step: str) -> None:
    """End this process where the plan beside the payloads says so, once."""
    plan = Path(folder) / PLAN
    if plan.exists() and plan.read_text() == step:
        plan.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def watch_steps(folder: str) -> None:
    """Have this process look at the plan at each step that it does on a payload's file."""
    placing.reached = lambda step: kill_if_planned(folder, step)


@holdings.read
def arm(tx: Transaction) -> None:
    watch_steps(folder_of(tx).path)

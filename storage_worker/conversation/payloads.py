"""The payload store's rows, in the transactions of the events that refer to them, and bounded reads of the bodies.

A body is a file beside the database before any row names it: `payload_client` writes it, `place_payload` takes its
hash and gives it its name. `commit` and `release` only count.
"""

import re

import msgspec

from ..protocol.errors import InvalidRequestError, result_too_large
from ..transaction import Transaction
from . import payload_files as files
from . import payload_placing as placing
from .errors import PayloadNotFoundError
from .payload_files import Folder
from .records import Cursor, Name, PayloadRef
from .schema import store

FIELDS = "sha256, content_type, retention_class, bytes, stored_bytes, encoding"
"""The columns of a `PayloadRef`, in its order."""

_COMMIT = (
    f"insert into conversation_payloads(name, {FIELDS}, state, reference_count, created_ms, changed_ms)"  # noqa: S608
    " values (?, ?, ?, ?, ?, ?, ?, 'committed', 1, ?, ?) on conflict (name) do update set"
    " reference_count = conversation_payloads.reference_count + 1, bytes = excluded.bytes,"
    " stored_bytes = excluded.stored_bytes, encoding = excluded.encoding, state = 'committed',"
    " changed_ms = excluded.changed_ms"
)
_RELEASE = (
    "update conversation_payloads set reference_count = reference_count - 1,"
    " state = case when reference_count = 1 then 'released' else state end, changed_ms = ?"
    " where name = ? and reference_count > 0 returning reference_count"
)
_FIND = f"select {FIELDS} from conversation_payloads where name = ?"  # noqa: S608 - of constants
_ALIKE = "select name from conversation_payloads where bytes = ? and encoding = 'identity' limit ?"

ALIKE_COUNT_MAX = 8
"""With how many payloads of its size a large body is compared before it is synced."""

_TABLE = re.compile(r"[a-z][a-z0-9_]{0,62}")

referring_tables = ["conversation_events", "conversation_messages"]
"""The tables whose rows refer to payloads, by columns `payload_sha256`, `content_type` and `retention_class`."""

condemned: set[str] = set()
"""Names whose files the running sweep will remove after its commit. Used by the writer's thread only."""


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What the worker says of a body that a client has. `ref` is None where the client has to write it."""

    folder: str
    ref: PayloadRef | None


class Located(msgspec.Struct, frozen=True, array_like=True):
    """A payload's record, and the folder that its file is in."""

    folder: str
    ref: PayloadRef


def refer_from(table: str) -> None:
    """Have `check_payloads` count the references in a table of another store, which commits and releases them.

    Called when that store's module is imported. Raises `ValueError` for what is no plain name of a table.
    """
    if _TABLE.fullmatch(table) is None:
        raise ValueError(f"{table!r} is no name of a table")
    if table not in referring_tables:
        referring_tables.append(table)


def folder_of(tx: Transaction) -> Folder:
    """The directory of the payloads, beside the database of the transaction."""
    return Folder.inside(tx.side_directory)


def name_of(ref: PayloadRef) -> str:
    """The name of the payload of a reference."""
    return files.name_of(ref.sha256, ref.content_type, ref.retention_class)


def commit(tx: Transaction, ref: PayloadRef) -> None:
    """Count one more reference to a payload; for handlers that store the reference in the same transaction.

    Only rows are written: the file is in its place already, where only checked ones are. Raises
    `PayloadNotFoundError` where it is not, `InvalidRequestError` where the reference contradicts itself,
    `StorageCorruptError` where the file has another size.
    """
    name = name_of(ref)
    # Whatever becomes of this transaction: the sweep before it in the same group must leave the file alone.
    condemned.discard(name)
    wrong = files.contradiction(ref)
    if wrong is not None:
        raise InvalidRequestError(f"the reference to the payload {ref.sha256} is wrong: {wrong}")
    if not files.is_placed(folder_of(tx), ref):
        tx.fail(_not_found(ref))
    now = tx.now_ms()
    tx.execute(_COMMIT, (name, *msgspec.structs.astuple(ref), now, now))


def release(tx: Transaction, ref: PayloadRef) -> None:
    """Count one reference less; for handlers that remove the reference in the same transaction.

    Without any the payload is swept after a grace time. Raises `PayloadNotFoundError` where there is none to release.
    """
    if not tx.execute(_RELEASE, (tx.now_ms(), name_of(ref))).rows:
        tx.fail(_not_found(ref))


def _not_found(ref: PayloadRef) -> PayloadNotFoundError:
    return PayloadNotFoundError(
        f"there is no payload {ref.sha256} ({ref.content_type}, {ref.retention_class}); put its body again",
        details={
            "payload": ref.sha256,
            "content_type": ref.content_type,
            "retention_class": ref.retention_class,
        },
    )


def recorded(tx: Transaction, ref: PayloadRef) -> PayloadRef:
    """What is recorded of a payload; `PayloadNotFoundError` where nothing is."""
    rows = tx.rows(_FIND, (name_of(ref),))
    if not rows:
        tx.fail(_not_found(ref))
    found = ref_of(rows[0])
    if found is None or (found.sha256, found.content_type, found.retention_class) != (
        ref.sha256,
        ref.content_type,
        ref.retention_class,
    ):
        raise files.damaged(ref, "record", "its row is not one that the store writes")
    wrong = files.contradiction(found)
    if wrong is not None:
        raise files.damaged(ref, "record", wrong)
    return found


def ref_of(row: tuple[object, ...]) -> PayloadRef | None:
    """The reference that the columns `FIELDS` hold, or None where they hold none."""
    try:
        return msgspec.convert(row, PayloadRef)
    except msgspec.ValidationError:
        return None


def record_of(name: object, fields: tuple[object, ...]) -> PayloadRef | None:
    """The reference that the row `name` holds in the columns `FIELDS`; None where the store writes no such row."""
    ref = ref_of(fields)
    try:
        is_it = ref is not None and name == name_of(ref) and files.contradiction(ref) is None
    except InvalidRequestError:
        return None
    return ref if is_it else None


# What the payload client asks


@store.read(pooled=True, for_writers=True)
def payload_folder(tx: Transaction) -> str:
    """The directory that holds the payloads, made where it is missing."""
    folder = folder_of(tx)
    placing.prepare(folder)
    return folder.path


@store.read(pooled=True, for_writers=True)
def offer_payload(
    tx: Transaction, sha256: Name, content_type: Name, retention_class: Name, size: Cursor
) -> Offer:
    """Ask for a payload by the identity and size (bytes) of its body, before it is written.

    Where its file is there and sound the answer has the reference, and the file is kept for the grace time.
    """
    folder = folder_of(tx)
    placing.prepare(folder)
    return Offer(folder.path, placing.find(folder, sha256, content_type, retention_class, size))


@store.read(pooled=True, for_writers=True)
def place_payload(
    tx: Transaction, temporary: Name, size: Cursor, content_type: Name, retention_class: Name
) -> PayloadRef:
    """Put a temporary file with a body of `size` bytes into its place; the reference to it, whose hash is taken anew.

    A read, since it touches no row. Raises `StorageCorruptError` where the file is missing (`check` in its details)
    or does not hold such a body, `StorageFullError`.
    """
    alike = [str(name) for (name,) in tx.rows(_ALIKE, (size, ALIKE_COUNT_MAX))]
    return placing.place(folder_of(tx), temporary, size, content_type, retention_class, alike)


@store.read
def locate_payload(tx: Transaction, ref: PayloadRef) -> Located:
    """Where a payload's file is and what is recorded of it, for a client that reads it itself.

    Raises `PayloadNotFoundError`.
    """
    return Located(folder_of(tx).path, recorded(tx, ref))


# Bodies over the pipe


@store.read(pooled=True)
def payload(tx: Transaction, ref: PayloadRef) -> bytes:
    """A whole body, checked against its hash; at most what the request allows as a result.

    Raises `PayloadNotFoundError`, `ResultTooLargeError` before anything is read, `StorageCorruptError`.
    """
    found = recorded(tx, ref)
    if found.bytes > tx.result_bytes_max:
        raise result_too_large(tx.result_bytes_max)
    with files.opened(folder_of(tx).path_of(name_of(ref)), found) as descriptor:
        return files.read_whole(descriptor, found)


@store.read(pooled=True)
def payload_range(tx: Transaction, ref: PayloadRef, offset: int, length: int) -> bytes:
    """`length` bytes of a body from `offset` on; cut at its end, empty from there on. Its hash is not checked.

    Raises `InvalidRequestError` for a negative offset or a length below 1, else as `payload`.
    """
    found = recorded(tx, ref)
    if files.range_bytes(found, offset, length) > tx.result_bytes_max:
        raise result_too_large(tx.result_bytes_max)
    with files.opened(folder_of(tx).path_of(name_of(ref)), found) as descriptor:
        return files.read_range(descriptor, found, offset, length)

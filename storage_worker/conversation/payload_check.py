"""Checking the payload store: every row against its file, its content and the references to it."""

from typing import Annotated, Literal

import msgspec

from ..protocol.errors import InvalidRequestError, StorageCorruptError
from ..protocol.limits import MIB
from ..transaction import Transaction
from . import payload_files as files
from .payload_files import Folder
from .payloads import FIELDS, folder_of, name_of, record_of, ref_of, referring_tables
from .records import PayloadRef
from .schema import store

ROWS_COUNT_MAX = 64
REFERENCES_COUNT_MAX = 256
"""How many rows, or distinct references, one slice looks at."""

CHECKED_BYTES_MAX = 16 * MIB
"""How much of the files one slice reads; a single one may be larger."""

_ROWS = (
    f"select name, state, reference_count, {FIELDS} from conversation_payloads"  # noqa: S608 - of constants
    " where name > ? order by name limit ?"
)
_COUNT = (
    "select count(*) from {} where payload_sha256 is not null and payload_sha256 = ? and content_type = ?"
    " and retention_class = ?"
)
_REFERENCES = (
    "select payload_sha256, content_type, retention_class from {} where payload_sha256 is not null"
    " and (payload_sha256, content_type, retention_class) > (?, ?, ?)"
    " group by payload_sha256, content_type, retention_class"
    " order by payload_sha256, content_type, retention_class limit ?"
)
_KNOWN = "select 1 from conversation_payloads where name = ?"

Place = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class CheckPosition(msgspec.Struct, frozen=True, array_like=True):
    """Where a check goes on: behind which row, or behind which reference in which of the referring tables."""

    part: Literal["rows", "references"] = "rows"
    after: tuple[str, str, str] = ("", "", "")
    table: Place = 0


class PayloadFinding(msgspec.Struct, frozen=True, array_like=True):
    """Something that is wrong with a payload.

    `payload` is its name in the directory. `check` is what it fails: `record`, `state`, `count`; of its file `missing`,
    `unreadable`, `size`, `gzip`, `digest`; `row` where something refers to it and no row is there.
    """

    payload: str
    check: str
    text: str


class PayloadsChecked(msgspec.Struct, frozen=True, array_like=True):
    """What one slice of a check has found in so many rows or references. `next` is where to go on, None at the end."""

    findings: list[PayloadFinding]
    seen: int
    next: CheckPosition | None


@store.read(pooled=True)
def check_payloads(tx: Transaction, position: CheckPosition | None = None) -> PayloadsChecked:
    """Do one slice of a check; a whole one begins without a position and ends where `next` is None."""
    position = position or CheckPosition()
    if position.part == "rows":
        return _check_rows(tx, position.after[0])
    return _check_references(tx, position)


def _check_rows(tx: Transaction, after: str) -> PayloadsChecked:
    folder = folder_of(tx)
    rows = tx.rows(_ROWS, (after, ROWS_COUNT_MAX))
    findings: list[PayloadFinding] = []
    size = 0
    for seen, (name, state, count, *fields) in enumerate(rows, 1):
        ref = record_of(name, tuple(fields))
        if ref is None:
            findings.append(PayloadFinding(str(name), "record", "its row is not one that the store writes"))
            continue
        findings += _check_row(tx, folder, ref, str(state), count)
        size += ref.stored_bytes
        if size >= CHECKED_BYTES_MAX and seen < len(rows):
            return PayloadsChecked(findings, seen, CheckPosition("rows", (str(name), "", "")))
    last = rows[-1][0] if len(rows) == ROWS_COUNT_MAX else None
    # What is no text comes behind all texts; there is nothing to go on behind.
    following = (
        CheckPosition("rows", (last, "", "")) if isinstance(last, str) else CheckPosition("references")
    )
    return PayloadsChecked(findings, len(rows), following)


def _check_row(
    tx: Transaction, folder: Folder, ref: PayloadRef, state: str, kept: object
) -> list[PayloadFinding]:
    name = name_of(ref)
    findings = []
    identity = (ref.sha256, ref.content_type, ref.retention_class)
    count = sum(int(tx.scalar(_COUNT.format(table), identity)) for table in referring_tables)
    if kept != count:
        findings.append(PayloadFinding(name, "count", f"{kept} references are recorded, there are {count}"))
    if state != ("committed" if kept else "released"):
        findings.append(PayloadFinding(name, "state", f"its row says {state} with {kept} references"))
    try:
        with files.opened(folder.path_of(name), ref) as descriptor:
            files.verify(descriptor, ref)
    except StorageCorruptError as error:
        findings.append(PayloadFinding(name, str(error.details["check"]), error.message))
    return findings


def _check_references(tx: Transaction, position: CheckPosition) -> PayloadsChecked:
    if position.table >= len(referring_tables):
        raise InvalidRequestError(f"a check looks at {len(referring_tables)} tables")
    table = referring_tables[position.table]
    rows = tx.rows(_REFERENCES.format(table), (*position.after, REFERENCES_COUNT_MAX))
    findings = []
    for row in rows:
        ref = ref_of((*row, 0, 0, "gzip"))
        name = None if ref is None else _name(ref)
        if name is None:
            findings.append(
                PayloadFinding(str(row[0]), "record", f"{table} refers to what can be no payload")
            )
        elif not tx.rows(_KNOWN, (name,)):
            findings.append(PayloadFinding(name, "row", f"{table} refers to it, and it has no row"))
    first, second, third = rows[-1] if len(rows) == REFERENCES_COUNT_MAX else (None, None, None)
    following = None
    if isinstance(first, str) and isinstance(second, str) and isinstance(third, str):
        following = CheckPosition("references", (first, second, third), position.table)
    elif position.table + 1 < len(referring_tables):
        following = CheckPosition("references", table=position.table + 1)
    return PayloadsChecked(findings, len(rows), following)


def _name(ref: PayloadRef) -> str | None:
    try:
        return name_of(ref)
    except InvalidRequestError:
        return None

"""Sweeping the payload store: rows that nothing refers to, files without a row, files that were never finished.

Why a sweep never takes a file from under a row, or from whoever puts it again:

- Whoever puts a body touches its file, and a file that was touched within the grace time is left alone. A released
  row is deleted a grace time after its release, and its file is touched then: that one goes another grace time later,
  when the deletion has long been on the disk, also at durability `normal`.
- A file is removed after the sweep's COMMIT and before the next handler, on the thread that runs every handler that
  writes. The sweep's handler condemned it because no row named it in that transaction, and every `commit` of a later
  handler in the same transaction pardons it. So no committed row names it at that instant, whatever else the
  transaction held; and a later `commit` looks for the file itself. Where the transaction is rolled back nothing is
  removed, and where the worker dies before the removal the file waits for the next sweep.
- A client may touch a file between the sweep's look at it and its removal. So the file is taken out of its place
  first, looked at then, and put back where it was touched (`payload_placing.remove`); whoever touches a file looks
  afterwards whether it is still in its place, and writes it anew where it is not (`payload_placing.find`).
"""

import logging
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from ..protocol.errors import InvalidRequestError
from ..protocol.limits import DEFAULT_LIMITS, MIB
from ..transaction import Transaction
from . import payload_files as files
from . import payload_placing as placing
from .payload_files import Folder
from .payloads import condemned, folder_of
from .records import Time
from .schema import store

log = logging.getLogger(__name__)

GRACE_MS_DEFAULT = 3_600_000
"""How long a body may be prepared before a row names it, and how long a released one stays at least."""

ABANDONED_MS_MIN = 900_000
"""How long an unfinished file must have been untouched, whatever the grace time: no put takes that long."""

assert DEFAULT_LIMITS.deadline_ms_max < ABANDONED_MS_MIN, "a put is over by its deadline"

SEEN_COUNT_MAX = 256
"""How many rows or files one slice looks at."""

REMOVED_COUNT_MAX = 64
REMOVED_BYTES_MAX = 64 * MIB
"""How much one slice removes; a single file may be larger."""

SWEEP_SECONDS = 3600.0
"""How long after the end of a sweep the worker begins the next one by itself."""

_BUCKETS = 256

_RELEASED = (
    "select name from conversation_payloads where state = 'released' and changed_ms <= ? and name > ?"
    " order by name limit ?"
)
_DELETE = "delete from conversation_payloads where name = ? and reference_count = 0"
_KNOWN = "select 1 from conversation_payloads where name = ?"


class SweepPosition(msgspec.Struct, frozen=True, array_like=True):
    """Where a sweep goes on: behind which row, or which file."""

    part: Literal["rows", "files", "temporary"] = "rows"
    after: str = ""


class Swept(msgspec.Struct, frozen=True, array_like=True):
    """What one slice has removed: rows, files and their bytes. `next` is where to go on, None at the end."""

    rows: int
    files: int
    bytes: int
    next: SweepPosition | None


class _Slice:
    """What one slice has found to be removed."""

    def __init__(self, folder: Folder, cutoff_ms: int) -> None:
        self.folder = folder
        self.cutoff_ns = cutoff_ms * 1_000_000
        self.names: list[str] = []
        self.temporaries: list[str] = []
        self.bytes = 0

    @property
    def is_full(self) -> bool:
        count = len(self.names) + len(self.temporaries)
        return count >= REMOVED_COUNT_MAX or self.bytes >= REMOVED_BYTES_MAX

    def take(self, found: list[str], name: str, path: str) -> None:
        """Take a file into `found` where it is old enough."""
        size = placing.old_bytes(path, self.cutoff_ns)
        if size is not None:
            found.append(name)
            self.bytes += size

    def result(self, position: SweepPosition | None) -> Swept:
        return Swept(0, len(self.names) + len(self.temporaries), self.bytes, position)

    def remove(self) -> None:
        """Remove what was found, unless it was pardoned; called after the commit."""
        for name in self.names:
            if name in condemned:
                condemned.discard(name)
                _try(placing.remove, self.folder, name, self.cutoff_ns)
        for name in self.temporaries:
            _try(placing.remove_temporary, self.folder, name)


def _try(work: Callable[..., object], *arguments: object) -> bool:
    """Whether it could be done; one file, or one folder, that refuses it holds up no sweep."""
    try:
        work(*arguments)
    except OSError as error:
        log.warning("a file of the payload store cannot be swept: %s", error)
        return False
    return True


@store.write(solo=True)
def sweep_payloads(
    tx: Transaction, position: SweepPosition | None = None, grace_ms: Time = GRACE_MS_DEFAULT
) -> Swept:
    """Do one slice of a sweep; a whole one begins without a position and ends where `next` is None.

    `grace_ms` is how many milliseconds a file must have been untouched, and a row without references. It must be
    longer than any body takes from being put to the commit of a reference to it; that commit fails otherwise.
    """
    position = position or SweepPosition()
    # What is left of a sweep that was rolled back; that of an earlier one in this transaction may wait.
    condemned.clear()
    if position.part == "temporary":
        grace_ms = max(grace_ms, ABANDONED_MS_MIN)
    part = _Slice(folder_of(tx), tx.now_ms() - grace_ms)
    if position.part == "rows":
        return _sweep_rows(tx, part, position.after)
    sweep = _sweep_files if position.part == "files" else _sweep_temporary
    swept = sweep(tx, part, position.after)
    if swept.files:
        condemned.update(part.names)
        tx.after_commit(part.remove)
    return swept


@store.background(every=SWEEP_SECONDS)
def sweep(tx: Transaction, position: SweepPosition | None) -> SweepPosition | None:
    """One slice of the sweep that the worker makes by itself, with the default grace time."""
    return sweep_payloads.handler(tx, position).next


def _sweep_rows(tx: Transaction, part: _Slice, after: str) -> Swept:
    cutoff_ms = part.cutoff_ns // 1_000_000
    names = [row[0] for row in tx.rows(_RELEASED, (cutoff_ms, after, SEEN_COUNT_MAX))]
    count = 0
    for name in names:
        # Where the deletion is rolled back the file has only become newer.
        if not files.is_name(name) or _try(placing.touch, part.folder.path_of(str(name))):
            tx.execute(_DELETE, (name,))
            count += 1
    last = names[-1] if len(names) == SEEN_COUNT_MAX else None
    # What is no text comes behind all texts; there is nothing to go on behind.
    following = SweepPosition("rows", last) if isinstance(last, str) else SweepPosition("files")
    return Swept(count, 0, 0, following)


def _sweep_files(tx: Transaction, part: _Slice, after: str) -> Swept:
    for seen, name in enumerate(_names(part.folder, after), 1):
        if not tx.rows(_KNOWN, (name,)):
            part.take(part.names, name, part.folder.path_of(name))
        if seen >= SEEN_COUNT_MAX or part.is_full:
            return part.result(SweepPosition("files", name))
    return part.result(SweepPosition("temporary"))


def _names(folder: Folder, after: str) -> Iterator[str]:
    if after and not files.is_name(after):
        raise InvalidRequestError(f"no sweep goes on behind the file {after!r}")
    for bucket in range(int(after[:2] or "0", 16), _BUCKETS):
        yield from filter(files.is_name, _listing(f"{folder.objects}/{bucket:02x}", after))


def _listing(directory: str, after: str) -> list[str]:
    names: list[str] = []
    _try(lambda: names.extend(placing.listing(directory, after)))
    return names


def _sweep_temporary(_: Transaction, part: _Slice, after: str) -> Swept:
    names = filter(files.is_temporary, _listing(part.folder.temporary, after))
    for seen, name in enumerate(names, 1):
        part.take(part.temporaries, name, f"{part.folder.temporary}/{name}")
        if seen >= SEEN_COUNT_MAX or part.is_full:
            return part.result(SweepPosition("temporary", name))
    return part.result(None)

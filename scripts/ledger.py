"""What the clients of a crash test know about their writes, kept where no kill takes it away.

Each client appends to a file of its own: a write is noted before it is sent, and again when its end is known. The
checker reads the files while the clients go on.
"""

import hashlib
import os
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import msgspec

import storage_worker as sw

ENTRY_BYTES = 12

CREATE = "create table if not exists writes(client integer, number integer, keyed integer, body blob)"
CREATE_INDEX = "create index if not exists writes_by_number on writes(client, number)"
INSERT = "insert into writes(client, number, keyed, body) values(?,?,?,?)"
FILL = "update writes set body = ? where client = ? and number = ?"
LEASE_SECONDS = 0.5
"""How long an interactive transaction of a client may last: shorter than some of its stops."""

PAGE_ROWS = 100
SEEN_PAGE_ROWS = 1_000
ROWID_MAX = 2**63 - 1
CHECK_SECONDS_MAX = 30.0


class Fate(Enum):
    """What a client knows about a write. A write that is only `SENT` may have happened or not."""

    SENT = b"S"
    ACKNOWLEDGED = b"A"
    UNKNOWN = b"U"
    NOT_COMMITTED = b"N"


class LedgerWriter:
    """One client's ledger; every entry reaches the system before the call returns."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, number: int, fate: Fate) -> None:
        """Append an entry."""
        os.write(self._descriptor, number.to_bytes(ENTRY_BYTES - 1, "big") + fate.value)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Ledger:
    """What all clients noted until it was read, by client and number of the write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._offsets: dict[int, int] = {}
        self.fates: dict[int, dict[int, Fate]] = {}

    def path(self, client: int) -> Path:
        """The file of a client."""
        return self.folder / f"client-{client}.ledger"

    def read(self) -> set[tuple[int, int]]:
        """Take in what was appended since the last call; client and number of the writes that it is about."""
        fresh = set()
        for path in self.folder.glob("client-*.ledger"):
            client = int(path.stem.removeprefix("client-"))
            if path.stat().st_size < self._offsets.get(client, 0) + ENTRY_BYTES:
                continue
            with path.open("rb") as file:
                file.seek(self._offsets.get(client, 0))
                data = file.read()
            whole = len(data) - len(data) % ENTRY_BYTES
            self._offsets[client] = self._offsets.get(client, 0) + whole
            fates = self.fates.setdefault(client, {})
            for start in range(0, whole, ENTRY_BYTES):
                entry = data[start : start + ENTRY_BYTES]
                number = int.from_bytes(entry[:-1], "big")
                fates[number] = Fate(entry[-1:])
                fresh.add((client, number))
        return fresh

    def count(self, fate: Fate) -> int:
        """How many writes have that fate."""
        return sum(found is fate for fates in self.fates.values() for found in fates.values())


def body_of(client: int, number: int) -> bytes:
    """What a write stores: 32 to 8,192 bytes that can be made again from its name."""
    seed = hashlib.sha256(f"{client}:{number}".encode()).digest()
    return seed * (1 + (seed[0] if seed[1] < 16 else seed[0] % 8))


def is_keyed(number: int) -> bool:
    """Whether a write carries a request key: every other one."""
    return number % 2 == 0


def key_of(client: int, number: int) -> str:
    """The request key of a write."""
    return f"{client}/{number}"


class Checked(msgspec.Struct):
    """What a check compared, and what it found wrong."""

    writes: int = 0
    wrong: list[str] = msgspec.field(default_factory=list)


def check(client: sw.Client, ledger: Ledger, *, bodies: bool, after: dict[int, int] | None = None) -> Checked:
    """Compare the database with what the clients knew before it was asked.

    `ledger` must have been read before. No acknowledged write may be missing, none may stand twice, none that
    is `not_committed` may stand at all. `bodies` compares what was stored too; `after` leaves out the writes of
    each client up to a number.
    """
    checked = Checked()
    for own, fates in ledger.fates.items():
        first = (after or {}).get(own, -1)
        times: dict[int, int] = {}
        for number, keyed, body in _stored(client, own, first, bodies=bodies):
            times[number] = times.get(number, 0) + 1
            if keyed != is_keyed(number) or (body is not None and body != body_of(own, number)):
                checked.wrong.append(f"client {own}, write {number}: it is stored with another content")
        for number, fate in fates.items():
            if number > first:
                checked.writes += 1
                checked.wrong.extend(_judge(own, number, fate, times.pop(number, 0)))
        checked.wrong.extend(
            f"client {own}, write {number}: it was never sent"
            for number in times
            if number <= max(fates, default=-1)
        )
    return checked


class Seen:
    """What a database was found to hold, looked at again and again without reading what was read before."""

    def __init__(self) -> None:
        self._rowid = 0
        self._times: dict[tuple[int, int], int] = {}

    def look(self, client: sw.Client, ledger: Ledger) -> Checked:
        """Compare what was written, and what became known, since the last look; see `check`."""
        judged = ledger.read()
        while rows := client.query(SEEN_SQL, (self._rowid, SEEN_PAGE_ROWS), timeout=CHECK_SECONDS_MAX).rows:
            for rowid, own, number in rows:
                self._times[own, number] = self._times.get((own, number), 0) + 1
                judged.add((own, number))
                self._rowid = rowid
        checked = Checked(len(judged))
        for own, number in judged:
            # One that was sent after the ledger was read is judged at the next look.
            fate = ledger.fates.get(own, {}).get(number, Fate.SENT)
            checked.wrong.extend(_judge(own, number, fate, self._times.get((own, number), 0)))
        return checked


def check_outcomes(client: sw.Client, ledger: Ledger) -> Checked:
    """Compare what the worker says of the request keys whose end no client knows with what is stored."""
    checked = Checked()
    for own, fates in ledger.fates.items():
        for number, fate in fates.items():
            if not is_keyed(number) or fate not in {Fate.SENT, Fate.UNKNOWN}:
                continue
            checked.writes += 1
            times = client.query(COUNT_SQL, (own, number), timeout=CHECK_SECONDS_MAX).scalar()
            state = client.outcome(key_of(own, number), timeout=CHECK_SECONDS_MAX).state
            if times != (state == "committed"):
                checked.wrong.append(
                    f"client {own}, write {number}: its key is {state}, and it stands {times} times"
                )
    return checked


SEEN_SQL = "select rowid, client, number from writes where rowid > ? order by rowid limit ?"
COUNT_SQL = "select count(*) from writes where client = ? and number = ?"


def _judge(client: int, number: int, fate: Fate, times: int) -> Iterator[str]:
    what = f"client {client}, write {number} ({'with' if is_keyed(number) else 'without'} a request key)"
    if times > 1:
        yield f"{what}: it stands {times} times"
    if times == 0 and fate is Fate.ACKNOWLEDGED:
        yield f"{what}: it was acknowledged and is missing"
    if times > 0 and fate is Fate.NOT_COMMITTED:
        yield f"{what}: it was called not committed and stands there"


def _stored(
    client: sw.Client, own: int, first: int, *, bodies: bool
) -> Iterator[tuple[int, bool, bytes | None]]:
    """The writes of one client after a number, in order, by pages; a number that stands twice comes twice."""
    sql = (
        f"select number, rowid, keyed, {'body' if bodies else 'null'} from writes"  # noqa: S608 (one of two names)
        " where client = ? and (number, rowid) > (?, ?) order by number, rowid limit ?"
    )
    place = (first, ROWID_MAX)
    while rows := client.query(sql, (own, *place, PAGE_ROWS), timeout=CHECK_SECONDS_MAX).rows:
        for number, _rowid, keyed, body in rows:
            yield number, bool(keyed), body
        place = rows[-1][:2]

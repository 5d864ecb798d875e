"""Pages by key cursor, bounded by rows and by bytes, of tables whose keys only grow.

No offset and no snapshot: a page begins behind the key where the last one ended, so that nothing is repeated or
skipped while others append. First only keys and sizes are read, so that rows beyond the bound are never loaded.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

from ..protocol.values import Value
from ..transaction import Transaction
from .canonical import REFERENCE_COLUMNS
from .records import Page, PayloadRef

T = TypeVar("T")

KEY_MAX: Final = 2**63 - 1

ROW_BYTES: Final = 320
"""The most that a record takes beside the texts that are counted: numbers, lengths, the hash of a payload."""

WINDOW_EVENTS: Final = 1_000
WINDOWS_MAX: Final = 20
"""How many events of a session are looked at in one step, and steps of one page, to find what they left."""

REFERENCE_COUNT: Final = len(REFERENCE_COLUMNS.split(","))

# Where the plan might depend on a plain parameter, SQLite prepares the statement anew for each of its values. That
# takes longer than a page, and a cast hides the value.
TEXT_PARAMETER: Final = "cast(? as text)"
NUMBER_PARAMETER: Final = "cast(? as integer)"

_LAST_SEQUENCE: Final = "select last_sequence from conversation_sessions where id = ?"

Key = tuple[int, int]
"""A key and the bytes of its record's texts."""


def prefixed(table: str, columns: str) -> str:
    """The columns, each as that of a table or of its other name in the query."""
    return ", ".join(f"{table}.{each.strip()}" for each in columns.split(","))


def size_of(texts: str) -> str:
    """The SQL of the bytes that some columns take in a record, where a reference repeats those of its identity."""
    names = [each.strip() for each in texts.split(",")]
    repeated = [each for each in names if each.rpartition(".")[2] in REFERENCE_COLUMNS.split(", ")]
    return " + ".join(f"coalesce(octet_length({each}), 0)" for each in names + repeated)


class Bound:
    """What a page may hold: at most so many rows and bytes, but always one row."""

    def __init__(self, tx: Transaction, rows_max: int, bytes_max: int) -> None:
        self.rows_max = rows_max
        self._bytes_max = min(bytes_max, tx.result_bytes_max - ROW_BYTES)

    def take(self, keys: list[Key]) -> int:
        """How many of the records with these keys fit, from the first on."""
        count, left = 0, self._bytes_max
        for _, size in keys[: self.rows_max]:
            left -= size + ROW_BYTES
            if count and left < 0:
                break
            count += 1
        return count


class Listing(Generic[T]):
    """The pages of one table, or of the part of it that belongs to one room or session.

    Arguments: `source`, the table; `key`, the column that orders it, unique within the scope; `columns` of a record;
    `texts`, those whose bytes count; `make`, which makes a record of a row; `scope`, the column that must equal a value
    that the caller gives, or "".
    """

    def __init__(
        self,
        source: str,
        key: str,
        columns: str,
        texts: str,
        make: Callable[[tuple[Any, ...]], T],
        scope: str = "",
    ) -> None:
        part = f"{scope} = {TEXT_PARAMETER} and " if scope else ""
        # Texts of the module, put together once when it is imported.
        head = f"select {key}, {size_of(texts)} from {source} where {part}{key}"  # noqa: S608
        rows = f"select {columns} from {source} where {part}{key} between ? and ? order by {key}"  # noqa: S608
        self._keys_up = f"{head} > ? order by {key} limit {NUMBER_PARAMETER}"
        self._keys_down = f"{head} < ? order by {key} desc limit {NUMBER_PARAMETER}"
        self._rows_up = rows
        self._rows_down = f"{rows} desc"
        self._make = make

    def page(
        self,
        tx: Transaction,
        after: int,
        rows_max: int,
        bytes_max: int,
        *,
        newest_first: bool = False,
        scope: tuple[Value, ...] = (),
    ) -> Page[T]:
        """The records behind the key `after`, 0 for the first page, or with `newest_first` those before it.

        At most `rows_max` of them, and as many bytes as `bytes_max` and the request allow, but always one where there
        is one.
        """
        bound = Bound(tx, rows_max, bytes_max)
        start = (after or KEY_MAX) if newest_first else after
        keys: list[Any] = tx.rows(
            self._keys_down if newest_first else self._keys_up, (*scope, start, rows_max + 1)
        )
        count = bound.take(keys)
        return Page(
            self._items(tx, keys[:count], newest_first, scope),
            _cursor(keys[:count], after),
            len(keys) > count,
        )

    def _items(
        self, tx: Transaction, keys: list[Key], newest_first: bool, scope: tuple[Value, ...]
    ) -> list[T]:
        """The records with these keys, which are all between the first and the last of them."""
        if not keys:
            return []
        least, greatest = sorted((keys[0][0], keys[-1][0]))
        sql = self._rows_down if newest_first else self._rows_up
        make = self._make
        return [make(row) for row in tx.rows(sql, (*scope, least, greatest))]


class WindowListing(Listing[T]):
    """The pages of records that stand among others, found without an index of their own, which each event would have to
    change.

    A page looks at a bounded number of keys; one that found less than it may hold can be empty and say that there is
    more. Arguments: `last`, the SQL of the last key of all; the others are as for `Listing`.
    """

    def __init__(
        self,
        source: str,
        key: str,
        columns: str,
        texts: str,
        make: Callable[[tuple[Any, ...]], T],
        scope: str,
        last: str,
    ) -> None:
        super().__init__(source, key, columns, texts, make, scope)
        head = (
            f"select {key}, {size_of(texts)} from {source}"  # noqa: S608 - of constants
            f" where {scope} = {TEXT_PARAMETER} and {key} between ? and ? order by {key}"
        )
        self._last = last
        self._window_up = f"{head} limit {NUMBER_PARAMETER}"
        self._window_down = f"{head} desc limit {NUMBER_PARAMETER}"

    def page(
        self,
        tx: Transaction,
        after: int,
        rows_max: int,
        bytes_max: int,
        *,
        newest_first: bool = False,
        scope: tuple[Value, ...] = (),
    ) -> Page[T]:
        """See `Listing.page`."""
        last = self._last_key(tx, scope)
        bound = Bound(tx, rows_max, bytes_max)
        sql = self._window_down if newest_first else self._window_up
        keys: list[Any] = []
        cursor, more = after, False
        for least, greatest in _windows(after, last, newest_first=newest_first):
            keys += tx.rows(sql, (*scope, least, greatest, rows_max + 1 - len(keys)))
            cursor = least if newest_first else greatest
            more = least > 1 if newest_first else greatest < last
            if len(keys) > rows_max:
                break
        count = bound.take(keys)
        items = self._items(tx, keys[:count], newest_first, scope)
        if count < len(keys):
            return Page(items, keys[count - 1][0], True)
        return Page(items, cursor, more)

    def _last_key(self, tx: Transaction, scope: tuple[Value, ...]) -> int:  # noqa: ARG002 - of a part it is another
        return int(tx.scalar(self._last) or 0)


class LogListing(WindowListing[T]):
    """The pages of what a session's events left in another table, found through the session's own index of its events.

    The key is the event's sequence. Arguments: `table`, which has the stream id of each event; the others are as for
    `Listing`, `e` being the events and `t` the table.
    """

    def __init__(self, table: str, columns: str, texts: str, make: Callable[[tuple[Any, ...]], T]) -> None:
        source = f"conversation_events e join {table} t on t.stream_id = e.stream_id"
        super().__init__(source, "e.sequence", columns, texts, make, "e.session_id", _LAST_SEQUENCE)

    def _last_key(self, tx: Transaction, scope: tuple[Value, ...]) -> int:
        found = tx.rows(self._last, scope)
        return int(found[0][0]) if found else 0


def record_of(kind: Callable[..., T], body_at: int, row: tuple[Any, ...]) -> T:
    """A record of a row that ends with `REFERENCE_COLUMNS`; a reference takes the place of the body at `body_at`."""
    end = len(row) - REFERENCE_COUNT
    if row[end] is None:
        return kind(*row[:end])
    return kind(*row[:body_at], PayloadRef(*row[end:]), *row[body_at + 1 : end])


def _windows(after: int, last: int, *, newest_first: bool) -> Iterator[tuple[int, int]]:
    """The first and last sequences of the windows of a page."""
    for _ in range(WINDOWS_MAX):
        if newest_first:
            greatest = min(after - 1 if after else last, last)
            least = max(1, greatest - WINDOW_EVENTS + 1)
            after = least
            if greatest < 1:
                return
        else:
            least, greatest = after + 1, min(after + WINDOW_EVENTS, last)
            after = greatest
            if least > last:
                return
        yield least, greatest
        if newest_first and least == 1:
            return


def _cursor(keys: list[Key], after: int) -> int:
    return keys[-1][0] if keys else after

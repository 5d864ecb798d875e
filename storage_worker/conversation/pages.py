"""Pages by key cursor, bounded by rows and by bytes, of tables whose keys only grow.

No offset and no snapshot: a page begins behind the key where the last one ended, so that nothing is repeated or
skipped while others append. First only keys and sizes are read, so that rows beyond the bound are never loaded.
"""

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from ..protocol.values import Value
from ..transaction import Transaction
from .records import Page

T = TypeVar("T")

KEY_MAX: Final = 2**63 - 1

ROW_BYTES: Final = 320
"""The most that a record takes beside the texts that are counted: numbers, lengths, the hash of a payload."""


class Listing(Generic[T]):
    """The pages of one table, or of the part of it that belongs to one room or session.

    Arguments: `source`, the table, or tables joined; `key`, the column that orders it, unique within the scope;
    `columns` of a record; `texts`, those whose bytes count; `make`, which makes a record of a row; `scope`, the
    column that must equal a value that the caller gives, or "".
    """

    def __init__(
        self, source: str, key: str, columns: str, texts: str, make: Callable[..., T], scope: str = ""
    ) -> None:
        part = f"{scope} = ? and " if scope else ""
        size = " + ".join(f"coalesce(octet_length({each.strip()}), 0)" for each in texts.split(","))
        # Texts of the module, put together once when it is imported.
        head = f"select {key}, {size} from {source} where {part}{key}"  # noqa: S608
        rows = f"select {columns} from {source} where {part}{key} between ? and ? order by {key}"  # noqa: S608
        self._keys_up = f"{head} > ? order by {key} limit ?"
        self._keys_down = f"{head} < ? order by {key} desc limit ?"
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
        if newest_first:
            keys = tx.query(self._keys_down, (*scope, after or KEY_MAX, rows_max + 1)).rows
        else:
            keys = tx.query(self._keys_up, (*scope, after, rows_max + 1)).rows
        count, left = 0, min(bytes_max, tx.result_bytes_max - ROW_BYTES)
        for _, size in keys[:rows_max]:
            left -= size + ROW_BYTES
            if count and left < 0:
                break
            count += 1
        if not count:
            return Page([], after, False)
        first, last = keys[0][0], keys[count - 1][0]
        if newest_first:
            rows = tx.query(self._rows_down, (*scope, last, first)).rows
        else:
            rows = tx.query(self._rows_up, (*scope, first, last)).rows
        make = self._make
        return Page([make(*row) for row in rows], last, len(keys) > count)

"""Long results in pages by key, each page a read of its own."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..protocol.errors import InvalidRequestError, ResultTooLargeError
from ..protocol.limits import Limits
from ..protocol.operation import Call
from ..protocol.statements import Rows
from ..protocol.values import Parameters, Value
from . import calls

Run = Callable[[Call[Rows]], Rows]


class Pages:
    """The reads of one paged select.

    Arguments: `sql`, the select; `key`, the names of its columns that order its rows and tell them apart;
    `page_rows`, the most rows of a page, None for the default; `parameters`, what `sql` binds; `limits`, the
    worker's. Raises `InvalidRequestError` where one of them cannot be.
    """

    def __init__(
        self, sql: str, key: Sequence[str], page_rows: int | None, parameters: Parameters, limits: Limits
    ) -> None:
        rows = limits.page_rows_default if page_rows is None else page_rows
        if type(rows) is not int or rows < 1:
            raise InvalidRequestError(f"page_rows is {page_rows!r}; it takes a whole number from 1")
        calls.query(sql, parameters, limits)
        self._key = _checked_key(key)
        self._rows = rows
        self._named = isinstance(parameters, Mapping)
        self._parameters = parameters
        self._limits = limits
        self._sql = sql.rstrip().rstrip(";")
        self._last: list[Value] = []
        self._extra = 1
        """One row more than a page is read, to see that its key differs; none where only one row has room."""
        self.are_over = False

    def read(self, run: Run) -> Iterator[Rows]:
        """The pages, each read by `run` when it is asked for."""
        while not self.are_over:
            try:
                page = run(self.next_call())
            except ResultTooLargeError as error:
                self.shrink(error)
            else:
                if self.take(page):
                    yield page

    def next_call(self) -> Call[Rows]:
        """The read of the next page."""
        return self._call(self._last)

    def take(self, page: Rows) -> bool:
        """Note what was read; whether it is a page, and not just the end."""
        self.are_over = len(page.rows) < self._rows + self._extra or not page.rows
        self._extra = 1
        if page.rows:
            keys = self._keys(page)
            del page.rows[self._rows :]
            self._last = keys[len(page.rows) - 1]
        return bool(page.rows)

    def shrink(self, error: ResultTooLargeError) -> None:
        """Ask for fewer rows from now on; raises `error` where that cannot be."""
        if self._rows > 1:
            self._rows //= 2
        elif self._extra:
            self._extra = 0
        else:
            raise error

    def _call(self, last: list[Value]) -> Call[Rows]:
        # Qualified, since SQLite takes a quoted name that is no column for a text. On a line of its own,
        # since the select may end in a comment.
        columns = ", ".join(f"_page.{name}" for name in map(_quoted, self._key))
        where = ""
        if last:
            where = f" where ({columns}) > ({', '.join(self._places(len(last)))})"
        limit = ":_page_rows" if self._named else "?"
        # The select is the caller's own, and the names are quoted: nothing of another one gets in.
        sql = f"select * from (\n{self._sql}\n) as _page{where} order by {columns} limit {limit}"  # noqa: S608
        return calls.query(sql, self._bound(last), self._limits)

    def _places(self, count: int) -> list[str]:
        return [f":_page_key_{number}" if self._named else "?" for number in range(count)]

    def _bound(self, last: list[Value]) -> Parameters:
        given: Any = self._parameters
        if not self._named:
            return [*given, *last, self._rows + self._extra]
        own = {f"_page_key_{number}": value for number, value in enumerate(last)}
        return {**given, **own, "_page_rows": self._rows + self._extra}

    def _keys(self, page: Rows) -> list[list[Value]]:
        names = [name.casefold() for name in page.columns]
        places = []
        for name in self._key:
            if name.casefold() not in names:
                raise InvalidRequestError(
                    f"the key {name!r} is no column of the select; it has {', '.join(page.columns)}"
                )
            places.append(names.index(name.casefold()))
        keys = [[row[place] for place in places] for row in page.rows]
        key = ", ".join(self._key)
        if any(None in each for each in keys):
            raise InvalidRequestError(
                f"a row has NULL in its key ({key}); pages need a key that is never NULL"
            )
        if any(one == other for one, other in itertools.pairwise(keys)):
            raise InvalidRequestError(
                f"two rows have the same key ({key}), and the second might be lost; add a column that tells them apart"
            )
        return keys


def _checked_key(key: Sequence[str]) -> list[str]:
    names = [key] if isinstance(key, str) else list(key)
    if not names:
        raise InvalidRequestError("pages need at least one key column")
    for name in names:
        if type(name) is not str or not name or "\0" in name:
            raise InvalidRequestError(f"the key {name!r} is no column's name")
    return names


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

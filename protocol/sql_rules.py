"""What SQL text of clients may not do, wherever it runs: the worker's authorizer and a snapshot's share it."""

import re
from typing import Final

PRAGMAS_TELLING: Final = frozenset(
    """collation_list compile_options database_list foreign_key_check foreign_key_list function_list index_info
    index_list index_xinfo integrity_check module_list pragma_list quick_check table_info table_list
    table_xinfo""".split()
)
"""Pragmas that only tell, with or without an argument."""

PRAGMAS_READ: Final = frozenset(
    """auto_vacuum cache_size data_version encoding foreign_keys freelist_count journal_mode
    page_count page_size schema_version synchronous""".split()
)
"""Pragmas that tell without an argument and would change something with one."""

PRAGMAS_WRITTEN: Final = frozenset(("user_version", "application_id"))
"""Pragmas that change no more than a transactional number in the database's header."""

FUNCTIONS_REFUSED: Final = frozenset(("load_extension", "fts3_tokenizer", "edit", "readfile", "writefile"))
"""Functions that leave the database."""

OWN_PREFIX: Final = "_sw_"
"""Tables of the worker itself."""

_LEAD = re.compile(r"(?:\s|--[^\n]*(?:\n|\Z)|/\*.*?\*/)*", re.DOTALL)
_VACUUM = re.compile(r"vacuum\b", re.IGNORECASE)
_ALTER = re.compile(r"alter\b", re.IGNORECASE)
_READING = re.compile(r"(?:select|with|values|explain|pragma)\b", re.IGNORECASE)


def has_statement(sql: str) -> bool:
    """Whether a text is more than white space, comments and semicolons."""
    start = _LEAD.match(sql)
    return bool(sql[start.end() if start else 0 :].strip(" \t\n\r;"))


def may_only_read(sql: str) -> bool:
    """Whether a statement is of a kind that can only read.

    SQLite calls a `drop ... if exists` that finds nothing read-only, too, and the same text changes something later.
    """
    start = _LEAD.match(sql)
    return _READING.match(sql, start.end() if start else 0) is not None


def text_reason(sql: str) -> str | None:
    """Why a statement is refused by its text, where SQLite's authorizer is not asked; None where it is not."""
    start = _LEAD.match(sql)
    begin = start.end() if start else 0
    if _VACUUM.match(sql, begin):
        return "VACUUM rewrites the whole file under a lock; the worker reclaims space itself"
    if _ALTER.match(sql, begin) and OWN_PREFIX in sql.lower():
        return f"names that begin with {OWN_PREFIX} are the worker's own"
    return None

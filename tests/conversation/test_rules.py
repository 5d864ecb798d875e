"""The rules that the store's SQL keeps, so that the same handlers can run on another engine."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_worker import conversation
from storage_worker.conversation.pages import Listing

FOLDER = Path(conversation.__file__).parent
ROOT = FOLDER.parents[1]
MODULES = sorted(FOLDER.glob("*.py"))
MIGRATIONS = sorted((FOLDER / "migrations").glob("*.sql"))

STATEMENT = re.compile(r"^\s*(select|insert|update|delete|create|with)\b", re.IGNORECASE)

FORBIDDEN = {
    "a trigger": r"\btrigger\b",
    "INSERT OR REPLACE and its like": r"\binsert\s+or\b|\breplace\s+into\b|\bupdate\s+or\b",
    "JSON inside SQL": r"\bjson_\w+|->>?",
    "the SQL clock": r"\bcurrent_(time|date|timestamp)\b|\b(date|time|datetime|julianday|unixepoch|strftime)\s*\(",
    "row id tricks": r"\b_?rowid_?\b|\boid\b|\bautoincrement\b|\blast_insert_rowid\b",
    "chance": r"\brandom(blob)?\s*\(|\bhex\s*\(",
    "pages by offset": r"\boffset\b",
    "text measured in SQL": r"\blength\s*\(",
    "pragmas": r"\bpragma",
}


def literals(tree: ast.AST) -> Iterator[str]:
    """Every string that is SQL as it stands in a module; the parts of one that is put together count each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and STATEMENT.match(node.value):
            yield node.value


def finished(path: Path) -> Iterator[str]:
    """The statements that a module has put together once it is imported, those of its pages too."""
    module = importlib.import_module(f"{conversation.__name__}.{path.stem}")
    for value in vars(module).values():
        parts = vars(value).values() if isinstance(value, Listing) else [value]
        yield from (each for each in parts if isinstance(each, str) and STATEMENT.match(each))


def statements(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".sql":
        return [text]
    # A package is not imported as a module of itself.
    made = [] if path.stem == "__init__" else finished(path)
    return [*literals(ast.parse(text)), *made]


@pytest.mark.parametrize("what", FORBIDDEN)
@pytest.mark.parametrize("path", [*MODULES, *MIGRATIONS], ids=lambda path: path.name)
def test_sql_is_of_the_plain_subset(path: Path, what: str) -> None:
    code = [re.sub(r"--[^\n]*", "", each) for each in statements(path)]
    assert [each for each in code if re.search(FORBIDDEN[what], each, re.IGNORECASE)] == []


def test_the_rules_would_find_something() -> None:
    bad = [
        "create trigger t after insert on a begin select 1; end",
        "insert or replace into a values (1)",
        "select json_extract(a, '$.b') from t",
        "select datetime('now')",
        "select rowid from t",
        "select random()",
        "select a from t limit 1 offset 5",
        "select length(a) from t",
        "select * from pragma_database_list",
    ]
    for rule, text in zip(FORBIDDEN.values(), bad, strict=True):
        assert STATEMENT.match(text)
        assert re.search(rule, text, re.IGNORECASE)


def test_there_is_sql_to_look_at() -> None:
    assert sum(len(list(literals(ast.parse(path.read_text(encoding="utf-8"))))) for path in MODULES) > 20
    # Pages of all events and of those of a session, in both directions, by their keys and their rows.
    pages = [each for each in finished(FOLDER / "events.py") if "cast(? as" in each]
    assert len(pages) >= 6
    assert MIGRATIONS


def test_the_version_is_the_number_of_migrations() -> None:
    assert conversation.store.version == len(MIGRATIONS) == len(conversation.store.migrations())

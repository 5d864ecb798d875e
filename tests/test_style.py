"""Rules of style that no linter knows, and rules of what may be imported where."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_worker.protocol.limits import Limits

ROOT = Path(__file__).parents[1]
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 400

PACKAGE = sorted(
    path for folder in ("storage_worker", "client", "protocol") for path in (ROOT / folder).rglob("*.py")
)
PROGRAMS = [*PACKAGE, *sorted((ROOT / "scripts").rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
EVERYTHING = [*PROGRAMS, *TESTS]

UNITS = (
    "bytes chars chunks spools ms us percent requests rows frames threads steps calls columns statements selects values count "
    "depth connections handshakes savepoints tasks replays deaths retries reads snapshots window"
).split()
"""What a limit may count; a window counts requests in flight."""

QUALIFIERS = {"max", "min", "default", "unfinished", "remembered", "ahead"}
"""What may follow the unit in a limit's name."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=name_of)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def absolute_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether a handler takes any exception and does nothing."""
    kinds = [] if handler.type is None else [ast.unparse(handler.type)]
    blind = not kinds or kinds[0] in {"Exception", "BaseException"}
    empty = all(
        isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in handler.body
    )
    return blind and empty


@each(EVERYTHING)
def test_functions_fit_a_screen(path: Path) -> None:
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in functions(tree_of(path))
        if node.end_lineno is not None and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    }
    assert not long


@each(PROGRAMS)
def test_modules_have_one_job(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MODULE_LINES_MAX


@each(EVERYTHING)
def test_nothing_swallows_every_error(path: Path) -> None:
    handlers = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ExceptHandler)]
    assert [handler.lineno for handler in handlers if swallows(handler)] == []


@each(PROGRAMS)
def test_modules_say_what_they_are_for(path: Path) -> None:
    assert ast.get_docstring(tree_of(path))


@each(PACKAGE)
def test_the_package_imports_itself_relatively(path: Path) -> None:
    roots = {name.split(".")[0] for name in absolute_imports(tree_of(path))}
    assert not roots & {"client", "protocol", "storage_worker"}


@each(EVERYTHING)
def test_no_second_copy_of_client_or_protocol_is_loaded(path: Path) -> None:
    roots = {name.split(".")[0] for name in absolute_imports(tree_of(path))}
    assert not roots & {"client", "protocol"}


@each(PACKAGE)
def test_only_the_database_knows_the_driver(path: Path) -> None:
    if not name_of(path).startswith("storage_worker/database"):
        assert "apsw" not in {name.split(".")[0] for name in absolute_imports(tree_of(path))}


@each(TESTS)
def test_time_is_not_waited_for_by_sleeping(path: Path) -> None:
    if path != Path(__file__):  # it names what it looks for
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\btime\.sleep\(|from time import .*\bsleep\b", text)


@each(EVERYTHING)
def test_nothing_is_left_for_later(path: Path) -> None:
    if path != Path(__file__):  # it names what it looks for
        assert not re.search(r"\b(TODO|FIXME|XXX)\b", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_limits_end_in_their_unit(name: str) -> None:
    words = name.split("_")
    while words[-1] in QUALIFIERS:
        words.pop()
    assert words[-1] in UNITS


def test_every_package_is_listed_for_the_wheel() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE}
    inner = re.compile(r"^(client|protocol)\b")
    assert {inner.sub(r"storage_worker.\1", name) for name in found} == set(setuptools["packages"])


@pytest.mark.parametrize(
    "kept_out", ["apsw", "sqlite3", "multiprocess", "dill", "typer", "rich", "matplotlib"]
)
def test_a_hosts_import_is_light(kept_out: str, imported_by_hosts: frozenset[str]) -> None:
    assert kept_out not in imported_by_hosts


@pytest.fixture(scope="module")
def imported_by_hosts() -> frozenset[str]:
    """What `import storage_worker` loads in a fresh interpreter."""
    program = "import sys, storage_worker; print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return frozenset(done.stdout.split())

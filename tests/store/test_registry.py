import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage_worker.protocol.errors import InvalidRequestError, OperationFailedError
from storage_worker.registry import Stores, load
from storage_worker.store import Store
from storage_worker.transaction import Transaction

NOTES = """
from storage_worker.store import Store
from storage_worker.transaction import Transaction

notes = Store("notes")

@notes.read
def count(tx: Transaction) -> int:
    return 0
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Write a module of the given text; its name."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def write(text: str) -> str:
        names.append(f"swtest_registry_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(text)
        return names[-1]

    yield write
    for name in names:
        sys.modules.pop(name, None)


class TestLoading:
    def test_by_import_string(self, module: Callable[[str], str]) -> None:
        (store,) = load([f"{module(NOTES)}:notes"])
        assert list(Stores([store]).operations) == ["notes.count"]

    def test_nothing(self) -> None:
        assert load([]) == []

    @pytest.mark.parametrize(
        "text", ["", "notes", "a:", ":b", "a:b:c", "a b:c", "a..b:c", "a.b:c.d", "a/b:c"]
    )
    def test_what_is_no_import_string(self, text: str) -> None:
        with pytest.raises(InvalidRequestError, match="module:attribute") as caught:
            load([text])
        assert caught.value.details == {"store": text}

    @pytest.mark.parametrize("name", ["swtest_nowhere", "swtest_nowhere.deeper", "json.nowhere"])
    def test_a_module_that_is_not_there(self, name: str) -> None:
        with pytest.raises(InvalidRequestError, match=f"the store {name}:notes: there is no module"):
            load([f"{name}:notes"])

    def test_a_module_that_misses_another(self, module: Callable[[str], str]) -> None:
        name = module("import swtest_nowhere")
        with pytest.raises(OperationFailedError, match="swtest_nowhere") as caught:
            load([f"{name}:notes"])
        assert caught.value.details == {"store": f"{name}:notes", "exception": "ModuleNotFoundError"}

    @pytest.mark.parametrize(
        ("text", "kind"),
        [
            ("1 / 0", "ZeroDivisionError"),
            ("raise SystemExit(3)", "SystemExit"),
            ("def", "SyntaxError"),
            (f"{NOTES}\n@notes.read\ndef other(tx, a): ...\n", "TypeError"),
        ],
    )
    def test_a_module_that_fails(self, module: Callable[[str], str], text: str, kind: str) -> None:
        name = module(text)
        with pytest.raises(OperationFailedError, match=f"the store {name}:notes") as caught:
            load([f"{name}:notes"])
        assert caught.value.details == {"store": f"{name}:notes", "exception": kind}

    def test_an_attribute_that_is_missing_or_no_store(self, module: Callable[[str], str]) -> None:
        name = module(NOTES)
        with pytest.raises(InvalidRequestError, match="no such attribute"):
            load([f"{name}:nots"])
        with pytest.raises(InvalidRequestError, match="a StoreOperation there, not a Store"):
            load([f"{name}:count"])


class TestStores:
    def test_operations_by_their_names(self) -> None:
        notes = Store("notes")

        @notes.read
        def count(tx: Transaction) -> int:
            return 0

        assert Stores([notes, Store("people")]).operations == {"notes.count": count}

    def test_two_stores_of_one_name(self, module: Callable[[str], str]) -> None:
        first, second = (f"{module(NOTES)}:notes" for _ in range(2))
        assert len(load([first, first])) == 1
        with pytest.raises(InvalidRequestError, match="two stores are named notes"):
            load([first, second])
        notes = Store("notes")
        assert Stores([notes, notes]).stores == (notes,)
        with pytest.raises(InvalidRequestError, match="two stores are named notes") as caught:
            Stores([notes, Store("notes")])
        assert caught.value.details == {"store": "notes"}

"""The two clients are one: same methods, same arguments, same defaults, same results."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import storage_worker as sw

PAIRS = [
    (sw.Client, sw.AsyncClient),
    (sw.Pipeline, sw.AsyncPipeline),
    (sw.PipelineFuture, sw.AsyncPipelineFuture),
    (sw.InteractiveTransaction, sw.AsyncInteractiveTransaction),
    (sw.Snapshot, sw.AsyncSnapshot),
    (sw.StorageWorker, sw.StorageWorker),
    (sw.Pipe, sw.Pipe),
]

INNER = {"send", "wait", "flush", "conclude", "abandon", "is_lost", "line", "end_lost", "finish"}
"""What the parts of a pipeline need of each other."""

RENAMED = {
    "Iterator": "AsyncIterator",
    **{ours.__name__: theirs.__name__ for ours, theirs in PAIRS if ours is not theirs},
}

WITHOUT_WAITING = {"transaction", "pipeline", "snapshot", "pages", "limits", "savepoint", "done"}


def members(kind: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in vars(kind).items()
        if not name.startswith("_") and name not in INNER and not inspect.ismemberdescriptor(member)
    }


def cases() -> Iterator[Any]:
    for ours, theirs in PAIRS:
        if ours is not theirs:
            for name in members(ours):
                yield pytest.param(ours, theirs, name, id=f"{ours.__name__}.{name}")


def function_of(kind: type, name: str) -> Callable[..., Any]:
    member = vars(kind)[name]
    found = member.fget if isinstance(member, property) else member
    assert callable(found)
    return found


def as_async(annotation: object) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    for before, after in RENAMED.items():
        text = re.sub(rf"\b{before}\b", after, text)
    return re.sub(r"[\w.]+\.(?=\w)", "", text)


@pytest.mark.parametrize(("ours", "theirs", "name"), list(cases()))
def test_signatures_agree(ours: type, theirs: type, name: str) -> None:
    function, twin = function_of(ours, name), function_of(theirs, name)
    signature, other = inspect.signature(function), inspect.signature(twin)
    assert [
        (parameter.name, parameter.kind, parameter.default, as_async(parameter.annotation))
        for parameter in signature.parameters.values()
    ] == [
        (parameter.name, parameter.kind, parameter.default, as_async(parameter.annotation))
        for parameter in other.parameters.values()
    ]
    assert as_async(signature.return_annotation) == as_async(other.return_annotation)
    assert inspect.iscoroutinefunction(twin) is (name not in WITHOUT_WAITING)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_nothing_is_missing_and_nothing_is_more(ours: type, theirs: type) -> None:
    assert set(members(ours)) - {"result"} == set(members(theirs)) - {
        "place",
        "placed",
        "send_again",
        "wake",
        "result",
    }


@pytest.mark.parametrize("kind", [sw.StorageWorker, sw.Pipe])
def test_hosts_give_both_kinds_with_the_same_arguments(kind: type) -> None:
    check_twins(function_of(kind, "connect"), function_of(kind, "connect_async"))


def test_connect_takes_the_same_arguments() -> None:
    check_twins(sw.connect, sw.connect_async)


def check_twins(function: Callable[..., Any], twin: Callable[..., Any]) -> None:
    assert inspect.signature(function).parameters == inspect.signature(twin).parameters
    assert inspect.iscoroutinefunction(twin)


@pytest.mark.parametrize("kind", [theirs for ours, theirs in PAIRS if ours is not theirs])
def test_everything_has_its_docstring(kind: type) -> None:
    for name in members(kind):
        assert inspect.getdoc(function_of(kind, name))

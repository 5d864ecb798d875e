"""Fixtures of the asynchronous client's tests: every test runs on each event loop."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from tests.client.fake import FakeWorker

T = TypeVar("T")

Run = Callable[[Coroutine[Any, Any, T]], T]

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.fixture(params=LOOPS)
def new_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    """Makes event loops of one kind."""
    return LOOPS[request.param]


@pytest.fixture
def run(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> Iterator[Run[Any]]:
    """Runs coroutines in one event loop; what an ignored task or callback raised fails the test."""
    ignored: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.get_loop().set_exception_handler(lambda _loop, context: ignored.append(context))
        yield runner.run
    assert not ignored


@pytest.fixture
def worker(runtime_directory: Path) -> Iterator[FakeWorker]:
    """A fake worker that answers every statement with what it binds."""
    with FakeWorker(runtime_directory) as fake:
        yield fake

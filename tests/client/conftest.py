"""Fixtures of the client's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.fake import FakeWorker


@pytest.fixture
def worker(runtime_directory: Path) -> Iterator[FakeWorker]:
    """A fake worker that answers every statement with what it binds."""
    with FakeWorker(runtime_directory) as fake:
        yield fake

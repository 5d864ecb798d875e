"""Fixtures of the launcher's tests: a fake worker in the place of the real one, and faults for it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from storage_worker import spawn

FAKE_WORKER = "tests.launch.fake_worker"


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Start fake workers from now on; call it with the name of a fault."""
    monkeypatch.setattr(spawn, "WORKER_MODULE", FAKE_WORKER)
    monkeypatch.setenv("SW_FAKE", "")
    return lambda fault: monkeypatch.setenv("SW_FAKE", fault)


def starts_of(database: Path) -> int:
    """How many fake workers have listened for a database."""
    return len(Path(f"{database}.starts").read_bytes())

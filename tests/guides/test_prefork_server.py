"""A pre-forking server under load: no answer is mixed up, nothing acknowledged is lost, one worker serves all."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import psutil
import pytest

from storage_worker.launch import find
from storage_worker.spawn import module_path
from tests.client.fake import PATIENCE_S, Calls

from .conftest import GUIDES, Rows

PROCESSES = 4
BROWSERS = 24
ORDERS_EACH = 10
ROUNDS_MAX = 100


@contextmanager
def served(database: Path, *options: str) -> Iterator[tuple[int, int]]:
    """The application under gunicorn; its port, and the id of the process that forked the others."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = [sys.executable, "-m", "gunicorn", "--workers", str(PROCESSES), "--threads", "8"]
        command += ["--no-control-socket", "--log-level", "warning", "--bind", f"fd://{listening.fileno()}"]
        server = subprocess.Popen(
            [*command, *options, "--chdir", str(GUIDES), f"prefork_server:application({str(database)!r})"],
            pass_fds=[listening.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(module_path())},
        )
        port = listening.getsockname()[1]
    try:
        yield port, server.pid
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            assert server.wait(PATIENCE_S) == 0
        finally:
            server.kill()


class Browser:
    """Orders from the server, one request at a time on one connection, and checks each answer."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self.processes: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def order(self, text: str, key: str | None = None) -> int:
        headers = {} if key is None else {"Idempotency-Key": key}
        status, answer = self._ask("POST", "/", text, headers)
        assert (status, answer["text"]) == (201, text)
        number = answer["id"]
        assert isinstance(number, int)
        return number

    def find(self, number: int) -> tuple[int, dict[str, object]]:
        return self._ask("GET", f"/{number}", None, {})

    def _ask(
        self, method: str, path: str, body: str | None, headers: dict[str, str]
    ) -> tuple[int, dict[str, object]]:
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        self.processes.add(int(response.headers["X-Server-Process"]))
        return response.status, json.loads(response.read())


class Ledger:
    """What was acknowledged, and which processes did it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.orders: dict[int, str] = {}
        self.processes: set[int] = set()
        self._lock = threading.Lock()

    def load(self, name: str) -> None:
        """What one browser orders; it looks every order up again."""
        with Browser(self.port) as browser:
            for place in range(ORDERS_EACH):
                text = f"{name}, order {place}"
                number = browser.order(text)
                assert browser.find(number) == (200, {"id": number, "text": text})
                with self._lock:
                    assert number not in self.orders
                    self.orders[number] = text
        with self._lock:
            self.processes |= browser.processes

    def load_all(self) -> None:
        """Rounds of many browsers at once, until every process has had its share."""
        for number in range(ROUNDS_MAX):
            with Calls() as calls:
                ends = [calls.start(self.load, f"round {number}, browser {each}") for each in range(BROWSERS)]
                for end in ends:
                    end.get()
            if len(self.processes) == PROCESSES:
                return
        pytest.fail(f"only {len(self.processes)} processes ever answered")


@pytest.mark.parametrize("options", [("--preload",), ()], ids=["before the fork", "at first use"])
def test_a_prefork_server(database: Path, stored: Callable[[str], Rows], options: tuple[str, ...]) -> None:
    with served(database, *options) as (port, parent):
        ledger = Ledger(port)
        ledger.load_all()
        with Browser(port) as browser:
            assert browser.find(0)[0] == 404
        with find(database) as client:
            status = client.status()
        assert ledger.processes == {child.pid for child in psutil.Process(parent).children()} - {
            status.process.pid
        }
        assert ledger.processes <= {each.pid for each in status.clients}
        with Calls() as calls:

            def order_again() -> int:
                with Browser(port) as browser:
                    return browser.order("tea", key="order-17")

            numbers = {each.get() for each in [calls.start(order_again) for _ in range(BROWSERS)]}
        assert len(numbers) == 1
        ledger.orders[numbers.pop()] = "tea"
        with find(database) as client:
            assert client.status().process.pid == status.process.pid
            assert client.status().errors == status.errors
    assert dict(stored("select id, text from orders")) == ledger.orders

"""A pre-forking web server: one client is made before the fork, and every server process goes on with it.

    pip install gunicorn
    gunicorn --chdir scripts/guides --preload --workers 4 --threads 8 'prefork_server:application("orders.db")'

    curl -d 'two cups of tea' -H 'Idempotency-Key: order-17' http://127.0.0.1:8000/
    curl http://127.0.0.1:8000/1

With --preload gunicorn calls `application` once and then forks. A forked process never touches the connection that
it inherited; its first call makes one of its own. Without --preload each process calls `application` itself, and all
of them find the same worker, which the first one started.
"""

import json
import os
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import storage_worker as sw

CREATE = "create table if not exists orders(id integer primary key, text text)"
INSERT = "insert into orders(text) values (?) returning id"

REQUEST_SECONDS_MAX = 10.0

Environment = dict[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], object]


class OrdersApplication:
    """A WSGI application: POST stores an order, GET /NUMBER tells it.

    Its threads share the client; each waits for its own answer only.
    """

    def __init__(self, client: sw.Client) -> None:
        self._client = client

    def __call__(self, environment: Environment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request with JSON."""
        try:
            if environment["REQUEST_METHOD"] == "POST":
                status, answer = HTTPStatus.CREATED, self._store(environment)
            else:
                status, answer = self._find(environment["PATH_INFO"])
        except sw.StorageError as error:
            # Overload, a passed deadline, a restart of the worker: the browser is told when to come again.
            status, answer = HTTPStatus.SERVICE_UNAVAILABLE, {"error": error.code, "outcome": error.outcome}
        headers = [("Content-Type", "application/json"), ("X-Server-Process", str(os.getpid()))]
        start_response(f"{status.value} {status.phrase}", headers)
        return [json.dumps(answer).encode()]

    def _store(self, environment: Environment) -> dict[str, object]:
        text = environment["wsgi.input"].read(int(environment["CONTENT_LENGTH"] or 0)).decode()
        # A browser that repeats its request, perhaps to another process, orders once.
        key = environment.get("HTTP_IDEMPOTENCY_KEY")
        stored = self._client.execute(INSERT, (text,), timeout=REQUEST_SECONDS_MAX, request_key=key)
        return {"id": stored.scalar(), "text": text}

    def _find(self, path: str) -> tuple[HTTPStatus, dict[str, object]]:
        find = "select id, text from orders where id = ?"
        for number, text in self._client.query(find, (path.strip("/"),), timeout=REQUEST_SECONDS_MAX):
            return HTTPStatus.OK, {"id": number, "text": text}
        return HTTPStatus.NOT_FOUND, {"error": "there is no such order"}


def application(database: str) -> OrdersApplication:
    """What gunicorn serves."""
    client = sw.connect(database)
    client.execute(CREATE)
    return OrdersApplication(client)

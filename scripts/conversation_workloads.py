"""What the clients of the conversation benchmark do: ingest real messages, insert plain rows, append, list."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import storage_worker as sw
from measuring import Recorder, Sample
from storage_worker import conversation

ROOM = "benchmark"
STORES = ["storage_worker.conversation:store"]
CREATE_PLAIN = "create table if not exists plain(id integer primary key, session text, event_id text, type text, body text)"
INSERT_PLAIN = "insert into plain(session, event_id, type, body) values (?, ?, ?, ?)"
TIMEOUT_SECONDS = 60.0
SESSION_EVENTS = 200
"""Events of each session that a store is filled with."""

APPEND_EVERY_SECONDS = 0.01

Output = dict[str, Any]


def read_outputs(path: Path) -> list[Output]:
    """The messages of tau-bench sessions as outputs, without event ids: assistants' texts and tools' results."""
    sessions = msgspec.json.decode(path.read_bytes())
    return [_output(message) for session in sessions for message in session["traj"]]


def _output(message: dict[str, Any]) -> Output:
    if message["role"] == "tool":
        return {
            "type": "tool_execution_finished",
            "tool_call_id": message["tool_call_id"],
            "name": message["name"],
            "output": message["content"],
        }
    output = {"type": "assistant_message", "role": message["role"], "text": message["content"]}
    if message.get("tool_calls"):
        output["tool_calls"] = message["tool_calls"]
    return output


def _pick(outputs: list[Output], own: int, number: int) -> Output:
    """The `number`th output of a client: real ones again and again, each client at another place."""
    return outputs[(own * 613 + number) % len(outputs)]


def _one_at_a_time(
    start: Callable[[], None],
    pipe: sw.Pipe,
    first: int,
    seconds: float,
    operation: Callable[[sw.Client, int], object],
) -> Sample:
    """Do an operation again and again, numbered from `first`; the latency is that of each."""
    with pipe.connect() as client:
        client.query("select 1")
        start()
        recorder = Recorder()
        clock, done = time.perf_counter, recorder.latencies_s.append
        end, number = clock() + seconds, first
        while (began := clock()) < end:
            operation(client, number)
            done(clock() - began)
            number += 1
        return recorder.sample()


def ingest_loop(
    start: Callable[[], None], pipe: sw.Pipe, own: int, first: int, seconds: float, outputs: list[Output]
) -> Sample:
    """Ingest outputs one at a time into a session of its own; `first` numbers its first event."""

    def ingest(client: sw.Client, number: int) -> None:
        event = _pick(outputs, own, number) | {"event_id": f"{own}-{number}"}
        call = conversation.ingest_output(f"session {own}", event, room=ROOM)
        client.call(call, timeout=TIMEOUT_SECONDS)

    return _one_at_a_time(start, pipe, first, seconds, ingest)


def plain_loop(
    start: Callable[[], None], pipe: sw.Pipe, own: int, first: int, seconds: float, outputs: list[Output]
) -> Sample:
    """Insert the same texts, one plain row each."""

    def insert(client: sw.Client, number: int) -> None:
        event = _pick(outputs, own, number) | {"event_id": f"{own}-{number}"}
        body = event.get("text") or event.get("output") or ""
        row = (f"session {own}", event["event_id"], event["type"], body)
        client.execute(INSERT_PLAIN, row, timeout=TIMEOUT_SECONDS)

    return _one_at_a_time(start, pipe, first, seconds, insert)


def session_name(number: int) -> str:
    """The session that a store's event with this number belongs to."""
    return f"stored session {number // SESSION_EVENTS:08}"


def fill_loop(
    start: Callable[[], None], pipe: sw.Pipe, first: int, last: int, outputs: list[Output]
) -> Sample:
    """Store the events from `first` up to `last`, many in flight."""
    with pipe.connect() as client:
        start()
        recorder = Recorder()
        with client.pipeline() as pipeline:
            for number in range(first, last):
                event = _pick(outputs, 0, number) | {"event_id": f"stored {number}"}
                call = conversation.ingest_output(session_name(number), event, room=ROOM)
                pipeline.call(call, timeout=TIMEOUT_SECONDS)
        return recorder.sample()


def add_loop(
    start: Callable[[], None],
    pipe: sw.Pipe,
    numbers: list[int],
    mark: str,
    outputs: list[Output],
) -> Sample:
    """Ingest one event into the session of each of these stored events, one at a time."""
    with pipe.connect() as client:
        client.query("select 1")
        start()
        recorder = Recorder()
        clock, done = time.perf_counter, recorder.latencies_s.append
        for place, number in enumerate(numbers):
            event = _pick(outputs, 0, place) | {"event_id": f"{mark} {place}"}
            began = clock()
            call = conversation.ingest_output(session_name(number), event, room=ROOM)
            client.call(call, timeout=TIMEOUT_SECONDS)
            done(clock() - began)
        return recorder.sample()


def append_loop(start: Callable[[], None], pipe: sw.Pipe, session: str, seconds: float) -> Sample:
    """Append one event every 10 ms."""
    with pipe.connect() as client:
        client.query("select 1")
        start()
        recorder = Recorder()
        clock = time.perf_counter
        end, due = clock() + seconds, clock()
        while clock() < end:
            began = clock()
            client.call(conversation.append(session, "note", {"at": began}), timeout=TIMEOUT_SECONDS)
            recorder.latencies_s.append(clock() - began)
            due += APPEND_EVERY_SECONDS
            time.sleep(max(0.0, due - clock()))
        return recorder.sample()


def list_until(ended: threading.Event, client: sw.Client, session: str) -> Sample:
    """List a whole session page by page, again and again until told to end; the latency is that of a page.

    An order that is not 1, 2, 3 and so on counts as an error.
    """
    recorder = Recorder()
    clock, cursor = time.perf_counter, 0
    while not ended.is_set():
        began = clock()
        page = client.call(conversation.events(session, cursor, 500), timeout=TIMEOUT_SECONDS)
        recorder.latencies_s.append(clock() - began)
        if [event.sequence for event in page.items] != list(range(cursor + 1, page.cursor + 1)):
            recorder.error("order")
        cursor = page.cursor if page.more else 0
    return recorder.sample()

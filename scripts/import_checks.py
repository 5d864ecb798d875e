"""Compares what the conversation store holds with the transcripts that were imported into it."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import storage_worker as sw
from measuring import Recorder
from storage_worker import conversation
from storage_worker.conversation import payload_client
from storage_worker.conversation.records import JSON, TEXT, Event, Historic, PayloadRef, Session
from storage_worker.exporting import all_pages, event_line
from storage_worker.transcripts import formats
from storage_worker.transcripts.records import Piece, Problem, Tally, Transcript, records_of


class Expected(msgspec.Struct):
    """What a session of the source holds."""

    format: str
    records: int
    digest: str


class Verdict(msgspec.Struct):
    """What the comparison of source and store gave."""

    sessions: int = 0
    records: int = 0
    differences: list[str] = msgspec.field(default_factory=list)


def expected_of(paths: Iterable[Path]) -> dict[str, Expected]:
    """Every session of the source with the number and the digest of its records, read without the store.

    The digest is that of the records in the order in which one import stores them. Of a session with several files of
    which some came, or grew, later the store has them in the order in which they came.
    """
    found: dict[str, Expected] = {}
    for transcript in formats.transcripts(*(str(path.resolve()) for path in paths)):
        if isinstance(transcript, Transcript):
            tally = Tally()
            for record in formats.read(transcript):
                if not isinstance(record, Problem):
                    tally.add(record.value)
            # A session that stands twice in the source is a copy: it is known by its content.
            found[transcript.session] = Expected(transcript.format, tally.records, tally.digest)
    return found


def verify(client: sw.Client, expected: dict[str, Expected], recorder: Recorder) -> Verdict:
    """Build every stored session's records again, compare count and digest, and look for what the source has not."""
    verdict = Verdict()
    missing = dict(expected)
    for session in sessions_of(client):
        wanted = missing.pop(session.id, None)
        if wanted is None:
            verdict.differences.append(f"{session.id}: not in the source")
            continue
        began = time.perf_counter()
        tally = stored_tally(client, session.id)
        recorder.latencies_s.append(time.perf_counter() - began)
        verdict.sessions += 1
        verdict.records += tally.records
        if tally.records != wanted.records:
            verdict.differences.append(f"{session.id}: {tally.records} records instead of {wanted.records}")
        elif tally.digest != wanted.digest:
            verdict.differences.append(f"{session.id}: the digest differs")
    verdict.differences.extend(f"{session}: missing" for session in missing)
    return verdict


def sessions_of(client: sw.Client) -> Iterator[Session]:
    """All sessions, in the order they were made."""
    return all_pages(client, lambda after: conversation.sessions(None, after))


def events_of(client: sw.Client, session: str | None = None) -> Iterator[Historic]:
    """The events of a session, or of all."""
    return all_pages(client, lambda after: conversation.history(session, after))


def stored_records(client: sw.Client, session: str) -> Iterator[tuple[str, Any]]:
    """The records, with their ids, that the events of a session were made of when it was imported."""
    return records_of(_pieces(client, session))


def _pieces(client: sw.Client, session: str) -> Iterator[Piece]:
    for historic in events_of(client, session):
        source = historic.event.attributes.get("source")
        if isinstance(source, dict) and "record" in source:
            yield Piece(source, _body_of(client, historic.event))


def _body_of(client: sw.Client, event: Event) -> Any:
    """The body of an event: a text, a JSON value, bytes, or None."""
    body = event.body
    if body is None:
        return None
    kind = event.content_type
    if isinstance(body, PayloadRef):
        kind = body.content_type
        if kind not in (JSON, TEXT):
            return payload_client.read(client, body)
        body = payload_client.read_text(client, body)
    return msgspec.json.decode(body) if kind == JSON else body


def stored_tally(client: sw.Client, session: str) -> Tally:
    """How many records a session was made of, and the digest of them, built again from its events."""
    tally = Tally()
    for _, value in stored_records(client, session):
        tally.add(value)
    return tally


def content_digest(client: sw.Client, session: str) -> str:
    """A digest of everything that a session's events and messages say: equal for an export that was imported.

    Numbers that a store gives by itself (of the log and of the room) and keys that it derives are left out.
    """
    tally = Tally()
    for historic in events_of(client, session):
        line = msgspec.to_builtins(event_line(historic))
        for name in ("stream_id", "idempotency_key"):
            del line[name]
        if line["message"] is not None:
            # Which message the thread begins with stays.
            del line["message"]["thread_root"]
            del line["message"]["number"]
        tally.add(line)
    return tally.digest

"""Stores one transcript through ordinary client calls, each as often as it takes, and each once.

Every event has an id that follows from its record, so that a repeat changes nothing. They are sent one after the
other: what is stored of a session is always its beginning, in order, wherever an importer or a worker ends.
"""

import time
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from . import conversation
from .client.client import Client
from .client.retry import back_off_seconds
from .conversation import payload_client
from .conversation.bounds import RETENTION_DEFAULT
from .conversation.canonical import canonical_json, is_inline, preview_of
from .conversation.records import JSON, Admitted, Body, Event, PayloadRef, Provenance, Sender
from .conversation.vocabulary import USER_MESSAGE, body_field
from .protocol.errors import DeclaredError, InvalidRequestError, RequestTooLargeError, StorageError
from .protocol.operation import Call
from .transcripts import formats
from .transcripts.files import content_of
from .transcripts.records import (
    BinaryBody,
    JSONBody,
    PlannedEvent,
    Problem,
    Record,
    Tally,
    Transcript,
    events_of,
    is_plain,
)

R = TypeVar("R")

CALL_SECONDS_MAX: Final = 30.0
PUT_SECONDS_MAX: Final = 120.0
PATIENCE_SECONDS_MAX: Final = 120.0
"""How long a call is repeated while the worker is lost, overloaded or out of space."""

SESSION_PROBLEMS_COUNT_MAX: Final = 100
"""How many problems of one session are told; the others are counted."""

FINISHED: Final = "import_finished"

CONTENT_CHARS: Final = 32
"""How much of the hash of a transcript's content the mark of a finished import holds."""

RECORD_ERRORS: Final = (DeclaredError, InvalidRequestError, RequestTooLargeError)
"""What the store says against one record, which is no reason not to take the others."""


class Imported(msgspec.Struct, kw_only=True):
    """What became of one transcript.

    `added` of its `events` were not there before; `sessions` are those that stand in the store now, `known` of them
    were there and left alone; `errors` counts the errors of calls that were sent again, by code; `latencies_s` are
    those of all calls that stored something, in seconds, as the bytes of an array of doubles; `failure` says what
    ended it early, None where nothing did.
    """

    format: str
    session: str
    size_bytes: int
    sessions: int = 0
    known: int = 0
    records: int = 0
    events: int = 0
    added: int = 0
    problems: list[Problem] = []
    problem_count: int = 0
    errors: dict[str, int] = {}
    latencies_s: bytes = b""
    failure: str | None = None


class Patience:
    """How long the calls of a process are repeated: not any more once one was given up.

    Each session of an import would otherwise wait for the same full disk again.
    """

    def __init__(self) -> None:
        self._seconds = PATIENCE_SECONDS_MAX

    @property
    def seconds(self) -> float:
        """How many seconds a call that begins now may be repeated."""
        return self._seconds

    def end(self) -> None:
        """Note that a call was given up."""
        self._seconds = 0.0


class PatientClient:
    """Makes calls until they have an answer, and measures them."""

    def __init__(self, client: Client, patience: Patience | None = None) -> None:
        self.client = client
        self._patience = patience or Patience()
        self.latencies_s = array("d")
        self.errors: Counter[str] = Counter()

    def store(self, call: Call[R]) -> R:
        """The result of a call that stores something, and may be sent again."""
        began = time.perf_counter()
        result = self.ask(call)
        self.latencies_s.append(time.perf_counter() - began)
        return result

    def ask(self, call: Call[R]) -> R:
        """The result of a call that may be sent again."""
        return self._until_done(lambda: self.client.call(call, timeout=CALL_SECONDS_MAX))

    def put(
        self, body: Any, content_type: str | None = None, retention_class: str = RETENTION_DEFAULT
    ) -> PayloadRef:
        """Put a body into the payload store: bytes, a text, or a file that is read from its beginning."""

        def attempt() -> PayloadRef:
            if hasattr(body, "seek"):
                body.seek(0)
            return payload_client.put(
                self.client, body, content_type, retention_class, timeout=PUT_SECONDS_MAX
            )

        return self._until_done(attempt)

    def _until_done(self, attempt: Callable[[], R]) -> R:
        give_up = time.monotonic() + self._patience.seconds
        number = 0
        while True:
            try:
                return attempt()
            except StorageError as error:
                number += 1
                wait = max(error.retry_after or 0.0, back_off_seconds(number, self.client.limits))
                if not error.retryable:
                    raise
                if time.monotonic() + wait >= give_up:
                    self._patience.end()
                    raise
                self.errors[error.code] += 1
            time.sleep(wait)


class Report:
    """Gathers what cannot be imported of a transcript, and counts what was."""

    def __init__(self, transcript: Transcript) -> None:
        self.found = Imported(
            format=transcript.format,
            session=transcript.session,
            size_bytes=transcript.size_bytes,
            problems=[],
        )

    def problem(self, problem: Problem) -> None:
        """Note a problem; of many only the first are kept."""
        self.found.problem_count += 1
        if len(self.found.problems) < SESSION_PROBLEMS_COUNT_MAX:
            self.found.problems.append(problem)

    def event(self, *, is_new: bool) -> None:
        """Count an event that is stored now."""
        self.found.events += 1
        self.found.added += is_new

    def run(self, work: Callable[[], None], client: PatientClient) -> Imported:
        """All that was found, also where an error ends the work before its time: then it says which."""
        try:
            work()
        except (StorageError, OSError) as error:
            self.found.failure = f"{type(error).__name__}: {error}"
        self.found.errors = dict(client.errors)
        self.found.latencies_s = client.latencies_s.tobytes()
        return self.found


def import_transcript(client: Client, transcript: Transcript, patience: Patience | None = None) -> Imported:
    """Store a transcript, or find that it is stored; `patience` is that of all of an import, or none is shared.

    What is wrong with one record is a problem of that; any other error, such as `StorageFullError`, is the `failure`.
    """
    patient, report = PatientClient(client, patience), Report(transcript)
    return report.run(_SessionImport(patient, report, transcript).run, patient)


def _says_all(last: Event, mark: str) -> bool:
    """Whether the last event of a session says that just this was imported, with nothing to complain of."""
    return last.type == FINISHED and last.event_id == mark and last.attributes.get("problems") == 0


def _is_unfinished(last: Event) -> bool:
    """Whether the last event of a session is a record's: an import has ended before its time."""
    source = last.attributes.get("source")
    return isinstance(source, dict) and "record" in source


class _SessionImport:
    """One transcript on its way into the store."""

    def __init__(self, client: PatientClient, report: Report, transcript: Transcript) -> None:
        self._client = client
        self._transcript = transcript
        self._report = report
        self._messages: dict[str, int] = {}
        self._last_ms: int | None = None
        self._is_settled = False
        self._has_room = False
        self._provenance = Provenance("import", transcript.format, "history")

    def run(self) -> None:
        """Store all of it."""
        transcript = self._transcript
        mark = f"import {content_of(transcript)[:CONTENT_CHARS]}"
        found = self._report.found
        last = self._last_event()
        # Known until something is added to it.
        found.sessions = found.known = int(last is not None)
        if last is not None and _says_all(last, mark):
            return
        self._is_settled = last is not None and not _is_unfinished(last)
        tally = Tally()
        for record in formats.read(transcript):
            if isinstance(record, Problem):
                self._report.problem(record)
            else:
                self._need_room()
                self._store_record(record, tally)
                found.records = tally.records
        if self._is_settled and not found.added:
            # Nothing has changed: what the session is doing now is not for an import to say.
            return
        if tally.records or not found.problem_count:
            self._need_room()
            self._finish(mark, tally)

    def _need_room(self) -> None:
        """Have the session's room; one of which nothing can be read gets none."""
        if not self._has_room:
            self._client.ask(conversation.create_room(self._transcript.room, self._transcript.title))
            self._has_room = True

    def _count(self, *, is_new: bool) -> bool:
        """Count the session where something of it is stored; whether that was not there before."""
        found = self._report.found
        if is_new:
            found.sessions, found.known = 1, 0
        elif not found.sessions:
            # Another import has stored it since this one began.
            found.sessions = found.known = 1
        return is_new

    def _last_event(self) -> Event | None:
        """The last event of the session, None where it has none."""
        call = conversation.events(self._transcript.session, page_rows=1, newest_first=True)
        return next(iter(self._client.ask(call).items), None)

    def _finish(self, mark: str, tally: Tally) -> None:
        problems = self._report.found.problem_count
        event = {
            "type": FINISHED,
            # With problems it is another event: a later import may have less of them.
            "event_id": mark if not problems else f"{mark} {problems}",
            "format": self._transcript.format,
            "records": tally.records,
            "digest": tally.digest,
            "problems": problems,
        }
        try:
            self._ingest(event, None, "", "import")
        except RECORD_ERRORS as error:
            self._report.problem(Problem(self._transcript.path, 0, f"its end was refused: {error}"))

    def _store_record(self, record: Record, tally: Tally) -> None:
        self._last_ms = self._last_ms if record.created_ms is None else record.created_ms
        try:
            tally.add(record.value)
            for event in events_of(record):
                self._store(record, event)
        except RecursionError:
            self._record_problem(record, "is nested too deeply")
        except RECORD_ERRORS as error:
            self._record_problem(record, f"was refused: {error}")

    def _record_problem(self, record: Record, what: str) -> None:
        path = record.path or self._transcript.path
        self._report.problem(Problem(path, record.line, f"record {record.id} {what}"))

    def _store(self, record: Record, event: PlannedEvent) -> None:
        if event.type == USER_MESSAGE:
            self._report.event(is_new=self._count(is_new=self._ingest_user(record, event).created))
            return
        fields = {**event.fields, "type": event.type, "event_id": event.id}
        payload: PayloadRef | None = None
        preview = ""
        match event.body:
            case BinaryBody(data, media_type):
                payload = self._client.put(data, media_type)
            case JSONBody(value):
                text = canonical_json(value, f"record {record.id}")
                if is_inline(text) and is_plain(value):
                    fields[body_field(event.type)] = value
                else:
                    payload, preview = self._client.put(text, JSON), preview_of(text)
            case str(text):
                body, preview = self._text(text)
                if isinstance(body, PayloadRef):
                    payload = body
                else:
                    fields[body_field(event.type)] = body
        self._report.event(is_new=self._ingest(fields, payload, preview, record.actor, record))

    def _text(self, text: str) -> tuple[Body, str]:
        """A text as it is stored, and its preview."""
        if is_inline(text):
            return text, preview_of(text)
        return self._client.put(text), preview_of(text)

    def _ingest_user(self, record: Record, event: PlannedEvent) -> Admitted:
        body, preview = self._text(event.body if isinstance(event.body, str) else "")
        transcript = self._transcript
        call = conversation.ingest_user(
            transcript.session,
            body,
            event_id=event.id,
            room=transcript.room,
            actor=record.actor,
            role=event.role,
            sender=Sender(record.actor, "import"),
            thread_root=self._thread(record),
            attributes=event.fields,
            preview=preview,
            created_ms=self._last_ms,
        )
        admitted = self._client.store(call)
        self._messages.setdefault(record.id, admitted.message_number)
        return admitted

    def _thread(self, record: Record) -> int | None:
        """The number in the room of the message that a record's thread begins with, once that is stored."""
        return None if record.thread is None else self._messages.get(record.thread)

    def _ingest(
        self,
        fields: dict[str, Any],
        payload: PayloadRef | None,
        preview: str,
        actor: str,
        record: Record | None = None,
    ) -> bool:
        """Store an output; whether it was not there before."""
        transcript = self._transcript
        call = conversation.ingest_output(
            transcript.session,
            fields,
            payload,
            room=transcript.room,
            actor=actor,
            sender=Sender(actor, "import"),
            thread_root=None if record is None else self._thread(record),
            provenance=self._provenance,
            preview=preview,
            created_ms=self._last_ms,
        )
        done = self._client.store(call)
        if record is not None and done.message_number is not None:
            self._messages.setdefault(record.id, done.message_number)
        return self._count(is_new=not done.duplicate)

"""The payloads of an export on their way into the store, before the events that name them."""

import tempfile
from typing import Final

from .conversation.payload_files import encoding_of
from .conversation.payloads import offer_payload
from .conversation.records import Body, PayloadRef
from .import_session import PatientClient, Report
from .protocol.limits import MIB
from .transcripts.exports import EventLine, MissingLine, PayloadKey, PayloadLine
from .transcripts.files import UnreadableError
from .transcripts.records import Problem, Transcript

SPOOL_BYTES: Final = 8 * MIB
"""How much of a payload is held in memory until it is written."""


class _Payload:
    """A payload whose parts are coming in, into a file that is in memory while it is small."""

    def __init__(self, number: int, first: PayloadLine) -> None:
        self.number = number
        self.first = first
        # Closed where the payload ends, in whatever way that is.
        self.file = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115
        self._bytes = 0

    @property
    def is_whole(self) -> bool:
        """Whether no part is missing any more."""
        return self._bytes >= self.first.size_bytes

    def goes_on_with(self, part: PayloadLine) -> bool:
        """Whether a part is the next one of this payload."""
        return part.offset == self._bytes and _payload_key(part) == _payload_key(self.first)

    def add(self, part: PayloadLine) -> None:
        """Take in the next part."""
        self.file.write(part.data)
        self._bytes += len(part.data)


class ExportedPayloads:
    """The payloads of an export: put when their last part has come, found again when an event names them."""

    def __init__(self, client: PatientClient, report: Report, transcript: Transcript) -> None:
        self._client = client
        self._report = report
        self._path = transcript.path
        self._open: _Payload | None = None
        self._incomplete: set[PayloadKey] = set()
        self._missing: dict[PayloadKey, str] = {}
        self._put: dict[PayloadKey, PayloadRef] = {}

    def take_part(self, number: int, part: PayloadLine) -> None:
        """Take in a part of a payload, and put the payload where it was the last one.

        Raises `UnreadableError` where another part is missing, or the payload is not what its hash says.
        """
        if self._open is not None and not self._open.goes_on_with(part):
            self.end_open()
        if self._open is None:
            if part.offset:
                if _payload_key(part) not in self._incomplete:
                    self._incomplete.add(_payload_key(part))
                    raise UnreadableError(f"a part of the payload {part.sha256} is missing")
                return
            self._open = _Payload(number, part)
        payload = self._open
        payload.add(part)
        if payload.is_whole:
            self._open = None
            with payload.file:
                first = payload.first
                ref = self._client.put(payload.file, first.content_type, first.retention_class)
                if ref.sha256 != first.sha256:
                    raise UnreadableError(f"the payload {first.sha256} has other bytes than its hash says")
                self._put[_payload_key(first)] = ref

    def give_up(self, line: MissingLine) -> None:
        """Take in that a payload, or the rest of it, could not be exported; events that need it will tell."""
        self._missing[_payload_key(line)] = f"it was missing when this was exported: {line.reason}"
        if self._open is not None and _payload_key(self._open.first) == _payload_key(line):
            self.close()
        self.end_open()

    def end_open(self) -> None:
        """Tell of a payload whose next part should have come."""
        if self._open is None:
            return
        payload = self._open
        self.close()
        self._incomplete.add(_payload_key(payload.first))
        reason = f"a part of the payload {payload.first.sha256} is missing"
        self._report.problem(Problem(self._path, payload.number, reason))

    def close(self) -> None:
        """Close the file of a payload that is not whole."""
        if self._open is not None:
            self._open.file.close()
            self._open = None

    def body_of(self, line: EventLine) -> Body | None:
        """The body of an event, also where it is a payload that did not come: the store may have it, or the event."""
        named = line.payload
        if named is None:
            return line.body
        key = _body_key(line)
        found = self._put.get(key)
        if found is None:
            kind = line.content_type or ""
            offer = offer_payload(named.sha256, kind, line.retention_class, named.size_bytes)
            found = self._client.ask(offer).ref
            if found is None:
                size = named.size_bytes
                return PayloadRef(named.sha256, kind, line.retention_class, size, size, encoding_of(size))
            self._put[key] = found
        return found

    def why_missing(self, line: EventLine) -> str | None:
        """Why the payload of an event is not there, or None where it has none or it is."""
        key = _body_key(line)
        if line.payload is None or key in self._put:
            return None
        reason = self._missing.get(key, "nothing of it stands before its event")
        return (
            f"the event was not stored: its payload {line.payload.sha256} is not in the export ({reason}); import one that"
            " has it"
        )


def _body_key(line: EventLine) -> PayloadKey:
    """Which payload the body of an event is."""
    return ("" if line.payload is None else line.payload.sha256, line.content_type, line.retention_class)


def _payload_key(line: PayloadLine | MissingLine) -> PayloadKey:
    return (line.sha256, line.content_type, line.retention_class)

"""What makes an event the same event: its idempotency key, its fingerprint, and how two of them differ.

A key begins with a hash of its session, so that the keys of one session stand together in the index: a session
that is written to touches a few pages of it, however many events are stored.
"""

import functools
import hashlib
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from ..protocol.errors import InvalidRequestError
from . import fingerprint_v1
from .bounds import (
    DIFFERENCES_COUNT_MAX,
    DIGEST_CHARS,
    DIGESTS_COUNT_MAX,
    NAME_CHARS_MAX,
    PROVENANCE_CHARS_MAX,
    SESSION_MARKS_COUNT_MAX,
)
from .canonical import encode_json
from .records import PayloadRef
from .vocabulary import Fields, execution_phase

UNKNOWN: Final = "unknown"

Digests = Mapping[str, str]

_StoredDigests = dict[str, str] | Annotated[list[dict[str, str]], msgspec.Meta(min_length=1, max_length=1)]


class Algorithm(msgspec.Struct, frozen=True):
    """One version of the fingerprint: the digests of an event's fields, and the fingerprint of these."""

    digests: Callable[[Fields, str, PayloadRef | None], dict[str, str]]
    fingerprint: Callable[[Digests], str]


ALGORITHMS: Final[dict[int, Algorithm]] = {
    1: Algorithm(fingerprint_v1.field_digests, fingerprint_v1.fingerprint),
}
"""Every version that was ever stored; none is ever removed or changed."""

VERSION: Final = max(ALGORITHMS)


class Arrival(msgspec.Struct, frozen=True):
    """An event as it arrived: its fields, which of them holds its body, and that body where it is a payload."""

    fields: Fields
    body_field: str
    payload: PayloadRef | None = None


class Fingerprint(msgspec.Struct, frozen=True):
    """What is stored of an event's content to know it again."""

    version: int | None
    fingerprint: str | None
    digests: str | None


NO_FINGERPRINT: Final = Fingerprint(None, None, None)


def take_fingerprint(arrival: Arrival) -> Fingerprint:
    """The fingerprint of an event by the present version."""
    algorithm = ALGORITHMS[VERSION]
    digests = algorithm.digests(arrival.fields, arrival.body_field, arrival.payload)
    names: Iterable[str] = digests
    if len(digests) > DIGESTS_COUNT_MAX:
        names = sorted(digests)[:DIGESTS_COUNT_MAX]
    kept = {name: digests[name][:DIGEST_CHARS] for name in names}
    # Of as many as are kept it would not show whether there were more: a list around them says that these are all.
    told = [kept] if len(digests) == DIGESTS_COUNT_MAX else kept
    return Fingerprint(VERSION, algorithm.fingerprint(digests), encode_json(told).decode())


class Stored(msgspec.Struct, frozen=True):
    """What is known of a stored event that has the same key."""

    stream_id: int
    session: str
    sequence: int
    room: str
    event_id: str | None
    client_transaction_id: str | None
    created_ms: int
    fingerprint: str | None
    fingerprint_version: int | None
    field_digests: str | None
    provenance: str | None
    key: str | None


class Comparison(msgspec.Struct, frozen=True):
    """Whether an arrival is a stored event again; where it is not, both fingerprints and what differs."""

    is_same: bool
    version: int = VERSION
    stored: str = ""
    incoming: str = ""
    differences: list[tuple[str, Literal["added", "removed", "changed"]]] = []
    is_cut: bool = False


def compare(stored: Stored, arrival: Arrival) -> Comparison:
    """Compare an arrival with a stored event, by the algorithm of the version that was stored.

    An event that was stored without a fingerprint, or with one of a version that this release does not know,
    counts as the same; a fingerprint without a version is of version 1.
    """
    version = 1 if stored.fingerprint_version is None else stored.fingerprint_version
    algorithm = ALGORITHMS.get(version)
    if stored.fingerprint is None or algorithm is None:
        return Comparison(True)
    digests = algorithm.digests(arrival.fields, arrival.body_field, arrival.payload)
    incoming = algorithm.fingerprint(digests)
    if incoming == stored.fingerprint:
        return Comparison(True)
    differences, is_cut = field_differences(*read_digests(stored.field_digests), digests)
    return Comparison(False, version, stored.fingerprint, incoming, differences, is_cut)


def read_digests(text: str | None) -> tuple[dict[str, str] | None, bool]:
    """Stored digests, at most as many as are kept of one event, and whether these are all that it had.

    None where they cannot be read.
    """
    try:
        told = msgspec.json.decode(text or "", type=_StoredDigests)
    except (msgspec.MsgspecError, RecursionError):
        return None, False
    found = told if isinstance(told, dict) else told[0]
    are_all = len(found) < DIGESTS_COUNT_MAX or (len(found) == DIGESTS_COUNT_MAX and isinstance(told, list))
    return {name: found[name] for name in sorted(found)[:DIGESTS_COUNT_MAX]}, are_all


def field_differences(
    stored: Digests | None, are_all: bool, incoming: Digests
) -> tuple[list[tuple[str, Literal["added", "removed", "changed"]]], bool]:
    """The fields that differ, sorted by name, and whether there may be more than are named.

    Without stored digests nothing is known of the fields. Where these are not all that the event had, nothing is known
    of fields behind the last of them.
    """
    if stored is None:
        return [], True
    found: list[tuple[str, Literal["added", "removed", "changed"]]] = []
    last = None if are_all else max(stored)
    for name in sorted({*stored, *incoming}):
        if last is not None and name > last:
            break
        if name not in stored:
            found.append((name, "added"))
        elif name not in incoming:
            found.append((name, "removed"))
        elif stored[name] != incoming[name][:DIGEST_CHARS]:
            found.append((name, "changed"))
    is_cut = not are_all or len(found) > DIFFERENCES_COUNT_MAX
    return [(name[:PROVENANCE_CHARS_MAX], how) for name, how in found[:DIFFERENCES_COUNT_MAX]], is_cut


def reduced_provenance(text: str | None) -> dict[str, str]:
    """A provenance as a diagnostic shows it; what cannot be read is `unknown`."""
    try:
        found = msgspec.json.decode(text or "", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        found = {}
    parts = {name: found.get(name) for name in ("producer", "projection", "phase")}
    return {
        name: part[:PROVENANCE_CHARS_MAX] if type(part) is str and part else UNKNOWN
        for name, part in parts.items()
    }


# --- Keys ---

_OWN_EVENT_ID_CHARS: Final = 32
"""How long the event id is that a client transaction's event gets where it was given none."""

_MESSAGE: Final = "m-"
_OBSERVATION: Final = "o-"


def message_id(key: str) -> str:
    """The id of the message whose event has a key."""
    return f"{_MESSAGE}{key}"


def observation_id(key: str) -> str:
    """The id of the observation whose event has a key."""
    return f"{_OBSERVATION}{key}"


def key_of_message(id_: str) -> str:
    """The key that the id of a message was made of."""
    return id_.removeprefix(_MESSAGE)


def event_id_of(fields: Fields) -> str | None:
    """The event id of an output, or None; `InvalidRequestError` where it is something that cannot be one."""
    found = fields.get("event_id")
    if found is None:
        return None
    if type(found) is not str or not 1 <= len(found) <= NAME_CHARS_MAX:
        raise InvalidRequestError(f"the event_id is a text of 1 to {NAME_CHARS_MAX} characters")
    return found


@functools.lru_cache(maxsize=SESSION_MARKS_COUNT_MAX)
def session_mark(session: str) -> str:
    """The beginning of a session's keys and of the ids of its records."""
    return urlsafe_b64encode(hashlib.sha256(session.encode()).digest()[:6]).decode()


def event_key(session: str, event_id: str) -> str:
    """The key of an event that is no output: its id within its session."""
    return _key("e", session, [event_id])


def transaction_event_id(room: str, actor: str, client_transaction_id: str) -> str:
    """The id of a client transaction's event that was given none: 32 hexadecimal characters."""
    return hashlib.sha256(encode_json([room, actor, client_transaction_id])).hexdigest()[:_OWN_EVENT_ID_CHARS]


def collision_key(session: str, stored_key: str, incoming: str) -> str:
    """The key of a diagnostic: the same collision is told once, however often it is repeated, in copies too."""
    return _key("c", session, [stored_key, incoming])


def place_key(session: str, sequence: int) -> str:
    """What tells an event without a key from any other: its place in its session."""
    return _key("p", session, [sequence])


def output_key(session: str, type_: str, event_id: str, arrival: Arrival) -> str:
    """The key of an output: session, type, event id, and the part of it that this output is."""
    return _key("o", session, [type_, event_id, output_part(type_, arrival)])


def older_keys(session: str, type_: str, event_id: str, fields: Fields) -> list[str]:
    """The keys that older forms gave to an execution result: it had no phase."""
    return [_key("o", session, [type_, event_id, ["execution", fields.get("action")]])]


def output_part(type_: str, arrival: Arrival) -> Any:
    """Which part of its event an output is; `main` where an event has one part only."""
    fields = arrival.fields
    if type_ == "tool_call":
        return [
            "call",
            fields.get("tool_call_id"),
            fields.get("invocation"),
            fields.get("arguments_complete") is not False,
            _arguments_hash(arrival),
        ]
    if type_ in ("compaction_start", "compaction_end"):
        return ["compaction", fields.get("index")]
    if type_ == "execution_result":
        return ["execution", fields.get("action"), execution_phase(fields)]
    return "main"


def _arguments_hash(arrival: Arrival) -> str:
    if arrival.payload is not None:
        return arrival.payload.sha256
    arguments = arrival.fields.get("arguments")
    raw = arguments.encode() if type(arguments) is str else encode_json(arguments)
    return hashlib.sha256(raw).hexdigest()


def _key(kind: str, session: str, rest: list[Any]) -> str:
    whole = hashlib.sha256(encode_json([session, *rest])).digest()
    return f"{session_mark(session)}{kind}{urlsafe_b64encode(whole[:18]).decode()}"

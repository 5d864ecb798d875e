"""Version 1 of the fingerprint of an output. It never changes: stored fingerprints are compared with it for ever."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from .canonical import encode_json
from .records import JSON, TEXT, PayloadRef

VOLATILE = frozenset(
    (
        "attempt",
        "created_at",
        "received_at",
        "sent_at",
        "sequence",
        "span_id",
        "timestamp",
        "trace_id",
    )
)
"""Fields that a producer makes anew each time it sends the same event."""

_MARKS = {TEXT: "t", JSON: "j"}


def field_digests(event: Mapping[str, Any], body_field: str, payload: PayloadRef | None) -> dict[str, str]:
    """A mark of the kind and SHA-256 in hex of each field that is not volatile, by its name.

    `payload` is the value of `body_field` where that stands in the payload store; its digest is the same as if it
    stood in the event.
    """
    digests = {}
    for name, value in event.items():
        if name in VOLATILE:
            continue
        if type(value) is str:
            digests[name] = "t" + sha256(value.encode()).hexdigest()
        else:
            digests[name] = "j" + sha256(encode_json(value)).hexdigest()
    if payload is not None:
        mark = _MARKS.get(payload.content_type, payload.content_type)
        digests[body_field] = mark + payload.sha256
    return digests


def fingerprint(digests: Mapping[str, str]) -> str:
    """The fingerprint, in hex, of an event with these digests."""
    return sha256(encode_json(digests)).hexdigest()

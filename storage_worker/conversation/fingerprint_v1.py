"""Version 1 of the fingerprint of an output. It never changes: stored fingerprints are compared with it for ever."""

import hashlib
from collections.abc import Mapping
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


def field_digests(event: Mapping[str, Any], body_field: str, payload: PayloadRef | None) -> dict[str, str]:
    """SHA-256 in hex of each field that is not volatile, by its name.

    `payload` is the value of `body_field` where that stands in the payload store; its digest is the same as if it
    stood in the event.
    """
    digests = {name: _digest_of(value) for name, value in event.items() if name not in VOLATILE}
    if payload is not None:
        digests[body_field] = _digest(payload.content_type, payload.sha256)
    return digests


def fingerprint(digests: Mapping[str, str]) -> str:
    """The fingerprint, in hex, of an event with these digests."""
    whole = hashlib.sha256()
    for name in sorted(digests):
        raw = name.encode()
        # The length keeps a name from running into its digest, which is always as long.
        whole.update(b"%d:%b%b" % (len(raw), raw, digests[name].encode()))
    return whole.hexdigest()


def _digest_of(value: Any) -> str:
    if type(value) is str:
        return _digest(TEXT, hashlib.sha256(value.encode()).hexdigest())
    return _digest(JSON, hashlib.sha256(encode_json(value)).hexdigest())


def _digest(content_type: str, sha256: str) -> str:
    return hashlib.sha256(f"{content_type}\0{sha256}".encode()).hexdigest()

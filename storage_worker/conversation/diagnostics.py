"""What is stored of a collision: everything that tells two outputs apart, and nothing of their content."""

from typing import Any, NoReturn

from ..transaction import Transaction
from .bounds import RETENTION_DEFAULT
from .canonical import NO_CONTENT, encode_json, is_inline
from .errors import OutputIdentityCollisionError
from .events import Draft, find_by_key, write_event
from .identity import Comparison, Stored, collision_key, reduced_provenance
from .standing import read_standing
from .vocabulary import COLLISION


def refuse_collision(tx: Transaction, stored: Stored, comparison: Comparison, incoming: Draft) -> NoReturn:
    """Append the diagnostic of an output that came again with other content, and end the call with it.

    The same collision again finds its diagnostic there. Always raises `OutputIdentityCollisionError`, and what was
    written stays.
    """
    key = collision_key(stored.session, stored.key or "", comparison.incoming)
    found = find_by_key(tx, key)
    stream_id = found.stream_id if found else _append(tx, stored, comparison, incoming, key)
    names = ", ".join(name for name, _ in comparison.differences)
    error = OutputIdentityCollisionError(
        f"an output of type {incoming.type!r} came again under the identity of event {stored.stream_id} with other content"
        f" in: {names or 'fields that are not known'}; the first one stays as it is",
        details={
            "stream_id": stored.stream_id,
            "diagnostic_stream_id": stream_id,
            "session": stored.session,
            "fields": names,
            "fields_cut": comparison.is_cut,
        },
    )
    tx.fail(error, keep=True)


def _append(tx: Transaction, stored: Stored, comparison: Comparison, incoming: Draft, key: str) -> int:
    now = tx.now_ms()
    standing = read_standing(tx, stored.session)
    draft = Draft(
        session=stored.session,
        actor="",
        type=COLLISION,
        attributes=_told(stored, comparison, incoming),
        content=NO_CONTENT,
        retention_class=RETENTION_DEFAULT,
        created_ms=now,
        room_named=False,
        key=key,
    )
    stream_id = write_event(tx, draft, standing, stored.room)
    assert stream_id is not None, "its key was looked for"
    standing.save(tx, stored.room, now, None, "", None)
    return stream_id


def _told(stored: Stored, comparison: Comparison, incoming: Draft) -> str:
    """The JSON of what is told, with as many differences as stand in a row: names may take six bytes a character."""
    differences = [{"field": name, "change": change} for name, change in comparison.differences]
    told: dict[str, Any] = {
        # Not the stream id, which is another one in a copy of the store.
        "output_event_id": stored.event_id,
        "output_key": stored.key,
        "output_type": incoming.type,
        "fingerprint_version": comparison.version,
        "stored": {
            "fingerprint": comparison.stored,
            "provenance": reduced_provenance(stored.provenance),
        },
        "incoming": {
            "fingerprint": comparison.incoming,
            "provenance": reduced_provenance(incoming.provenance),
        },
        "differences": differences,
        "differences_cut": comparison.is_cut,
    }
    while differences and not is_inline(encode_json(told).decode()):
        differences.pop()
        told["differences_cut"] = True
    return encode_json(told).decode()

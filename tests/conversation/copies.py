"""An event as a copy of it comes from another store."""

from storage_worker.conversation import Sender
from storage_worker.conversation.event_restores import EventCopy

COPY = EventCopy(
    session="s",
    room="room",
    room_named=True,
    actor="",
    type="note",
    event_id=None,
    aggregate_kind="session",
    aggregate_id="s",
    version=1,
    client_transaction_id=None,
    idempotency_key=None,
    provenance=None,
    attributes_json="{}",
    added_json=None,
    content_type=None,
    body=None,
    preview="",
    retention_class="conversation",
    created_ms=5,
    sender=Sender(),
    role=None,
    turn_id=None,
)
"""One that says as little as an event can; tests change what they need."""

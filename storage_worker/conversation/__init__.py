"""The conversation store: rooms, sessions, an ordered event log, messages, observations and navigation.

Written on the public store API: every operation is a handler that sees a `Transaction` and nothing else, takes one
transaction, and may run again. A worker is told of it as `storage_worker.conversation:store`; a client calls
`client.call(conversation.admit("session", "hello"))`. Importing this loads no SQLite.

A body over 16 KiB goes through `payload_client`, or through `payload_client_async` in an event loop.
"""

from .arrivals import admit, ingest_user
from .errors import (
    EventConflictError,
    OutputIdentityCollisionError,
    PayloadNotFoundError,
    RoomNotFoundError,
    RoomReadOnlyError,
    SessionNotFoundError,
)
from .event_restores import find_message, restore_event, restore_thread
from .events import append, events, find
from .history import history
from .ingest import ingest_output
from .messages import messages
from .navigation import navigation, session_states
from .observations import observations
from .payload_check import PayloadFinding, PayloadsChecked, check_payloads
from .payload_client import PreparedText, prepare_text
from .payload_sweep import Swept, sweep_payloads
from .payloads import payload, payload_range
from .records import (
    Admitted,
    Appended,
    Body,
    Event,
    Historic,
    Ingested,
    Message,
    Navigation,
    Observation,
    Page,
    PayloadRef,
    Provenance,
    Room,
    Said,
    Sender,
    Session,
)
from .rooms import archive_room, create_room, resolve_room, restore_room, room, rooms
from .schema import store
from .session_restores import restore_session, restore_session_state
from .sessions import session, session_ids, sessions, set_session_status, upsert_session

__all__ = [
    "Admitted",
    "Appended",
    "Body",
    "Event",
    "EventConflictError",
    "Historic",
    "Ingested",
    "Message",
    "Navigation",
    "Observation",
    "OutputIdentityCollisionError",
    "Page",
    "PayloadFinding",
    "PayloadNotFoundError",
    "PayloadRef",
    "PayloadsChecked",
    "PreparedText",
    "Provenance",
    "Room",
    "RoomNotFoundError",
    "RoomReadOnlyError",
    "Said",
    "Sender",
    "Session",
    "SessionNotFoundError",
    "Swept",
    "admit",
    "append",
    "archive_room",
    "check_payloads",
    "create_room",
    "events",
    "find",
    "find_message",
    "history",
    "ingest_output",
    "ingest_user",
    "messages",
    "navigation",
    "observations",
    "payload",
    "payload_range",
    "prepare_text",
    "resolve_room",
    "restore_event",
    "restore_room",
    "restore_session",
    "restore_session_state",
    "restore_thread",
    "room",
    "rooms",
    "session",
    "session_ids",
    "session_states",
    "sessions",
    "set_session_status",
    "store",
    "sweep_payloads",
    "upsert_session",
]

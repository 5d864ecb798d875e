"""The failures that this store declares; none of them is retryable, since a repeat would fail in the same way."""

from ..protocol.errors import DeclaredError


class RoomNotFoundError(DeclaredError):
    """The room that was named does not exist. Create it, or name none to use the default room."""

    code = "room_not_found"


class RoomReadOnlyError(DeclaredError):
    """The room is archived and takes no more messages, also none that it has already."""

    code = "room_read_only"


class SessionNotFoundError(DeclaredError):
    """The session does not exist. Make it with `upsert_session`, or by its first event."""

    code = "session_not_found"


class EventConflictError(DeclaredError):
    """The client transaction id or the event id was used before for another event; `details` name that one."""

    code = "event_conflict"


class OutputIdentityCollisionError(DeclaredError):
    """An output came again under the same identity with other content.

    Nothing of the first one was touched. `details` name it and the diagnostic event that was stored, which tells
    both fingerprints and the fields that differ.
    """

    code = "output_identity_collision"


class PayloadNotFoundError(DeclaredError):
    """No such payload, or none any more: put the body again, and use the reference within the grace time."""

    code = "payload_not_found"

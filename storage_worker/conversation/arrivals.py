"""A user's messages: as they come in, and from history."""

import msgspec

from ..transaction import Transaction
from .bounds import RETENTION_DEFAULT
from .canonical import attributes_json, text_content
from .errors import RoomReadOnlyError
from .events import Draft, conflict, find_by_transaction, find_repeated, write_event
from .identity import Arrival, Stored, event_key, message_id, take_fingerprint, transaction_event_id
from .messages import Voice, message_of, write_message
from .records import (
    Admitted,
    Attributes,
    Binding,
    Body,
    Label,
    Name,
    Number,
    PayloadRef,
    Preview,
    Sender,
    Time,
)
from .rooms import require_room
from .schema import store
from .standing import Noted, Standing, read_standing
from .vocabulary import COMPLETE, IDLE, RUNNING, USER_MESSAGE

NOBODY = Sender()


class UserMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A user's message as its caller gave it."""

    session: str
    text: Body
    preview: str
    actor: str
    event_id: str | None
    turn_id: str | None
    client_transaction_id: str | None = None
    role: str
    sender: Sender
    thread_root: int | None
    attributes: Attributes | None
    runtime_binding: str | None
    retention_class: str
    created_ms: int | None
    room_named: bool
    is_copy: bool = False
    """Whether its thread may be known later than itself, and is none of what makes it the same message."""

    def arrival(self) -> Arrival:
        """Its content, to know it again."""
        fields = {
            "type": USER_MESSAGE,
            "attributes": self.attributes or {},
            "role": self.role,
            "turn_id": self.turn_id,
            "sender_label": self.sender.label,
            "source": self.sender.source,
            "agent_key": self.sender.agent_key,
        }
        if isinstance(self.text, PayloadRef):
            return Arrival(fields, "text", self.text)
        return Arrival(fields | {"text": self.text}, "text")


def store_message(tx: Transaction, message: UserMessage, standing: Standing, room: str) -> Admitted:
    """Store a message with its event, session and navigation, unless it is there already."""
    arrival = message.arrival()
    event_id = message.event_id or _own_event_id(tx, message, room)
    key = event_key(message.session, event_id)
    id_ = message_id(key)
    draft = Draft(
        session=message.session,
        actor=message.actor,
        type=USER_MESSAGE,
        attributes=attributes_json(message.attributes),
        content=text_content(message.text, message.preview),
        retention_class=message.retention_class,
        created_ms=tx.now_ms() if message.created_ms is None else message.created_ms,
        room_named=message.room_named,
        event_id=event_id,
        key=key,
        fingerprint=take_fingerprint(arrival),
        client_transaction_id=message.client_transaction_id,
        aggregate_kind="message",
        aggregate_id=id_,
    )
    stored = find_by_transaction(tx, draft, room, arrival)
    if stored is not None:
        return _admitted_before(tx, stored, message, "client transaction")
    stream_id = write_event(tx, draft, standing, room)
    if stream_id is None:
        return _admitted_before(tx, find_repeated(tx, draft, arrival), message, "event id")
    number = _write(tx, message, draft, standing, room, id_)
    return Admitted(
        stream_id,
        message.session,
        standing.sequence,
        room,
        event_id,
        draft.created_ms,
        True,
        id_,
        number,
    )


def _own_event_id(tx: Transaction, message: UserMessage, room: str) -> str:
    """The event id of a message that was given none: that of its client transaction, or a new one."""
    if message.client_transaction_id is None:
        return tx.new_id()
    return transaction_event_id(room, message.actor, message.client_transaction_id)


def _write(
    tx: Transaction, message: UserMessage, draft: Draft, standing: Standing, room: str, id_: str
) -> int:
    """Write what an event of a user leaves beside it; the number of its message."""
    now, preview = draft.created_ms, draft.content.preview
    voice = Voice(message.role, message.turn_id, message.sender, message.thread_root, COMPLETE)
    number = write_message(tx, draft, voice, standing, room, id_)
    standing.save(tx, room, now, RUNNING, preview, Noted(IDLE, preview, message.runtime_binding))
    return number


def _admitted_before(tx: Transaction, stored: Stored, message: UserMessage, by: str) -> Admitted:
    found = message_of(tx, stored.stream_id)
    # The thread is no part of the fingerprint: the number of a message is another one in a copy of the store.
    if found is None or not (message.is_copy or found.thread_root == message.thread_root):
        raise conflict(stored, by)
    return Admitted(
        stored.stream_id,
        stored.session,
        stored.sequence,
        stored.room,
        stored.event_id or str(stored.stream_id),
        stored.created_ms,
        False,
        found.id,
        found.number,
    )


@store.write
def admit(
    tx: Transaction,
    session: Name,
    text: Body,
    *,
    room: Name | None = None,
    actor: Label = "",
    client_transaction_id: Name | None = None,
    event_id: Name | None = None,
    turn_id: Name | None = None,
    role: Name = "user",
    sender: Sender = NOBODY,
    thread_root: Number | None = None,
    attributes: Attributes | None = None,
    runtime_binding: Binding | None = None,
    preview: Preview = "",
    retention_class: Name = RETENTION_DEFAULT,
) -> Admitted:
    """Take in a user's message: its event, session, message and navigation, in one transaction.

    Arguments: `text`, at most 16 KiB or a reference, whose `preview` is given with it; `room`, else the session's,
    else the default room; `client_transaction_id`, unique for the room and the actor, or `event_id`, unique in the
    session, by which a repeat is known; `thread_root`, the number in the room of the message that its thread begins
    with; `runtime_binding`, stored where the session has none. The session becomes `idle`, its navigation `running`.

    A repeat returns the first message with `created` false. Raises `RoomNotFoundError`, `RoomReadOnlyError` where the
    room is archived, also for a repeat, `EventConflictError` where a repeat has other content, and
    `RequestTooLargeError` where text or attributes are over 16 KiB.
    """
    standing = read_standing(tx, session)
    room_id = standing.room_of(tx, room)
    if require_room(tx, room_id).archived_ms is not None:
        raise RoomReadOnlyError(
            f"the room {room_id!r} is archived and takes no more messages of users; `find` tells whether this one was"
            " stored before",
            details={"room": room_id},
        )
    message = UserMessage(
        session=session,
        text=text,
        preview=preview,
        actor=actor,
        event_id=event_id,
        turn_id=turn_id,
        client_transaction_id=client_transaction_id,
        role=role,
        sender=sender,
        thread_root=thread_root,
        attributes=attributes,
        runtime_binding=runtime_binding,
        retention_class=retention_class,
        created_ms=None,
        room_named=room is not None,
    )
    return store_message(tx, message, standing, room_id)


@store.write
def ingest_user(
    tx: Transaction,
    session: Name,
    text: Body,
    *,
    event_id: Name | None = None,
    room: Name | None = None,
    actor: Label = "",
    client_transaction_id: Name | None = None,
    turn_id: Name | None = None,
    role: Name = "user",
    sender: Sender = NOBODY,
    thread_root: Number | None = None,
    attributes: Attributes | None = None,
    runtime_binding: Binding | None = None,
    preview: Preview = "",
    retention_class: Name = RETENTION_DEFAULT,
    created_ms: Time | None = None,
) -> Admitted:
    """Store a user's message from history, also in an archived room.

    It is known again by its `event_id` in the session, or by its `client_transaction_id` as for `admit`; with neither
    it is stored each time. `created_ms` is when it was said, in milliseconds since 1970 in UTC; now where it is not
    told. All else is as for `admit`.
    """
    message = UserMessage(
        session=session,
        text=text,
        preview=preview,
        actor=actor,
        event_id=event_id,
        turn_id=turn_id,
        client_transaction_id=client_transaction_id,
        role=role,
        sender=sender,
        thread_root=thread_root,
        attributes=attributes,
        runtime_binding=runtime_binding,
        retention_class=retention_class,
        created_ms=created_ms,
        room_named=room is not None,
    )
    standing = read_standing(tx, session)
    return store_message(tx, message, standing, standing.room_of(tx, room))

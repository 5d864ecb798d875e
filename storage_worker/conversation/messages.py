"""Messages: what users and agents said, numbered in their room and in their session."""

from typing import Any, Final, NamedTuple

import msgspec

from ..protocol.errors import InvalidRequestError
from ..transaction import Transaction
from . import payloads
from .bounds import PAGE_BYTES_DEFAULT, PAGE_ROWS_DEFAULT
from .canonical import EMPTY_TEXT, NO_CONTENT, REFERENCE_COLUMNS
from .events import Draft
from .pages import Listing, LogListing, prefixed, record_of
from .records import Cursor, Message, Name, Page, PageBytes, PageRows, Sender
from .schema import store
from .standing import Standing

_COLUMNS = (
    "stream_id, id, room_id, number, session_id, sequence, role, turn_id, actor, sender_label, source, agent_key,"
    f" thread_root, status, content_type, body, preview, created_ms, {REFERENCE_COLUMNS}"
)
_TEXTS = (
    "id, room_id, session_id, role, turn_id, actor, sender_label, source, agent_key, status, preview,"
    " content_type, retention_class, body"
)
_INSERT = (
    "insert into conversation_messages(stream_id, id, room_id, number, session_id, sequence, role, turn_id, actor,"
    " sender_label, source, agent_key, thread_root, status, preview, created_ms, content_type, retention_class, body,"
    " payload_sha256, payload_bytes, payload_stored_bytes, payload_encoding)"
    " values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_OF_EVENT = "select id, number, thread_root from conversation_messages where stream_id = ?"


def _message(row: tuple[Any, ...]) -> Message:
    return record_of(Message, 15, row)


_OF_SESSION: Final = LogListing(
    "conversation_messages", prefixed("t", _COLUMNS), prefixed("t", _TEXTS), _message
)
_OF_ROOM: Final = Listing("conversation_messages", "number", _COLUMNS, _TEXTS, _message, "room_id")


class Voice(msgspec.Struct, frozen=True):
    """Who says a message, to whom it answers: everything that its event does not say."""

    role: str
    turn_id: str | None
    sender: Sender
    thread_root: int | None
    status: str


def write_message(
    tx: Transaction, draft: Draft, voice: Voice, standing: Standing, room: str, id_: str
) -> int:
    """Write the message of the event that was just written; its number in the room."""
    number = standing.next_message(tx, room)
    sender = voice.sender
    content = EMPTY_TEXT if draft.content is NO_CONTENT else draft.content
    tx.execute(
        _INSERT,
        (
            standing.stream_id,
            id_,
            room,
            number,
            draft.session,
            standing.message,
            voice.role,
            voice.turn_id,
            draft.actor,
            sender.label,
            sender.source,
            sender.agent_key,
            voice.thread_root,
            voice.status,
            content.preview,
            draft.created_ms,
            *content.columns(draft.retention_class),
        ),
    )
    if content.ref is not None:
        payloads.commit(tx, content.ref)
    return number


class MessageNumber(NamedTuple):
    """A message's id, its number in the room, and that of the message which its thread begins with."""

    id: str
    number: int
    thread_root: int | None


def message_of(tx: Transaction, stream_id: int) -> MessageNumber | None:
    """The message of an event, or None where it has none."""
    rows = tx.rows(_OF_EVENT, (stream_id,))
    return MessageNumber(*rows[0]) if rows else None


@store.read
def messages(
    tx: Transaction,
    session: Name | None = None,
    room: Name | None = None,
    after: Cursor = 0,
    page_rows: PageRows = PAGE_ROWS_DEFAULT,
    page_bytes: PageBytes = PAGE_BYTES_DEFAULT,
    newest_first: bool = False,
) -> Page[Message]:
    """A page of messages, of a session or of a room, in their order there; `after` is the last page's cursor.

    Raises `InvalidRequestError` where not exactly one of session and room is named.
    """
    if session is not None and room is None:
        return _OF_SESSION.page(tx, after, page_rows, page_bytes, newest_first=newest_first, scope=(session,))
    if room is not None and session is None:
        return _OF_ROOM.page(tx, after, page_rows, page_bytes, newest_first=newest_first, scope=(room,))
    raise InvalidRequestError("messages are those of a session or of a room; name one of the two")

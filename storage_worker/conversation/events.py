"""The event log: appended in one order for all sessions and one for each, and never changed."""

from typing import Any, Final

import msgspec

from ..transaction import Transaction
from . import payloads
from .bounds import PAGE_BYTES_DEFAULT, PAGE_ROWS_DEFAULT, RETENTION_DEFAULT
from .canonical import NO_CONTENT, REFERENCE_COLUMNS, Content, attributes_json, text_content
from .errors import EventConflictError
from .identity import NO_FINGERPRINT, Arrival, Fingerprint, Stored, compare, event_key, take_fingerprint
from .pages import Listing, record_of
from .records import (
    Appended,
    Attributes,
    Body,
    Cursor,
    Event,
    Label,
    Name,
    Page,
    PageBytes,
    PageRows,
    PayloadRef,
    Preview,
    Time,
)
from .rooms import find_default_room
from .schema import store
from .standing import Noted, Standing, read_standing

COLUMNS = (
    "stream_id, session_id, sequence, room_id, actor, type, event_id, aggregate_kind, aggregate_id, version,"
    " client_transaction_id, idempotency_key, provenance, attributes, content_type, body, preview, retention_class,"
    f" created_ms, added, room_named, {REFERENCE_COLUMNS}"
)
_ROOM_NAMED_AT = COLUMNS.split(", ").index("room_named")
TEXTS = (
    "session_id, room_id, actor, type, event_id, aggregate_kind, aggregate_id, client_transaction_id,"
    " idempotency_key, provenance, attributes, added, preview, content_type, retention_class, body"
)
_INSERT = (
    "insert into conversation_events(stream_id, session_id, sequence, room_id, actor, type, event_id,"
    " aggregate_kind, aggregate_id, version, client_transaction_id, idempotency_key, fingerprint,"
    " fingerprint_version, field_digests, provenance, attributes, preview, created_ms, content_type, retention_class,"
    " body, payload_sha256, payload_bytes, payload_stored_bytes, payload_encoding, added, room_named)"
    " values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " on conflict (idempotency_key) where idempotency_key is not null do nothing"
)
_STORED = (
    "select stream_id, session_id, sequence, room_id, event_id, client_transaction_id, created_ms, fingerprint,"
    " fingerprint_version, field_digests, provenance, idempotency_key from conversation_events"
)
_BY_KEY = f"{_STORED} where idempotency_key = ?"
_OF_TRANSACTION = "room_id = ? and actor = ? and client_transaction_id = ?"
_BY_TRANSACTION = f"{_STORED} where {_OF_TRANSACTION}"
_ONE = f"select {COLUMNS} from conversation_events where stream_id = ?"  # noqa: S608 - of constants
_FIND = f"select {COLUMNS} from conversation_events where {_OF_TRANSACTION}"  # noqa: S608 - of constants


def event_of(row: tuple[Any, ...]) -> Event:
    """The event of a row of `COLUMNS`."""
    at = _ROOM_NAMED_AT
    return record_of(Event, 15, (*row[:at], row[at] == 1, *row[at + 1 :]))


_ALL: Final = Listing("conversation_events", "stream_id", COLUMNS, TEXTS, event_of)
_OF_SESSION: Final = Listing("conversation_events", "sequence", COLUMNS, TEXTS, event_of, "session_id")


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """An event that is about to be appended: everything but its place.

    `attributes` are their JSON as they arrived, `added` that of those which the store adds; `room_named` says whether
    the caller named the room.
    """

    session: str
    actor: str
    type: str
    attributes: str
    content: Content
    retention_class: str
    created_ms: int
    room_named: bool
    event_id: str | None = None
    key: str | None = None
    fingerprint: Fingerprint | None = None
    client_transaction_id: str | None = None
    aggregate_kind: str = "session"
    aggregate_id: str | None = None
    version: int = 1
    provenance: str | None = None
    added: str | None = None


def write_event(tx: Transaction, draft: Draft, standing: Standing, room: str) -> int | None:
    """Append an event and move its session on; its stream id, or None where another event has its key already."""
    known = draft.fingerprint or NO_FINGERPRINT
    stream_id, sequence = (standing.stream_id or 0) + 1, standing.sequence + 1
    values = (
        stream_id,
        draft.session,
        sequence,
        room,
        draft.actor,
        draft.type,
        draft.event_id,
        draft.aggregate_kind,
        draft.session if draft.aggregate_id is None else draft.aggregate_id,
        draft.version,
        draft.client_transaction_id,
        draft.key,
        known.fingerprint,
        known.version,
        known.digests,
        draft.provenance,
        draft.attributes,
        draft.content.preview,
        draft.created_ms,
        *draft.content.columns(draft.retention_class),
        draft.added,
        1 if draft.room_named else 0,
    )
    if not tx.execute(_INSERT, values).rows_changed:
        return None
    standing.stream_id, standing.sequence = stream_id, sequence
    if draft.content.ref is not None:
        payloads.commit(tx, draft.content.ref)
    return stream_id


def read_event(tx: Transaction, stream_id: int) -> Event:
    """The event with a stream id that is known to be there."""
    return event_of(tx.rows(_ONE, (stream_id,))[0])


def find_by_key(tx: Transaction, key: str) -> Stored | None:
    """What is stored under an idempotency key."""
    return _stored(tx.rows(_BY_KEY, (key,)))


def _stored(rows: list[tuple[Any, ...]]) -> Stored | None:
    return Stored(*rows[0]) if rows else None


def find_by_transaction(tx: Transaction, draft: Draft, room: str, arrival: Arrival) -> Stored | None:
    """The event of a draft's client transaction, or None; `EventConflictError` where it is not the same event.

    The event id does not count: who repeats a transaction may have made a new one.
    """
    if draft.client_transaction_id is None:
        return None
    values = (room, draft.actor, draft.client_transaction_id)
    stored = _stored(tx.rows(_BY_TRANSACTION, values))
    return stored and same_or_conflict(stored, draft.session, arrival, "client transaction")


def find_repeated(tx: Transaction, draft: Draft, arrival: Arrival) -> Stored:
    """The event that has a draft's key; `EventConflictError` where it is not the same event."""
    stored = find_by_key(tx, draft.key or "")
    assert stored is not None, "an insert found the key taken"
    if draft.client_transaction_id is not None:
        # It is another transaction's, or none's, and would not be found by this one later.
        raise conflict(stored, "event id")
    return same_or_conflict(stored, draft.session, arrival, "event id")


def same_or_conflict(stored: Stored, session: str, arrival: Arrival, by: str) -> Stored:
    """The stored event where an arrival is the same; else `EventConflictError`."""
    if stored.session != session or not compare(stored, arrival).is_same:
        raise conflict(stored, by)
    return stored


_OWN_ACTOR = ", or an `actor` of its own: it is unique for the room and the actor"


def conflict(stored: Stored, by: str) -> EventConflictError:
    """The error of an event whose transaction or id is that of another one."""
    return EventConflictError(
        f"another event of the session {stored.session!r} has this {by} already, with other content; what is no repeat"
        f" takes a new {by}{_OWN_ACTOR if by == 'client transaction' else ''}",
        details={"stream_id": stored.stream_id, "session": stored.session, "by": by},
    )


def appended(stored: Stored) -> Appended:
    """Where an event stands that was there before."""
    return Appended(
        stored.stream_id,
        stored.session,
        stored.sequence,
        stored.room,
        stored.event_id or str(stored.stream_id),
        stored.created_ms,
        False,
    )


@store.write
def append(
    tx: Transaction,
    session: Name,
    event_type: Name,
    attributes: Attributes | None = None,
    body: Body | None = None,
    *,
    room: Name | None = None,
    actor: Label = "",
    client_transaction_id: Name | None = None,
    event_id: Name | None = None,
    aggregate_kind: Name = "session",
    aggregate_id: Name | None = None,
    version: Cursor = 1,
    preview: Preview = "",
    retention_class: Name = RETENTION_DEFAULT,
    created_ms: Time | None = None,
) -> Appended:
    """Append one event.

    A repeat, known by `room`, `actor` and `client_transaction_id`, else by `event_id` within its session, returns the
    first one; with neither the event is stored each time. `body` is a text of at most 16 KiB or a reference, whose
    `preview` is given with it; `aggregate_id` is the session where it is not told; `created_ms` is now.

    Raises `EventConflictError` where a repeat has other content, `RoomNotFoundError`, `RequestTooLargeError` where
    attributes or body are over 16 KiB.
    """
    draft = Draft(
        session=session,
        actor=actor,
        type=event_type,
        attributes=attributes_json(attributes),
        content=NO_CONTENT if body is None else text_content(body, preview),
        retention_class=retention_class,
        created_ms=tx.now_ms() if created_ms is None else created_ms,
        room_named=room is not None,
        event_id=event_id,
        key=None if event_id is None else event_key(session, event_id),
        client_transaction_id=client_transaction_id,
        aggregate_kind=aggregate_kind,
        aggregate_id=aggregate_id,
        version=version,
    )
    return append_once(tx, draft, arrival_of(draft, attributes, body), room, Noted())


def arrival_of(draft: Draft, attributes: Attributes | None, body: Body | None) -> Arrival:
    """The content of an event that is no output and no message, to know it again."""
    fields = {
        "type": draft.type,
        "attributes": attributes or {},
        "aggregate_kind": draft.aggregate_kind,
        # Told or not, its session is the same.
        "aggregate_id": draft.session if draft.aggregate_id is None else draft.aggregate_id,
        "version": draft.version,
    }
    if isinstance(body, PayloadRef):
        return Arrival(fields, "body", body)
    return Arrival(fields if body is None else fields | {"body": body}, "body")


def append_once(
    tx: Transaction, draft: Draft, arrival: Arrival, room: str | None, noted: Noted | None
) -> Appended:
    """Store an event unless it is there already, with what is `noted` in its session; where it stands."""
    draft = msgspec.structs.replace(draft, fingerprint=take_fingerprint(arrival))
    standing = read_standing(tx, draft.session)
    room_id = standing.room_of(tx, room)
    stored = find_by_transaction(tx, draft, room_id, arrival)
    if stored is not None:
        return appended(stored)
    stream_id = write_event(tx, draft, standing, room_id)
    if stream_id is None:
        return appended(find_repeated(tx, draft, arrival))
    standing.save(tx, room_id, draft.created_ms, None, "", noted)
    return Appended(
        stream_id,
        draft.session,
        standing.sequence,
        room_id,
        draft.event_id or str(stream_id),
        draft.created_ms,
        True,
    )


@store.read
def find(
    tx: Transaction, client_transaction_id: Name, actor: Label = "", room: Name | None = None
) -> Event | None:
    """The event of a client transaction in a room, the default one where none is named; None where there is none."""
    if room is None:
        default = find_default_room(tx)
        if default is None:
            return None
        room = default.id
    rows = tx.rows(_FIND, (room, actor, client_transaction_id))
    return event_of(rows[0]) if rows else None


@store.read
def events(
    tx: Transaction,
    session: Name | None = None,
    after: Cursor = 0,
    page_rows: PageRows = PAGE_ROWS_DEFAULT,
    page_bytes: PageBytes = PAGE_BYTES_DEFAULT,
    newest_first: bool = False,
) -> Page[Event]:
    """A page of events: of one session by their sequence, or of all by their stream id.

    `after` is the last page's cursor, 0 for the first page; `page_bytes` bounds the page, which always has one
    event where there is one.
    """
    if session is None:
        return _ALL.page(tx, after, page_rows, page_bytes, newest_first=newest_first)
    return _OF_SESSION.page(tx, after, page_rows, page_bytes, newest_first=newest_first, scope=(session,))

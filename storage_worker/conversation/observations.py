"""Observations: what happened inside a turn beside its messages."""

from typing import Any, Final

from ..transaction import Transaction
from .bounds import PAGE_BYTES_DEFAULT, PAGE_ROWS_DEFAULT
from .canonical import REFERENCE_COLUMNS
from .pages import TEXT_PARAMETER, LogListing, record_of
from .records import Cursor, Name, Observation, Page, PageBytes, PageRows
from .schema import store
from .vocabulary import PARTIAL, EventType, Fields, status_of, text_of

_COLUMNS = (
    "t.stream_id, t.id, t.session_id, t.kind, t.turn_id, t.tool_call_id, t.invocation, t.status, e.attributes,"
    f" e.content_type, e.body, e.created_ms, e.added, {', '.join(f'e.{each.strip()}' for each in REFERENCE_COLUMNS.split(','))}"
)
_INSERT = (
    "insert into conversation_observations(stream_id, id, session_id, kind, turn_id, tool_call_id, invocation, status)"
    " values (?, ?, ?, ?, ?, ?, ?, ?)"
)
_OF_CALL = f"session_id = {TEXT_PARAMETER} and tool_call_id = {TEXT_PARAMETER}"
_LAST = f"select max(invocation) from conversation_observations where {_OF_CALL}"  # noqa: S608 - of constants
_LAST_OF = (
    f"select kind, status from conversation_observations where {_OF_CALL} and invocation = ?"  # noqa: S608
    " order by stream_id desc limit 1"
)

INVOCATION_MAX: Final = 2**53
"""The largest ordinal that is believed: whole numbers are exact in every JSON up to this."""

_OF_EVENT = "select id from conversation_observations where stream_id = ?"


def _observation(row: tuple[Any, ...]) -> Observation:
    return record_of(Observation, 10, row)


_OF_SESSION: Final = LogListing(
    "conversation_observations",
    _COLUMNS,
    "t.id, t.session_id, t.kind, t.turn_id, t.tool_call_id, t.status, e.attributes, e.added, e.content_type,"
    " e.retention_class, e.body",
    _observation,
)


def write_observation(
    tx: Transaction, stream_id: int, id_: str, session: str, kind: EventType, fields: Fields
) -> None:
    """Write the observation of an event."""
    tool_call_id = text_of(fields, "tool_call_id")
    status = status_of(kind.kind, fields)
    invocation = None
    if tool_call_id is not None:
        invocation = _invocation(tx, session, kind.kind, tool_call_id, fields)
    tx.execute(
        _INSERT,
        (stream_id, id_, session, kind.kind, text_of(fields, "turn_id"), tool_call_id, invocation, status),
    )


def _invocation(tx: Transaction, session: str, kind: str, tool_call_id: str, fields: Fields) -> int:
    """Which call of this id it is: as the event says, else by order, since the same id comes again and again.

    A call is a new one unless the last one's arguments were still incomplete; all else belongs to the last call.
    """
    told = fields.get("invocation")
    if type(told) is int and 0 <= told <= INVOCATION_MAX:
        return told
    last = tx.scalar(_LAST, (session, tool_call_id))
    if last is None:
        return 1
    if kind != "tool_call":
        return int(last)
    found = tx.rows(_LAST_OF, (session, tool_call_id, last))[0]
    return int(last) if found == ("tool_call", PARTIAL) else int(last) + 1


def observation_of(tx: Transaction, stream_id: int) -> str | None:
    """The id of the observation of an event, or None."""
    rows = tx.rows(_OF_EVENT, (stream_id,))
    return str(rows[0][0]) if rows else None


@store.read
def observations(
    tx: Transaction,
    session: Name,
    after: Cursor = 0,
    page_rows: PageRows = PAGE_ROWS_DEFAULT,
    page_bytes: PageBytes = PAGE_BYTES_DEFAULT,
    newest_first: bool = False,
) -> Page[Observation]:
    """A page of a session's observations in their order; `after` is the last page's cursor."""
    return _OF_SESSION.page(tx, after, page_rows, page_bytes, newest_first=newest_first, scope=(session,))

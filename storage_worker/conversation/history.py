"""The log with everything that a copy of it needs: each event with what is stored of its message."""

from typing import Any, Final

from ..protocol.errors import InvalidRequestError
from ..transaction import Transaction
from .bounds import PAGE_BYTES_DEFAULT, PAGE_ROWS_DEFAULT
from .events import COLUMNS, TEXTS, event_of
from .pages import Listing, WindowListing, prefixed
from .records import (
    Cursor,
    Historic,
    MessagePlace,
    Name,
    Page,
    PageBytes,
    PageRows,
    Said,
)
from .schema import store

_SAID: Final = "id, number, sequence, role, turn_id, sender_label, source, agent_key, thread_root, status"
_SAID_COUNT: Final = len(_SAID.split(","))
_ROOT: Final = "r.id, f.session_id, f.sequence, f.created_ms"
_ROOT_COUNT: Final = len(_ROOT.split(","))

_SOURCE: Final = (
    "conversation_events e left join conversation_messages m on m.stream_id = e.stream_id"
    " left join conversation_messages r on r.room_id = m.room_id and r.number = m.thread_root"
    " left join conversation_events f on f.stream_id = r.stream_id"
)
_COLUMNS: Final = f"{prefixed('m', _SAID)}, {_ROOT}, {prefixed('e', COLUMNS)}"
_SAID_TEXTS: Final = "id, role, turn_id, sender_label, source, agent_key, status"
_TEXTS: Final = f"{prefixed('e', TEXTS)}, {prefixed('m', _SAID_TEXTS)}, r.id, f.session_id"


def _historic(row: tuple[Any, ...]) -> Historic:
    said: list[Any] = list(row[:_SAID_COUNT])
    root, rest = row[_SAID_COUNT : _SAID_COUNT + _ROOT_COUNT], row[_SAID_COUNT + _ROOT_COUNT :]
    if said[0] is None:
        return Historic(event_of(rest), None)
    said.append(None if root[0] is None else MessagePlace(*root))
    return Historic(event_of(rest), Said(*said))


_ALL: Final = Listing(_SOURCE, "e.stream_id", _COLUMNS, _TEXTS, _historic)
_OF_SESSION: Final = Listing(_SOURCE, "e.sequence", _COLUMNS, _TEXTS, _historic, "e.session_id")
_OF_ROOM: Final = WindowListing(
    _SOURCE,
    "e.stream_id",
    _COLUMNS,
    _TEXTS,
    _historic,
    "e.room_id",
    "select max(stream_id) from conversation_events",
)


@store.read
def history(
    tx: Transaction,
    session: Name | None = None,
    after: Cursor = 0,
    page_rows: PageRows = PAGE_ROWS_DEFAULT,
    page_bytes: PageBytes = PAGE_BYTES_DEFAULT,
    room: Name | None = None,
) -> Page[Historic]:
    """A page of events with their messages: of one session by their sequence, or of a room or of all by their stream id.

    Arguments as of `events`. Events of a room are looked for in the log: a page can be empty and say that there is
    more. Raises `InvalidRequestError` where both a session and a room are named.
    """
    if session is not None and room is not None:
        raise InvalidRequestError("history is of a session or of a room; name one of the two")
    if room is not None:
        return _OF_ROOM.page(tx, after, page_rows, page_bytes, scope=(room,))
    if session is None:
        return _ALL.page(tx, after, page_rows, page_bytes)
    return _OF_SESSION.page(tx, after, page_rows, page_bytes, scope=(session,))

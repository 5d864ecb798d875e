from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage_worker import conversation
from storage_worker.conversation import pages
from storage_worker.conversation.bounds import NAME_CHARS_MAX, PAGE_BYTES_DEFAULT, ROW_BYTES_MAX
from storage_worker.conversation.records import Page, PayloadRef, Sender
from storage_worker.protocol.errors import InvalidRequestError, ResultTooLargeError
from storage_worker.protocol.limits import DEFAULT_LIMITS, INLINE_BYTES_MAX
from storage_worker.store import StoreOperation
from storage_worker.transaction import Transaction

from .desk import ROOM, Desk, desk_at

Reader = Callable[..., Page[Any]]


def reader(desk: Desk, operation: StoreOperation[..., Any], **scope: Any) -> Reader:
    return lambda **options: operation.handler(desk.tx, **scope, **options)


def read_all(read: Reader, between: Callable[[], object] = lambda: None, **options: Any) -> list[Any]:
    """Every item of a listing, page by page; `between` is called between pages."""
    found: list[Any] = []
    after = 0
    while True:
        page = read(after=after, **options)
        found += page.items
        if not page.more:
            return found
        assert page.items
        after = page.cursor
        between()


def fill(desk: Desk, count: int) -> dict[str, Reader]:
    """All listings, each of so many items."""
    for number in range(count):
        session = f"s{number}"
        desk.admit(f"message {number}", session=session, room=ROOM)
        desk.admit(f"message {number}")
        desk.output("reasoning", text=str(number))
    for number in range(count - 1):
        conversation.create_room.handler(desk.tx, f"r{number}")
    return {
        "events": reader(desk, conversation.events, session="s"),
        "all events": reader(desk, conversation.events),
        "messages of a session": reader(desk, conversation.messages, session="s"),
        "messages of a room": reader(desk, conversation.messages, room=ROOM),
        "observations": reader(desk, conversation.observations, session="s"),
        "rooms": reader(desk, conversation.rooms),
        "sessions": reader(desk, conversation.sessions),
        "sessions of a room": reader(desk, conversation.sessions, room=ROOM),
        "navigation": reader(desk, conversation.navigation),
        "navigation of a room": reader(desk, conversation.navigation, room=ROOM),
    }


def test_every_listing_in_pages_of_every_size(desk: Desk) -> None:
    for name, read in fill(desk, 7).items():
        everything = read().items
        assert len(everything) >= 7, name
        assert len(set(everything)) == len(everything), name
        for rows in (1, 2, 3, 7, 50):
            assert read_all(read, page_rows=rows) == everything, name
            newest = read_all(read, page_rows=rows, newest_first=True)
            assert newest == everything[::-1], name


def test_the_cursor_goes_on_behind_the_last_page(desk: Desk) -> None:
    for name, read in fill(desk, 3).items():
        last = read()
        assert not last.more
        empty = read(after=last.cursor)
        assert (empty.items, empty.more, empty.cursor) == ([], False, last.cursor), name
    read = reader(desk, conversation.events, session="s")
    cursor = read().cursor
    added = desk.append()
    assert [event.stream_id for event in read(after=cursor).items] == [added.stream_id]


def key_of(item: Any) -> int:
    return int(item.stream_id if hasattr(item, "stream_id") else item.number)


def test_nothing_is_repeated_or_skipped_while_others_append(desk: Desk) -> None:
    listings = fill(desk, 5)

    for name, read in listings.items():
        before = [key_of(each) for each in read().items]
        times = iter(range(4))

        def append(times: Iterator[int] = times) -> None:
            if next(times, None) is not None:
                desk.admit("more", room=ROOM)
                desk.output("reasoning")
                desk.admit("elsewhere", session=f"new {len(desk.events(None))}", room=ROOM)

        keys = [key_of(each) for each in read_all(read, append, page_rows=2)]
        assert keys[: len(before)] == before, name
        assert len(set(keys)) == len(keys), name
        assert len(keys) > len(before) or name == "rooms", name


@pytest.mark.parametrize("bytes_max", [1, 2_000, 40_000])
def test_pages_are_bounded_by_bytes_and_always_go_on(desk: Desk, bytes_max: int) -> None:
    sizes = [10, INLINE_BYTES_MAX, 10, 10, INLINE_BYTES_MAX, INLINE_BYTES_MAX, 5]
    for size in sizes:
        desk.admit("x" * size, room=ROOM)
    for operation, scope in (
        (conversation.events, {"session": "s"}),
        (conversation.messages, {"room": ROOM}),
    ):
        read = reader(desk, operation, **scope)
        pages: list[int] = []

        def noting(read: Reader = read, pages: list[int] = pages, **options: Any) -> Page[Any]:
            page = read(**options)
            size = sum(len(str(getattr(each, "text", None) or each.body)) for each in page.items)
            pages.append(len(page.items))
            assert size <= bytes_max or len(page.items) == 1
            return page

        assert len(read_all(noting, page_bytes=bytes_max)) == len(sizes)
        assert all(pages)


@pytest.mark.usefixtures("committed")
@pytest.mark.parametrize("longest", [True, False])
def test_the_encoded_records_of_a_page_are_within_its_bytes(desk: Desk, longest: bool) -> None:
    name = "\N{GRINNING FACE}" * NAME_CHARS_MAX if longest else "n"
    ref = PayloadRef("0" * 64, name, name, 2**60, 2**60, "identity")
    names = dict.fromkeys(("actor", "aggregate_kind", "aggregate_id", "room"), name)
    sender = Sender(name, name, name)
    conversation.create_room.handler(desk.tx, name, name)
    for number in range(12):
        own = f"{number:02}{name[2:]}"
        body = ref if number % 2 else name
        names |= {"client_transaction_id": own, "event_id": own}
        desk.append(own, session=name, body=body, preview=name if number % 2 else "", **names)
        desk.output(
            "tool_call", session=name, tool_call_id=name, turn_id=name, text=name, arguments=[0.5] * 20
        )
        desk.ingest_user(body, session=name, room=name, sender=sender, turn_id=name, role=name, thread_root=1)
        desk.admit(name, session=own, room=name, actor=name, runtime_binding=name)
    bytes_max = 150_000 if longest else 3_000
    for operation, scope in (
        (conversation.events, {}),
        (conversation.events, {"session": name}),
        (conversation.history, {}),
        (conversation.history, {"session": name}),
        (conversation.history, {"room": name}),
        (conversation.messages, {"session": name}),
        (conversation.messages, {"room": name}),
        (conversation.observations, {"session": name}),
        (conversation.sessions, {}),
        (conversation.navigation, {}),
        (conversation.rooms, {}),
    ):
        page = reader(desk, operation, **scope)(page_bytes=bytes_max)
        assert page.items
        assert len(msgspec.msgpack.encode(page.items)) <= bytes_max
        for item in page.items:
            assert len(msgspec.msgpack.encode(item)) <= ROW_BYTES_MAX


def test_a_page_is_bounded_by_what_the_request_allows(desk: Desk) -> None:
    for _ in range(40):
        desk.append(body="\N{GRINNING FACE}" * 1000, attributes={"a": "ä" * 1000})
    statements = desk.tx._statements
    small = Transaction(statements, 50_000, reads=True)
    page = conversation.events.handler(small, "s")
    assert page.more
    assert 5 <= len(page.items) <= 9
    tiny = Transaction(statements, 1_000, reads=True)
    with pytest.raises(ResultTooLargeError):
        conversation.events.handler(tiny, "s")


def test_a_default_page_fits_a_default_result() -> None:
    assert DEFAULT_LIMITS.result_bytes_default > PAGE_BYTES_DEFAULT + ROW_BYTES_MAX


def test_messages_are_of_a_session_or_of_a_room(desk: Desk) -> None:
    for session, room in ((None, None), ("s", ROOM)):
        with pytest.raises(InvalidRequestError):
            conversation.messages.handler(desk.tx, session, room)


def test_what_is_not_there_is_an_empty_page(desk: Desk) -> None:
    empty: list[tuple[StoreOperation[..., Any], dict[str, str]]] = [
        (conversation.events, {"session": "no"}),
        (conversation.messages, {"session": "no"}),
        (conversation.messages, {"room": "no"}),
        (conversation.observations, {"session": "no"}),
        (conversation.sessions, {"room": "no"}),
        (conversation.navigation, {"room": "no"}),
    ]
    for operation, scope in empty:
        page = operation.handler(desk.tx, **scope)
        assert (page.items, page.cursor, page.more) == ([], 0, False)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 3_000), max_size=25),
    rows=st.integers(1, 10),
    bytes_max=st.integers(1, 9_000),
    newest_first=st.booleans(),
)
def test_any_bounds_give_every_event_once(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    rows: int,
    bytes_max: int,
    newest_first: bool,
) -> None:
    with desk_at(tmp_path_factory.mktemp("pages") / "app.db") as desk:
        for size in sizes:
            desk.append(body="x" * size)
        read = reader(desk, conversation.events, session="s")
        found = read_all(read, page_rows=rows, page_bytes=bytes_max, newest_first=newest_first)
        expected = list(range(1, len(sizes) + 1))
        assert [event.sequence for event in found] == (expected[::-1] if newest_first else expected)


def test_what_events_left_is_found_however_rare_it_is(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "WINDOW_EVENTS", 3)
    monkeypatch.setattr(pages, "WINDOWS_MAX", 2)
    at = {5, 6, 20, 21, 22, 23, 40}
    for number in range(1, 50):
        if number in at:
            desk.admit(f"message {number}")
        else:
            desk.append()
    read = reader(desk, conversation.messages, session="s")
    for newest_first in (False, True):
        for rows in (1, 2, 100):
            found: list[Any] = []
            after, empty = 0, 0
            while True:
                page = read(after=after, page_rows=rows, newest_first=newest_first)
                assert len(page.items) <= rows
                found += page.items
                empty += not page.items
                if not page.more:
                    break
                assert page.cursor != after
                after = page.cursor
            expected = [f"message {number}" for number in sorted(at, reverse=newest_first)]
            assert [message.text for message in found] == expected
            assert empty <= 50 / 6 + 1


def test_events_of_a_room_are_found_however_rare_they_are(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "WINDOW_EVENTS", 3)
    monkeypatch.setattr(pages, "WINDOWS_MAX", 2)
    conversation.create_room.handler(desk.tx, "rare")
    at = {5, 6, 20, 21, 22, 23, 40}
    for number in range(1, 50):
        # Also those of a session that stands elsewhere.
        desk.append(session=f"s{number % 3}", room="rare" if number in at else ROOM)
    for rows in (1, 2, 100):
        found: list[int] = []
        page = conversation.history.handler(desk.tx, room="rare", page_rows=rows)
        while page.more:
            found += [each.event.stream_id for each in page.items]
            page = conversation.history.handler(desk.tx, None, page.cursor, rows, room="rare")
        assert found + [each.event.stream_id for each in page.items] == sorted(at)
    assert not conversation.history.handler(desk.tx, room="nothing").items
    with pytest.raises(InvalidRequestError):
        conversation.history.handler(desk.tx, "s1", room="rare")


def test_the_end_is_known_where_nothing_follows(desk: Desk) -> None:
    desk.admit()
    desk.append()
    page = conversation.messages.handler(desk.tx, "s")
    assert (len(page.items), page.cursor, page.more) == (1, 2, False)
    desk.admit()
    assert len(conversation.messages.handler(desk.tx, "s", after=2).items) == 1

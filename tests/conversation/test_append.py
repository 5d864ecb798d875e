from typing import Any

import pytest

from storage_worker import conversation
from storage_worker.conversation import EventConflictError, RoomNotFoundError
from storage_worker.conversation.records import PayloadRef
from storage_worker.protocol.errors import InvalidRequestError, RequestTooLargeError
from storage_worker.protocol.limits import INLINE_BYTES_MAX

from .desk import ROOM, Desk, reference_to

FULL: dict[str, Any] = {
    "attributes": {"b": [1, 2.5, None, True], "a": "\0ä"},
    "body": "a text",
    "room": ROOM,
    "actor": "me",
    "client_transaction_id": "t1",
    "event_id": "e1",
    "aggregate_kind": "thread",
    "aggregate_id": "t",
    "version": 3,
    "retention_class": "short",
    "created_ms": 1234,
}


def test_an_event_comes_back_as_it_was(desk: Desk) -> None:
    stored = desk.append("note", **FULL)
    assert (stored.sequence, stored.stream_id, stored.created, stored.event_id) == (1, 1, True, "e1")
    (event,) = desk.events()
    assert event.attributes == FULL["attributes"]
    assert event.attributes_json == '{"a":"\\u0000ä","b":[1,2.5,null,true]}'
    assert (event.body, event.content_type, event.preview) == ("a text", "text/plain", "a text")
    assert (event.room, event.actor, event.type, event.version) == (ROOM, "me", "note", 3)
    assert (event.aggregate_kind, event.aggregate_id) == ("thread", "t")
    assert (event.client_transaction_id, event.event_id) == ("t1", "e1")
    assert (event.retention_class, event.created_ms) == ("short", 1234)
    assert conversation.find.handler(desk.tx, "t1", "me", ROOM) == event


def test_defaults(desk: Desk) -> None:
    stored = desk.append()
    (event,) = desk.events()
    assert stored.event_id == str(stored.stream_id)
    assert (event.event_id, event.idempotency_key, event.provenance) == (None, None, None)
    assert (event.attributes, event.body, event.content_type, event.preview) == ({}, None, None, "")
    assert (event.aggregate_kind, event.aggregate_id, event.version) == ("session", "s", 1)
    assert event.room == conversation.resolve_room.handler(desk.tx).id
    session = desk.session()
    assert session is not None
    assert (session.room, session.status) == (event.room, "idle")


def test_sequences_have_no_gaps(desk: Desk) -> None:
    stored = [desk.append(session=session) for session in ("a", "b", "a", "a", "b")]
    assert [each.stream_id for each in stored] == [1, 2, 3, 4, 5]
    assert [each.sequence for each in stored] == [1, 1, 2, 3, 2]
    desk.append(session="a", event_id="e")
    desk.append(session="a", event_id="e")
    assert desk.append(session="a").sequence == 5
    assert [event.sequence for event in desk.events("a")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("known_by", [{"client_transaction_id": "t"}, {"event_id": "e"}])
def test_a_repeat_returns_the_first(desk: Desk, known_by: dict[str, str]) -> None:
    first = desk.append(body="x", **known_by)
    desk.append()
    again = desk.append(body="x", created_ms=1, **known_by)
    assert not again.created
    assert (again.stream_id, again.sequence, again.created_ms) == (first.stream_id, 1, first.created_ms)
    assert len(desk.events()) == 2


@pytest.mark.parametrize("known_by", [{"client_transaction_id": "t"}, {"event_id": "e"}])
@pytest.mark.parametrize(
    "change",
    [
        {"body": "y"},
        {"body": None},
        {"attributes": {"a": 1}},
        {"version": 2},
        {"aggregate_id": "other"},
        {"type_": "other"},
    ],
)
def test_other_content_is_a_conflict(desk: Desk, known_by: dict[str, str], change: dict[str, Any]) -> None:
    first = desk.append(body="x", **known_by)
    with pytest.raises(EventConflictError) as caught:
        desk.append(**{"body": "x", **known_by, **change})
    assert (caught.value.code, caught.value.retryable) == ("event_conflict", False)
    assert caught.value.details["stream_id"] == first.stream_id
    assert len(desk.events()) == 1


def test_a_transaction_belongs_to_one_session(desk: Desk) -> None:
    first = desk.append(room=ROOM, client_transaction_id="t", event_id="e")
    for told in (None, "e", "made anew for the repeat"):
        again = desk.append(room=ROOM, client_transaction_id="t", event_id=told)
        assert (again.created, again.stream_id, again.event_id) == (False, first.stream_id, "e")
    with pytest.raises(EventConflictError):
        desk.append(session="other", room=ROOM, client_transaction_id="t")


@pytest.mark.parametrize("first", [None, "t"])
def test_an_event_id_belongs_to_one_transaction(desk: Desk, first: str | None) -> None:
    desk.append(room=ROOM, client_transaction_id=first, event_id="e")
    desk.admit(room=ROOM, client_transaction_id=first and "for a message", event_id="m")
    assert not desk.append(room=ROOM, event_id="e").created
    with pytest.raises(EventConflictError):
        desk.append(room=ROOM, event_id="e", client_transaction_id="u")
    with pytest.raises(EventConflictError):
        desk.admit(room=ROOM, event_id="m", client_transaction_id="u")
    # Whatever was answered with an event is found by its transaction; this one has none.
    assert conversation.find.handler(desk.tx, "u", room=ROOM) is None
    assert desk.append("another", room=ROOM, client_transaction_id="u").created


@pytest.mark.parametrize("known_by", [{"client_transaction_id": "t"}, {"event_id": "e"}])
@pytest.mark.parametrize("told", [(None, "s"), ("s", None)])
def test_the_aggregate_of_an_event_is_its_session_told_or_not(
    desk: Desk, known_by: dict[str, str], told: tuple[str | None, str | None]
) -> None:
    first, again = (desk.append(aggregate_id=each, **known_by) for each in told)
    assert (first.created, again.created) == (True, False)
    assert desk.events()[0].aggregate_id == "s"


def test_equal_content_with_two_ids_is_two_events(desk: Desk) -> None:
    for known_by in ("client_transaction_id", "event_id"):
        first = desk.append(body="x", **{known_by: "1"})
        second = desk.append(body="x", **{known_by: "2"})
        assert first.stream_id != second.stream_id
    assert len(desk.events()) == 4


def test_a_transaction_id_is_the_rooms_and_the_actors(desk: Desk) -> None:
    conversation.create_room.handler(desk.tx, "other")
    places = [(ROOM, "a"), (ROOM, "b"), ("other", "a")]
    for number, (room, actor) in enumerate(places):
        assert desk.append(f"n{number}", room=room, actor=actor, client_transaction_id="t").created
    found = [conversation.find.handler(desk.tx, "t", actor, room) for room, actor in places]
    assert [event and event.type for event in found] == ["n0", "n1", "n2"]
    assert conversation.find.handler(desk.tx, "t", "c", ROOM) is None
    assert conversation.find.handler(desk.tx, "t") is None
    stored = desk.append(session="without", client_transaction_id="t")
    event = conversation.find.handler(desk.tx, "t")
    assert event is not None
    assert event.stream_id == stored.stream_id


def test_without_any_id_it_is_stored_each_time(desk: Desk) -> None:
    assert [desk.append(body="x").sequence for _ in range(3)] == [1, 2, 3]


def test_an_unknown_room_is_refused(desk: Desk) -> None:
    with pytest.raises(RoomNotFoundError):
        desk.append(room="nowhere")
    assert desk.events() == []
    assert desk.session() is None


def test_archived_rooms_take_events(desk: Desk) -> None:
    conversation.archive_room.handler(desk.tx, ROOM)
    assert desk.append(room=ROOM).created


@pytest.mark.parametrize("text", ["x" * INLINE_BYTES_MAX, "ä" * (INLINE_BYTES_MAX // 2), ""])
def test_a_text_up_to_the_bound_stands_in_the_row(desk: Desk, text: str) -> None:
    desk.append(body=text)
    (event,) = desk.events()
    assert event.body == text
    assert event.content_type == "text/plain"
    assert text.startswith(event.preview)
    assert len(event.preview.encode()) <= 256


def test_what_is_over_the_bound_is_refused(desk: Desk) -> None:
    options: dict[str, Any]
    for options in (
        {"body": "x" * (INLINE_BYTES_MAX + 1)},
        {"body": "\N{GRINNING FACE}" * (INLINE_BYTES_MAX // 4 + 1)},
        {"attributes": {"a": "x" * INLINE_BYTES_MAX}},
    ):
        with pytest.raises(
            RequestTooLargeError, match="payload_client.put" if "body" in options else "into the event.s body"
        ):
            desk.append(**options)
    assert desk.events() == []


def test_previews_are_cut_at_a_character(desk: Desk) -> None:
    desk.append(body="x" + "\N{GRINNING FACE}" * 100)
    (event,) = desk.events()
    assert event.preview == "x" + "\N{GRINNING FACE}" * 63


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), b"bytes", {1: 2}, {"a": [float("nan")]}, {1, 2}]
)
def test_what_json_cannot_say_is_refused(desk: Desk, value: object) -> None:
    with pytest.raises(InvalidRequestError):
        desk.append(attributes={"a": value})
    assert desk.events() == []


def test_numbers_stay_what_they_are(desk: Desk) -> None:
    attributes = {
        "a": 2**70,
        "A": 2**64 - 1,
        "b": -(2**63),
        "c": 1.0,
        "d": 1e308,
        "e": -0.0,
        "f": 0.1,
        "g": True,
    }
    desk.append(attributes=attributes)
    (event,) = desk.events()
    assert repr(event.attributes) == repr(dict(sorted(attributes.items())))


def test_a_reference_is_committed_and_comes_back(desk: Desk, committed: list[PayloadRef]) -> None:
    ref = reference_to("image/png", "a" * 64)
    desk.append(body=ref, preview="an image", event_id="e", retention_class="other")
    assert committed == [ref]
    (event,) = desk.events()
    assert (event.body, event.content_type, event.preview) == (ref, "image/png", "an image")
    assert event.retention_class == ref.retention_class
    assert not desk.append(body=ref, event_id="e").created
    assert committed == [ref]
    with pytest.raises(EventConflictError):
        desk.append(body=reference_to("image/png", "b" * 64), event_id="e")

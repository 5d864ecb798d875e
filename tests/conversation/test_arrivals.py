from pathlib import Path
from typing import Any

import pytest

from storage_worker import conversation
from storage_worker.conversation import EventConflictError, RoomNotFoundError, RoomReadOnlyError, Sender
from storage_worker.conversation.records import PayloadRef

from .desk import ROOM, Desk, desk_at, everything, reference_to


def test_a_message_comes_in(desk: Desk) -> None:
    admitted = desk.admit(
        "Where is my bag?",
        room=ROOM,
        actor="ann",
        client_transaction_id="t1",
        turn_id="turn",
        sender=Sender("Ann | Support", "browser", "key"),
        thread_root=1,
        attributes={"urgent": True},
        runtime_binding="codex",
    )
    assert (admitted.created, admitted.sequence, admitted.message_number) == (True, 1, 1)
    (event,) = desk.events()
    assert (event.type, event.body, event.attributes) == (
        "user_message",
        "Where is my bag?",
        {"urgent": True},
    )
    assert (event.aggregate_kind, event.aggregate_id) == ("message", admitted.message_id)
    (message,) = desk.messages()
    assert (message.id, message.room, message.number) == (admitted.message_id, ROOM, 1)
    assert (message.session, message.sequence, message.stream_id) == ("s", 1, admitted.stream_id)
    assert (message.role, message.turn_id, message.actor, message.status) == (
        "user",
        "turn",
        "ann",
        "complete",
    )
    assert (message.sender_label, message.source, message.agent_key) == ("Ann | Support", "browser", "key")
    assert (message.thread_root, message.text, message.preview) == (1, "Where is my bag?", "Where is my bag?")
    session, shown = desk.session(), desk.navigation()
    assert session is not None
    assert shown is not None
    assert (session.room, session.status, session.runtime_binding) == (ROOM, "idle", "codex")
    assert session.first_preview == "Where is my bag?"
    assert (shown.status, shown.preview, shown.last_message) == ("running", "Where is my bag?", 1)


def test_a_plain_message_sets_its_session_idle_and_its_navigation_running(desk: Desk) -> None:
    conversation.upsert_session.handler(desk.tx, "s", status="busy", room=ROOM)
    desk.admit()
    session, shown = desk.session(), desk.navigation()
    assert session is not None
    assert shown is not None
    assert (session.status, shown.status) == ("idle", "running")


def test_a_repeat_returns_the_first_and_changes_nothing(desk: Desk) -> None:
    for known_by in ({"client_transaction_id": "t"}, {"event_id": "e"}):
        first = desk.admit("x", **known_by)
        before = (desk.events(), desk.messages(), desk.session(), desk.navigation())
        again = desk.admit("x", **known_by)
        assert not again.created
        assert (again.stream_id, again.message_id, again.message_number, again.event_id) == (
            first.stream_id,
            first.message_id,
            first.message_number,
            first.event_id,
        )
        assert (desk.events(), desk.messages(), desk.session(), desk.navigation()) == before


@pytest.mark.parametrize("arrive", ["admit", "ingest_user"])
def test_a_message_of_a_transaction_has_the_same_ids_in_every_store(
    desk: Desk, tmp_path: Path, arrive: str
) -> None:
    known_by = {"room": ROOM, "actor": "a", "client_transaction_id": "t"}
    with desk_at(tmp_path / "other.db") as other:
        here, there = (getattr(each, arrive)("x", **known_by) for each in (desk, other))
    assert (here.event_id, here.message_id) == (there.event_id, there.message_id)
    repeat = getattr(desk, arrive)("x", event_id="made anew for the repeat", **known_by)
    assert (repeat.created, repeat.event_id) == (False, here.event_id)
    others = [known_by | {each: "other"} for each in ("actor", "client_transaction_id")]
    assert len({here.event_id, *(getattr(desk, arrive)("x", **each).event_id for each in others)}) == 3
    assert getattr(desk, arrive)("x").event_id != getattr(desk, arrive)("x").event_id


@pytest.mark.parametrize(
    "change",
    [
        {"text": "y"},
        {"turn_id": "other"},
        {"role": "system"},
        {"sender": Sender("other")},
        {"thread_root": 7},
        {"attributes": {"a": 1}},
        {"session": "other"},
    ],
)
def test_the_same_transaction_with_other_content(desk: Desk, change: dict[str, Any]) -> None:
    first = desk.admit("x", room=ROOM, client_transaction_id="t")
    with pytest.raises(EventConflictError) as caught:
        desk.admit(**{"text": "x", "room": ROOM, "client_transaction_id": "t", **change})
    assert caught.value.details["stream_id"] == first.stream_id
    assert len(desk.events(None)) == 1


def test_a_plain_event_does_not_become_a_message(desk: Desk) -> None:
    desk.append("user_message", body="x", client_transaction_id="t", event_id="e")
    for known_by in ({"client_transaction_id": "t"}, {"event_id": "e"}):
        with pytest.raises(EventConflictError):
            desk.admit("x", **known_by)


def test_equal_messages_with_two_ids(desk: Desk) -> None:
    first = desk.admit("x", client_transaction_id="1")
    second = desk.admit("x", client_transaction_id="2")
    assert first.message_id != second.message_id
    assert [message.number for message in desk.messages()] == [1, 2]


def test_an_archived_room_takes_no_message_and_no_repeat(desk: Desk) -> None:
    desk.admit("x", room=ROOM, client_transaction_id="t")
    conversation.archive_room.handler(desk.tx, ROOM)
    for known_by in ({"client_transaction_id": "t"}, {"client_transaction_id": "u"}, {}):
        with pytest.raises(RoomReadOnlyError) as caught:
            desk.admit("x", room=ROOM, **known_by)
        assert (caught.value.code, caught.value.retryable) == ("room_read_only", False)
    with pytest.raises(RoomReadOnlyError):
        desk.admit("x")  # the session's own room
    assert len(desk.events()) == 1
    assert desk.output("assistant_message", text="still running").message_number == 2
    assert desk.ingest_user("from history", room=ROOM).created


def test_an_unknown_room_is_refused_and_the_default_one_made(desk: Desk) -> None:
    with pytest.raises(RoomNotFoundError):
        desk.admit(room="nowhere")
    assert desk.admit().room == desk.admit(session="t").room
    assert [room.is_default for room in everything(conversation.rooms.handler(desk.tx))] == [False, True]


def test_a_message_without_a_room_goes_into_its_sessions(desk: Desk) -> None:
    desk.admit(room=ROOM)
    assert desk.admit().room == ROOM


def test_a_stored_runtime_binding_stays(desk: Desk) -> None:
    desk.admit(room=ROOM, runtime_binding="first")
    desk.admit(room=ROOM, runtime_binding="second")
    desk.ingest_user(room=ROOM, runtime_binding="third")
    desk.ingest({"type": "reasoning"}, room=ROOM, runtime_binding="fourth")
    session = desk.session()
    assert session is not None
    assert session.runtime_binding == "first"


def test_history_is_known_by_its_event_id(desk: Desk) -> None:
    first = desk.ingest_user("x", event_id="e", role="system", created_ms=77)
    again = desk.ingest_user("x", event_id="e", role="system", created_ms=88)
    assert (again.created, again.stream_id, again.created_ms) == (False, first.stream_id, 77)
    assert again.message_id == first.message_id
    (message,) = desk.messages()
    assert (message.role, message.created_ms) == ("system", 77)
    with pytest.raises(EventConflictError):
        desk.ingest_user("y", event_id="e", role="system")
    assert desk.ingest_user("x", event_id="e", role="system", session="other").created
    assert [desk.ingest_user("x").created for _ in range(2)] == [True, True]


def test_what_was_admitted_is_known_when_it_comes_from_history(desk: Desk) -> None:
    admitted = desk.admit("x", event_id="e")
    again = desk.ingest_user("x", event_id="e")
    assert (again.created, again.message_id) == (False, admitted.message_id)


def test_the_first_preview_is_that_of_the_first_text(desk: Desk) -> None:
    for text in ("", "first", "second"):
        desk.admit(text)
    session, shown = desk.session(), desk.navigation()
    assert session is not None
    assert shown is not None
    assert (session.first_preview, shown.preview) == ("first", "second")


def test_a_large_text_is_a_reference(desk: Desk, committed: list[PayloadRef]) -> None:
    ref = reference_to("text/plain", "c" * 64)
    desk.admit(ref, event_id="e", preview="it begins so")
    (message,) = desk.messages()
    assert (message.text, message.preview, message.content_type) == (ref, "it begins so", "text/plain")
    assert committed == [ref, ref]  # one reference of the event, one of the message
    assert not desk.admit(ref, event_id="e").created
    assert len(committed) == 2

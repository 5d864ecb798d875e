"""Rooms and sessions as they were elsewhere: made once, never changed."""

import pytest

from storage_worker import conversation
from storage_worker.conversation import RoomNotFoundError
from storage_worker.protocol.errors import InvalidRequestError

from .desk import ROOM, Desk


def test_a_room_is_made_as_it_was_and_then_left_alone(desk: Desk) -> None:
    restore = conversation.restore_room.handler
    made = restore(desk.tx, "a", "title", is_default=True, created_ms=5, archived_ms=7)
    assert (made.title, made.is_default, made.created_ms, made.archived_ms) == ("title", True, 5, 7)
    assert conversation.room.handler(desk.tx, "a") == made
    assert restore(desk.tx, "a", "other", created_ms=6) == made
    second = restore(desk.tx, "b", is_default=True, created_ms=6)
    assert (second.is_default, second.archived_ms) == (False, None)
    assert conversation.resolve_room.handler(desk.tx).id == "a"


def test_a_session_is_made_as_it_was_and_then_left_alone(desk: Desk) -> None:
    restore = conversation.restore_session.handler
    told = {"parent": "p", "root": "r", "status": "waiting", "runtime_binding": "b", "first_preview": "hi"}
    assert restore(desk.tx, "s", ROOM, **told, created_ms=5, activity_ms=9)
    made = desk.session()
    assert made is not None
    assert (made.parent, made.root, made.status, made.runtime_binding, made.first_preview) == (
        "p", "r", "waiting", "b", "hi",
    )  # fmt: skip
    assert (made.created_ms, made.activity_ms) == (5, 9)
    shown = desk.navigation()
    assert shown is not None
    assert (shown.status, shown.preview, shown.activity_ms) == ("waiting", "", 9)
    assert not restore(desk.tx, "s", ROOM, status="idle", activity_ms=10)
    assert desk.session() == made


def test_a_session_that_only_output_had_named_is_made(desk: Desk) -> None:
    desk.ingest({"type": "assistant_message", "text": "x"})
    assert conversation.restore_session.handler(desk.tx, "s", ROOM)
    made = desk.session()
    assert made is not None
    assert (made.room, made.root) == (ROOM, "s")


def test_a_session_needs_its_room_and_another_parent(desk: Desk) -> None:
    with pytest.raises(InvalidRequestError):
        conversation.restore_session.handler(desk.tx, "s", ROOM, parent="s")
    with pytest.raises(RoomNotFoundError):
        conversation.restore_session.handler(desk.tx, "s", "nothing")


def test_a_status_of_another_time_moves_no_activity_back(desk: Desk) -> None:
    conversation.restore_session.handler(desk.tx, "s", ROOM, activity_ms=9)
    for told, found in ((5, 9), (11, 11)):
        session = conversation.set_session_status.handler(desk.tx, "s", "waiting", told)
        assert (session.status, session.activity_ms) == ("waiting", found)

from typing import Any

import pytest

from storage_worker import conversation
from storage_worker.conversation import RoomNotFoundError, SessionNotFoundError
from storage_worker.protocol.errors import InvalidRequestError

from .desk import ROOM, Desk, everything


def upsert(desk: Desk, session: str = "s", **options: Any) -> conversation.Session:
    return conversation.upsert_session.handler(desk.tx, session, **options)


def test_a_new_session_is_idle_and_its_own_root(desk: Desk) -> None:
    made = upsert(desk, room=ROOM)
    assert (made.id, made.room, made.parent, made.root, made.status) == ("s", ROOM, None, "s", "idle")
    assert (made.runtime_binding, made.first_preview) == (None, None)
    assert desk.session() == made
    shown = desk.navigation()
    assert shown is not None
    assert (shown.status, shown.preview, shown.last_sequence, shown.last_message) == ("idle", "", 0, 0)


def test_an_upsert_changes_what_it_is_given(desk: Desk) -> None:
    upsert(desk, room=ROOM, status="running", runtime_binding="one")
    assert upsert(desk).runtime_binding == "one"
    changed = upsert(desk, runtime_binding="two")
    assert (changed.status, changed.runtime_binding, changed.room) == ("running", "two", ROOM)


def test_ids_by_their_beginning(desk: Desk) -> None:
    for name in ("b", "ab", "a", "ab\U0010fffe", "ac", "a%", "A"):
        upsert(desk, name)
    desk.output("assistant_message", session="abc")
    ids = conversation.session_ids.handler
    assert ids(desk.tx, "ab") == ["ab", "abc", "ab\U0010fffe"]
    assert ids(desk.tx, "a", 2) == ["a", "a%"]
    assert ids(desk.tx, "a%") == ["a%"]
    assert ids(desk.tx, "x") == []


def test_the_root_is_the_parents_root(desk: Desk) -> None:
    upsert(desk, "top")
    upsert(desk, "middle", parent="top")
    assert upsert(desk, "leaf", parent="middle").root == "top"
    assert upsert(desk, "orphan", parent="unknown").root == "unknown"
    assert upsert(desk, "leaf").parent == "middle"


def test_a_session_stays_in_its_room(desk: Desk) -> None:
    conversation.create_room.handler(desk.tx, "other")
    upsert(desk, room=ROOM)
    for refused in ({"room": "other"}, {"parent": "s"}):
        with pytest.raises(InvalidRequestError):
            upsert(desk, **refused)
    with pytest.raises(RoomNotFoundError):
        upsert(desk, "t", room="nowhere")
    assert desk.session("t") is None


def test_a_session_without_a_room_stands_in_the_default_one(desk: Desk) -> None:
    assert upsert(desk).room == conversation.resolve_room.handler(desk.tx).id


def test_setting_a_status(desk: Desk) -> None:
    with pytest.raises(SessionNotFoundError) as caught:
        conversation.set_session_status.handler(desk.tx, "s", "busy")
    assert caught.value.code == "session_not_found"
    upsert(desk, room=ROOM, runtime_binding="one")
    changed = conversation.set_session_status.handler(desk.tx, "s", "busy")
    assert (changed.status, changed.runtime_binding) == ("busy", "one")
    shown = desk.navigation()
    assert shown is not None
    assert shown.status == "busy"


def test_lists_of_one_room(desk: Desk) -> None:
    conversation.create_room.handler(desk.tx, "other")
    for session, room in (("a", ROOM), ("b", "other"), ("c", ROOM)):
        upsert(desk, session, room=room)
    sessions, shown = conversation.sessions.handler, conversation.navigation.handler
    assert [session.id for session in everything(sessions(desk.tx, ROOM))] == ["a", "c"]
    assert [each.session for each in everything(shown(desk.tx, ROOM))] == ["a", "c"]
    assert len(everything(sessions(desk.tx))) == len(everything(shown(desk.tx))) == 3


def test_activity_never_goes_back(desk: Desk) -> None:
    desk.ingest_user(room=ROOM, created_ms=5_000)
    desk.ingest_user(room=ROOM, created_ms=3_000)
    session, shown = desk.session(), desk.navigation()
    assert session is not None
    assert shown is not None
    assert (session.activity_ms, shown.activity_ms) == (5_000, 5_000)

import importlib
from typing import Any

import pytest

from storage_worker import conversation
from storage_worker.conversation import RoomNotFoundError, SessionNotFoundError
from storage_worker.protocol.errors import InvalidRequestError

from .desk import ROOM, Desk, everything

sessions_module = importlib.import_module("storage_worker.conversation.sessions")
"""The package's `sessions` is the operation of that name."""


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
    last = "\U0010ffff" * 510
    for name in ("b", "ab", "a", "ab\U0010fffe", "ab\U0010ffff", f"ab{last}", "ac", "a%", "A"):
        upsert(desk, name)
    desk.output("assistant_message", session="abc")
    ids = conversation.session_ids.handler
    assert ids(desk.tx, "ab") == ["ab", "abc", "ab\U0010fffe", "ab\U0010ffff", f"ab{last}"]
    assert ids(desk.tx, "a", 2) == ["a", "a%"]
    assert ids(desk.tx, "a%") == ["a%"]
    assert ids(desk.tx, "x") == []


def test_the_root_is_the_parents_root(desk: Desk) -> None:
    upsert(desk, "top")
    upsert(desk, "middle", parent="top")
    assert upsert(desk, "leaf", parent="middle").root == "top"
    assert upsert(desk, "orphan", parent="unknown").root == "unknown"
    assert upsert(desk, "leaf").parent == "middle"


def roots(desk: Desk) -> dict[str, str]:
    return {each.id: each.root for each in everything(conversation.sessions.handler(desk.tx))}


def test_sessions_below_one_get_its_new_root(desk: Desk) -> None:
    for session, parent in (("c", "b"), ("d", "c"), ("e", "b"), ("x", "other")):
        upsert(desk, session, parent=parent)
    assert upsert(desk, "b", parent="a").root == "a"
    assert roots(desk) == {"b": "a", "c": "a", "d": "a", "e": "a", "x": "other"}
    upsert(desk, "a", parent="top")
    assert set(roots(desk).values()) == {"top", "other"}


def test_what_has_a_root_without_its_parent_moves_with_it(desk: Desk) -> None:
    conversation.restore_session.handler(desk.tx, "deep", ROOM, parent="missing", root="b")
    upsert(desk, "b", parent="a")
    assert roots(desk)["deep"] == "a"
    assert upsert(desk, "deeper", parent="deep").root == "a"


def test_a_session_that_is_no_root_takes_those_below_it_along(desk: Desk) -> None:
    for session, parent in (("b", "a"), ("c", "b"), ("d", "c"), ("e", "b"), ("y", "x")):
        upsert(desk, session, parent=parent)
    assert upsert(desk, "c", parent="y").root == "x"
    assert roots(desk) == {"b": "a", "c": "x", "d": "x", "e": "a", "y": "x"}


@pytest.mark.parametrize("above", ["b", "c", "d"])
def test_no_session_stands_above_itself(desk: Desk, above: str) -> None:
    for session, parent in (("c", "b"), ("d", "c"), ("b", "a")):
        upsert(desk, session, parent=parent)
    before = roots(desk)
    with pytest.raises(InvalidRequestError):
        upsert(desk, "b", parent=above)
    with pytest.raises(InvalidRequestError):
        upsert(desk, "a", parent=above)
    assert roots(desk) == before


def test_a_tree_that_is_too_large_for_one_request_stays_where_it_is(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "SESSIONS_MOVED_COUNT_MAX", 2)
    for session, parent in (("c", "b"), ("d", "b"), ("e", "d")):
        upsert(desk, session, parent=parent)
    with pytest.raises(InvalidRequestError) as caught:
        upsert(desk, "b", parent="a")
    assert caught.value.details["sessions_moved_count_max"] == 2
    assert upsert(desk, "d", parent="a").root == "a"
    assert upsert(desk, "b", parent="a").root == "a"


CHAIN = [(f"c{number}", f"c{number + 1}") for number in range(8)]


@pytest.mark.parametrize("pairs", [CHAIN, CHAIN[::-1], CHAIN[::2] + CHAIN[1::2]])
def test_sessions_stand_far_above_one_another_and_can_be_told_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, pairs: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(sessions_module, "SESSION_DEPTH_MAX", 3)
    for session, parent in pairs:
        upsert(desk, session, parent=parent)
    for session, parent in CHAIN:
        assert upsert(desk, session, parent=parent).root == "c8"
    for session, parent in pairs:
        name = f"copy {session}"
        conversation.restore_session.handler(desk.tx, name, ROOM, parent=f"copy {parent}", root="copy c8")
    assert set(roots(desk).values()) == {"c8", "copy c8"}


def test_a_ring_is_not_looked_for_without_an_end(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for session, parent in (*CHAIN, ("below", "s")):
        upsert(desk, session, parent=parent)
    monkeypatch.setattr(sessions_module, "SESSION_DEPTH_MAX", 3)
    with pytest.raises(InvalidRequestError) as caught:
        upsert(desk, "s", parent="c0")
    assert caught.value.details["session_depth_max"] == 3
    assert upsert(desk, "s", parent="c6").root == "c8"


def test_sessions_above_one_another_in_an_older_store_end_no_search(desk: Desk) -> None:
    for session, parent in (("b", "a"), ("c", "b"), ("below", "e")):
        upsert(desk, session, parent=parent)
    desk.tx.execute(
        "update conversation_sessions set root_id = 'x', parent_id = case id when 'b' then 'c' else 'b' end"
        " where id <> 'below'"
    )
    assert upsert(desk, "e", parent="c").root == "x"
    upsert(desk, "b", parent="top")
    assert roots(desk) == dict.fromkeys(("b", "c", "e", "below"), "top")


def test_a_session_that_was_told_with_its_root_gets_that_of_what_comes_above_it(desk: Desk) -> None:
    conversation.restore_session.handler(desk.tx, "deep", ROOM, parent="missing", root="b")
    assert upsert(desk, "missing", parent="x").root == "x"
    assert roots(desk)["deep"] == "x"


@pytest.mark.parametrize("is_analyzed", [True, False])
@pytest.mark.parametrize("session", ["top", "c"])
def test_sessions_above_and_below_one_are_found_by_an_index(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, session: str, is_analyzed: bool
) -> None:
    if is_analyzed:
        # What SQLite knows of a store is of when it was small.
        desk.tx.execute("analyze")
    for child, parent in (("b", "top"), ("c", "b"), ("d", "c")):
        upsert(desk, child, parent=parent)
    plans: list[str] = []
    run = desk.tx.execute

    def explained(sql: str, parameters: Any = ()) -> Any:
        if "set root_id" in sql or "recursive" in sql:
            plans.extend(str(row[3]) for row in run(f"explain query plan {sql}", parameters).rows)
        return run(sql, parameters)

    monkeypatch.setattr(type(desk.tx), "execute", lambda _, *given: explained(*given))
    monkeypatch.setattr(type(desk.tx), "rows", lambda _, *given: explained(*given).rows)
    upsert(desk, "a", parent="z")
    upsert(desk, session, parent="a")
    monkeypatch.undo()
    assert any("above" in plan for plan in plans)
    name = "parent" if session == "c" else "root"
    assert any(f"USING INDEX conversation_sessions_{name}" in plan for plan in plans), plans
    assert not [plan for plan in plans if plan.startswith(("SCAN conversation_sessions", "SCAN s"))]


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


def test_who_pages_through_a_room_meets_sessions_that_come_into_it_later(desk: Desk) -> None:
    shown = conversation.navigation.handler
    for session in ("early", "late"):
        desk.ingest({"type": "reasoning", "text": "x"}, session=session)
    default = conversation.resolve_room.handler(desk.tx).id
    upsert(desk, "a", room=ROOM)
    seen = {room: shown(desk.tx, room) for room in (ROOM, default, None)}
    desk.admit(session="early", room=ROOM)
    desk.admit(session="late", room=default)
    upsert(desk, "b", room=ROOM)
    desk.ingest({"type": "reasoning", "text": "x"}, session="c")

    def behind(room: str | None) -> list[str]:
        return [each.session for each in everything(shown(desk.tx, room, seen[room].cursor))]

    assert (behind(ROOM), behind(default), behind(None)) == (["early", "b"], ["c"], ["b", "c"])
    assert [each.session for each in everything(shown(desk.tx, ROOM))] == ["a", "early", "b"]
    assert [each.session for each in everything(shown(desk.tx))] == ["early", "late", "a", "b", "c"]


def test_activity_never_goes_back(desk: Desk) -> None:
    desk.ingest_user(room=ROOM, created_ms=5_000)
    desk.ingest_user(room=ROOM, created_ms=3_000)
    session, shown = desk.session(), desk.navigation()
    assert session is not None
    assert shown is not None
    assert (session.activity_ms, shown.activity_ms) == (5_000, 5_000)

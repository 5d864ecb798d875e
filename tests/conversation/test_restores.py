"""Rooms, sessions and events as they were elsewhere: made once, and given what they lack."""

import json
from typing import Any

import msgspec
import pytest

from storage_worker import conversation
from storage_worker.conversation import Provenance, RoomNotFoundError, Sender
from storage_worker.conversation.bounds import LOOK_AHEAD_COUNT_MAX
from storage_worker.conversation.event_restores import Restored
from storage_worker.conversation.identity import collision_key
from storage_worker.conversation.records import MessagePlace
from storage_worker.conversation.session_restores import Made, Shown
from storage_worker.conversation.vocabulary import COLLISION
from storage_worker.protocol.errors import InvalidRequestError

from .copies import COPY
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


MADE = Made("p", "r", "waiting", "b", "hi", activity_ms=9, created_ms=5)
SHOWN = Shown("running", "shown", activity_ms=11)


def restore_state(desk: Desk, last: int = 0, shown: Shown = SHOWN, made: Made | None = MADE) -> bool:
    return conversation.restore_session_state.handler(desk.tx, "s", ROOM, last, shown, made)


def state_of(desk: Desk) -> tuple[Any, ...]:
    session, shown = desk.session(), desk.navigation()
    assert shown is not None
    made = session and (
        session.parent, session.root, session.status, session.runtime_binding, session.first_preview,
        session.activity_ms, session.created_ms,
    )  # fmt: skip
    return made, (shown.status, shown.preview, shown.activity_ms)


def test_a_session_is_made_as_it_was_begun_and_then_left_alone(desk: Desk) -> None:
    restore = conversation.restore_session.handler
    assert restore(desk.tx, "s", ROOM, parent="p", root="r", created_ms=5)
    before = state_of(desk)
    assert before == (("p", "r", "idle", None, None, 5, 5), ("idle", "", 5))
    assert not restore(desk.tx, "s", ROOM, parent="other", created_ms=10)
    assert state_of(desk) == before


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_session_stands_as_it_did(desk: Desk, is_begun: bool) -> None:
    if is_begun:
        conversation.restore_session.handler(desk.tx, "s", ROOM, created_ms=5)
    assert restore_state(desk)
    assert state_of(desk) == (msgspec.structs.astuple(MADE), msgspec.structs.astuple(SHOWN))
    assert not restore_state(desk)


def test_a_session_that_went_on_here_is_left_alone(desk: Desk) -> None:
    first = desk.append(room=ROOM, created_ms=3)
    second = desk.append(room=ROOM, created_ms=3)
    before = state_of(desk)
    # Another event is its last one: one came here, or one is missing here.
    assert not restore_state(desk, first.stream_id)
    assert not restore_state(desk)
    assert not conversation.restore_session_state.handler(desk.tx, "not there", ROOM, 7, SHOWN, MADE)
    assert state_of(desk) == before
    assert restore_state(desk, second.stream_id)
    for later, status in ((10, None), (12, "live")):
        conversation.upsert_session.handler(desk.tx, "s", status=status, activity_ms=later)
        before = state_of(desk)
        assert not restore_state(desk, second.stream_id)
        assert state_of(desk) == before


def test_a_session_that_was_made_here_only_is_left_alone(desk: Desk) -> None:
    last = desk.append(created_ms=3)
    before = state_of(desk)
    assert not restore_state(desk, last.stream_id, made=None)
    assert state_of(desk) == before


@pytest.mark.parametrize("has_messages", [True, False])
def test_a_session_that_was_made_stays_in_its_room(desk: Desk, has_messages: bool) -> None:
    conversation.create_room.handler(desk.tx, "other")
    conversation.restore_session.handler(desk.tx, "s", ROOM, created_ms=3)
    last = desk.ingest_user(created_ms=3).stream_id if has_messages else 0
    before = state_of(desk), desk.session()
    with pytest.raises(InvalidRequestError, match="cannot leave"):
        conversation.restore_session_state.handler(desk.tx, "s", "other", last, SHOWN, MADE)
    assert (state_of(desk), desk.session()) == before
    assert restore_state(desk, last)


def test_a_session_that_was_only_shown_is_made_in_the_room_that_is_told(desk: Desk) -> None:
    conversation.create_room.handler(desk.tx, "other")
    last = desk.ingest({"type": "reasoning", "text": "x"}, created_ms=3)
    assert conversation.restore_session_state.handler(desk.tx, "s", "other", last.stream_id, SHOWN, MADE)
    made = desk.session()
    assert made is not None
    assert made.room == "other"


def test_navigation_of_a_session_that_was_never_made(desk: Desk) -> None:
    last = desk.ingest({"type": "reasoning", "text": "x"}, created_ms=3)
    assert restore_state(desk, last.stream_id, made=None)
    assert state_of(desk) == (None, msgspec.structs.astuple(SHOWN))
    assert restore_state(desk, last.stream_id)
    assert state_of(desk)[0] == msgspec.structs.astuple(MADE)


NOTE = msgspec.structs.replace(
    COPY,
    room=ROOM,
    room_named=False,
    attributes_json='{"a":1}',
    content_type="text/plain",
    body="x",
    preview="x",
)


def output(**changes: Any) -> dict[str, Any]:
    """What makes an event that of an output."""
    return {
        "type": "assistant_message",
        "event_id": "e",
        "attributes_json": "{}",
        "provenance": Provenance(),
        **changes,
    }


def restore(desk: Desk, after: int = 0, thread_root: int | None = None, **changes: Any) -> Restored:
    event = msgspec.structs.replace(NOTE, **changes)
    return conversation.restore_event.handler(desk.tx, event, thread_root, after)


def test_an_event_without_a_key_is_known_behind_its_predecessor(desk: Desk) -> None:
    first, second = restore(desk), restore(desk, after=1)
    assert [(each.sequence, each.created) for each in (first, second)] == [(1, True), (2, True)]
    desk.append(created_ms=5)
    assert [restore(desk, after).sequence for after in (0, 1)] == [1, 2]
    assert restore(desk, after=2).created


def test_an_event_without_a_key_is_known_far_behind_its_predecessor(desk: Desk) -> None:
    desk.append(created_ms=5)
    for number in range(LOOK_AHEAD_COUNT_MAX + 1):
        desk.append(event_id=str(number), created_ms=5)
        desk.append(body=str(number), created_ms=6)
    first = restore(desk, after=1)
    assert first.created
    assert [restore(desk, after) for after in (0, 1)] == [msgspec.structs.replace(first, created=False)] * 2


def test_of_very_many_events_in_one_millisecond_the_first_are_looked_at(desk: Desk) -> None:
    for number in range(LOOK_AHEAD_COUNT_MAX):
        desk.append(body=str(number), created_ms=5)
    known = restore(desk)
    assert restore(desk, after=1).sequence == known.sequence
    # Behind them, it is stored another time rather than looked for without an end.
    assert restore(desk).created


def test_an_event_without_a_key_is_found_by_an_index(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    restore(desk)
    plans: list[str] = []
    run = desk.tx.execute

    def explained(sql: str, parameters: Any = ()) -> Any:
        if "created_ms = " in sql:
            plans.extend(str(row[3]) for row in run(f"explain query plan {sql}", parameters).rows)
        return run(sql, parameters)

    monkeypatch.setattr(type(desk.tx), "execute", lambda _, *given: explained(*given))
    monkeypatch.setattr(type(desk.tx), "rows", lambda _, *given: explained(*given).rows)
    assert not restore(desk).created
    monkeypatch.undo()
    looked = "conversation_events_keyless (session_id=? AND created_ms=? AND sequence>?)"
    assert any(plan.endswith(f"USING INDEX {looked}") for plan in plans), plans
    assert not [plan for plan in plans if "TEMP B-TREE" in plan or plan.startswith("SCAN conversation")]


def test_outputs_that_differ_in_their_provenance_are_two(desk: Desk) -> None:
    told = [output(event_id=None, provenance=Provenance(phase=phase)) for phase in ("one", "two")]
    assert [restore(desk, **each).created for each in told] == [True, True]
    assert [restore(desk, **each).sequence for each in told] == [1, 2]


@pytest.mark.parametrize(
    "sender", [Sender("other", "s", "k"), Sender("l", "other", "k"), Sender("l", "s"), Sender("l", "s", "")]
)
def test_messages_of_others_are_others(desk: Desk, sender: Sender) -> None:
    for each in (Sender("l", "s", "k"), sender):
        told = output(event_id=None, sender=each)
        assert [restore(desk, **told).created for _ in range(2)] == [True, False]


@pytest.mark.parametrize(
    "change",
    [
        {"type": "other"},
        {"actor": "other"},
        {"attributes_json": "{}"},
        {"body": "y"},
        {"body": None, "content_type": None},
        {"created_ms": 6},
        {"version": 2},
        {"aggregate_id": "other"},
        {"aggregate_kind": "other"},
        {"provenance": Provenance()},
        {"event_id": "e"},
        {"client_transaction_id": "t"},
        {"room": "other"},
    ],
)
def test_an_event_that_says_something_else_is_another(desk: Desk, change: dict[str, Any]) -> None:
    conversation.create_room.handler(desk.tx, "other")
    restore(desk)
    assert restore(desk, **change).created


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "[" * 5_000, '{"a":NaN}'])
@pytest.mark.parametrize("field", ["attributes_json", "added_json", "body"])
def test_what_is_no_json_is_refused(desk: Desk, field: str, text: str) -> None:
    if field == "body" and text in ("[]", '"x"'):
        return
    with pytest.raises(InvalidRequestError):
        restore(desk, **output(**{"content_type": "application/json", field: text}))
    assert desk.events() == []


def test_an_output_that_named_no_room_stands_in_its_room_and_leaves_its_session(desk: Desk) -> None:
    restore(desk, **output())
    [event] = desk.events()
    assert (event.room, event.room_named, desk.session()) == (ROOM, False, None)
    restore(desk, **output(event_id="f", room_named=True))
    assert desk.session() is not None


@pytest.mark.parametrize("is_known", [False, True])
def test_a_collision_that_two_stores_tell_of_is_one(desk: Desk, is_known: bool) -> None:
    if is_known:
        desk.output("assistant_message", event_id="e", text="x")
        error = desk.collide({"type": "assistant_message", "event_id": "e", "text": "y"})
        told = desk.events()[-1]
        assert told.stream_id == error.details["diagnostic_stream_id"]
        attributes, key = told.attributes, told.idempotency_key
    else:
        attributes = {"output_key": "k", "incoming": {"fingerprint": "f"}}
        key = collision_key("s", "k", "f")
    made = []
    for phase in ("one", "two", "one"):
        incoming = {**attributes["incoming"], "provenance": {"phase": phase}}
        restored = restore(
            desk,
            type=COLLISION,
            idempotency_key=key,
            attributes_json=json.dumps({**attributes, "incoming": incoming}),
            content_type=None,
            body=None,
        )
        made.append((restored.created, restored.sequence))
    assert made == [(False, 2)] * 3 if is_known else [(True, 1), (False, 1), (False, 1)]
    assert len(desk.events()) == made[0][1]


def test_statistics_of_a_copy_are_those_of_the_store_it_came_from(desk: Desk) -> None:
    end = output(type="compaction_end", body=None, content_type=None)
    desk.output("tool_execution_finished", output="x")
    added = {"statistics": {"tools_finished": 7}}
    restore(desk, **dict(end, added_json='{"statistics":{"tools_finished":7}}'))
    assert desk.events()[-1].added == added
    assert desk.observations()[-1].attributes == added
    assert desk.events()[-1].output() == {"type": "compaction_end", "event_id": "e"}
    # It was a boundary; what it did not bring along is counted here.
    restore(desk, **dict(end, event_id="f"))
    assert desk.events()[-1].attributes == {"statistics": {"tools_finished": 0}}


@pytest.mark.parametrize("told", [output(), {"event_id": "e", "role": "user", "attributes_json": "{}"}])
def test_a_thread_that_comes_later(desk: Desk, told: dict[str, Any]) -> None:
    assert restore(desk, **told).thread_root is None
    repeated = restore(desk, **told, thread_root=4)
    assert (repeated.created, repeated.thread_root) == (False, 4)
    # What begins a thread goes on beginning it.
    assert restore(desk, **told, thread_root=5).thread_root == 4
    assert not conversation.restore_thread.handler(desk.tx, repeated.stream_id, 5)
    other = restore(desk, **dict(told, event_id="f"))
    assert conversation.restore_thread.handler(desk.tx, other.stream_id, 5)
    assert [message.thread_root for message in desk.messages()] == [4, 5]


def test_a_message_is_found_by_its_id_and_its_place(desk: Desk) -> None:
    find = conversation.find_message.handler
    desk.output("reasoning", text="first")
    keyed = desk.output("assistant_message", text="x", event_id="e")
    placed = desk.output("assistant_message", text="x")
    for sequence, done in ((2, keyed), (3, placed)):
        place = MessagePlace(done.message_id or "", "s", sequence, done.created_ms)
        assert find(desk.tx, ROOM, place) == done.message_number
        assert find(desk.tx, "other", place) is None
        assert find(desk.tx, ROOM, msgspec.structs.replace(place, created_ms=1)) is None
    at_another = MessagePlace(placed.message_id or "", "s", 2, placed.created_ms)
    assert find(desk.tx, ROOM, at_another) is None
    assert find(desk.tx, ROOM, MessagePlace("m-nothing", "s", 9, 1)) is None


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
    conversation.restore_session.handler(desk.tx, "s", ROOM, created_ms=9)
    for told, found in ((5, 9), (11, 11)):
        session = conversation.set_session_status.handler(desk.tx, "s", "waiting", told)
        assert (session.status, session.activity_ms) == ("waiting", found)


def roots(desk: Desk, *sessions: str) -> list[str]:
    found = [desk.session(each) for each in sessions]
    return [each.root for each in found if each is not None]


def made_below(parent: str, root: str) -> Made:
    return Made(parent, root, "idle", None, None, activity_ms=9, created_ms=5)


def test_the_roots_of_restored_sessions_are_those_of_what_is_stored_here(desk: Desk) -> None:
    begin, set_state = conversation.restore_session.handler, conversation.restore_session_state.handler
    begin(desk.tx, "c", ROOM, parent="b", root="told")
    begin(desk.tx, "d", ROOM, parent="c", root="elsewhere")
    assert roots(desk, "c", "d") == ["told", "told"]
    begin(desk.tx, "told", ROOM, created_ms=5)
    assert set_state(desk.tx, "told", ROOM, 0, SHOWN, made_below("top", "top"))
    assert roots(desk, "told", "c", "d") == ["top", "top", "top"]


def test_no_session_is_restored_below_itself(desk: Desk) -> None:
    begin, set_state = conversation.restore_session.handler, conversation.restore_session_state.handler
    begin(desk.tx, "b", ROOM, parent="a")
    begin(desk.tx, "c", ROOM, parent="b")
    for session, parent in (("a", "c"), ("b", "b")):
        with pytest.raises(InvalidRequestError):
            set_state(desk.tx, session, ROOM, 0, SHOWN, made_below(parent, "a"))
    for session, parent in (("a", "c"), ("s", "s")):
        with pytest.raises(InvalidRequestError):
            begin(desk.tx, session, ROOM, parent=parent)
    assert desk.session("a") is None
    assert roots(desk, "b", "c") == ["a", "a"]

from typing import Any

import msgspec
import pytest

from storage_worker import conversation
from storage_worker.conversation import Provenance, RoomNotFoundError, Sender
from storage_worker.conversation.records import PayloadRef
from storage_worker.conversation.vocabulary import EVENT_TYPES
from storage_worker.protocol.errors import InvalidRequestError, RequestTooLargeError
from storage_worker.protocol.limits import INLINE_BYTES_MAX

from .desk import ROOM, Desk, reference_to

LEAVES = {
    "message_queued": (None, None),
    "message_started": (None, "running"),
    "message_finished": (None, "idle"),
    "message_steered": (None, None),
    "session_error": ("error", "error"),
    "assistant_message": ("message", None),
    "assistant_delta": (None, "running"),
    "reasoning": ("reasoning", "running"),
    "tool_call": ("tool_call", "running"),
    "tool_execution_started": ("tool_started", "running"),
    "tool_execution_finished": ("tool_result", "running"),
    "assistant_usage": ("usage", None),
    "execution_result": ("execution_result", None),
    "compaction_start": ("compaction_started", None),
    "compaction_end": ("compaction", None),
    "attachment": (None, None),
    "transcript_record": (None, None),
    "import_finished": (None, "idle"),
}
"""The observation or message that each type leaves, and its session's status."""


def test_every_type_is_known() -> None:
    assert set(LEAVES) == set(EVENT_TYPES)


@pytest.mark.parametrize("type_", LEAVES)
def test_what_each_type_leaves(desk: Desk, type_: str) -> None:
    kind, status = LEAVES[type_]
    conversation.upsert_session.handler(desk.tx, "s", room=ROOM, status="before")
    done = desk.output(type_, event_id="e", turn_id="t")
    assert (done.duplicate, done.event_id, done.known_type) == (False, "e", True)
    (event,) = desk.events()
    assert (event.type, event.event_id, event.actor, event.stream_id) == (
        type_,
        "e",
        "agent",
        done.stream_id,
    )
    assert [message.id for message in desk.messages()] == ([done.message_id] if done.message_id else [])
    assert (done.message_id is not None) == (kind == "message")
    observations = desk.observations()
    assert [each.id for each in observations] == ([done.observation_id] if done.observation_id else [])
    assert [(each.kind, each.turn_id) for each in observations] == (
        [(kind, "t")] if kind not in (None, "message") else []
    )
    session, shown = desk.session(), desk.navigation()
    assert session is not None
    assert shown is not None
    assert session.status == shown.status == (status or "before")


@pytest.mark.parametrize("type_", [*LEAVES, "something_new"])
def test_each_type_arrives_again(desk: Desk, type_: str) -> None:
    event = {"type": type_, "event_id": "e", "text": "x", "output": "y", "timestamp": 1}
    first = desk.ingest(event, room=ROOM, created_ms=5)
    before = (desk.events(), desk.messages(), desk.observations(), desk.session(), desk.navigation())
    again = desk.ingest({**event, "timestamp": 2}, room=ROOM, created_ms=9)
    assert again.duplicate
    assert (again.stream_id, again.created_ms, again.event_id) == (first.stream_id, 5, "e")
    assert (again.message_id, again.observation_id, again.message_number) == (
        first.message_id,
        first.observation_id,
        first.message_number,
    )
    assert (desk.events(), desk.messages(), desk.observations(), desk.session(), desk.navigation()) == before


def test_an_unknown_type_is_stored_and_reported(desk: Desk) -> None:
    done = desk.output("plan_updated", event_id="e", body={"steps": [1, 2]}, note="n")
    assert not done.known_type
    assert (done.message_id, done.observation_id) == (None, None)
    (event,) = desk.events()
    assert (event.body, event.content_type, event.attributes) == (
        '{"steps":[1,2]}',
        "application/json",
        {"note": "n"},
    )


def test_without_event_id_it_is_stored_each_time(desk: Desk) -> None:
    done = [desk.output("assistant_message", text="x") for _ in range(2)]
    assert [each.duplicate for each in done] == [False, False]
    assert [each.event_id for each in done] == ["1", "2"]
    assert len({message.id for message in desk.messages()}) == 2
    assert all(event.idempotency_key is None for event in desk.events())


@pytest.mark.parametrize(
    ("type_", "field", "body"),
    [
        ("assistant_message", "text", "said"),
        ("assistant_message", "text", [{"type": "text", "text": "in parts"}]),
        ("reasoning", "text", "thought"),
        ("tool_call", "arguments", {"b": 1, "a": None}),
        ("tool_call", "arguments", '{"b": 1}'),
        ("tool_execution_finished", "output", "result"),
        ("execution_result", "result", {"status": "queued"}),
        ("session_error", "error", {"message": "no"}),
        ("assistant_usage", "usage", {"input_tokens": 5}),
        ("compaction_start", "summary", "short"),
        ("assistant_message", "text", ""),
        ("assistant_message", "text", None),
        ("assistant_message", "text", 5),
    ],
)
def test_an_event_keeps_all_that_it_said(desk: Desk, type_: str, field: str, body: object) -> None:
    said = {"type": type_, "event_id": "e", field: body, "extra": {"b": [1], "a": 2.5}, "turn_id": None}
    desk.ingest(said, room=ROOM)
    (event,) = desk.events()
    assert event.output() == said


def test_a_message_of_an_agent(desk: Desk) -> None:
    done = desk.ingest(
        {"type": "assistant_message", "text": "Hi", "turn_id": "t", "status": "cut", "role": "tool"},
        room=ROOM,
        actor="bot",
        sender=Sender("Bot", "agent", "key"),
        thread_root=1,
    )
    (message,) = desk.messages()
    assert (message.role, message.turn_id, message.status, message.actor) == ("tool", "t", "cut", "bot")
    assert (message.sender_label, message.source, message.agent_key, message.thread_root) == (
        "Bot",
        "agent",
        "key",
        1,
    )
    assert (message.text, message.number, done.message_number) == ("Hi", 1, 1)
    desk.output("assistant_message")
    message = desk.messages()[1]
    assert (message.text, message.role, message.source, message.status) == (
        "",
        "assistant",
        "agent",
        "complete",
    )


def test_a_text_in_parts_is_json(desk: Desk) -> None:
    desk.output("assistant_message", text=[{"type": "text", "text": "a"}])
    (message,) = desk.messages()
    assert (message.content_type, message.text) == ("application/json", '[{"text":"a","type":"text"}]')


class TestRooms:
    def test_output_without_a_room_leaves_the_session_alone(self, desk: Desk) -> None:
        desk.admit("question", room=ROOM)
        before = desk.session()
        for type_ in ("message_started", "assistant_message", "session_error"):
            desk.ingest({"type": type_, "text": "answer"}, runtime_binding="x", created_ms=10**15)
        assert desk.session() == before
        shown = desk.navigation()
        assert shown is not None
        assert (shown.status, shown.preview, shown.activity_ms) == ("error", "answer", 10**15)
        assert {event.room for event in desk.events()} == {ROOM}

    def test_output_without_a_room_makes_no_session(self, desk: Desk) -> None:
        done = desk.ingest({"type": "assistant_message", "text": "x"})
        assert done.message_number == 1
        assert desk.session() is None
        shown = desk.navigation()
        assert shown is not None
        assert shown.room == conversation.resolve_room.handler(desk.tx).id
        desk.output("reasoning")
        session, shown = desk.session(), desk.navigation()
        assert session is not None
        assert shown is not None
        assert session.room == shown.room == ROOM
        assert [event.sequence for event in desk.events()] == [1, 2]

    def test_output_of_another_room_stands_there(self, desk: Desk) -> None:
        conversation.create_room.handler(desk.tx, "other")
        desk.admit(room=ROOM)
        desk.ingest({"type": "assistant_message", "text": "x"}, room="other")
        assert [(each.room, each.number) for each in desk.messages()] == [(ROOM, 1), ("other", 1)]
        session = desk.session()
        assert session is not None
        assert session.room == ROOM

    @pytest.mark.parametrize("type_", ["assistant_message", "reasoning", "message_queued"])
    def test_an_unknown_room_is_refused(self, desk: Desk, type_: str) -> None:
        with pytest.raises(RoomNotFoundError):
            desk.ingest({"type": type_}, room="nowhere")
        assert desk.navigation() is None


class TestToolCalls:
    def test_the_same_id_again_and_again(self, desk: Desk) -> None:
        for _ in range(3):
            desk.output("tool_call", tool_call_id="c", arguments={})
            desk.output("tool_execution_started", tool_call_id="c")
            desk.output("tool_execution_finished", tool_call_id="c", output="x")
        desk.output("tool_execution_finished", tool_call_id="unseen")
        desk.output("tool_call")
        found = [(each.tool_call_id, each.invocation) for each in desk.observations()]
        assert found == [("c", n) for n in (1, 2, 3) for _ in range(3)] + [("unseen", 1), (None, None)]

    def test_arguments_that_are_still_coming_are_the_same_call(self, desk: Desk) -> None:
        for arguments, complete in (('{"a"', False), ('{"a":1', False), ('{"a":1}', True)):
            desk.output(
                "tool_call",
                event_id="e",
                tool_call_id="c",
                arguments=arguments,
                arguments_complete=complete,
            )
        desk.output("tool_call", event_id="f", tool_call_id="c", arguments="{}")
        found = [(each.invocation, each.status) for each in desk.observations()]
        assert found == [(1, "partial"), (1, "partial"), (1, "complete"), (2, "complete")]

    def test_an_ordinal_that_is_told_counts(self, desk: Desk) -> None:
        for told in (0, 7, "x", -1, 2**60, True, 1.5):
            desk.output("tool_call", tool_call_id="c", invocation=told)
        assert [each.invocation for each in desk.observations()] == [0, 7, 8, 9, 10, 11, 12]

    def test_the_parts_of_one_event_are_told_apart(self, desk: Desk) -> None:
        call: Any = {
            "type": "tool_call",
            "event_id": "e",
            "tool_call_id": "c",
            "invocation": 1,
            "arguments": {},
        }
        changes: list[dict[str, Any]] = [
            {},
            {"tool_call_id": "d"},
            {"invocation": 2},
            {"arguments_complete": False},
            {"arguments": {"a": 1}},
        ]
        assert [desk.ingest({**call, **change}).duplicate for change in changes] == [False] * 5
        assert [desk.ingest({**call, **change}).duplicate for change in changes] == [True] * 5
        assert desk.ingest({**call, "arguments_complete": True}, session="other").duplicate is False

    @pytest.mark.parametrize(
        ("fields", "status"),
        [({}, "complete"), ({"is_error": True}, "failed"), ({"status": "x" * 100}, "x" * 64)],
    )
    def test_the_status_of_a_result(self, desk: Desk, fields: dict[str, Any], status: str) -> None:
        desk.output("tool_execution_finished", **fields)
        assert [each.status for each in desk.observations()] == [status]

    def test_an_observation_has_all_that_its_event_said(self, desk: Desk) -> None:
        desk.output("tool_execution_finished", tool_call_id="c", output={"a": 1}, name="find")
        (found,) = desk.observations()
        assert found.attributes == {"tool_call_id": "c", "name": "find"}
        assert (found.content_type, found.body) == ("application/json", '{"a":1}')


class TestBounds:
    @pytest.mark.parametrize(
        "event", [{}, {"type": ""}, {"type": 5}, {"type": "x" * 513}, {"type": "x", "event_id": 5}]
    )
    def test_an_event_without_type_or_with_a_wrong_id(self, desk: Desk, event: dict[str, object]) -> None:
        with pytest.raises(InvalidRequestError):
            desk.ingest(event)
        assert desk.events() == []

    @pytest.mark.parametrize("field", ["text", "other"])
    def test_an_event_over_the_bound(self, desk: Desk, field: str) -> None:
        with pytest.raises(
            RequestTooLargeError, match="payload_client.put" if field == "text" else "into the event.s body"
        ):
            desk.output("assistant_message", **{field: "x" * (INLINE_BYTES_MAX + 1)})
        assert desk.events() == []

    @pytest.mark.parametrize(
        ("type_", "field"), [("assistant_message", "text"), ("note", "body"), ("tool_call", "arguments")]
    )
    def test_a_reference_may_stand_in_the_place_of_the_body(
        self, desk: Desk, committed: list[PayloadRef], type_: str, field: str
    ) -> None:
        ref = reference_to("text/plain", "d" * 64)
        # As it comes through the pipe: an array of its fields.
        arrived = list(msgspec.structs.astuple(ref))
        first = desk.ingest({"type": type_, "event_id": "e", field: arrived}, room=ROOM)
        (event,) = desk.events()
        assert (event.body, field in event.attributes) == (ref, False)
        assert ref in committed
        again = desk.ingest({"type": type_, "event_id": "e"}, payload=ref, room=ROOM)
        assert (again.duplicate, again.stream_id) == (True, first.stream_id)
        with pytest.raises(InvalidRequestError):
            desk.ingest({"type": type_, field: arrived}, payload=ref)

    def test_a_large_body_is_a_payload(self, desk: Desk, committed: list[PayloadRef]) -> None:
        ref = reference_to("text/plain", "d" * 64)
        event = {"type": "assistant_message", "event_id": "e"}
        desk.ingest(event, payload=ref, preview="it begins so")
        (message,) = desk.messages()
        assert (message.text, message.preview) == (ref, "it begins so")
        assert committed == [ref, ref]
        assert desk.ingest(event, payload=ref).duplicate
        assert len(committed) == 2
        with pytest.raises(InvalidRequestError):
            desk.ingest({**event, "text": "both"}, payload=ref)

    def test_a_payload_of_an_observation_counts_once(self, desk: Desk, committed: list[PayloadRef]) -> None:
        ref = reference_to("application/json", "e" * 64)
        desk.ingest({"type": "tool_call", "tool_call_id": "c"}, payload=ref)
        (found,) = desk.observations()
        assert (found.body, found.content_type) == (ref, "application/json")
        assert committed == [ref]


def test_the_provenance_is_stored(desk: Desk) -> None:
    desk.output("reasoning")
    desk.ingest({"type": "reasoning"}, provenance=Provenance("a", "b", "c"))
    assert [event.provenance for event in desk.events()] == [
        '{"producer":"direct-ingest","projection":"product-history","phase":"direct"}',
        '{"producer":"a","projection":"b","phase":"c"}',
    ]

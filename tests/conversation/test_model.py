"""Any order of calls against a plain model: what is stored, what repeats, what is refused, and every number."""

from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage_worker.conversation import EventConflictError
from storage_worker.transaction import KeptFailure

from .desk import ROOM, Desk, desk_at


class Step(NamedTuple):
    """One call."""

    operation: str
    session: str
    room: str | None
    text: str
    event_id: str | None
    transaction: str | None


steps = st.builds(
    Step,
    st.sampled_from(["append", "admit", "ingest_user", "message", "reasoning"]),
    st.sampled_from(["a", "b"]),
    st.sampled_from([None, ROOM]),
    st.sampled_from(["x", "y"]),
    st.sampled_from([None, "e1", "e2"]),
    st.sampled_from([None, "t1"]),
)


class Model:
    """The events in their order, and what each is known by."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []
        self.known: dict[tuple[Any, ...], tuple[int, tuple[Any, ...]]] = {}
        self.rooms: dict[str, str] = {}
        self.made: set[str] = set()
        self.collisions: set[tuple[Any, ...]] = set()
        self.messages: dict[str, int] = {}

    def expect(self, step: Step) -> tuple[str, int | None]:
        """What a call gives: `new`, `again`, `conflict` or `collision`, and the event's number."""
        is_output = step.operation in ("message", "reasoning")
        kind = "user" if step.operation in ("admit", "ingest_user") else step.operation
        room = step.room or self.rooms.get(step.session, "default")
        content = (step.session, kind, step.text)
        keys: list[tuple[Any, ...]] = []
        if step.transaction is not None and step.operation in ("append", "admit"):
            keys.append(("transaction", room, step.transaction))
        if step.event_id is not None:
            keys.append((step.operation if is_output else "event", step.session, step.event_id))
        for key in keys:
            if key in self.known:
                # An event that a new transaction meets by its id is not that transaction's.
                is_others = key[0] == "event" and len(keys) > 1
                return self._met(key, step, content, is_output=is_output, is_others=is_others)
        self.events.append((step.session, kind, step.text))
        number = len(self.events)
        for key in keys:
            self.known[key] = (number, content)
        if kind in ("user", "message"):
            self.messages[room] = self.messages.get(room, 0) + 1
        if step.session not in self.rooms or (step.session not in self.made and step.room):
            self.rooms[step.session] = room
        if step.room or not is_output:
            self.made.add(step.session)
        return "new", number

    def _met(
        self,
        key: tuple[Any, ...],
        step: Step,
        content: tuple[Any, ...],
        *,
        is_output: bool,
        is_others: bool,
    ) -> tuple[str, int | None]:
        number, stored = self.known[key]
        if stored == content and not is_others:
            return "again", number
        if not is_output:
            return "conflict", None
        if (key, content) not in self.collisions:
            self.collisions.add((key, content))
            self.events.append((step.session, "collision", ""))
        return "collision", None


def run(desk: Desk, step: Step) -> tuple[str, int | None]:
    """What a call really gives."""
    try:
        if step.operation == "append":
            done: Any = desk.append(
                "append",
                step.session,
                body=step.text,
                room=step.room,
                event_id=step.event_id,
                client_transaction_id=step.transaction,
            )
        elif step.operation == "admit":
            done = desk.admit(
                step.text,
                step.session,
                room=step.room,
                event_id=step.event_id,
                client_transaction_id=step.transaction,
            )
        elif step.operation == "ingest_user":
            done = desk.ingest_user(step.text, step.session, room=step.room, event_id=step.event_id)
        else:
            type_ = "assistant_message" if step.operation == "message" else "reasoning"
            event = {"type": type_, "text": step.text, "event_id": step.event_id}
            done = desk.ingest(event, step.session, room=step.room)
            return ("again" if done.duplicate else "new"), done.stream_id
    except EventConflictError:
        return "conflict", None
    except KeptFailure:
        return "collision", None
    return ("new" if done.created else "again"), done.stream_id


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, max_size=30))
def test_any_calls_do_what_the_model_says(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Step]
) -> None:
    model = Model()
    with desk_at(tmp_path_factory.mktemp("model") / "app.db") as desk:
        for step in steps:
            assert run(desk, step) == model.expect(step), step
        events = desk.events(None)
        assert [event.stream_id for event in events] == list(range(1, len(model.events) + 1))
        kinds = {
            "append": "append",
            "user_message": "user",
            "assistant_message": "message",
            "reasoning": "reasoning",
            "output_identity_collision": "collision",
        }
        assert [(event.session, kinds[event.type], event.body or "") for event in events] == model.events
        for session in ("a", "b"):
            own = [event.sequence for event in events if event.session == session]
            assert own == list(range(1, len(own) + 1))
            assert (desk.session(session) is not None) == (session in model.made)
            shown = desk.navigation(session)
            assert (shown.last_sequence if shown else 0) == len(own)
            messages = desk.messages(session)
            assert [message.sequence for message in messages] == list(range(1, len(messages) + 1))
        numbers: dict[str, list[int]] = {}
        for message in sorted((*desk.messages("a"), *desk.messages("b")), key=lambda each: each.stream_id):
            numbers.setdefault(message.room, []).append(message.number)
        assert all(found == list(range(1, len(found) + 1)) for found in numbers.values())
        assert sorted(map(len, numbers.values())) == sorted(model.messages.values())

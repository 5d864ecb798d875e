import pytest

from storage_worker import conversation
from storage_worker.conversation import RoomNotFoundError

from .desk import ROOM, Desk, everything


def test_a_room_is_made_once(desk: Desk) -> None:
    made = conversation.create_room.handler(desk.tx, "lobby", "The lobby")
    assert (made.id, made.title, made.is_default, made.archived_ms) == ("lobby", "The lobby", False, None)
    assert conversation.create_room.handler(desk.tx, "lobby", "Another title") == made


def test_the_default_room_is_made_once(desk: Desk) -> None:
    first = conversation.resolve_room.handler(desk.tx)
    assert first.is_default
    assert conversation.resolve_room.handler(desk.tx) == first
    assert conversation.resolve_room.handler(desk.tx, "nowhere") == first
    assert conversation.resolve_room.handler(desk.tx, first.id, required=True) == first
    rooms = everything(conversation.rooms.handler(desk.tx))
    assert [room.is_default for room in rooms] == [False, True]
    assert [room.number for room in rooms] == [1, 2]


def test_a_room_that_exists_is_resolved(desk: Desk) -> None:
    assert conversation.resolve_room.handler(desk.tx, ROOM).id == ROOM
    assert conversation.resolve_room.handler(desk.tx, ROOM, required=True).id == ROOM


@pytest.mark.parametrize("room", ["nowhere", None])
def test_a_required_room_that_is_missing(desk: Desk, room: str | None) -> None:
    with pytest.raises(RoomNotFoundError) as caught:
        conversation.resolve_room.handler(desk.tx, room, required=True)
    assert (caught.value.code, caught.value.retryable) == ("room_not_found", False)
    assert not any(each.is_default for each in everything(conversation.rooms.handler(desk.tx)))


def test_archiving_keeps_the_first_time(desk: Desk) -> None:
    first = conversation.archive_room.handler(desk.tx, ROOM)
    assert first.archived_ms is not None
    desk.tx.execute("update conversation_rooms set archived_ms = 5")
    assert conversation.archive_room.handler(desk.tx, ROOM).archived_ms == 5
    with pytest.raises(RoomNotFoundError):
        conversation.archive_room.handler(desk.tx, "nowhere")


def test_a_room_counts_its_messages(desk: Desk) -> None:
    numbers = [desk.admit(session=session, room=ROOM).message_number for session in ("a", "b", "a")]
    assert numbers == [1, 2, 3]
    assert conversation.resolve_room.handler(desk.tx, ROOM).last_message == 3

"""How the demo shares its work out."""

import pytest

import demo_clients
from transcripts import Conversation, Message


@pytest.mark.parametrize("clients", [1, 3, 8])
def test_every_message_is_given_once_and_evenly(clients: int) -> None:
    sizes = (1, 950, 0, 3, 199, 200, 201, 2)
    conversations = [
        Conversation(f"c{number}", "x", [Message("user", "", f"{number}/{place}") for place in range(size)])
        for number, size in enumerate(sizes)
    ]
    given = demo_clients.shares(conversations, clients)
    placed = sorted(
        (share.conversation, share.position + offset, message.text)
        for own in given
        for share in own
        for offset, message in enumerate(share.messages)
    )
    assert placed == sorted(
        (c.name, place, m.text) for c in conversations for place, m in enumerate(c.messages)
    )
    loads = [sum(len(share.messages) for share in own) for own in given]
    assert max(loads) - min(loads) <= demo_clients.SHARE_MESSAGES_MAX

"""What the demo's processes do: write their share of the transcripts, read everything back, and compare."""

import heapq
import time
from collections.abc import Callable, Iterator

import msgspec

import storage_worker as sw
import transcripts
import transcripts_store
from measuring import Recorder, Sample
from transcripts import Conversation, Message, Transcripts

SHARE_MESSAGES_MAX = 200
PAGE_BYTES = 512 * 1024
CONVERSATIONS_PAGE = 500
TIMEOUT_SECONDS = 30.0


class Share(msgspec.Struct):
    """Messages of one conversation that one client writes, from a position on."""

    conversation: str
    position: int
    messages: list[Message]


class Verdict(msgspec.Struct):
    """What the comparison of source and database gave."""

    conversations: int = 0
    messages: int = 0
    differences: list[str] = msgspec.field(default_factory=list)


def shares(conversations: list[Conversation], clients: int) -> list[list[Share]]:
    """What each client writes: about the same number of messages, long conversations in several hands."""
    loads = [(0, client) for client in range(clients)]
    given: list[list[Share]] = [[] for _ in range(clients)]
    for conversation in conversations:
        for start in range(0, len(conversation.messages), SHARE_MESSAGES_MAX):
            messages = conversation.messages[start : start + SHARE_MESSAGES_MAX]
            load, client = heapq.heappop(loads)
            given[client].append(Share(conversation.name, start, messages))
            heapq.heappush(loads, (load + len(messages), client))
    return given


def write_share(start: Callable[[], None], pipe: sw.Pipe, share: list[Share]) -> Sample:
    """One client process: every message a durable write that is waited for."""
    client = pipe.connect()
    start()
    recorder = Recorder()
    for part in share:
        for position, message in enumerate(part.messages, part.position):
            began = time.perf_counter()
            call = transcripts_store.add(
                part.conversation, position, message.role, message.author, message.text, message.details
            )
            try:
                client.call(call, timeout=TIMEOUT_SECONDS)
            except sw.StorageError as error:
                recorder.error(error.code)
            else:
                recorder.latencies_s.append(time.perf_counter() - began)
    client.close()
    return recorder.sample()


def stored_counts(client: sw.Client) -> Iterator[transcripts_store.Counted]:
    """Every conversation in the database, by pages."""
    after = ""
    while found := client.call(transcripts_store.counts(after, CONVERSATIONS_PAGE), timeout=TIMEOUT_SECONDS):
        yield from found
        after = found[-1].conversation


def stored_messages(
    client: sw.Client, stored: transcripts_store.Counted, recorder: Recorder
) -> Iterator[Message]:
    """Every message of a conversation in its order, by pages."""
    position, left = -1, stored.messages
    while left > 0:
        began = time.perf_counter()
        call = transcripts_store.page(stored.conversation, position, PAGE_BYTES)
        found = client.call(call, timeout=TIMEOUT_SECONDS)
        recorder.latencies_s.append(time.perf_counter() - began)
        if not found:
            return
        for message in found:
            yield Message(message.role, message.author, message.body, message.details)
        position = found[-1].position
        left -= len(found)


def verify(client: sw.Client, source: Transcripts, recorder: Recorder) -> Verdict:
    """Compare every conversation's count and digest with the source's, and look for what the source has not."""
    verdict = Verdict()
    missing = {
        conversation.name: conversation for conversation in source.conversations if conversation.messages
    }
    for stored in stored_counts(client):
        verdict.conversations += 1
        verdict.messages += stored.messages
        expected = missing.pop(stored.conversation, None)
        if expected is None:
            verdict.differences.append(f"{stored.conversation}: not in the source")
        elif len(expected.messages) != stored.messages:
            verdict.differences.append(
                f"{stored.conversation}: {stored.messages} messages instead of {len(expected.messages)}"
            )
        elif transcripts.digest(expected.messages) != transcripts.digest(
            stored_messages(client, stored, recorder)
        ):
            verdict.differences.append(f"{stored.conversation}: the digest differs")
    verdict.differences.extend(f"{name}: missing" for name in missing)
    return verdict

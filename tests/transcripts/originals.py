"""Builds what stood in a file again, from the records that a format's reader gave."""

import base64
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from storage_worker.transcripts import formats
from storage_worker.transcripts.records import (
    BinaryBody,
    JSONBody,
    Piece,
    Problem,
    Record,
    Transcript,
    events_of,
    records_of,
)


def sessions_in(path: Path) -> list[Transcript]:
    return [found for found in formats.transcripts(str(path)) if isinstance(found, Transcript)]


def records_in(transcript: Transcript) -> list[Record]:
    return [found for found in formats.read(transcript) if isinstance(found, Record)]


def problems_in(path: Path) -> list[Problem]:
    found = list(formats.transcripts(str(path)))
    inner = [each for one in found if isinstance(one, Transcript) for each in formats.read(one)]
    return [each for each in [*found, *inner] if isinstance(each, Problem)]


def pieces_of(records: Iterable[Record]) -> Iterator[Piece]:
    """What a store that keeps everything would tell of the events of some records."""
    for record in records:
        for event in events_of(record):
            body: Any = event.body
            if isinstance(body, JSONBody):
                body = body.value
            elif isinstance(body, BinaryBody):
                body = body.data
            yield Piece(event.fields["source"], body)


def rebuilt(records: Iterable[Record]) -> list[Any]:
    """The values of some records, built again from their events."""
    return [value for _, value in records_of(pieces_of(records))]


def chat(values: list[Any]) -> Any:
    """A session of messages, as it stood in its file."""
    if values and isinstance(values[0], dict) and set(values[0]) == {"messages", "session"}:
        return {**values[0]["session"], values[0]["messages"]: values[1:]}
    return values


def dialogue(values: list[Any]) -> Any:
    return {**values[0], "messages_display": "".join(turn["head"] + turn["text"] for turn in values[1:])}


def tree(values: list[Any]) -> Any:
    """A tree of replies from its messages in preorder."""
    about = None if "message" in values[0] else values[0]
    nodes = values if about is None else values[1:]
    # Each open message waits for so many replies.
    root: dict[str, Any] = {}
    waiting: list[tuple[dict[str, Any], int]] = []
    for value in nodes:
        node = dict(value["message"])
        if waiting:
            above, left = waiting.pop()
            above["replies"].append(node)
            if left > 1:
                waiting.append((above, left - 1))
        else:
            root = node
        if "replies" in value:
            node["replies"] = []
            if value["replies"]:
                waiting.append((node, value["replies"]))
    return root if about is None else {**about, "prompt": root}


def room_log(values: list[Any]) -> tuple[str, list[str]]:
    """The lines of a log as one text, and its links, sorted."""
    text = "".join(f"{value['head']}{value['text']}\n" for value in values)
    links = [f"{a} {b} -" for b, value in enumerate(values) for a in value.get("answers", [])]
    return text, sorted(links)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()

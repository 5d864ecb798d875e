"""Reply trees: a prompt and the replies to it, each with replies of its own, as deep as they come."""

from collections.abc import Iterator
from typing import Any, Final

from .contents import message_role, message_type
from .files import SourceFile, item_spans, read_values
from .records import RECORD, Part, Problem, Record, Transcript, body_path

NAME: Final = "tree"


def recognises(source: SourceFile) -> bool:
    """Whether a file's first record is a tree, or the first message of one."""
    first = source.first
    if not isinstance(first, dict):
        return False
    root = first.get("prompt", first)
    return isinstance(root, dict) and {"message_id", "text", "role", "replies"} <= root.keys()


def sessions(source: SourceFile) -> Iterator[Transcript | Problem]:
    """One session for each tree."""
    for place, span in enumerate(item_spans(source)):
        yield span if isinstance(span, Problem) else source.transcript(NAME, [span], place)


def read(transcript: Transcript) -> Iterator[Record | Problem]:
    """What is said of the tree, then its messages, each before its replies.

    A message is `{"message": what it says, "replies": how many follow it}`, so that the tree can be built again.
    """
    for line, tree in read_values(transcript.path, transcript.spans, dict):
        if isinstance(tree, Problem):
            yield tree
            continue
        root = tree
        if isinstance(tree.get("prompt"), dict):
            root = tree.pop("prompt")
            yield Record(id="session", line=line, value=tree, parts=[Part(type=RECORD)])
        yield from _messages(transcript.path, line, root)


def _messages(path: str, line: int, root: dict[str, Any]) -> Iterator[Record | Problem]:
    waiting: list[tuple[Any, str | None]] = [(root, None)]
    number = 0
    while waiting:
        node, parent = waiting.pop()
        own, number = str(number), number + 1
        if not isinstance(node, dict):
            yield Problem(path, line, f"message {own} of the tree is no object")
            continue
        value: dict[str, Any] = {"message": node}
        replies = node.get("replies")
        if isinstance(replies, list):
            value = {"message": {k: v for k, v in node.items() if k != "replies"}, "replies": len(replies)}
            waiting += [(reply, own) for reply in reversed(replies)]
        role = node.get("role")
        part = Part(
            type=message_type(role),
            path=body_path(node["text"], "message", "text") if isinstance(node.get("text"), str) else None,
            fields={} if parent is None else {"answers": [parent]},
            role=message_role(role),
        )
        yield Record(id=own, line=line, value=value, parts=[part], actor=message_role(role), thread="0")

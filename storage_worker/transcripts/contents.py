"""What chat messages of several formats have in common: contents that are a text, or a list of blocks."""

from typing import Any, Final

from ..conversation.vocabulary import USER_MESSAGE
from .records import ATTACHMENT, Part, Path, is_base64, name_in

ASSISTANT_MESSAGE: Final = "assistant_message"


def message_type(role: Any) -> str:
    """The type of the event that a message with this role becomes."""
    return ASSISTANT_MESSAGE if role == "assistant" else USER_MESSAGE


def message_role(role: Any) -> str:
    """The role of a message, `user` where it has no usable one."""
    return name_in(role) or "user"


def message_parts(content: Any, path: Path, role: Any, fields: dict[str, Any]) -> list[Part]:
    """The messages and attachments of a content; at least one message."""
    kind, who = message_type(role), message_role(role)
    if isinstance(content, str):
        return [Part(type=kind, path=path, fields=fields, role=who)]
    parts: list[Part] = []
    for place, block in enumerate(content if isinstance(content, list) else ()):
        if isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str):
            parts.append(Part(type=kind, path=(*path, place, "text"), fields=fields, role=who))
        else:
            parts += attachments(block, (*path, place))
    if not any(part.type == kind for part in parts):
        parts.insert(0, Part(type=kind, fields=fields, role=who))
    return parts


def attachments(block: Any, path: Path) -> list[Part]:
    """The attachment that a block with bytes in base64 is, or nothing."""
    if not isinstance(block, dict):
        return []
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "base64" or not is_base64(source.get("data")):
        return []
    media_type = name_in(source.get("media_type")) or "application/octet-stream"
    fields = {"kind": name_in(block.get("type")) or "file"}
    return [Part(type=ATTACHMENT, path=(*path, "source", "data"), fields=fields, media_type=media_type)]

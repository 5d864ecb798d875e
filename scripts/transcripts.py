"""Readers of real transcripts: agent sessions, reply trees, chat-room logs and dialogue corpora.

Formats are found by content, never by file name: tau-bench sessions (a JSON list of `traj`), tau-bench dialogues
(JSON lines of `messages_display`), oasst reply trees (JSON lines), oasst flat messages with parent links (a JSON
list), room logs with reply links beside them, and chatterbot-corpus (YAML).
"""

import hashlib
import importlib
import importlib.util
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

SOURCE_PART_CHARS = 200_000
"""How much of a source file goes into one body: at four bytes a character it stays under a request's limit."""


class TranscriptError(Exception):
    """A path cannot be read as a transcript; the text says why and what can be done."""


class Message(msgspec.Struct, frozen=True):
    """One message; `details` is JSON text of whatever its source says beyond role, author and text, or ""."""

    role: str
    author: str
    text: str
    details: str = ""


class Conversation(msgspec.Struct, frozen=True):
    """A named list of messages in their order."""

    name: str
    kind: str
    messages: list[Message]


class Transcripts(msgspec.Struct):
    """What was read: conversations, and the files that are none with the reason."""

    conversations: list[Conversation]
    skipped: list[tuple[str, str]]

    @property
    def message_count(self) -> int:
        """Messages of all conversations."""
        return sum(len(conversation.messages) for conversation in self.conversations)


def digest(messages: Iterable[Message]) -> str:
    """SHA-256 in hex over every field of every message; each field with its length, so that none can shift."""
    found = hashlib.sha256()
    for message in messages:
        for field in (message.role, message.author, message.text, message.details):
            raw = field.encode()
            found.update(len(raw).to_bytes(8, "big"))
            found.update(raw)
    return found.hexdigest()


def default_path() -> Path:
    """The data of the installed `chatterbot-corpus` package; `TranscriptError` where it is not installed."""
    spec = importlib.util.find_spec("chatterbot_corpus")
    for location in spec.submodule_search_locations or () if spec else ():
        return Path(location) / "data"
    raise TranscriptError(
        "chatterbot-corpus is not installed: pip install chatterbot-corpus, or name paths to read"
    )


def read(paths: Iterable[Path], *, sources: bool = False) -> Transcripts:
    """Read files and whole folders.

    `sources` adds each source file itself as one more conversation, in bodies of up to `SOURCE_PART_CHARS`
    characters. Raises `TranscriptError` where a path does not exist, a file that was named itself has no known
    format, or nothing was found at all.
    """
    found = Transcripts([], [])
    taken: set[str] = set()
    for path in paths:
        for file, short in _files(path):
            # Two folders may hold files of the same name, and a path may be given twice.
            name = next(name for name in _variants(short) if name not in taken)
            taken.add(name)
            try:
                text = _text_of(file)
                kind, conversations = _conversations_of(file, name, text)
            except TranscriptError as error:
                if path == file:
                    raise TranscriptError(f"{path}: {error}") from error
                found.skipped.append((name, str(error)))
                continue
            found.conversations.extend(conversations)
            if sources:
                found.conversations.append(_source_of(name, kind, text))
    if not found.conversations:
        raise TranscriptError("no transcripts found in " + ", ".join(map(str, paths)))
    return found


def _files(path: Path) -> Iterator[tuple[Path, str]]:
    if path.is_dir():
        for file in sorted(found for found in path.rglob("*") if found.is_file()):
            yield file, f"{path.name}/{file.relative_to(path)}"
    elif path.exists():
        yield path, path.name
    else:
        raise TranscriptError(f"{path} does not exist")


def _variants(name: str) -> Iterator[str]:
    yield name
    for number in itertools.count(2):
        yield f"{name} ({number})"


def _text_of(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise TranscriptError(f"no UTF-8 text: {error}") from error


def _conversations_of(file: Path, name: str, text: str) -> tuple[str, list[Conversation]]:
    if text.lstrip()[:1] in ("[", "{"):
        whole = _json_of(text)
        if whole is not None:
            return _first_format(whole, name)
        records = [_json_of(line) for line in _lines_of(text) if line]
        if None not in records:
            return _first_format(records, name)
    if re.search(r"^conversations:", text, re.MULTILINE):
        return "chatterbot", _read_chatterbot(text, name)
    lines = _lines_of(text)
    if _mostly(_LOG_LINE, lines):
        return "room log", [_read_room_log(file, name, lines)]
    if _mostly(_LINK_LINE, lines):
        raise TranscriptError("reply links, which are read with their log")
    raise TranscriptError("no known transcript format")


def _source_of(name: str, kind: str, text: str) -> Conversation:
    parts = [text[start : start + SOURCE_PART_CHARS] for start in range(0, len(text), SOURCE_PART_CHARS)]
    return Conversation(f"{name} (source)", f"{kind} source", [Message("source", "", part) for part in parts])


def _json_of(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _lines_of(text: str) -> list[str]:
    # Lines of logs hold form feeds and other characters at which str.splitlines would split too.
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _details(record: dict[str, Any], *without: str) -> str:
    rest = {name: value for name, value in record.items() if name not in without}
    return msgspec.json.encode(rest).decode() if rest else ""


# --- JSON -------------------------------------------------------------------------------------------------------


def _read_sessions(records: list[dict[str, Any]], name: str) -> list[Conversation]:
    # Tool-call ids repeat, also within a session: only the place in the file tells sessions and messages apart.
    return [
        Conversation(
            f"{name}#{number}",
            "tau-bench",
            [_session_message(record) for record in session["traj"]],
        )
        for number, session in enumerate(records)
    ]


def _session_message(record: dict[str, Any]) -> Message:
    text = record.get("content")
    # Null and empty content have the same text; the null stays among the details.
    taken = ("role", "name") if text is None else ("role", "name", "content")
    return Message(record["role"], record.get("name") or "", text or "", _details(record, *taken))


def _read_dialogues(records: list[dict[str, Any]], name: str) -> list[Conversation]:
    start = re.compile(r"(?:^|\n)(user|assistant|tool|system): ")
    conversations = []
    for number, record in enumerate(records):
        pieces = start.split(record["messages_display"])
        messages = [Message(role, "", text) for role, text in zip(pieces[1::2], pieces[2::2], strict=True)]
        if pieces[0]:
            messages.insert(0, Message("", "", pieces[0]))
        conversations.append(Conversation(f"{name}#{number}", "dialogue", messages))
    return conversations


def _read_trees(records: list[dict[str, Any]], name: str) -> list[Conversation]:
    conversations = []
    for number, record in enumerate(records):
        messages = []
        waiting = [record.get("prompt", record)]
        while waiting:
            node = waiting.pop()
            waiting.extend(reversed(node.get("replies") or []))
            details = _details(node, "text", "role", "replies")
            messages.append(Message(node["role"], "", node["text"], details))
        conversations.append(Conversation(f"{name}#{number}", "reply tree", messages))
    return conversations


def _read_linked(records: list[dict[str, Any]], name: str) -> list[Conversation]:
    root_of: dict[str, str] = {}
    threads: dict[str, list[Message]] = {}
    for record in records:
        own, parent = str(record["user_message_id"]), str(record.get("parent_message_id") or "")
        root = root_of.get(parent, parent) or own
        root_of[own] = root
        details = _details(record, "text", "role")
        threads.setdefault(root, []).append(Message(record["role"], "", record["text"], details))
    return [Conversation(f"{name}#{root}", "linked messages", messages) for root, messages in threads.items()]


_Reader = Callable[[list[dict[str, Any]], str], list[Conversation]]
_JSON_FORMATS: tuple[tuple[str, frozenset[str], _Reader], ...] = (
    ("tau-bench", frozenset(("traj",)), _read_sessions),
    ("dialogue", frozenset(("messages_display",)), _read_dialogues),
    ("reply tree", frozenset(("message_tree_id", "prompt")), _read_trees),
    ("linked messages", frozenset(("user_message_id", "text", "role")), _read_linked),
    ("reply tree", frozenset(("message_id", "text", "role")), _read_trees),
)


def _first_format(value: Any, name: str) -> tuple[str, list[Conversation]]:
    records = value if isinstance(value, list) else [value]
    for kind, fields, reader in _JSON_FORMATS:
        if records and all(isinstance(record, dict) and fields <= record.keys() for record in records):
            try:
                return kind, reader(records, name)
            except (AttributeError, KeyError, TypeError) as error:
                raise TranscriptError(
                    f"it looks like {kind}, but a record is not whole: {error!r}"
                ) from error
    raise TranscriptError("JSON of no known transcript format")


# --- YAML -------------------------------------------------------------------------------------------------------


def _read_chatterbot(text: str, name: str) -> list[Conversation]:
    try:
        yaml = importlib.import_module("yaml")
    except ModuleNotFoundError as error:
        raise TranscriptError("YAML, which needs pyyaml: pip install pyyaml") from error
    # The base loader leaves every scalar the text that it is: no "no" becomes False.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        document = yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise TranscriptError(f"no YAML: {error}") from error
    conversations = []
    for number, turns in enumerate(document["conversations"] or []):
        texts = [turns] if isinstance(turns, str) else turns
        if not all(isinstance(text, str) for text in texts):
            raise TranscriptError(f"conversation {number} holds something else than texts")
        messages = [Message(("user", "assistant")[place % 2], "", text) for place, text in enumerate(texts)]
        conversations.append(Conversation(f"{name}#{number}", "chatterbot", messages))
    return conversations


# --- Room logs --------------------------------------------------------------------------------------------------

_LOG_LINE = re.compile(
    r"(?:(?P<room>\S+) (?P<date>\d{4}-\d\d-\d\d) )?"
    r"(?:(?P<system>===)|\[(?P<time>\d\d:\d\d(?::\d\d)?)\] +"
    r"(?:<(?P<nick>[^>]*)>|\* ?(?P<actor>\S+)|-(?P<notice>[^-\s]+)-))"
    r"[ \t]?(?P<text>.*)",
    re.DOTALL,
)
_LINK_LINE = re.compile(r"(\d+) (\d+) -\s*")


def _mostly(pattern: re.Pattern[str], lines: list[str]) -> bool:
    first = lines[:50]
    return bool(first) and sum(pattern.fullmatch(line) is not None for line in first) >= 0.9 * len(first)


def _read_room_log(file: Path, name: str, lines: list[str]) -> Conversation:
    answers = _links_beside(file)
    messages = [_message_of(line, answers.get(number)) for number, line in enumerate(lines)]
    return Conversation(name, "room log", messages)


def _message_of(line: str, answers: list[int] | None) -> Message:
    # Every line is a message, blank and odd ones too: reply links count lines.
    match = _LOG_LINE.fullmatch(line)
    links = {"answers": answers} if answers else {}
    if match is None:
        return Message("line", "", line, _details(links))
    found = match.groupdict()
    role = next(
        role
        for role, group in (
            ("system", "system"),
            ("message", "nick"),
            ("action", "actor"),
            ("notice", "notice"),
        )
        if found[group] is not None
    )
    author = found["nick"] or found["actor"] or found["notice"] or ""
    when = {key: found[key] for key in ("room", "date", "time") if found[key]}
    return Message(role, author, found["text"], _details(when | links))


def _links_beside(file: Path) -> dict[int, list[int]]:
    """Which lines each line of a log answers, by the annotation file beside it; nothing where there is none."""
    stem = re.sub(r"\.(ascii|raw)\.txt$", "", file.name)
    annotation = file.with_name(f"{stem}.annotation.txt")
    links: dict[int, list[int]] = {}
    if stem == file.name or not annotation.is_file():
        return links
    for line in _lines_of(_text_of(annotation)):
        match = _LINK_LINE.fullmatch(line)
        if match is not None:
            answered, answer = int(match[1]), int(match[2])
            links.setdefault(answer, []).append(answered)
    return links

"""The installed chatterbot-corpus (dialogues in many languages, as YAML), written as chat messages to import."""

import importlib
import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

SOURCES = "sources.jsonl"
"""The file with the sources themselves, each one large message."""


class CorpusError(Exception):
    """The corpus cannot be read; the text says why and what can be done."""


def default_path() -> Path:
    """The data of the installed `chatterbot-corpus` package; `CorpusError` where it is not installed."""
    spec = importlib.util.find_spec("chatterbot_corpus")
    for location in spec.submodule_search_locations or () if spec else ():
        return Path(location) / "data"
    raise CorpusError(
        "chatterbot-corpus is not installed: pip install chatterbot-corpus, or name paths to read"
    )


def write_as_chats(source: Path, folder: Path, per_language: int | None = None) -> None:
    """Write each YAML file below `source` as JSON lines, a conversation a line, into `folder`.

    Of each language, which is a folder, about `per_language` conversations are taken, the first of each file; None for
    all. Raises `CorpusError` where PyYAML is missing or a file is no corpus.
    """
    files = sorted(source.rglob("*.yml"))
    counts = Counter(file.parent for file in files)
    for file in files:
        share = None if per_language is None else -(-per_language // counts[file.parent])
        conversations = _conversations(file)[:share]
        target = folder / f"{file.parent.name}-{file.stem}.jsonl"
        target.write_bytes(msgspec.json.Encoder().encode_lines([_chat(turns) for turns in conversations]))


def write_sources(paths: list[Path], folder: Path) -> None:
    """Write the text of every file as one message of a conversation of its own: bodies of any size."""
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else (path,))]
    with (folder / SOURCES).open("wb") as target:
        for file in files:
            try:
                text = file.read_bytes().decode() if file.is_file() else ""
            except UnicodeDecodeError:
                continue
            if text:
                message = {"role": "user", "name": file.name, "content": text}
                target.write(msgspec.json.encode({"messages": [message]}) + b"\n")


def _conversations(file: Path) -> list[list[str]]:
    try:
        yaml = importlib.import_module("yaml")
    except ModuleNotFoundError as error:
        raise CorpusError("the corpus is YAML, which needs PyYAML: pip install pyyaml") from error
    # The base loader leaves every scalar the text that it is: no "no" becomes False.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        found: Any = yaml.load(file.read_bytes(), Loader=loader)["conversations"] or []
        return [[turns] if isinstance(turns, str) else msgspec.convert(turns, list[str]) for turns in found]
    except (yaml.YAMLError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise CorpusError(f"{file} is no corpus: {error!r}") from error


def _chat(turns: list[str]) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]

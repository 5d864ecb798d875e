"""The real data is read whole: counts that others took, and every source built again from its records."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage_worker.transcripts.records import Record, events_of

from . import originals
from .originals import rebuilt, records_in, sessions_in
from .shared import SHARED, needs_shared

pytestmark = needs_shared


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


@pytest.mark.parametrize(
    ("name", "original", "read"),
    [
        ("tau-bench/gpt-4o-airline.json", originals.chat, lambda path: json.loads(path.read_bytes())),
        ("tau-bench/MockAirlineDomainEnv-few_shot.jsonl", originals.dialogue, lines_of),
        ("tau-bench/MockRetailDomainEnv-few_shot.jsonl", originals.dialogue, lines_of),
        ("oasst/en_100_tree.jsonl", originals.tree, lines_of),
        ("oasst/en_100_message.jsonl", originals.tree, lines_of),
    ],
)
def test_sources_are_built_again(
    name: str, original: Callable[[list[Any]], Any], read: Callable[[Path], list[Any]]
) -> None:
    path = SHARED / name
    assert [original(rebuilt(records_in(each))) for each in sessions_in(path)] == read(path)


def test_linked_messages_are_built_again() -> None:
    path = SHARED / "oasst" / "realistic_seed_data.json"
    found = [message for each in sessions_in(path) for message in rebuilt(records_in(each))]
    assert len(found) == 444
    assert sorted(found, key=str) == sorted(json.loads(path.read_bytes()), key=str)


@pytest.mark.parametrize(
    "stem", ["rust.0", "mediawiki.1", "ubuntu-meeting.2", "2004-11-15_03", "2009-03-03_10"]
)
def test_logs_and_links_are_built_again(stem: str) -> None:
    kind = "raw" if stem[0] == "2" else "ascii"
    path = SHARED / "irc" / f"{stem}.{kind}.txt"
    [session] = sessions_in(path)
    text, links = originals.room_log(rebuilt(records_in(session)))
    assert text == path.read_bytes().decode()
    annotation = (SHARED / "irc" / f"{stem}.annotation.txt").read_text()
    assert links == sorted(line.strip() for line in annotation.split("\n") if line)


def airline() -> list[Record]:
    return [
        record
        for each in sessions_in(SHARED / "tau-bench" / "gpt-4o-airline.json")
        for record in records_in(each)
    ]


def test_the_traps_of_the_agent_sessions() -> None:
    records = airline()
    messages = [record for record in records if record.id != "session"]
    assert len(messages) == 5_308
    events = Counter(event.type for record in messages for event in events_of(record))
    assert (events["tool_call"], events["tool_execution_finished"]) == (1_164, 1_164)
    results = [part for record in messages for part in record.parts if part.type == "tool_execution_finished"]
    assert len({part.fields["tool_call_id"] for part in results}) == 134
    assert sum(not record.value.get("content") for record in messages) == 1_166


def test_a_line_that_answers_several_keeps_all_its_links() -> None:
    several = 0
    for path in sorted((SHARED / "irc").glob("*.a*i.txt")):
        [session] = sessions_in(path)
        several += sum(len(record.value.get("answers", ())) > 1 for record in records_in(session))
    assert several > 0


def test_the_deepest_reply_is_six_down() -> None:
    deepest = 0
    for session in sessions_in(SHARED / "oasst" / "en_100_tree.jsonl"):
        depths: dict[str, int] = {}
        for record in records_in(session)[1:]:
            above = record.parts[0].fields.get("answers", [None])[0]
            depths[record.id] = depths.get(above, 0) + 1
        deepest = max(deepest, *depths.values())
    assert deepest == 6

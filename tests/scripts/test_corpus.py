"""The demo's default input as chat messages, and its comparison of source and store."""

import json
from pathlib import Path

import pytest

import corpus
import import_checks
import storage_worker as sw
from measuring import Recorder
from storage_worker.conversation_client import STORE
from storage_worker.import_session import import_transcript
from storage_worker.transcripts import formats
from storage_worker.transcripts.records import Transcript


def chats_in(folder: Path) -> list[list[list[dict[str, str]]]]:
    files = sorted(folder.glob("*.jsonl"))
    return [[json.loads(line) for line in file.read_bytes().splitlines()] for file in files]


def test_scalars_stay_text_and_roles_alternate(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    source, folder = tmp_path / "english", tmp_path / "chats"
    source.mkdir()
    folder.mkdir()
    text = "categories:\n- x\nconversations:\n- - no\n  - 1.0\n- 'alone'\n"
    (source / "x.yml").write_text(text)
    corpus.write_as_chats(tmp_path, folder)
    assert chats_in(folder) == [
        [
            [{"role": "user", "content": "no"}, {"role": "assistant", "content": "1.0"}],
            [{"role": "user", "content": "alone"}],
        ]
    ]


def test_a_sample_has_some_of_every_file(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "english").mkdir()
    for name in ("a", "b", "c"):
        lines = "".join(f"- {name}{number}\n" for number in range(9))
        (tmp_path / "english" / f"{name}.yml").write_text(f"conversations:\n{lines}")
    corpus.write_as_chats(tmp_path, tmp_path, 4)
    texts = [[turns[0]["content"] for turns in file] for file in chats_in(tmp_path)]
    assert texts == [["a0", "a1"], ["b0", "b1"], ["c0", "c1"]]


@pytest.mark.parametrize("text", ["conversations: [[{}]]", "conversations: [", "other: []", "[]"])
def test_what_is_no_corpus_is_named(tmp_path: Path, text: str) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "odd.yml").write_text(text)
    with pytest.raises(corpus.CorpusError, match=r"odd\.yml is no corpus"):
        corpus.write_as_chats(tmp_path, tmp_path)


def test_sources_are_whole_messages(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "inputs"
    source.mkdir()
    folder.mkdir()
    (source / "a.txt").write_text("é" * 50_000)
    (source / "b.bin").write_bytes(b"\xff")
    (source / "c.txt").write_text("")
    corpus.write_sources([source], folder)
    [found] = (json.loads(line) for line in (folder / corpus.SOURCES).read_bytes().splitlines())
    assert [message["content"] for message in found["messages"]] == ["é" * 50_000]


def test_a_difference_between_source_and_store_is_seen(database: Path, tmp_path: Path) -> None:
    def write(name: str, *texts: str) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps([{"role": "user", "content": text}]) + "\n" for text in texts))
        return path

    path = write("a.jsonl", "one", "two", "three")
    one, two, three = (each for each in formats.transcripts(str(path)) if isinstance(each, Transcript))
    expected = import_checks.expected_of([path])
    with sw.StorageWorker(database, stores=[STORE]) as worker, worker.connect() as client:
        for each in (one, two):
            import_transcript(client, each)
        expected[one.session].records += 1
        expected[two.session].digest = "another"
        other = import_checks.expected_of([write("b.jsonl", "other")])
        missing = import_checks.verify(client, expected, Recorder()).differences
        assert missing == [
            f"{one.session}: 1 records instead of 2",
            f"{two.session}: the digest differs",
            f"{three.session}: missing",
        ]
        surplus = import_checks.verify(client, other, Recorder()).differences
        assert f"{one.session}: not in the source" in surplus

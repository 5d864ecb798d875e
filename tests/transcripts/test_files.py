"""Files are taken apart exactly, whatever they hold and however they are read."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_worker.transcripts import files
from storage_worker.transcripts.files import (
    Line,
    UnreadableError,
    content_of,
    decoded,
    item_spans,
    list_spans,
    open_source,
    read_lines,
    read_spans,
    whole_span,
)
from storage_worker.transcripts.records import Problem, Span, Transcript

from .samples import write

texts = st.text(alphabet='ab"\\[]{},\n\u00e9')
values = st.recursive(
    texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)
items = st.lists(st.dictionaries(texts, values, max_size=3) | st.lists(values, max_size=3), max_size=6)


def items_of(path: Path) -> list[Any]:
    spans = [span for span in list_spans(str(path)) if isinstance(span, Span)]
    return [json.loads(raw) for _, raw in read_spans(str(path), spans)]


@given(items, st.integers(1, 7), st.sampled_from([None, 1]))
def test_list_items_are_found_in_chunks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, found: list[Any], chunk: int, indent: int | None
) -> None:
    path = write(tmp_path_factory.mktemp("list"), "a.json", json.dumps(found, indent=indent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHUNK_BYTES", chunk)
        assert items_of(path) == found


def test_a_list_that_is_cut_off_is_told_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "a.json", '[\n{"a": 1},\n{"b":\n 2')
    first, last = list_spans(str(path))
    assert first == Span(2, 8, 2)
    assert last == Problem(str(path), 3, "the list is cut off here")


def test_items_have_the_lines_they_begin_in(tmp_path: Path) -> None:
    path = write(tmp_path, "a.json", '[{"a": "x\\ny"},\n\n{"b": [\n1]}, {"c": {}}]')
    assert [span.line for span in list_spans(str(path)) if isinstance(span, Span)] == [1, 3, 4]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('[{"a": 1},\n7, "x",\n{"b": "]"},\nnull]', [2, 4]),
        ('["[{",\n{"a": 1}\n]', [1]),
        ('[{"a": 1}]\n\n', []),
        ('[{"a": 1}]\n {"b": 1}', [2]),
        ('[\n{"a": 1} , {}\n]]', [3]),
    ],
)
@pytest.mark.parametrize("chunk", [1, 3, 1_000])
def test_what_is_no_item_of_a_list_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, lines: list[int], chunk: int
) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", chunk)
    path = write(tmp_path, "a.json", text)
    assert [found.line for found in list_spans(str(path)) if isinstance(found, Problem)] == lines
    assert {"a": 1} in items_of(path)


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    lines = ["form\x0cfeed", "\x85\u2028\x1c", "", "cr\r", "last"]
    path = write(tmp_path, "a.txt", "\n".join(lines))
    read = list(read_lines(str(path), [whole_span(str(path))]))
    found = [line for line in read if not isinstance(line, Problem)]
    assert [(line.span.line, line.raw.decode()) for line in found] == list(enumerate(lines, 1))
    assert sum(line.span.length for line in found) == path.stat().st_size


def test_a_line_over_the_bound_is_told_and_the_next_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "RECORD_BYTES_MAX", 10)
    monkeypatch.setattr(files, "CHUNK_BYTES", 4)
    for length in (10, 11, 25):
        path = write(tmp_path, "a.txt", "short\n" + "x" * length + "\nend\n")
        for spans in (None, [whole_span(str(path))], [Span(6, length + 5, 2)]):
            long, last = list(read_lines(str(path), spans))[-2:]
            assert last == (Span(length + 7, 4, 3), b"end")
            assert isinstance(long, Problem)
            assert long.line == 2


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ('[{"a": 1}]', "list"),
        ('[\n {"a": 1}\n]', "list"),
        ('{"a": 1}\n{"a": 2}\n', "lines"),
        ('\n{"a": 1}\n', "lines"),
        ('[{"a": 1}]\n[{"a": 2}]\n', "lines"),
        ('{\n "a": 1\n}\n', "one value"),
        ('{"a": \n{"a": 1}\n', "lines"),
        ('garbage\n{"a": 1}\n', "lines"),
        ('{"a": [\n{"b": 1}\n]}\n', "one value"),
        ('[\n{"a": 1e400},\n{"a": 1}\n]', "list"),
        ("[12:18] <a> hi\n", "no JSON"),
        ("", "no JSON"),
        ("[]", "no JSON"),
        ('{"a": \n', "no JSON"),
    ],
)
def test_layouts(tmp_path: Path, text: str, layout: str) -> None:
    assert open_source(str(write(tmp_path, "a", text))).layout == layout


@pytest.mark.parametrize("raw", [b"NaN", b'"\\ud800"', b"1e400", b"{", b"", b"\xff", b"[" * 5_000])
def test_what_cannot_be_kept_exactly_is_refused(raw: bytes) -> None:
    with pytest.raises(UnreadableError):
        decoded(raw)


def test_huge_numbers_are_kept() -> None:
    assert decoded(b"123456789012345678901234567890") == 123456789012345678901234567890


def test_a_transcripts_content_is_that_of_its_spans(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "one\ntwo\none\n")
    first, second, third = (
        Transcript(format="x", path=str(path), session="s", room="r", title="t", spans=[line.span])
        for line in read_lines(str(path))
        if isinstance(line, Line)
    )
    assert content_of(first) == content_of(third) != content_of(second)


@pytest.mark.parametrize("text", ['[{"a": 1}]', '{"a": 1}\n{"a": 2}\n', '{\n"a": 1}'])
def test_a_mark_in_front_of_a_text_is_no_part_of_it(tmp_path: Path, text: str) -> None:
    plain, marked = (
        open_source(str(write(tmp_path, name, start + text))) for name, start in (("a", ""), ("b", "\ufeff"))
    )
    assert (marked.layout, marked.first, marked.head) == (plain.layout, plain.first, plain.head)
    spans = [found for found in item_spans(marked) if isinstance(found, Span)]
    assert next(decoded(raw) for _, raw in read_spans(marked.path, spans)) == {"a": 1}
    [first, *_] = [line.raw for line in read_lines(marked.path) if isinstance(line, Line)]
    assert first == text.split("\n", maxsplit=1)[0].encode()

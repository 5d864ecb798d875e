"""Any record can be built again from its events."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_worker.transcripts.records import (
    RECORD,
    REST_BYTES_MAX,
    JSONBody,
    Part,
    Path,
    Record,
    Tally,
    events_of,
    is_base64,
)

from .originals import encoded, rebuilt

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def bodies(value: Any, path: Path = ()) -> list[Path]:
    """The paths of everything in a value that can be a body."""
    found = [path] if isinstance(value, str | list | dict) and path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [each for key, below in items for each in bodies(below, (*path, key))]


@given(json_values, st.data())
def test_a_record_is_built_again_whatever_its_parts(value: Any, data: st.DataObject) -> None:
    paths = data.draw(st.lists(st.sampled_from(bodies(value)), unique=True)) if bodies(value) else []
    parts = [Part(type="x", path=path) for path in paths] or [Part(type="x")]
    record = Record(id="r", line=1, value=value, parts=parts)
    [again] = rebuilt([record])
    assert again == value
    assert digest_of(again) == digest_of(value)


def digest_of(*values: Any) -> str:
    tally = Tally()
    for value in values:
        tally.add(value)
    return tally.digest


def test_a_body_inside_another_body() -> None:
    image = encoded(b"\x00\xff\x10")
    value = {"content": [{"data": image}, {"text": "t"}]}
    parts = [
        Part(type="outer", path=("content",)),
        Part(type="inner", path=("content", 0, "data"), media_type="image/png"),
    ]
    outer, inner = events_of(Record(id="r", line=1, value=value, parts=parts))
    assert outer.body == JSONBody([{}, {"text": "t"}])
    assert inner.fields["source"] == {"record": "r", "path": ["content", 0, "data"]}
    assert rebuilt([Record(id="r", line=1, value=value, parts=parts)]) == [value]


@pytest.mark.parametrize(
    ("value", "is_beside"),
    [
        ({"a": 1}, True),
        ({"a": "x" * REST_BYTES_MAX}, False),
        ({"a": 2**64}, False),
        ({"a": [[[[]]]]}, True),
    ],
)
def test_a_rest_that_cannot_stand_in_a_row_is_an_event_of_its_own(value: Any, is_beside: bool) -> None:
    record = Record(id="r", line=1, value=value, parts=[Part(type="x")])
    events = list(events_of(record))
    assert [event.type for event in events] == (["x"] if is_beside else [RECORD, "x"])
    assert len({event.id for event in events}) == len(events)
    assert rebuilt([record]) == [value]


def test_nesting_that_no_request_carries_is_an_event_of_its_own() -> None:
    value: Any = 0
    for _ in range(200):
        value = [value]
    record = Record(id="r", line=1, value=value, parts=[Part(type="x")])
    assert [event.type for event in events_of(record)] == [RECORD, "x"]
    assert rebuilt([record]) == [value]


def test_what_was_read_is_not_changed() -> None:
    value = {"a": {"b": ["text"]}}
    list(events_of(Record(id="r", line=1, value=value, parts=[Part(type="x", path=("a", "b", 0))])))
    assert value == {"a": {"b": ["text"]}}


@pytest.mark.parametrize("text", ["YQ==", "", "AP8Q"])
def test_base64_that_says_itself_again(text: str) -> None:
    assert is_base64(text)


@pytest.mark.parametrize("text", ["YQ", "YR==", "Y Q==", "é", None, 7, "YQ==\n"])
def test_base64_that_would_be_altered(text: Any) -> None:
    assert not is_base64(text)


def test_a_digest_knows_order_and_borders() -> None:
    assert digest_of("a", "b") != digest_of("b", "a")
    assert digest_of([1], [2]) != digest_of([1, 2])
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})

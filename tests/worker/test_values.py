"""Values that cannot be stored unchanged are refused, by name; those that can come back as they were."""

import math
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage_worker.protocol.errors import InvalidRequestError, OperationFailedError
from storage_worker.protocol.statements import BATCH, QUERY, Batch, Statement
from tests.worker.conftest import RunningWorker
from tests.worker.hostile import BOMB, WRITE, Bystander, refusal, statement, table_is_empty
from tests.worker.raw import RawClient

SURROGATE = b"\xed\xa0\x80"
INSERT = b"insert into kept values(?)"


@pytest.fixture
def client(standing_worker: RunningWorker) -> Iterator[RawClient]:
    """A client of the standing worker with an empty table `kept`; afterwards a bystander finds it as it was."""
    bystander = Bystander(standing_worker)
    with RawClient(standing_worker.address) as client:
        client.execute("drop table if exists kept")
        client.execute("create table kept(a)")
        yield client
    bystander.check()
    bystander.client.close()


REFUSED = {
    "2^63": b"\xcf\x80" + bytes(7),
    "2^64-1": b"\xcf" + b"\xff" * 8,
    "NaN": b"\xcb\x7f\xf8" + bytes(6),
    "another NaN": b"\xcb\xff\xf0" + bytes(5) + b"\x01",
    "32-bit NaN": b"\xca\x7f\xc0\x00\x00",
    "lone surrogate": b"\xa3" + SURROGATE,
    "the other lone surrogate": b"\xa3\xed\xbf\xbf",
    "overlong": b"\xa2\xc0\x80",
    "beyond Unicode": b"\xa4\xf4\x90\x80\x80",
    "half a character": b"\xa1\xc3",
    "list": b"\x91\x01",
    "map": b"\x81\xa1a\x01",
    "empty list": b"\x90",
    "extension": b"\xd4\x05\x00",
    "time": b"\xd6\xff\x00\x00\x00\x01",
    "broken time": b"\xc7\x0c\xff" + b"\xff" * 12,
    "64 bit of nesting": b"\x91" * 64 + b"\xc0",
    "bomb": BOMB,
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_a_value_that_does_not_fit(client: RawClient, value: bytes) -> None:
    by_place = statement(INSERT, value)
    text = b"insert into kept values(:a)"
    by_name = b"\x92\xd9" + bytes([len(text)]) + text + b"\x81\xa1a" + value
    in_a_batch = b"\x91\x92" + statement(INSERT, b"\x01") + by_place
    for arguments, operation in (
        (by_place, WRITE),
        (by_place, QUERY.name),
        (by_name, WRITE),
        (by_name, QUERY.name),
        (in_a_batch, BATCH.name),
    ):
        error = refusal(client, arguments, operation)
        assert isinstance(error, InvalidRequestError)
        assert error.outcome == "not_committed"
        assert table_is_empty(client, "kept")


@pytest.mark.parametrize("key", [b"\x01", b"\xc4\x01a", b"\xc0", b"\xa3" + SURROGATE, b"\x91\x01"])
def test_a_name_that_is_no_text(client: RawClient, key: bytes) -> None:
    assert isinstance(refusal(client, b"\x92\xa8select 1\x81" + key + b"\x01", WRITE), InvalidRequestError)


@pytest.mark.parametrize("place", [1, 2, 5])
def test_the_value_at_fault_is_named(client: RawClient, place: int) -> None:
    values = [b"\x01"] * 5
    values[place - 1] = REFUSED["2^63"]
    assert f"parameter {place}" in str(refusal(client, statement(b"select ?,?,?,?,?", *values)))


@pytest.mark.parametrize("sql", [b"select '" + SURROGATE + b"'", b"select \xff"])
def test_sql_that_is_no_text(client: RawClient, sql: bytes) -> None:
    assert isinstance(refusal(client, statement(sql)), InvalidRequestError)


KEPT = {
    "NUL inside": "a\0b",
    "NUL": "\0",
    "many NULs": "\0" * 1_000,
    "bytes of NUL": b"a\0b",
    "the smallest": -(2**63),
    "the largest": 2**63 - 1,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "smallest float": 5e-324,
    "empty": "",
    "no bytes": b"",
    "a surrogate's bytes": SURROGATE,
    "non-character": "\uffff\ufffe",
    "beyond the first plane": "\U0010ffff",
    "right to left": "\u202eabc\u202c",
    "combining": "e\u0301",
    "line ends": "\r\n\u2028\x85\x0b",
}


@pytest.mark.parametrize("value", KEPT.values(), ids=KEPT)
def test_a_value_that_fits_comes_back_unchanged(client: RawClient, value: object) -> None:
    client.execute("insert into kept values(?)", value)
    client.execute("insert into kept values(?)", value, key=f"kept {value!r}"[:200])
    assert client.query("select a from kept").rows == [(value,), (value,)]
    assert client.query("select count(*) from kept where a = ?", value).scalar() == 2


storable = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(storable, min_size=1, max_size=20))
def test_whatever_can_be_stored_comes_back(client: RawClient, values: list[object]) -> None:
    marks = ",".join("?" * len(values))
    found = client.query(f"select {marks}", *values).rows
    assert [type(value) for value in found[0]] == [type(value) for value in values]
    assert found == [tuple(values)]
    # Written in one statement, so that half of it can never be there.
    rows = ",".join(["(?)"] * len(values))
    client.call(
        BATCH, Batch([Statement("delete from kept"), Statement(f"insert into kept values {rows}", values)])
    )
    assert client.query("select a from kept order by rowid").rows == [(value,) for value in values]


def test_a_bool_is_a_number(client: RawClient) -> None:
    assert client.query("select ?, ?", True, False).rows == [(1, 0)]


NAMES = {
    "NUL in the text": "select 1\0; drop table kept",
    "NUL in a name": 'select 1 as "a\0b"',
    "only a NUL": "\0",
    "NUL behind": "select 1\0",
}


@pytest.mark.parametrize("sql", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("operation", ["sql.execute", "sql.query"])
def test_sql_with_a_nul_is_refused_whole(client: RawClient, sql: str, operation: str) -> None:
    """SQLite would end the text at the NUL and run what stands before it."""
    assert isinstance(refusal(client, Statement(sql), operation), InvalidRequestError)
    assert table_is_empty(client, "kept")


def test_a_name_with_a_nul_is_no_name(client: RawClient) -> None:
    assert isinstance(refusal(client, Statement("select :a", {"a\0": 1})), InvalidRequestError)


def test_too_few_and_too_many_values(client: RawClient) -> None:
    for values in ([], [1, 2], {}, {"b": 1}):
        assert isinstance(
            refusal(client, Statement("insert into kept values(:a)", values), WRITE), InvalidRequestError
        )
    assert table_is_empty(client, "kept")


@pytest.mark.parametrize("stored", ["cast(x'eda080' as text)", "cast(x'ff' as text)"])
def test_stored_text_that_is_none_is_a_typed_error(client: RawClient, stored: str) -> None:
    """Another program may have stored it; reading it must not take anything along."""
    client.execute(f"insert into kept values({stored})")
    error = refusal(client, Statement("select a from kept"))
    assert isinstance(error, InvalidRequestError | OperationFailedError)
    error = refusal(client, Statement(f"insert into kept values(1) returning {stored}"), WRITE)
    assert isinstance(error, InvalidRequestError | OperationFailedError)
    assert client.query("select count(*) from kept").scalar() == 1
    assert client.query("select cast(a as blob) from kept").scalar() in (SURROGATE, b"\xff")


def test_a_column_name_of_any_text(client: RawClient) -> None:
    name = "ä \N{GRINNING FACE} ' ] ."
    assert client.query(f'select 1 as "{name}"').columns == (name,)
    assert msgspec.msgpack.encode(name)

"""Texts of several statements: split where SQLite splits them, in one pass, and ended between two of them."""

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_worker.database.script import split
from storage_worker.protocol.statements import BATCH, SCRIPT, Batch, Script, Statement
from tests.worker.conftest import RunningWorker, StartWorker
from tests.worker.hostile import Bystander, ask_with, error_in
from tests.worker.raw import RawClient

TRIGGER = "create temp trigger t after insert on kept begin select 1; select ';'; end;"

WORDS = """; ;; ' '' " ` [ ] -- /* */ end END create CREATE temp temporary trigger explain query plan begin
    select x 1 $ _a ä \N{GRINNING FACE} ( ) , . - * /""".split()
PIECES = st.sampled_from(
    [
        *WORDS,
        " ",
        "\n",
        "\t",
        "\x0b",
        "\xa0",
        TRIGGER,
        "select 1;",
        "-- a;\n",
        "/* ; */",
        "'a;b'",
        '"a;b"',
        "[a;b]",
    ]
)


def as_sqlite_splits(text: str) -> list[str]:
    found = []
    begin = look = 0
    while (stop := text.find(";", look) + 1) > 0:
        if apsw.complete(text[begin:stop]):
            found.append(text[begin:stop])
            begin = stop
        look = stop
    return [*found, text[begin:]] if begin < len(text) else found


@given(pieces=st.lists(PIECES, max_size=25))
def test_a_text_is_split_where_sqlite_splits_it(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert list(split(text)) == as_sqlite_splits(text)
    text = " ".join(pieces)
    assert list(split(text)) == as_sqlite_splits(text)


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_nothing_of_a_text_is_lost(text: str) -> None:
    assert "".join(split(text)) == text
    assert list(split(text)) == as_sqlite_splits(text)


def test_a_trigger_is_one_statement() -> None:
    assert list(split(f"select 1; {TRIGGER} select 2")) == ["select 1;", f" {TRIGGER}", " select 2"]


# Each was quadratic or worse where every semicolon was a question to SQLite: minutes, in which nobody else writes.
BOMBS = {
    "in a literal": "select length('" + ";" * 200_000 + "')",
    "in a long literal": "select '" + ";" * 900_000 + "'",
    "in a trigger": "create trigger t after insert on ledger begin "
    + "select 1;" * 20_000
    + " end; drop trigger t",
    "alone": ";" * 200_000,
    "in a comment": "select 1 --" + ";" * 200_000,
    "in an open comment": "/*" * 100_000 + ";" * 100_000,
    "open quotes": "'" * 300_001 + ";" * 1_000,
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_many_semicolons(standing_worker: RunningWorker, text: str) -> None:
    bystander = Bystander(standing_worker)
    with RawClient(standing_worker.address, role="admin") as client:
        number = ask_with(client, Script(text), SCRIPT.name)
        bystander.check()
        client.answer(number)
    bystander.check()
    bystander.client.close()


@pytest.mark.parametrize("kind", ["script", "batch"])
def test_many_short_statements_meet_their_deadline(start_worker: StartWorker, kind: str) -> None:
    """None of them runs long enough to be asked whether it must end."""
    worker = start_worker(batch_statements_max=100_000)
    bystander = Bystander(worker)
    client = worker.connect(role="admin")
    one = "select 1;"
    if kind == "script":
        number = client.ask(
            SCRIPT, Script("insert into ledger values('script', 1);" + one * 100_000), seconds=0.2
        )
    else:
        number = client.ask(BATCH, Batch([Statement(one)] * 70_000), seconds=0.2)
    error = error_in(client.answer(number))
    assert error.code == "storage_deadline"
    assert error.details["stage"] == "execution"
    bystander.check()
    assert bystander.client.query("select count(*) from ledger where owner = 'script'").scalar() == 0


def test_a_script_runs_all_and_tells_of_its_last(standing_worker: RunningWorker) -> None:
    with RawClient(standing_worker.address, role="admin") as client:
        text = f"create table kept(a); {TRIGGER.replace('temp ', '')} insert into kept values(1), (2);; select a from kept; -- ;"
        assert client.call(SCRIPT, Script(text)).rows == [(1,), (2,)]
        error = error_in(
            client.answer(ask_with(client, Script("insert into kept values(3); select nothing"), SCRIPT.name))
        )
        assert error.code == "storage_operation_failed"
        assert client.query("select count(*) from kept").scalar() == 2
        assert (
            error_in(client.answer(ask_with(client, Script(TRIGGER), SCRIPT.name))).code
            == "storage_not_permitted"
        )

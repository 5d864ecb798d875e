"""The crash test itself: what it draws, what it takes for wrong, and one short run over everything it has."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import msgspec
import psutil
import pytest

import crash_faults
import crash_points
import storage_worker as sw
from crash_clients import KINDS, bystander, delays
from crash_fleet import Resources, not_flat
from crash_points import Point, Switch
from crash_report import Outcome
from crash_test import shortfall
from crash_writes import (
    REPEATS_MAX,
    Ask,
    Diary,
    Insert,
    Note,
    Step,
    is_asked,
    is_doubled,
    life,
    live,
    read_diaries,
)
from ledger import Fate, is_keyed

ROOT = Path(__file__).parents[2]
RUN_SECONDS_MAX = 120.0

PLAIN, REPEATED, ASKED, DOUBLED = 1, 4, 2, 0


@pytest.mark.parametrize(
    ("marks", "told_s", "found"),
    [
        ([(10.0, True), (20.0, True)], [20.5, 10.25], [0.25, 0.5]),
        ([(10.0, True), (20.0, True)], [19.0], [9.0]),
        ([(10.0, True)], [10.0], [0.0]),
        # A client that lost its worker before the first kill was told of something else.
        ([(10.0, True)], [9.0], []),
        ([], [1.0], []),
        # After a stop or a host's death nobody knows of what a client was told.
        ([(10.0, True), (11.0, False), (12.0, True)], [10.5, 11.5, 12.5], [0.5, 0.5]),
    ],
)
def test_delays_count_from_the_last_death(
    marks: list[tuple[float, bool]], told_s: list[float], found: list[float]
) -> None:
    assert delays(marks, told_s) == found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the system does not show descriptors")
def test_a_bystander_holds_what_its_parent_has_open(tmp_path: Path) -> None:
    with (tmp_path / "held").open("w") as held:
        before = set(psutil.Process().children())
        with bystander():
            [child] = set(psutil.Process().children()) - before
            assert Path(f"/proc/{child.pid}/fd/{held.fileno()}").readlink() == Path(held.name)
        assert not child.is_running()


def test_less_than_was_asked_for_is_a_finding() -> None:
    outcome = Outcome(seed=1, rounds=19)
    assert shortfall(outcome, rounds=20) == ["only 19 of 20 rounds were done"]
    assert shortfall(outcome, rounds=19) == []
    whole = crash_faults.rounds_of_a_deck()
    done = {fault.name: 1 for fault in crash_faults.deck()}
    assert shortfall(Outcome(seed=1, rounds=whole, faults=done), whole) == []
    del done["kill the host"]
    assert shortfall(Outcome(seed=1, rounds=whole, faults=done), whole) == [
        "it never happened: kill the host"
    ]


def test_only_growth_beyond_the_tolerance_is_a_finding() -> None:
    first = Resources(descriptors=10, children=1, threads=3)
    assert not_flat("it", first, Resources(descriptors=15, children=0, threads=3)) == []
    assert not_flat("it", first, Resources(descriptors=16, children=1, threads=3)) == [
        "it: descriptors grew from 10 to 16"
    ]


# What it draws


def drawn(seed: int, rounds: int) -> list[tuple[str, float]]:
    return [
        (fault.name, dice.random()) for fault, dice in itertools.islice(crash_faults.faults(seed), rounds)
    ]


def test_a_seed_gives_its_faults_again_and_another_one_others() -> None:
    rounds = crash_faults.rounds_of_a_deck() * 2
    assert drawn(7, rounds) == drawn(7, rounds)
    assert drawn(7, rounds) != drawn(8, rounds)


def test_every_fault_comes_before_one_comes_too_often() -> None:
    rounds = crash_faults.rounds_of_a_deck()
    deck = sorted(fault.name for fault in crash_faults.deck())
    names = [name for name, _ in drawn(3, rounds * 2)]
    assert sorted(names[:rounds]) == sorted(names[rounds:]) == deck
    assert all(any(point.text in name for name in deck) for point in Point)
    assert all(any(kind in name for name in deck if name.startswith("kill clients")) for kind in KINDS)


# The switch


def test_nothing_dies_where_nothing_is_armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    switch = Switch.make(tmp_path / "switch")
    for point in Point:
        switch.passing(point)
    switch.arm(Point.RECEIPT, 1)
    switch.disarm()
    switch.passing(Point.RECEIPT)
    switch.close()
    monkeypatch.delenv(crash_points.SWITCH_VARIABLE, raising=False)
    assert crash_points.switch_of_this_process() is None


def test_a_process_dies_at_the_passing_that_was_asked_for(tmp_path: Path) -> None:
    switch = Switch.make(tmp_path / "switch")
    switch.arm(Point.BEFORE_COMMIT, 3)
    program = (
        "from crash_points import Point, switch_of_this_process\n"
        "switch = switch_of_this_process()\n"
        "for number in range(1, 5):\n"
        "    switch.passing(Point.AFTER_COMMIT)\n"
        "    print(number, flush=True)\n"
        "    switch.passing(Point.BEFORE_COMMIT)\n"
    )
    environment = os.environ | {crash_points.SWITCH_VARIABLE: str(switch.path)}
    done = [
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT / "scripts",
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        for _ in range(2)
    ]
    assert [(each.returncode, each.stdout.split()) for each in done] == [
        (-9, ["1", "2", "3"]),
        (0, ["1", "2", "3", "4"]),
    ]
    assert (switch.hits(Point.BEFORE_COMMIT), switch.hits(Point.AFTER_COMMIT)) == (1, 0)
    assert switch.died_s > 0
    switch.close()


@pytest.mark.parametrize("armed", [False, True])
def test_a_worker_has_points_only_where_the_switch_is_named(tmp_path: Path, armed: bool) -> None:
    program = (
        "from storage_worker.database.connection import Database\n"
        "original = Database.commit\n"
        "from crash_store import crashing\n"
        "print(crashing.version, Database.commit is original)\n"
    )
    switch = Switch.make(tmp_path / "switch")
    switch.arm(Point.MIGRATION, 1)
    environment = {name: text for name, text in os.environ.items() if name != crash_points.SWITCH_VARIABLE}
    environment["PYTHONPATH"] = str(ROOT)
    if armed:
        environment[crash_points.SWITCH_VARIABLE] = str(switch.path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "scripts",
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == (["1", "False"] if armed else ["0", "True"])
    switch.close()


# The life of a write


class Script:
    """Answers steps with what the test says, and keeps them."""

    def __init__(self, *answers: sw.Rows | sw.KnownOutcome | sw.StorageError) -> None:
        self._answers = list(answers)
        self.steps: list[Step] = []

    def __call__(self, step: Step) -> sw.Rows | sw.KnownOutcome:
        self.steps.append(step)
        answer = self._answers.pop(0)
        if isinstance(answer, sw.StorageError):
            raise answer
        return answer


def lost() -> sw.StorageError:
    return sw.WorkerUnavailableError("gone")


def overloaded() -> sw.StorageError:
    return sw.OverloadedError("full")


def row(number: int = 1) -> sw.Rows:
    return sw.Rows(last_insert_rowid=number)


def known(state: str) -> sw.KnownOutcome:
    return msgspec.convert([state], sw.KnownOutcome)


def conflict() -> sw.StorageError:
    return sw.RequestConflictError("fenced")


@pytest.mark.parametrize(
    ("number", "answers", "fate", "steps"),
    [
        (PLAIN, [row()], Fate.ACKNOWLEDGED, "I"),
        (PLAIN, [lost()], Fate.UNKNOWN, "I"),
        (PLAIN, [overloaded()], Fate.NOT_COMMITTED, "I"),
        (REPEATED, [lost(), lost(), row()], Fate.ACKNOWLEDGED, "III"),
        (REPEATED, [overloaded()], Fate.NOT_COMMITTED, "I"),
        (ASKED, [overloaded()], Fate.NOT_COMMITTED, "I"),
        (ASKED, [lost(), known("committed")], Fate.ACKNOWLEDGED, "IA"),
        (ASKED, [lost(), lost(), known("fenced"), conflict()], Fate.NOT_COMMITTED, "IAAI"),
        (ASKED, [lost(), known("fenced"), lost()], Fate.NOT_COMMITTED, "IAI"),
        (DOUBLED, [row(), row()], Fate.ACKNOWLEDGED, "II"),
        (DOUBLED, [row(), lost()], Fate.ACKNOWLEDGED, "II"),
    ],
)
def test_a_write_is_sent_repeated_or_asked_for_until_its_fate_is_known(
    number: int, answers: list[sw.Rows | sw.StorageError], fate: Fate, steps: str
) -> None:
    notes: list[Note] = []
    script = Script(*answers)
    assert live(life(5, number, notes.append, lambda: 3.0), script) is fate
    assert "".join("A" if isinstance(step, Ask) else "I" for step in script.steps) == steps
    assert [note.wrong for note in notes if note.wrong] == []
    # Only a write without a key is told at once; the others are repeated meanwhile.
    assert [note.told_s for note in notes] == ([3.0] if fate is Fate.UNKNOWN else [])


@pytest.mark.parametrize(
    ("number", "answers", "wrong"),
    [
        (DOUBLED, [row(1), row(2)], "its repeat gave another result"),
        (ASKED, [lost(), known("fenced"), row()], "done although its key was fenced"),
        (ASKED, [lost(), known("fenced"), sw.SchemaError("odd")], "SchemaError"),
        (PLAIN, [sw.InvalidRequestError("odd")], "InvalidRequestError"),
        (DOUBLED, [row(), conflict()], "RequestConflictError"),
        (REPEATED, [lost()] * REPEATS_MAX, "no answer"),
        (ASKED, [lost()] * (1 + REPEATS_MAX), "in vain"),
    ],
)
def test_what_contradicts_itself_is_told(
    number: int, answers: list[sw.Rows | sw.StorageError], wrong: str
) -> None:
    notes: list[Note] = []
    live(life(5, number, notes.append, lambda: 0.0), Script(*answers))
    [note] = notes
    assert wrong in note.wrong
    assert f"client 5, write {number}" in note.wrong


def test_the_numbers_of_writes_cover_every_way() -> None:
    assert [is_keyed(number) for number in (PLAIN, REPEATED, ASKED, DOUBLED)] == [False, True, True, True]
    assert (is_asked(ASKED), is_asked(REPEATED), is_doubled(DOUBLED), is_doubled(REPEATED)) == (
        True,
        False,
        True,
        False,
    )


def test_a_first_step_that_was_begun_elsewhere_is_not_begun_again() -> None:
    script = Script(row())
    fate = live(life(5, REPEATED, lambda _: None, lambda: 0.0), script, lambda: _raise(lost()))
    assert fate is Fate.ACKNOWLEDGED
    [step] = script.steps
    assert cast("Insert", step).key == "5/4"


def _raise(error: Exception) -> sw.Rows:
    raise error


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "client-1.diary")
    diary.note(Note(told_s=1.5))
    diary.note(Note(wrong="odd"))
    diary.close()
    with (tmp_path / "client-1.diary").open("ab") as file:
        file.write(b'{"told_s":2')
    assert read_diaries(tmp_path) == [Note(told_s=1.5), Note(wrong="odd")]


# A run


def test_one_deck_of_faults_loses_nothing_and_does_nothing_twice(tmp_path: Path) -> None:
    rounds, figures = crash_faults.rounds_of_a_deck(), tmp_path / "figures.json"
    arguments = ["--rounds", str(rounds), "--seed", "1", "--seconds-max", str(RUN_SECONDS_MAX)]
    done = subprocess.run(
        [sys.executable, "scripts/crash_test.py", *arguments, "--json", str(figures)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = msgspec.json.decode(figures.read_bytes(), type=Outcome)
    assert outcome.seed == 1
    assert min(outcome.points.values()) >= 1
    assert len(outcome.points) == len(Point)
    assert min(outcome.fates["acknowledged"], outcome.writes_judged) > rounds
    assert outcome.told_after_s

"""What the crash test found, as a table for people and as JSON."""

from collections import Counter

import msgspec
from rich.console import Console
from rich.table import Table

from crash_points import Point
from measuring import quantile

WRONG_SHOWN_MAX = 20


class Outcome(msgspec.Struct):
    """What the whole test did and found.

    `faults` are the rounds by what was done in them; `missed` those in which it could not be done, such as a point
    that no worker passed in time; `points` how many workers died at each. Lists of seconds are sorted.
    """

    seed: int
    rounds: int = 0
    seconds: float = 0.0
    faults: dict[str, int] = msgspec.field(default_factory=Counter)
    missed: dict[str, int] = msgspec.field(default_factory=Counter)
    points: dict[str, int] = msgspec.field(default_factory=dict)
    fates: dict[str, int] = msgspec.field(default_factory=dict)
    writes_judged: int = 0
    outcomes_asked: int = 0
    told_after_s: list[float] = msgspec.field(default_factory=list)
    round_s: list[float] = msgspec.field(default_factory=list)
    worker_outlived_host_s: list[float] = msgspec.field(default_factory=list)
    wrong: list[str] = msgspec.field(default_factory=list)


def print_outcome(console: Console, outcome: Outcome) -> None:
    """What was done and what was found."""
    console.print(_faults_table(outcome), _points_table(outcome), _figures_table(outcome))
    for text in outcome.wrong[:WRONG_SHOWN_MAX]:
        console.print(text, style="red", highlight=False)
    verdict = (
        f"{len(outcome.wrong):,} findings; repeat them with --seed {outcome.seed}"
        if outcome.wrong
        else "nothing lost, nothing twice, no promise broken, everything flat"
    )
    console.print(verdict, style="bold red" if outcome.wrong else "bold green")


def _faults_table(outcome: Outcome) -> Table:
    table = Table("fault", "rounds", "not possible")
    for name in sorted(set(outcome.faults) | set(outcome.missed)):
        if not name.startswith("die "):
            table.add_row(name, f"{outcome.faults.get(name, 0):,}", f"{outcome.missed.get(name, 0) or ''}")
    return table


def _points_table(outcome: Outcome) -> Table:
    table = Table("crash point", "where the worker dies", "deaths")
    for point in Point:
        table.add_row(point.label, point.text, f"{outcome.points.get(point.label, 0):,}")
    return table


def _figures_table(outcome: Outcome) -> Table:
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("seed", str(outcome.seed))
    table.add_row("rounds", f"{outcome.rounds:,} in {outcome.seconds:.0f} s")
    table.add_row(
        "writes", ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in outcome.fates.items())
    )
    table.add_row("judged between rounds", f"{outcome.writes_judged:,}")
    table.add_row("keys asked for at the end", f"{outcome.outcomes_asked:,}")
    for name, took in (
        ("clients told of a death", outcome.told_after_s),
        ("a round", outcome.round_s),
        ("worker outlived its host", outcome.worker_outlived_host_s),
    ):
        if took:
            table.add_row(
                name,
                f"p50 {quantile(took, 0.5) * 1e3:.0f} ms, longest {took[-1] * 1e3:.0f} ms, of {len(took):,}",
            )
    return table

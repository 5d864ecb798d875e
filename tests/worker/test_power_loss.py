"""The power goes at every moment of a small workload: what was acknowledged is there, and nothing by half.

The worker's own writer runs over a file system that remembers what was synced (`power_loss`). At each sync,
before and after it, and at each acknowledgement the disk is taken as it might be found, opened anew by
another SQLite, and looked at.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from storage_worker.database.connection import CheckpointMode
from storage_worker.database.opening import Durability
from storage_worker.protocol.envelope import Reply
from storage_worker.protocol.errors import InvalidRequestError
from storage_worker.transaction import Transaction
from tests.worker.power_loss import Disk, Moment
from tests.worker.workbench import Workbench, answer

ROWS_EACH = 3
ROUNDS = 14
CHECKPOINTS: dict[int, CheckpointMode] = {3: "passive", 5: "passive", 8: "truncate", 11: "passive"}
FILLING = "x" * 900
"""Makes a few requests fill a page, so that writes are many and tear."""

SEED = int(os.environ.get("POWER_LOSS_SEED", "1"))


class Point(NamedTuple):
    """A moment of the disk, and which requests were acknowledged by then."""

    moment: Moment
    acknowledged: frozenset[int]


def write(number: int) -> Callable[[Transaction], int]:
    """A request of several rows; every fifth fails in the middle, after it has written."""

    def work(tx: Transaction) -> int:
        for part in range(ROWS_EACH):
            tx.execute("insert into t(request, part, filling) values(?,?,?)", (number, part, FILLING))
            if number % 5 == 4 and part == 1:
                raise InvalidRequestError("it fails on purpose")
        tx.execute("update total set requests = requests + 1")
        return number

    return work


def points(path: Path, durability: Durability) -> Iterator[Point]:
    """A workload: groups of one to five requests, some that fail, with all kinds of checkpoints between them."""
    acknowledged: set[int] = set()
    number = 0
    with Disk() as disk, Workbench(path, durability=durability) as bench:
        for sql in (
            "create table t(request integer, part integer, filling text, primary key (request, part))",
            "create table total(requests integer)",
            "insert into total values(0)",
        ):
            bench.execute(sql)
            bench.run_all()
        # From here on the tables are there, whatever is lost.
        bench.writer.database.checkpoint("truncate")
        disk.moments.clear()
        for turn in range(ROUNDS):
            disk.note = f"turn {turn}"
            sent = {}
            for _ in range(1 + turn % 5):
                sent[number] = bench.handler(write(number))
                number += 1
            bench.run_all()
            yield from (Point(moment, frozenset(acknowledged)) for moment in disk.moments)
            disk.moments.clear()
            acknowledged |= {one for one, job in sent.items() if isinstance(answer(job), Reply)}
            disk.look("after the acknowledgement")
            if turn in CHECKPOINTS:
                bench.writer.database.checkpoint(CHECKPOINTS[turn])
            yield from (Point(moment, frozenset(acknowledged)) for moment in disk.moments)
            disk.moments.clear()
        disk.note = "the end"
    yield from (Point(moment, frozenset(acknowledged)) for moment in disk.moments)


def found_in(image: dict[str, bytes], place: Path) -> tuple[dict[int, int], int]:
    """What a machine finds that comes up with this disk: the rows of each request, and how many it counted."""
    place.mkdir()
    for name, content in image.items():
        (place / name).write_bytes(content)
    with closing(sqlite3.connect(place / "app.db")) as reader:
        assert reader.execute("pragma integrity_check").fetchall() == [("ok",)]
        rows = dict(reader.execute("select request, count(*) from t group by request"))
        (counted,) = reader.execute("select requests from total").fetchone()
    for file in place.iterdir():
        file.unlink()
    place.rmdir()
    return rows, counted


def test_what_was_acknowledged_survives_the_loss_of_power_and_nothing_is_there_by_half(
    tmp_path: Path,
) -> None:
    looked = 0
    for point in points(tmp_path / "app.db", "full"):
        for image in point.moment.images(SEED, 3):
            what = f"seed {SEED}, {point.moment.what}"
            rows, counted = found_in(image, tmp_path / "found")
            assert point.acknowledged <= rows.keys(), f"{what}: acknowledged and lost"
            assert set(rows.values()) <= {ROWS_EACH}, f"{what}: a request is there by half"
            assert counted == len(rows), f"{what}: rows and their count are of different transactions"
            assert not any(number % 5 == 4 for number in rows), f"{what}: a request that failed is there"
            looked += 1
    assert looked > 5 * 2 * ROUNDS, "there is a sync for each group"


def test_without_syncs_the_same_check_finds_lost_writes(tmp_path: Path) -> None:
    """The canary: at durability `normal` a commit is not synced, and acknowledged writes go with the power."""
    lost = 0
    for point in points(tmp_path / "app.db", "normal"):
        nothing_of_what_was_pending = next(point.moment.images(SEED, 0))
        rows, counted = found_in(nothing_of_what_was_pending, tmp_path / "found")
        lost += len(point.acknowledged - rows.keys())
        assert counted == len(rows)
    assert lost > 0

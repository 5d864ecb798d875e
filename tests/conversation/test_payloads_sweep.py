"""What is swept and what is not: grace times, transactions that are shared or rolled back, and puts at that moment."""

import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

import storage_worker as sw
from storage_worker.conversation import PayloadNotFoundError, payload_sweep
from storage_worker.conversation import payload_client as client_side
from storage_worker.conversation import payload_placing as placing
from storage_worker.conversation.payload_files import GZIP_BYTES_MAX
from storage_worker.conversation.payload_sweep import SEEN_COUNT_MAX, SweepPosition, sweep_payloads
from storage_worker.conversation.payloads import name_of
from storage_worker.conversation.records import PayloadRef
from tests.conversation.payload_places import Payloads, age, in_child, status_of
from tests.conversation.payload_store import drop, hold

CLIENTS = 8
ROUNDS = 12


@pytest.fixture
def store(store_of_module: Payloads) -> Payloads:
    """One worker for all tests of the module; nothing that can be swept is there when a test begins."""
    store_of_module.put(b"first")
    store_of_module.sweep(grace_ms=0)
    store_of_module.sweep(grace_ms=0)
    return store_of_module


def released(store: Payloads, body: bytes) -> PayloadRef:
    """A payload that was held and is not any more."""
    ref = store.put(body)
    store.client.call(hold(ref))
    store.client.call(drop(ref))
    return ref


def swept_away(store: Payloads, ref: PayloadRef) -> None:
    """Sweep a released payload entirely."""
    store.age(ref)
    assert store.sweep().rows == 1
    age(store.file(ref))
    assert store.sweep().files == 1
    assert not store.file(ref).exists()


def test_what_nothing_refers_to_goes_after_two_grace_times(store: Payloads) -> None:
    ref = released(store, b"goes")
    assert store.row(ref) == ("released", 0)
    assert store.sweep() == payload_sweep.Swept(0, 0, 0, None)
    store.age(ref)
    swept = store.sweep()
    assert (swept.rows, swept.files) == (1, 0)
    assert store.row(ref) is None
    # Deleted just now: at durability `normal` a power loss could bring the row back.
    assert store.sweep().files == 0
    assert store.file(ref).exists()
    age(store.file(ref))
    size = store.file(ref).stat().st_size
    swept = store.sweep()
    assert (swept.rows, swept.files, swept.bytes) == (0, 1, size)
    assert not store.file(ref).exists()
    assert store.findings() == []


def test_what_is_held_stays(store: Payloads) -> None:
    ref = store.put(b"held")
    for _ in range(3):
        store.client.call(hold(ref))
    store.client.call(drop(ref))
    store.age(ref)
    store.sweep(grace_ms=0)
    assert store.row(ref) == ("committed", 2)
    assert client_side.read(store.client, ref) == b"held"


def test_what_was_prepared_and_never_used_goes_after_the_grace_time(store: Payloads) -> None:
    refs = [store.put(b"never"), store.put(bytes(GZIP_BYTES_MAX + 7))]
    assert store.sweep().files == 0
    age(store.file(refs[0]))
    assert store.sweep().files == 1
    assert [store.file(ref).exists() for ref in refs] == [False, True]
    with pytest.raises(PayloadNotFoundError):
        store.client.call(hold(refs[0]))
    store.client.call(hold(refs[1]))


def test_a_released_payload_that_is_held_again_stays(store: Payloads) -> None:
    ref = released(store, b"held again")
    store.age(ref)
    store.client.call(hold(ref))
    store.sweep(grace_ms=0)
    assert store.row(ref) == ("committed", 1)
    assert store.findings() == []


def test_unfinished_files_go_after_the_grace_time(store: Payloads) -> None:
    temporary = Path(store.folder.temporary)
    old, new = temporary / ("0" * 32), temporary / "something else"
    for file in (old, new):
        file.write_bytes(b"part")
    age(old)
    # One that is being written stays, whatever the grace time.
    assert store.sweep(grace_ms=0).files == 1
    assert [old.exists(), new.exists()] == [False, True]
    new.unlink()


def test_strange_things_in_the_directory_are_left_alone(store: Payloads) -> None:
    ref = store.put(b"beside")
    strange = [
        store.file(ref).with_name("strange"),
        Path(store.folder.objects) / "00x",
        Path(store.folder.path) / "x",
    ]
    for file in strange:
        file.write_bytes(b"mine")
        age(file)
    folder = store.file(ref).with_name("f" * 64 + "-" + "0" * 32)
    folder.mkdir()
    age(folder)
    assert store.sweep().files == 0
    for file in strange:
        file.unlink()
    folder.rmdir()


def test_a_folder_that_cannot_be_read_holds_up_no_sweep(store: Payloads) -> None:
    refs = sorted((released(store, b"held up %d" % number) for number in range(3)), key=name_of)
    foreign, looped, behind = refs
    assert len({store.file(ref).parent for ref in refs}) == 3
    store.age(*refs)
    for ref in (foreign, looped):
        shutil.rmtree(store.file(ref).parent)
    store.file(foreign).parent.write_bytes(b"mine")
    store.file(looped).parent.symlink_to(store.file(looped).parent)
    swept = store.sweep()
    # A row stays where it is not known whether its file does.
    assert [store.row(ref) for ref in refs] == [None, ("released", 0), None]
    assert swept.rows == 2
    age(store.file(behind))
    assert store.sweep().files == 1
    assert store.file(foreign).parent.read_bytes() == b"mine"
    for ref in (foreign, looped):
        store.file(ref).parent.unlink()
    assert store.sweep().rows == 1


def test_foreign_files_among_the_unfinished_are_left_alone(store: Payloads) -> None:
    """Their names need not be text, which what a sweep answers is."""
    temporary = Path(store.folder.temporary)
    foreign = {temporary / os.fsdecode(b"\xff%d" % number) for number in range(SEEN_COUNT_MAX + 1)}
    unfinished = temporary / ("f" * 32)
    for file in (*foreign, unfinished):
        file.write_bytes(b"part")
        age(file)
    assert store.sweep().files == 1
    assert set(temporary.iterdir()) == foreign
    for file in foreign:
        file.unlink()


def test_a_sweep_is_made_of_bounded_slices(store: Payloads) -> None:
    refs = [store.put(f"slice {number}") for number in range(payload_sweep.REMOVED_COUNT_MAX + 10)]
    for ref in refs:
        age(store.file(ref))
    slices = list(client_side.sweep(store.client))
    assert sum(each.files for each in slices) == len(refs)
    assert max(each.files for each in slices) == payload_sweep.REMOVED_COUNT_MAX
    assert not any(store.file(ref).exists() for ref in refs)


@pytest.mark.parametrize("position", [SweepPosition("files", "../x"), SweepPosition("files", "zz")])
def test_a_position_that_is_none_is_refused(store: Payloads, position: SweepPosition) -> None:
    with pytest.raises(sw.InvalidRequestError):
        store.client.call(sweep_payloads(position))


# In one transaction


def whole_sweep(tx: sw.InteractiveTransaction) -> int:
    position: SweepPosition | None = SweepPosition()
    found = 0
    while position is not None:
        swept = tx.call(sweep_payloads(position))
        found += swept.files
        position = swept.next
    return found


def sweep_files(tx: sw.InteractiveTransaction) -> int:
    return tx.call(sweep_payloads(SweepPosition("files"))).files


def test_a_commit_behind_the_sweep_of_its_transaction_keeps_the_file(store: Payloads) -> None:
    ref = store.put(b"behind")
    age(store.file(ref))
    with store.client.transaction() as tx:
        assert sweep_files(tx) == 1
        tx.call(hold(ref))
    assert client_side.read(store.client, ref) == b"behind"
    assert store.findings() == []


def test_a_commit_before_the_sweep_of_its_transaction_keeps_the_file(store: Payloads) -> None:
    ref = store.put(b"before")
    age(store.file(ref))
    with store.client.transaction() as tx:
        tx.call(hold(ref))
        assert sweep_files(tx) == 0
    assert client_side.read(store.client, ref) == b"before"


@pytest.mark.parametrize("grace_ms", [0, payload_sweep.GRACE_MS_DEFAULT])
def test_a_sweep_that_is_rolled_back_removes_nothing(store: Payloads, grace_ms: int) -> None:
    ref = released(store, b"rolled back")
    unused = store.put(b"unused")
    store.age(ref, unused)
    with store.client.transaction() as tx:
        for part in ("rows", "files", "rows", "files"):
            tx.call(sweep_payloads(SweepPosition(part), grace_ms))
        tx.rollback()
    assert store.row(ref) == ("released", 0)
    assert store.file(ref).exists()
    assert store.file(unused).exists()
    assert store.findings() == []


def test_what_a_rolled_back_sweep_condemned_is_not_removed_by_the_next_one(store: Payloads) -> None:
    ref = store.put(b"condemned once")
    age(store.file(ref))
    with store.client.transaction() as tx:
        assert sweep_files(tx) == 1
        tx.rollback()
    store.client.call(hold(ref))
    store.sweep()
    assert client_side.read(store.client, ref) == b"condemned once"


def test_a_file_that_is_touched_after_the_look_is_put_back(store: Payloads) -> None:
    ref = store.put(b"touched")
    age(store.file(ref))
    with store.client.transaction() as tx:
        assert sweep_files(tx) == 1
        assert store.put(b"touched") == ref
    assert store.file(ref).exists()
    assert store.temporaries() == []
    store.client.call(hold(ref))
    assert client_side.read(store.client, ref) == b"touched"


def test_a_put_notices_that_its_file_was_taken_away(store: Payloads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that looked at the file just before the touch is not held up by it: the put begins anew."""
    ref = store.put(b"taken")

    def utime(path: str, follow_symlinks: bool = True) -> None:
        Path(path).unlink()
        raise FileNotFoundError

    identity = (ref.sha256, ref.content_type, ref.retention_class, ref.bytes)
    assert placing.find(store.folder, *identity) == ref
    monkeypatch.setattr(os, "utime", utime)
    assert placing.find(store.folder, *identity) is None


# Many clients


class Crowd:
    """Clients in processes of their own that put and hold the same bodies, all at once in each round."""

    def __init__(self, store: Payloads, bodies: list[bytes]) -> None:
        self._address = store.worker.address
        self._bodies = bodies
        self._answers = os.pipe()
        self._gates = [os.pipe() for _ in range(CLIENTS)]
        self._children = [in_child(partial(self._work, gate)) for gate, _ in self._gates]
        self.gather()

    def _work(self, gate: int) -> None:
        try:
            self._take_part(gate)
        except BaseException:
            os.write(self._answers[1], b"f")
            raise

    def _take_part(self, gate: int) -> None:
        with sw.connect(self._address) as client:
            for _ in range(ROUNDS):
                os.write(self._answers[1], b"r")
                os.read(gate, 1)
                for body in self._bodies:
                    ref = client_side.put(client, body, retention_class="test")
                    client.call(hold(ref))
                    assert client_side.read(client, ref) == body
            os.write(self._answers[1], b"r")

    def go(self) -> None:
        """Let all of them go."""
        for _, gate in self._gates:
            os.write(gate, b"g")

    def gather(self) -> None:
        """Wait for all of them; none may have failed."""
        for _ in range(CLIENTS):
            assert os.read(self._answers[0], 1) == b"r"

    def end(self) -> list[int]:
        """Close the gates; the exit statuses."""
        for descriptor in (*self._answers, *(end for gate in self._gates for end in gate)):
            os.close(descriptor)
        for pid in self._children:
            os.kill(pid, signal.SIGTERM)
        return [status_of(pid) for pid in self._children]


def test_a_sweep_while_eight_clients_put_again_what_it_sweeps(store: Payloads) -> None:
    """Every put and every commit succeeds, and the file is there at the end of each round."""
    bodies = [b"small and swept", b"large and swept " * 40_000]
    refs = [released(store, body) for body in bodies]
    crowd = Crowd(store, bodies)
    try:
        for turn in range(ROUNDS):
            forget(store, refs, with_rows=turn % 2 == 0)
            crowd.go()
            for _ in range(4):
                store.sweep()
            crowd.gather()
            assert [store.row(ref) for ref in refs] == [("committed", CLIENTS)] * len(refs)
            assert store.findings() == []
    finally:
        crowd.end()


def forget(store: Payloads, refs: list[PayloadRef], *, with_rows: bool) -> None:
    """Have payloads be old, released and about to be swept; or their files without a row."""
    for ref in refs:
        store.client.execute("delete from holdings where payload_sha256 = ?", (ref.sha256,))
        name = (name_of(ref),)
        if with_rows:
            store.client.execute(
                "update conversation_payloads set reference_count = 0, state = 'released' where name = ?",
                name,
            )
        else:
            store.client.execute("delete from conversation_payloads where name = ?", name)
        store.age(ref)


def test_a_sweep_without_grace_gives_right_answers_or_typed_errors(store: Payloads) -> None:
    """Whoever sweeps away what is being put at that moment makes commits fail, and no row without a file."""

    def work() -> None:
        with sw.connect(store.worker.address) as client:
            for _ in range(30):
                ref = client_side.put(client, b"no grace", retention_class="test")
                try:
                    client.call(hold(ref))
                    client.call(drop(ref))
                except PayloadNotFoundError:
                    continue

    children = [in_child(work) for _ in range(3)]
    for _ in range(40):
        store.sweep(grace_ms=0)
        assert [found.check for found in store.findings() if found.check != "missing"] == []
    assert [status_of(pid) for pid in children] == [0] * 3
    assert store.findings() == []

"""`backup` and `check` of a database with payloads."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import storage_worker as sw
from storage_worker import conversation, conversation_client
from storage_worker.conversation import payload_client
from storage_worker.conversation.records import PayloadRef
from tests.cli.commands import run, run_json

BODIES = (b"packed " * 5_000, bytes(range(256)) * 3_000, "a text, é " * 4_000)
"""Two that are packed, and a larger one that is stored as it is."""


def payloads_of(database: Path) -> list[Path]:
    return sorted(each for each in Path(f"{database}-sw", "payloads").rglob("*") if each.is_file())


@pytest.fixture
def filled(database: Path) -> Iterator[tuple[Path, list[PayloadRef]]]:
    """A database with payloads that is not served."""
    with (
        sw.StorageWorker(database, stores=[conversation_client.STORE]) as worker,
        worker.connect() as client,
    ):
        refs = [payload_client.put(client, body) for body in BODIES]
        for number, ref in enumerate(refs):
            client.call(conversation.append("s", "file", body=ref, event_id=f"e-{number}"))
    yield database, refs
    assert run("stop", database).exit_code == 0


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


class TestBackup:
    def test_a_copy_has_its_payloads_and_is_sound(
        self, filled: tuple[Path, list[PayloadRef]], tmp_path: Path
    ) -> None:
        database, refs = filled
        copy = tmp_path / "copy.db"
        done = run_json("backup", database, copy)
        files = payloads_of(copy)
        assert (done["payloads"], done["findings"]) == (3, [])
        assert done["payload_bytes"] == sum(each.stat().st_size for each in files)
        assert [each.name for each in files] == [each.name for each in payloads_of(database)]
        side = Path(f"{copy}-sw")
        for place in (side, *side.rglob("*")):
            wanted = 0o700 if place.is_dir() else 0o600
            assert stat.S_IMODE(place.stat().st_mode) == wanted, place
        assert sorted(each.name for each in side.iterdir()) == ["payloads"]
        # The copy stands alone.
        for file in payloads_of(database):
            file.unlink()
        with (
            sw.StorageWorker(copy, stores=[conversation_client.STORE]) as worker,
            worker.connect() as client,
        ):
            for ref, body in zip(refs, BODIES, strict=True):
                wanted_body = body.encode() if isinstance(body, str) else body
                assert payload_client.read(client, ref) == wanted_body
            assert not list(payload_client.check(client))
        assert "3 payloads" in run("backup", copy, tmp_path / "second.db").stdout
        assert run_json("check", copy) == {"sound": True, "findings": [], "unchecked": None}
        assert run("stop", copy).exit_code == 0

    def test_a_damaged_payload_is_told_and_all_else_is_copied(
        self, filled: tuple[Path, list[PayloadRef]], tmp_path: Path
    ) -> None:
        database, _ = filled
        copy = tmp_path / "copy.db"
        broken, gone, good = payloads_of(database)
        damage(broken)
        gone.unlink()
        done = run_json("backup", database, copy, status=1)
        assert done["payloads"] == 1
        assert [broken.name in done["findings"][0], gone.name in done["findings"][1]] == [True, True]
        assert [each.name for each in payloads_of(copy)] == [good.name]

    def test_where_payloads_cannot_be_copied_no_copy_is_left(
        self, filled: tuple[Path, list[PayloadRef]], tmp_path: Path
    ) -> None:
        database, _ = filled
        copy = tmp_path / "copy.db"
        other = Path(f"{copy}-sw", "payloads", "objects")
        other.mkdir(parents=True)
        refused = run_json("backup", database, copy, status=3)
        assert (refused["code"], "is there already" in refused["message"]) == ("storage_path", True)
        assert not copy.exists()
        assert other.is_dir()

    def test_help_says_where_they_are(self) -> None:
        assert "TARGET-sw" in run("backup", "--help").output


class TestCheck:
    @pytest.mark.parametrize("fault", ["damaged", "missing"])
    def test_a_payload_that_is_not_as_it_was_is_found(
        self, filled: tuple[Path, list[PayloadRef]], fault: str
    ) -> None:
        database, _ = filled
        assert run_json("check", database)["sound"] is True
        file = payloads_of(database)[1]
        damage(file) if fault == "damaged" else file.unlink()
        found = run_json("check", database, status=1)
        assert (found["sound"], found["unchecked"], len(found["findings"])) == (False, None, 1)
        assert file.name in found["findings"][0]
        shown = run("check", database)
        assert (shown.exit_code, file.name in shown.stdout, "is sound" in shown.stdout) == (1, True, False)

    def test_a_worker_without_the_store_cannot_be_asked(self, filled: tuple[Path, list[PayloadRef]]) -> None:
        database, _ = filled
        damage(payloads_of(database)[0])
        with sw.StorageWorker(database):
            shown = run("check", database)
            assert shown.exit_code == 0
            sound, unchecked = shown.stdout.splitlines()
            assert sound == f"{database} is sound"
            assert unchecked.startswith("payloads were not checked: the worker that runs was started without")
            assert "payloads were not checked" in run_json("check", database)["unchecked"]


def test_the_modes_do_not_depend_on_the_umask(filled: tuple[Path, list[PayloadRef]], tmp_path: Path) -> None:
    database, _ = filled
    kept = os.umask(0)
    try:
        assert run("backup", database, tmp_path / "copy.db").exit_code == 0
    finally:
        os.umask(kept)
    side = Path(f"{tmp_path / 'copy.db'}-sw")
    assert all(stat.S_IMODE(place.stat().st_mode) & 0o077 == 0 for place in (side, *side.rglob("*")))

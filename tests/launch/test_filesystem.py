import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_worker import filesystem
from storage_worker.filesystem import Mount, check_path, make_private, mount_of, mounts, private_directory
from storage_worker.protocol.errors import DatabasePathError

NOBODY = 65534


@contextlib.contextmanager
def ordinary_user() -> Iterator[None]:
    """No permissions beside those of the mode bits, which root does not heed."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o777)
        yield Path(name)


def refusal(path: str | os.PathLike[str]) -> str:
    with pytest.raises(DatabasePathError) as caught:
        check_path(path)
    reason = str(caught.value.details["reason"])
    assert reason in caught.value.message
    return reason


def test_a_path_is_resolved_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert check_path(tmp_path / "link" / ".." / "link" / "app.db") == str(tmp_path / "real" / "app.db")
    assert list((tmp_path / "real").iterdir()) == []


def test_an_existing_file_is_taken(database: Path) -> None:
    database.touch()
    link = database.with_name("link.db")
    link.symlink_to(database.name)
    assert check_path(link) == str(database)


@pytest.mark.parametrize(
    "name", ["ä" * 40 + ".db", "資料" * 30 + ".db", "x" * 200, "with space\nand line.db"]
)
def test_long_and_multibyte_names_are_taken(tmp_path: Path, name: str) -> None:
    assert check_path(tmp_path / name) == str(tmp_path / name)


@pytest.mark.parametrize("path", ["", ":memory:", "a\0b", "\udcff.db"])
def test_what_names_no_file_is_refused(path: str) -> None:
    refusal(path)


def test_bytes_are_refused() -> None:
    refusal(b"app.db")  # type: ignore[arg-type]


def test_names_that_sqlite_cannot_take_are_refused(tmp_path: Path) -> None:
    assert "leaves no room" in refusal(tmp_path / ("x" * 250))
    assert "bytes are more than" in refusal(tmp_path / "/".join(["d" * 100] * 6))


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "it is a directory"


def test_special_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert refusal(tmp_path / "fifo") == "it is no regular file"
    assert refusal("/dev/null") == "it is no regular file"


def test_a_hard_link_is_refused(database: Path) -> None:
    database.touch()
    os.link(database, database.with_name("other.db"))
    assert "2 hard links" in refusal(database)


def test_a_missing_parent_is_refused_and_not_made(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none" / "app.db")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_the_parent_is_refused(database: Path) -> None:
    database.touch()
    refusal(database / "app.db")


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    refusal(tmp_path / "a")


def test_a_file_that_may_not_be_written_is_refused(open_directory: Path) -> None:
    database = open_directory / "app.db"
    database.touch()
    database.chmod(0o444)
    with ordinary_user():
        assert refusal(database) == "it is read-only"


def test_a_directory_that_may_not_be_written_is_refused(open_directory: Path) -> None:
    open_directory.chmod(0o555)
    with ordinary_user():
        assert "its directory is read-only" in refusal(open_directory / "app.db")


@pytest.mark.parametrize(
    "kind", ["nfs4", "nfs", "cifs", "smb3", "9p", "virtiofs", "fuse.sshfs", "fuseblk", "fuse"]
)
def test_network_and_fuse_file_systems_are_refused(
    monkeypatch: pytest.MonkeyPatch, database: Path, kind: str
) -> None:
    mounted = [Mount("/", "ext4", None), Mount(str(database.parent), kind, None)]
    monkeypatch.setattr(filesystem, "mounts", lambda: mounted)
    assert kind in refusal(database)


def test_a_file_mounted_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch, database: Path) -> None:
    mounted = [Mount("/", "ext4", None), Mount(str(database), "ext4", 77)]
    monkeypatch.setattr(filesystem, "mounts", lambda: mounted)
    assert "mounted by itself" in refusal(database)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "apfs"])
def test_local_file_systems_are_taken(monkeypatch: pytest.MonkeyPatch, database: Path, kind: str) -> None:
    monkeypatch.setattr(filesystem, "mounts", lambda: [Mount("/", kind, None)])
    check_path(database)


def test_the_mount_is_the_longest_that_is_not_hidden() -> None:
    found = [
        Mount("/", "ext4", 1),
        Mount("/data/deep", "nfs", 2),
        Mount("/data", "xfs", 3),
        Mount("/database", "nfs", 4),
        Mount("/twice", "nfs", 5),
        Mount("/twice", "ext4", 6),
    ]
    assert mount_of("/data/deep/a.db", 2, found) == found[1]
    assert mount_of("/data/deep/a.db", 3, found) == found[2]
    assert mount_of("/data/a.db", 99, found) == found[2]
    assert mount_of("/elsewhere/a.db", 1, found) == found[0]
    assert mount_of("/twice/a.db", 99, found) == found[5]
    assert mount_of("/a.db", 1, []) is None


def test_mounts_are_read_with_their_escapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listing = tmp_path / "mountinfo"
    listing.write_bytes(
        b"22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        b"30 22 0:41 /x /with\\040space\\134\\011\xff rw - fuse.sshfs me@there:/ rw,a - b\n"
    )
    monkeypatch.setattr(filesystem, "MOUNTS_FILE", listing)
    root, other = mounts()
    assert root == Mount("/", "ext4", os.makedev(254, 0))
    assert other == Mount("/with space\\\t\udcff", "fuse.sshfs", os.makedev(0, 41))
    monkeypatch.setattr(filesystem, "MOUNTS_FILE", tmp_path / "none")
    assert mounts() == []


def test_the_mounts_of_this_machine_are_read() -> None:
    assert any(mount.point == "/" for mount in mounts())


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o777])
def test_a_private_directory_is_private_whatever_the_mask(tmp_path: Path, mask: int) -> None:
    kept = os.umask(mask)
    try:
        private_directory(str(tmp_path / "own"))
    finally:
        os.umask(kept)
    assert mode_of(tmp_path / "own") == 0o700
    (tmp_path / "own").chmod(0o755)
    private_directory(str(tmp_path / "own"))
    assert mode_of(tmp_path / "own") == 0o700


def test_a_private_directory_is_no_link_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("link", "file", "none/below"):
        with pytest.raises(DatabasePathError):
            private_directory(str(tmp_path / name))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_no_private_one(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(0o700)
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    with pytest.raises(DatabasePathError, match="belongs to the user"):
        private_directory(str(tmp_path / "theirs"))


def test_the_files_of_a_database_are_made_private(database: Path) -> None:
    wal = Path(f"{database}-wal")
    for path in (database, wal):
        path.touch()
        path.chmod(0o664)
    make_private(str(database))
    assert mode_of(database) == mode_of(wal) == 0o600
    assert not Path(f"{database}-shm").exists()


def test_another_users_database_is_refused(open_directory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    database = open_directory / "app.db"
    database.touch()
    database.chmod(0o666)
    with ordinary_user(), pytest.raises(DatabasePathError, match="cannot make private"):
        make_private(str(database))


def test_a_socket_in_place_of_the_database_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(tmp_path):
        listener.bind("s")
        assert refusal("s") == "it is no regular file"

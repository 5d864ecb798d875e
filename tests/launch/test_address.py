import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_worker import address as addresses
from storage_worker.address import inode_of, listen, socket_address, socket_path, withdraw
from storage_worker.protocol.errors import DatabasePathError

from .test_filesystem import NOBODY


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A runtime directory of the test's own, short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/tmp") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


def path_of(address: str) -> Path:
    return Path(socket_path(address))


def test_the_address_of_a_database_stays_the_same(runtime: Path) -> None:
    first = socket_address("/data/app.db")
    assert first == socket_address("/data/app.db") != socket_address("/data/other.db")
    assert path_of(first).parent == runtime / "storage-worker"
    assert stat.S_IMODE(path_of(first).parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["ä" * 100, "資" * 80, "x" * 200, "/d" * 200, "new\nline"])
def test_the_address_is_short_whatever_the_name(runtime: Path, name: str) -> None:
    path = socket_path(socket_address(f"/{name}.db"))
    assert len(path.encode()) < 100
    with listen(socket_address(f"/{name}.db"), 1):
        assert stat.S_ISSOCK(Path(path).lstat().st_mode)


def test_a_runtime_directory_with_a_long_path_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    long = runtime / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))
    assert path_of(socket_address("/app.db")).parent == runtime / f"storage-worker-{os.geteuid()}"
    assert list(long.iterdir()) == []


def test_a_directory_whose_path_is_no_text_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    """An address is sent as text, to the worker and to other processes."""
    strange = runtime / "\udcff"
    strange.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(strange))
    monkeypatch.setattr(tempfile, "tempdir", str(strange))
    monkeypatch.setattr(addresses, "_bases", lambda: [f"{strange}/storage-worker"])
    base = path_of(socket_address("/app.db")).parent
    assert base.parent == Path("/tmp")
    base.rmdir()
    assert list(strange.iterdir()) == []


@pytest.mark.parametrize("given", ["", "relative", "/nowhere/at/all"])
def test_a_runtime_directory_that_is_none_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, runtime: Path, given: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", given)
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))
    assert path_of(socket_address("/app.db")).parent == runtime / f"storage-worker-{os.geteuid()}"


def occupy(base: Path, how: str) -> None:
    if how == "open to others":
        base.mkdir()
        base.chmod(0o770)
    elif how == "a link":
        (base.parent / "theirs").mkdir(mode=0o700)
        base.symlink_to(base.parent / "theirs")
    elif how == "a file":
        base.touch(0o600)
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give a directory away")
        base.mkdir(mode=0o700)
        os.chown(base, NOBODY, NOBODY)


@pytest.mark.parametrize("how", ["open to others", "a link", "a file", "another user's"])
def test_a_directory_that_is_not_ours_alone_is_never_used(
    monkeypatch: pytest.MonkeyPatch, runtime: Path, how: str
) -> None:
    occupy(runtime / "storage-worker", how)
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))
    assert path_of(socket_address("/app.db")).parent == runtime / f"storage-worker-{os.geteuid()}"


def test_without_any_of_the_usual_directories_a_fresh_one_is_made(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    monkeypatch.setattr(addresses, "_bases", lambda: [str(runtime / "none" / "below")])
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))
    address = socket_address("/app.db")
    assert path_of(address).parent.parent == runtime
    assert stat.S_IMODE(path_of(address).parent.stat().st_mode) == 0o700
    listen(address, 1).close()
    withdraw(address, inode_of(address))
    assert list(runtime.iterdir()) == []
    # A restarted worker makes it again.
    listen(address, 1).close()
    assert path_of(address).exists()


def test_without_any_directory_there_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> str:
        raise OSError("no space")

    monkeypatch.setattr(addresses, "_bases", list)
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(DatabasePathError, match="XDG_RUNTIME_DIR"):
        socket_address("/app.db")


@pytest.mark.parametrize("text", ["", "app.db", "unix:/x", "unix://x", "tcp://host"])
def test_what_is_no_address_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="no address"):
        socket_path(text)


def test_a_listener_takes_the_place_of_a_dead_one(runtime: Path) -> None:
    address = socket_address("/app.db")
    listen(address, 1).close()
    dead = inode_of(address)
    kept = os.umask(0)
    try:
        listener = listen(address, 1)
    finally:
        os.umask(kept)
    with listener, socket.socket(socket.AF_UNIX) as client:
        assert inode_of(address) != dead
        assert stat.S_IMODE(path_of(address).lstat().st_mode) == 0o600
        client.connect(socket_path(address))
        withdraw(address, dead)
        assert path_of(address).exists()
        withdraw(address, inode_of(address))
    assert list(path_of(address).parent.iterdir()) == []
    withdraw(address, dead)


def test_a_directory_that_was_cleaned_away_is_made_again(runtime: Path) -> None:
    address = socket_address("/app.db")
    path_of(address).parent.rmdir()
    listen(address, 1).close()


def test_a_place_for_the_socket_that_is_gone_is_told(runtime: Path) -> None:
    address = f"unix://{runtime}/none/below/x.sock"
    with pytest.raises(DatabasePathError):
        listen(address, 1)
    (runtime / "storage-worker").mkdir(0o700)
    (runtime / "storage-worker" / "x.sock").mkdir()
    with pytest.raises(DatabasePathError, match="cannot make the worker's socket"):
        listen(f"unix://{runtime}/storage-worker/x.sock", 1)
    assert [path.name for path in (runtime / "storage-worker").iterdir()] == ["x.sock"]

"""Shows that the wheel holds what the tree holds, and works where a host has modules called client and protocol.

The tree is copied first, as git sees it, so that the build leaves nothing behind in it.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "storage_worker": "storage_worker",
    "client": "storage_worker/client",
    "protocol": "storage_worker/protocol",
}
"""The tree's folders and where their files stand in the wheel."""

PROGRAM = """
import pathlib, sys
import storage_worker, storage_worker.client, storage_worker.protocol.envelope

home = pathlib.Path(storage_worker.__file__).parent
assert home.is_relative_to(sys.prefix), f"imported from {home}, not from the wheel"
assert not {"client", "protocol"} & sys.modules.keys(), "a module of the host was imported"
with storage_worker.StorageWorker("app.db") as worker, worker.connect() as client:
    client.execute("create table t(a)")
    client.execute("insert into t values (?)", (7,))
    assert client.query("select a from t").scalar() == 7
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command to its end and return what it printed; end the script where it fails."""
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nerror: {' '.join(map(str, command))} failed")
    return done.stdout


def tree_files() -> list[PurePosixPath]:
    """The project's files as git sees them, new ones included."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    found = {PurePosixPath(name) for name in listed.split("\0") if name}
    return sorted(path for path in found if (ROOT / path).exists())


def copy_tree(files: list[PurePosixPath], target: Path) -> None:
    """Copy the files, symbolic links as links."""
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target / path, follow_symlinks=False)


def expected_files(files: list[PurePosixPath]) -> set[str]:
    """What the wheel has to hold of the tree."""
    return {
        str(PurePosixPath(FOLDERS[path.parts[0]], *path.parts[1:]))
        for path in files
        if path.parts[0] in FOLDERS and not (ROOT / path).is_symlink()
    }


def compare(what: str, found: set[str], expected: set[str]) -> None:
    """End the script naming each file that is only on one side."""
    differences = [f"  missing: {name}" for name in sorted(expected - found)]
    differences += [f"  surplus: {name}" for name in sorted(found - expected)]
    if differences:
        sys.exit("\n".join([f"error: the {what} differs from the tree", *differences]))
    print(f"{what}: {len(found)} files of the package, none missing, none twice")


def build(source: Path, target: Path) -> tuple[Path, Path]:
    """Build the source archive, and the wheel from it."""
    run(sys.executable, "-m", "build", "--outdir", target, source, cwd=source)
    [archive] = target.glob("*.tar.gz")
    [wheel] = target.glob("*.whl")
    return archive, wheel


def check_archive(archive: Path, files: list[PurePosixPath]) -> None:
    """The source archive holds each folder's files once, under the folder's own name."""
    with tarfile.open(archive) as content:
        names = {PurePosixPath(*PurePosixPath(name).parts[1:]) for name in content.getnames() if "/" in name}
    sources = {
        str(path) for path in names if path.parts and path.parts[0] in FOLDERS and path.suffix == ".py"
    }
    tree = {str(path) for path in files if path.parts[0] in FOLDERS and path.suffix == ".py"}
    compare("source archive", sources, tree)


def check_wheel(wheel: Path, files: list[PurePosixPath]) -> None:
    """The wheel holds the package and what describes it, nothing else."""
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    compare("wheel", {name for name in names if ".dist-info/" not in name}, expected_files(files))
    if not any(name.endswith("/licenses/LICENSE") for name in names):
        sys.exit("error: the wheel has no licence file")


def check_installed(wheel: Path, place: Path) -> None:
    """The wheel works in a fresh environment, beside a host's own modules of the same names."""
    venv.create(place / "environment", with_pip=True)
    python = place / "environment" / "bin" / "python"
    pins = Path(__file__).with_name("constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", "--constraint", pins, wheel, cwd=place)
    host = place / "host"
    host.mkdir()
    for name in ("client.py", "protocol.py"):
        (host / name).write_text("raise ImportError('this is the host\\'s own module')\n")
    (host / "program.py").write_text(PROGRAM)
    run(python, "program.py", cwd=host)
    run(python.with_name("storage-worker"), "--help", cwd=host)
    print("installed: imports, works and starts beside a host's own client.py and protocol.py")


def main() -> None:
    """Run every check; the first that fails ends the script with status 1."""
    files = tree_files()
    with tempfile.TemporaryDirectory(prefix="wheel-") as name:
        place = Path(name)
        source, target = place / "source", place / "dist"
        copy_tree(files, source)
        archive, wheel = build(source, target)
        check_archive(archive, files)
        check_wheel(wheel, files)
        check_installed(wheel, place)
    print(f"{wheel.name} is sound")


if __name__ == "__main__":
    main()

"""A disk that can lose its power: what was written and not synced may be there afterwards, or not, or in part.

`Disk` watches the files of one directory through a VFS that lies over the platform's own. At each point of
interest it gives a `Moment`: what is surely on the disk, and the writes that are only on their way. From a
moment any number of `images` can be made, each as a machine might find its disk after the power came back.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import apsw

BASE = "unix"
NAME = "power-loss"
SECTOR_BYTES = 512
SHARED_MEMORY = "-shm"


class Write(NamedTuple):
    """Bytes on their way to a place in a file."""

    offset: int
    data: bytes

    def apply(self, content: bytearray) -> None:
        if len(content) < self.offset:
            content.extend(bytes(self.offset - len(content)))
        content[self.offset : self.offset + len(self.data)] = self.data

    def torn(self, chance: random.Random) -> "Iterator[Write]":
        """The sectors of it that reached the disk."""
        for start in range(0, len(self.data), SECTOR_BYTES):
            if chance.random() < 0.5:
                yield Write(self.offset + start, self.data[start : start + SECTOR_BYTES])


class Cut(NamedTuple):
    """A new, smaller size on its way."""

    size: int

    def apply(self, content: bytearray) -> None:
        del content[self.size :]


Change = Write | Cut


class Moment(NamedTuple):
    """A disk at one moment: by file name the bytes that are safe, and the changes after them in their order."""

    what: str
    safe: dict[str, bytes]
    pending: dict[str, tuple[Change, ...]]

    def images(self, seed: int, count: int) -> Iterator[dict[str, bytes]]:
        """What may be found: nothing of what was pending, all of it, and `count` times some, torn and out of order."""
        yield self._image(lambda _: [])
        yield self._image(list)
        chance = random.Random(f"{seed} {self.what}")
        for _ in range(count):
            yield self._image(lambda changes: list(_some(changes, chance)))

    def _image(self, choose: Any) -> dict[str, bytes]:
        image: dict[str, bytes] = {}
        for name, safe in self.safe.items():
            content = bytearray(safe)
            for change in choose(self.pending.get(name, ())):
                change.apply(content)
            image[name] = bytes(content)
        return image


def _some(changes: tuple[Change, ...], chance: random.Random) -> Iterator[Change]:
    """A later write may be there without an earlier one, and a write in part."""
    share = chance.random()
    for change in changes:
        if chance.random() >= share:
            continue
        if isinstance(change, Write) and chance.random() < 0.3:
            yield from change.torn(chance)
        else:
            yield change


class Disk(apsw.VFS):
    """Watches what SQLite does to its files; `moments` has one from before and after each sync.

    While it exists it is the default of every connection that is opened in this process.
    """

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self._safe: dict[str, bytearray] = {}
        self._pending: dict[str, list[Change]] = {}
        self.note = ""
        """What the moments from now on are called."""
        super().__init__(NAME, BASE, makedefault=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        apsw.set_default_vfs(BASE)
        self.unregister()

    def look(self, what: str) -> None:
        """Note what the disk is like now."""
        self.moments.append(
            Moment(
                f"{self.note}, {what} ({len(self.moments)})",
                {name: bytes(content) for name, content in self._safe.items()},
                {name: tuple(changes) for name, changes in self._pending.items() if changes},
            )
        )

    def change(self, name: str, change: Change) -> None:
        """A change is on its way."""
        self._pending[name].append(change)

    def sync(self, name: str) -> None:
        """All changes of a file are safe."""
        self.look(f"before a sync of {name}")
        for change in self._pending[name]:
            change.apply(self._safe[name])
        self._pending[name].clear()
        self.look(f"after a sync of {name}")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802 - the driver's name
        path = str(name.filename()) if isinstance(name, apsw.URIFilename) else str(name)
        file = Path(path).name
        if file not in self._safe:
            assert not Path(path).exists() or Path(path).stat().st_size == 0, (
                "it is watched from its beginning"
            )
            self._safe[file], self._pending[file] = bytearray(), []
        return WatchedFile(self, file, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802 - the driver's name
        super().xDelete(filename, syncdir)
        self._safe.pop(Path(filename).name, None)
        self._pending.pop(Path(filename).name, None)
        self.look(f"after the end of {Path(filename).name}")


class WatchedFile(apsw.VFSFile):
    """One open file; the platform's own file system does the work."""

    def __init__(self, disk: Disk, file: str, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__(BASE, name, flags)
        self._disk = disk
        self._file = file

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802 - the driver's name
        super().xWrite(data, offset)
        self._disk.change(self._file, Write(offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:  # noqa: N802 - the driver's name
        super().xTruncate(newsize)
        self._disk.change(self._file, Cut(newsize))

    def xSync(self, flags: int) -> None:  # noqa: N802 - the driver's name
        super().xSync(flags)
        self._disk.sync(self._file)

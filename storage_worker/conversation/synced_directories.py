"""Which directories are on the disk as they are."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..filesystem import sync_directory


class SyncedDirectories:
    """Syncs each change of a directory once, and forgets none; of one process.

    A process does not know what another one left behind: it syncs each directory at least once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changing: dict[str, int] = {}
        self._changes: dict[str, int] = {}
        self._synced: dict[str, int] = {}

    @contextmanager
    def changing(self, path: str) -> Iterator[None]:
        """Within, something in the directory changes: whoever sees that must not rely on an earlier sync."""
        with self._lock:
            self._changing[path] = self._changing.get(path, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._changing[path] -= 1
                self._changes[path] = self._changes.get(path, 0) + 1

    def sync(self, path: str) -> None:
        """Sync a directory, unless nothing in it has changed since that was done."""
        with self._lock:
            changes = self._changes.setdefault(path, 0)
            is_changing = self._changing.get(path, 0) > 0
            if self._synced.get(path, -1) >= changes and not is_changing:
                return
        sync_directory(path)
        with self._lock:
            # Where it was changing meanwhile this counts for less than the change.
            self._synced[path] = max(self._synced.get(path, -1), changes)

"""The store itself: its name, its version and where its migrations are. Every module declares operations on it."""

from ..store import Store

store = Store("conversation", version=2, migrations="migrations")
"""Name it to a worker as `storage_worker.conversation:store`."""

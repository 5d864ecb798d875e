"""A store with background work that is due at once, for a worker to import."""

import storage_worker as sw


def _table(tx: sw.Transaction) -> None:
    tx.execute("create table tidied(at integer)")


tidy = sw.Store("tidy", version=1, migrations=[_table])


@tidy.background(every=0.01)
def tidy_up(tx: sw.Transaction, position: int | None) -> int | None:
    """Two slices each time."""
    tx.execute("insert into tidied values(?)", (position,))
    return 1 if position is None else None

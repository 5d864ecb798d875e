"""A script that owns its worker: the worker starts in the `with` line and ends with it, or with the script.

    python scripts/guides/script.py shop.db

Run it twice: what has a request key happens once, all the rest is added.
"""

import sys

import storage_worker as sw

# No `if __name__ == "__main__"` is needed: the worker is a process of its own that never runs this file.
database = sys.argv[1] if len(sys.argv) > 1 else "shop.db"

with sw.StorageWorker(database) as worker, worker.connect() as client:
    client.execute("create table if not exists orders(id integer primary key, item text, pieces int)")

    # When `execute` returns, the row is on the disk. With a request key it may be sent again after any
    # failure, by you or by the client, and still happens once.
    client.execute("insert into orders(item, pieces) values (?, ?)", ("tea", 2), request_key="order-17")

    # Several statements, all or nothing.
    client.batch(
        [
            ("insert into orders(item, pieces) values (?, ?)", ("cup", 6)),
            ("update orders set pieces = pieces + 1 where item = ?", ("tea",)),
        ]
    )

    # A decision between a read and a write: nobody else writes meanwhile, for at most 5 seconds.
    with client.transaction(lease=5.0) as transaction:
        pieces = transaction.query("select sum(pieces) from orders").scalar()
        transaction.execute("insert into orders(item, pieces) values ('box', ?)", (pieces // 4,))

    # Many writes without waiting for each one; their results come in order.
    with client.pipeline() as pipeline:
        written = [
            pipeline.execute("insert into orders(item, pieces) values ('spoon', 1)") for _ in range(100)
        ]
    print(
        "first and last spoon:", written[0].result().last_insert_rowid, written[-1].result().last_insert_rowid
    )

    for row in client.query("select item, count(*), sum(pieces) from orders group by item"):
        print(*row)

    # Every error is a StorageError; its outcome says whether anything was committed.
    try:
        client.execute("insert into oders(item) values ('typo')")
    except sw.StorageError as error:
        print(f"{error.code}: {error.message} ({error.outcome})")

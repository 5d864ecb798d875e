"""The small store of the load test's ingest workload: messages of conversations, each a row."""

import storage_worker as sw


def create_messages(tx: sw.Transaction) -> None:
    """The first and only migration."""
    tx.execute(
        "create table messages_messages(conversation text not null, position integer not null,"
        " role text not null, author text not null, body text not null, details text not null,"
        " primary key (conversation, position)) without rowid"
    )


messages = sw.Store("messages", version=1, migrations=[create_messages])


@messages.write
def add(
    tx: sw.Transaction, conversation: str, position: int, role: str, author: str, body: str, details: str
) -> None:
    """Store one message at its place in a conversation."""
    tx.execute(
        "insert into messages_messages(conversation, position, role, author, body, details)"
        " values(?, ?, ?, ?, ?, ?)",
        (conversation, position, role, author, body, details),
    )

"""A small store of messages, declared as a host application declares its own operations."""

import msgspec

import storage_worker as sw


class Stored(msgspec.Struct, frozen=True):
    """A stored message and its place in its conversation."""

    position: int
    role: str
    author: str
    body: str
    details: str


class Counted(msgspec.Struct, frozen=True):
    """A conversation and how many messages are stored of it."""

    conversation: str
    messages: int


def create_messages(tx: sw.Transaction) -> None:
    """The first and only migration."""
    tx.execute(
        "create table transcripts_messages(conversation text not null, position integer not null,"
        " role text not null, author text not null, body text not null, details text not null,"
        " primary key (conversation, position)) without rowid"
    )


transcripts = sw.Store("transcripts", version=1, migrations=[create_messages])


@transcripts.write
def add(
    tx: sw.Transaction, conversation: str, position: int, role: str, author: str, body: str, details: str
) -> None:
    """Store one message at its place in a conversation."""
    tx.execute(
        "insert into transcripts_messages(conversation, position, role, author, body, details)"
        " values(?, ?, ?, ?, ?, ?)",
        (conversation, position, role, author, body, details),
    )


@transcripts.read
def page(tx: sw.Transaction, conversation: str, after: int, bytes_max: int) -> list[Stored]:
    """The messages of a conversation after a position, in order, up to `bytes_max` bytes of them but at least one."""
    rows = tx.query(
        "select position, role, author, body, details from ("
        " select *, sum(length(cast(body as blob)) + length(cast(details as blob)) + 100)"
        "   over (order by position) as running, row_number() over (order by position) as place"
        " from (select * from transcripts_messages where conversation = ? and position > ? order by position limit 100)"
        ") where running <= ? or place = 1 order by position",
        (conversation, after, bytes_max),
    )
    return rows.into(Stored)


@transcripts.read
def counts(tx: sw.Transaction, after: str, limit: int) -> list[Counted]:
    """How many messages each conversation has, `limit` conversations after a name."""
    rows = tx.query(
        "select conversation, count(*) as messages from transcripts_messages where conversation > ?"
        " group by conversation order by conversation limit ?",
        (after, limit),
    )
    return rows.into(Counted)

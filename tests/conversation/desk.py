"""The store's handlers on one open transaction, as a test calls them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from storage_worker import conversation
from storage_worker.conversation.records import (
    Admitted,
    Appended,
    Event,
    Ingested,
    Message,
    Navigation,
    Observation,
    Page,
    PayloadRef,
    Session,
)
from storage_worker.migrations import migrate
from storage_worker.transaction import KeptFailure, Transaction
from tests.store.doubles import MigratedFile

T = TypeVar("T")

ROOM = "room"


class Desk:
    """Each method is an operation, run directly; `room` is there already."""

    def __init__(self, tx: Transaction) -> None:
        self.tx = tx
        conversation.create_room.handler(tx, ROOM)

    def output(self, type_: str, session: str = "s", **fields: Any) -> Ingested:
        """Ingest an output with these fields into the room."""
        return self.ingest({"type": type_, **fields}, session=session, room=ROOM)

    def ingest(self, event: dict[str, Any], session: str = "s", **options: Any) -> Ingested:
        return conversation.ingest_output.handler(self.tx, session, event, **options)

    def collide(self, event: dict[str, Any], **options: Any) -> conversation.OutputIdentityCollisionError:
        """Ingest an output that must collide; the failure, whose writes are kept."""
        with pytest.raises(KeptFailure) as caught:
            self.ingest(event, **options)
        error = caught.value.error
        assert isinstance(error, conversation.OutputIdentityCollisionError)
        assert error.outcome == "committed"
        assert not error.retryable
        return error

    def admit(self, text: Any = "hello", session: str = "s", **options: Any) -> Admitted:
        return conversation.admit.handler(self.tx, session, text, **options)

    def ingest_user(self, text: Any = "hello", session: str = "s", **options: Any) -> Admitted:
        return conversation.ingest_user.handler(self.tx, session, text, **options)

    def append(self, type_: str = "note", session: str = "s", **options: Any) -> Appended:
        return conversation.append.handler(self.tx, session, type_, **options)

    def events(self, session: str | None = "s") -> list[Event]:
        return everything(conversation.events.handler(self.tx, session, page_rows=1000))

    def messages(self, session: str = "s") -> list[Message]:
        return everything(conversation.messages.handler(self.tx, session, page_rows=1000))

    def observations(self, session: str = "s") -> list[Observation]:
        return everything(conversation.observations.handler(self.tx, session, page_rows=1000))

    def navigation(self, session: str = "s") -> Navigation | None:
        found = everything(conversation.navigation.handler(self.tx, page_rows=1000))
        return next((each for each in found if each.session == session), None)

    def session(self, session: str = "s") -> Session | None:
        return conversation.session.handler(self.tx, session)


def everything(page: Page[T]) -> list[T]:
    """The items of a page behind which nothing stands."""
    assert not page.more
    return page.items


@contextmanager
def desk_at(path: Path) -> Iterator[Desk]:
    """A desk on a new database; what it did is committed at the end."""
    file = MigratedFile(path)
    try:
        migrate(file, [conversation.store])
        with file.transaction() as tx:
            yield Desk(tx)
    finally:
        file.database.close()


def reference_to(content_type: str, sha256: str, **changes: Any) -> PayloadRef:
    ref = PayloadRef(sha256, content_type, "conversation", 20_000, 300, "gzip")
    return msgspec.structs.replace(ref, **changes)

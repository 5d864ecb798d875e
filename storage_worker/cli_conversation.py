"""The commands for the conversation store: import, export, and looking at what is stored."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from . import conversation, conversation_client
from .cli_output import (
    CLIENT_NAME,
    EXIT_FINDINGS,
    JsonOption,
    PathArgument,
    TimeoutOption,
    console,
    examples,
    print_json,
    print_result,
    tidy_ending,
    typed_errors,
    written_out,
)
from .client.client import Client
from .client.terms import deadline_after, seconds_left
from .conversation import payload_client
from .conversation.records import Event, Observation, Page, PayloadRef
from .conversation_views import conversation_view, import_view, rooms_view, sessions_view
from .exporting import STANDARD_OUTPUT, export_lines, write_lines, write_out
from .import_fleet import PROCESSES_DEFAULT, PROCESSES_MAX, Summary, import_paths, input_bytes
from .protocol.errors import (
    DatabasePathError,
    InvalidRequestError,
    ResultTooLargeError,
    StorageCorruptError,
)
from .protocol.limits import DEFAULT_LIMITS
from .protocol.operation import Call
from .tables import printable
from .transcripts.records import Problem

app = typer.Typer()

T = TypeVar("T")

ROWS_DEFAULT = 200
ROWS_MAX = 1_000

CANDIDATES_MAX = 5
"""How many sessions are named where an id is not told whole and several begin so."""

AfterOption = Annotated[int, typer.Option(min=0, help="Go on behind this one, as the last output says.")]
RowsOption = Annotated[int, typer.Option(min=1, max=ROWS_MAX, help="How many to show at the most.")]
RoomOption = Annotated[str | None, typer.Option(help="Only those of this room.")]


class _Reader:
    """A client that may read, and the deadline of the command that it works for (monotonic clock, ns)."""

    def __init__(self, client: Client, deadline_ns: int) -> None:
        self.client = client
        self._deadline_ns = deadline_ns

    @property
    def seconds_left(self) -> float:
        """The seconds that the command may still take."""
        return seconds_left(self._deadline_ns)

    def call(self, call: Call[T]) -> T:
        """The result of a call, within the time of the whole command."""
        return self.client.call(call, timeout=self.seconds_left)


@contextmanager
def _reader(path: Path, timeout: float) -> Iterator[_Reader]:
    """A reader of a database; a shared worker is started where none runs, but no database and no store is made."""
    if not path.exists():
        raise DatabasePathError(
            f"there is no database {path}; `import` makes one", details={"path": os.path.abspath(path)}
        )
    conversation_client.require_store(path)
    deadline_ns = deadline_after(timeout, DEFAULT_LIMITS)
    with conversation_client.connect(path, role="read", name=CLIENT_NAME, timeout=timeout) as client:
        yield _Reader(client, deadline_ns)


@app.command(
    "import",
    epilog=examples(
        "storage-worker import app.db ~/transcripts",
        "storage-worker import app.db session.jsonl room.ascii.txt --processes 4 --json",
    ),
)
def import_(
    path: PathArgument,
    sources: Annotated[list[Path], typer.Argument(help="Files or folders.", exists=True, show_default=False)],
    processes: Annotated[
        int, typer.Option(min=1, max=PROCESSES_MAX, help="Client processes at once.")
    ] = PROCESSES_DEFAULT,
    json: JsonOption = False,
) -> None:
    """Import transcripts into the conversation store; again, it adds only what is new.

    Formats are found by content: chat-completions messages, dialogues, reply trees, linked messages, room logs with
    reply links, session logs of coding agents, and what `export` wrote. Rooms and sessions that are there are left as
    they are; an event of an export without an id of its own is known again by its place in its session. Exit status 1
    where something could not be read; all else is imported.
    """
    # The bar hides the cursor, which has to be shown again in whatever way this ends.
    with typed_errors(json=json, writes=True), tidy_ending():
        summary = _import_with_progress(path, sources, processes)
    print_result(lambda: import_view(summary), lambda: _summary_plain(summary), json=json)
    if summary.problem_count or summary.failures:
        raise typer.Exit(EXIT_FINDINGS)


def _import_with_progress(path: Path, sources: list[Path], processes: int) -> Summary:
    columns = (TextColumn("importing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # Results go to the standard output, also where that is a file.
    out = Console(stderr=True)
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        task = progress.add_task("importing", total=input_bytes(sources))
        return import_paths(
            path,
            sources,
            processes=processes,
            on_progress=lambda done: progress.advance(task, done),
        )


def _summary_plain(summary: Summary) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(summary)
    del found["latencies_s"]
    return {"total": msgspec.to_builtins(summary.total), **found}


@app.command(
    epilog=examples(
        "storage-worker export app.db everything.jsonl",
        "storage-worker export app.db - --session 4f7c > session.jsonl",
    )
)
def export(
    path: PathArgument,
    file: Annotated[
        Path | None,
        typer.Argument(help="Where to write; - is standard output, as is none.", dir_okay=False),
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Only this session: its id, or what no other id begins with.")
    ] = None,
    room: RoomOption = None,
    call_timeout: Annotated[
        float,
        typer.Option(min=0.01, max=600.0, help="Seconds for each call to the worker; an export makes many."),
    ] = 30.0,
) -> None:
    """Write a session, a room or everything as JSON lines, payloads included; `import` takes them back.

    FILE is there whole or stays as it was. Its last line says how many events there are. Exit status 1 where a payload
    cannot be read: then the export has everything else, and is FILE.incomplete where there is a FILE already. Compare
    two exports without stream_id and the numbers of messages, which each database gives itself.
    """
    if session is not None and room is not None:
        raise typer.BadParameter("name a session or a room, not both")
    stderr = Console(stderr=True)
    missing = 0

    def say(text: str) -> None:
        stderr.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def tell(problem: Problem) -> None:
        # At once: what was found must be told also where the export cannot go on.
        nonlocal missing
        missing += 1
        say(str(problem))

    with typed_errors(json=False), tidy_ending(), _reader(path, call_timeout) as reader:
        found = None if session is None else _session_id(reader, session)
        is_out = file is None or str(file) == "-"
        name = STANDARD_OUTPUT if is_out else str(file)
        lines = export_lines(reader.client, found, room, name=name, on_problem=tell, timeout=call_timeout)
        if is_out:
            write_out(lines, sys.stdout.buffer)
        else:
            written = write_lines(lines, name, str(path), is_whole=lambda: not missing)
            if written != name:
                say(f"{name} stays as it was; what could be exported is in {written}")
    if missing:
        raise typer.Exit(EXIT_FINDINGS)


@app.command(epilog=examples("storage-worker rooms app.db", "storage-worker rooms app.db --json"))
def rooms(
    path: PathArgument,
    after: AfterOption = 0,
    rows: RowsOption = ROWS_DEFAULT,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = False,
) -> None:
    """List the rooms of the conversation store."""
    with typed_errors(json=json), _reader(path, timeout) as reader:
        page = reader.call(conversation.rooms(after, rows))
    print_result(
        lambda: rooms_view(page.items, more=_more(page)), lambda: _page_plain(page, "rooms"), json=json
    )


@app.command(
    epilog=examples(
        "storage-worker sessions app.db", "storage-worker sessions app.db --room agent-logs --json"
    )
)
def sessions(
    path: PathArgument,
    room: RoomOption = None,
    after: AfterOption = 0,
    rows: RowsOption = ROWS_DEFAULT,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = False,
) -> None:
    """List sessions, the newest first, each with its status and its last message."""
    with typed_errors(json=json), _reader(path, timeout) as reader:
        if room is not None and reader.call(conversation.room(room)) is None:
            raise conversation.RoomNotFoundError(f"there is no room {room!r}", details={"room": room})
        page = reader.call(conversation.navigation(room, after, rows, newest_first=True))
    print_result(
        lambda: sessions_view(page.items, more=_more(page)), lambda: _page_plain(page, "sessions"), json=json
    )


@app.command(
    epilog=examples(
        "storage-worker show app.db 4f7c",
        "storage-worker show app.db 4f7c --full",
        "storage-worker show app.db 4f7c --json",
    )
)
def show(
    path: PathArgument,
    session: Annotated[str, typer.Argument(help="The session's id, or what no other id begins with.")],
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Show long texts whole, and what an import keeps beside the conversation."
        ),
    ] = False,
    after: AfterOption = 0,
    rows: RowsOption = ROWS_MAX,
    timeout: TimeoutOption = 30.0,
    json: JsonOption = False,
) -> None:
    """Show a conversation: its messages, and what happened between them folded to one line each."""
    with typed_errors(json=json), _reader(path, timeout) as reader:
        page = reader.call(conversation.history(_session_id(reader, session), after, rows))
        if json:
            print_json(_page_plain(page, "events"))
            return
        out = console()
        for view in conversation_view(page.items, _text_reader(reader) if full else None):
            with written_out():
                out.print(view)
        if page.more:
            with written_out():
                out.print(_more(page), style="dim")


def _session_id(reader: _Reader, given: str) -> str:
    """The id of a session, whole or as much of it as only that one begins with."""
    if not given:
        raise InvalidRequestError("the session's id is empty")
    # Events have a session that may never have been made.
    is_whole = (
        reader.call(conversation.session(given)) is not None
        or reader.call(conversation.history(given, page_rows=1)).items
    )
    if is_whole:
        return given
    found = reader.call(conversation.session_ids(given, CANDIDATES_MAX + 1))
    if not found:
        raise conversation.SessionNotFoundError(f"there is no session {given!r}", details={"session": given})
    if len(found) > 1 and given not in found:
        more = " and more" if len(found) > CANDIDATES_MAX else ""
        raise InvalidRequestError(
            f"{given!r} begins the ids of {', '.join(map(repr, found[:CANDIDATES_MAX]))}{more}; give more of the one",
            details={"session": given},
        )
    return found[0]


def _text_reader(reader: _Reader) -> Callable[[PayloadRef], str | None]:
    """Reads the texts of messages from the payload store one by one; None for one that cannot be read."""

    def read(ref: PayloadRef) -> str | None:
        try:
            return payload_client.read_text(reader.client, ref, timeout=reader.seconds_left)
        except (
            conversation.PayloadNotFoundError,
            StorageCorruptError,
            ResultTooLargeError,
            InvalidRequestError,
        ):
            return None

    return read


def _more(page: Page[Any]) -> str:
    return f"there are more: --after {page.cursor}" if page.more else ""


def _page_plain(page: Page[Any], name: str) -> dict[str, Any]:
    return {name: [_plain(item) for item in page.items], "cursor": page.cursor, "more": page.more}


def _plain(value: Any) -> Any:
    """A record with the names of its fields, which do not travel with it."""
    if not isinstance(value, msgspec.Struct):
        return value
    found = {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Event | Observation):
        del found["attributes_json"], found["added_json"]
        found["attributes"] = value.attributes
    return found

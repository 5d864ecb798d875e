"""Rooms, sessions and conversations as a person reads them in a terminal.

Whatever stands in the store was written by others: control characters are made harmless, and no text is markup.
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .conversation.records import Event, Historic, Navigation, PayloadRef, Room, Said
from .import_fleet import Summary
from .tables import printable, size

TEXT_CHARS_SHOWN: Final = 2_000
"""How much of a message is shown unless all of it is asked for."""

LINE_CHARS_SHOWN: Final = 100
"""How much of what is folded to a line is shown."""

PROBLEMS_SHOWN_MAX: Final = 20

_COLOURS: Final = {"user": "cyan", "prompter": "cyan", "assistant": "green", "system": "magenta"}
_MARKS: Final = {
    "tool_call": "→",
    "tool_execution_started": "→",
    "tool_execution_finished": "←",
    "reasoning": "…",
    "attachment": "+",
    "session_error": "!",
}


def rooms_view(rooms: Iterable[Room], *, more: str) -> RenderableType:
    """A table of rooms; `more` says how to see the others, "" where there are none."""
    table = _table("room", "title", "messages", "made", "state")
    for room in rooms:
        state = ["default"] if room.is_default else []
        if room.archived_ms is not None:
            state.append(f"archived {_when(room.archived_ms)}")
        table.add_row(
            _one_line(room.id),
            _one_line(room.title),
            f"{room.last_message:,}",
            _when(room.created_ms),
            ", ".join(state),
        )
    return _with_more(table, more)


def sessions_view(sessions: Iterable[Navigation], *, more: str) -> RenderableType:
    """A table of sessions; `more` as for rooms."""
    table = _table("session", "room", "messages", "events", "status", "last activity", "last message")
    for each in sessions:
        table.add_row(
            _one_line(each.session),
            _one_line(each.room),
            f"{each.last_message:,}",
            f"{each.last_sequence:,}",
            _one_line(each.status),
            _when(each.activity_ms),
            _one_line(each.preview),
        )
    return _with_more(table, more)


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in ("messages", "events") else "left")
    return table


def _with_more(view: RenderableType, more: str) -> RenderableType:
    return Group(view, Text(more, style="dim")) if more else view


ReadText = Callable[[PayloadRef], str | None]
"""Reads a text from the payload store, None where it cannot be read."""


def conversation_view(events: Iterable[Historic], read_text: ReadText | None) -> Iterator[RenderableType]:
    """Each event of a session: messages with their text, everything else folded to one line.

    With `read_text` no text is cut; it is asked for each text when its message is shown.
    """
    for historic in events:
        if historic.message is None:
            yield _folded(historic.event)
        else:
            yield _message(historic.event, historic.message, read_text)


def _message(event: Event, said: Said, read_text: ReadText | None) -> Text:
    who = said.role if said.sender_label in ("", said.role) else f"{said.role} {said.sender_label}"
    thread = "" if said.thread_root is None else f"  in the thread of {said.thread_root:,}"
    view = Text()
    view.append(f"{event.sequence:>5}  ", style="dim")
    view.append(_one_line_text(who), style=f"bold {_COLOURS.get(said.role, 'blue')}")
    view.append(f"  {_when(event.created_ms)}{thread}\n", style="dim")
    body = event.body
    if isinstance(body, PayloadRef):
        found = None if read_text is None else read_text(body)
        text, whole = (event.preview if found is None else found), f"{body.bytes:,} bytes"
        is_cut = found is None
    else:
        text = (body or "")[:TEXT_CHARS_SHOWN] if read_text is None else (body or "")
        whole = f"{len(body or ''):,} characters"
        is_cut = len(text) < len(body or "")
    view.append(_indented(printable(text)))
    if is_cut:
        more = "--full shows them" if read_text is None else "which cannot be read"
        view.append(f"\n       … cut; {whole} in all, {more}", style="dim")
    return view


def _indented(text: str) -> str:
    return "\n".join(f"       {line}" for line in text.split("\n"))


def _folded(event: Event) -> Text:
    """An event in one line: its kind, its tool or name, and the beginning of its body."""
    attributes = event.attributes
    name = attributes.get("name") or attributes.get("kind") or ""
    mark = _MARKS.get(event.type)
    view = Text(no_wrap=True, overflow="ellipsis")
    view.append(f"{event.sequence:>5}  ", style="dim")
    view.append(f"{mark} " if mark else f"{_one_line_text(event.type)} ", style="yellow" if mark else "dim")
    if isinstance(name, str) and name:
        view.append(f"{_one_line_text(name)} ", style="bold")
    if attributes.get("is_error") is True:
        view.append("failed ", style="red")
    body = event.body
    if isinstance(body, PayloadRef):
        view.append(f"{_one_line_text(body.content_type)}, {size(body.bytes)}  ", style="dim")
    elif body is not None and len(body) > LINE_CHARS_SHOWN:
        view.append(f"{len(body):,} characters  ", style="dim")
    view.append(_one_line_text(event.preview)[:LINE_CHARS_SHOWN], style="dim")
    return view


def _one_line(text: str) -> Text:
    return Text(_one_line_text(text)[: 2 * LINE_CHARS_SHOWN])


def _one_line_text(text: str) -> str:
    return printable(text.replace("\n", " "))


def _when(milliseconds: int) -> str:
    try:
        return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return f"{milliseconds:,} ms"


def import_view(summary: Summary) -> RenderableType:
    """What an import did, by format, and what it could not."""
    table = _table("format", "sessions", "there before", "records", "events", "added", "size")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = [*sorted(summary.formats.items()), *([("all", summary.total)] if len(summary.formats) > 1 else [])]
    for name, count in rows:
        table.add_row(
            name,
            *(
                f"{each:,}"
                for each in (count.sessions, count.known, count.records, count.events, count.added)
            ),
            size(count.size_bytes),
            style="bold" if name == "all" else "",
        )
    parts: list[RenderableType] = [table] if rows else [Text("nothing to import")]
    if summary.skipped:
        parts.append(Text(f"skipped {len(summary.skipped):,} files that are no transcripts", style="dim"))
    shown = summary.problems[:PROBLEMS_SHOWN_MAX]
    parts += [Text(printable(str(problem)), style="yellow") for problem in shown]
    if summary.problem_count > PROBLEMS_SHOWN_MAX:
        parts.append(Text(f"{summary.problem_count:,} problems in all; --json tells more", style="yellow"))
    parts += [Text(printable(failure), style="red") for failure in summary.failures]
    return Group(*parts)

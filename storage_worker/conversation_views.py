"""Rooms, sessions and conversations as a person reads them in a terminal.

Whatever stands in the store was written by others: control characters are made harmless, and no text is markup.
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .conversation.records import Event, Historic, Navigation, PayloadRef, Room, Said
from .import_fleet import Summary
from .import_session import FINISHED
from .tables import printable, size
from .transcripts.formats import WITH_ITS_LOG
from .transcripts.records import RECORD

TEXT_CHARS_SHOWN: Final = 2_000
"""How much of a message is shown unless all of it is asked for."""

LINE_CHARS_SHOWN: Final = 100
"""How much of what is folded to a line is shown."""

PROBLEMS_SHOWN_MAX: Final = 20
SKIPPED_SHOWN_MAX: Final = 10

LAST_CHARS_MIN: Final = 30
"""How much of its last column a list shows before it shows one more column."""

TAB_CHARS: Final = 8

WIDTH_MAX: Final = 1_000_000
"""A width that cuts nothing, to measure with."""

FREE_TEXTS: Final = ("room", "title", "state", "last message")
"""Columns that are cut where a line is too long."""

_OF_IMPORTS: Final = (RECORD, FINISHED)
"""What an import keeps to give its source back, which is no part of the conversation."""

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
    listed = list(rooms)
    if not listed:
        return Text("no rooms")
    table = _table("room", "title", "messages", "made", "state")
    for room in listed:
        state = ["default"] if room.is_default else []
        if room.archived_ms is not None:
            state.append(f"archived {_when(room.archived_ms)}")
        table.add_row(
            _whole(room.id),
            _one_line(room.title),
            f"{room.last_message:,}",
            _when(room.created_ms),
            ", ".join(state),
        )
    return _with_more(_WithWholeIds(table), more)


def sessions_view(sessions: Iterable[Navigation], *, more: str) -> RenderableType:
    """A table of sessions, their rooms only where that leaves space for the last message; `more` as for rooms."""
    listed = list(sessions)
    if not listed:
        return Text("no sessions")
    tables = (_sessions_table(listed, with_room=with_room) for with_room in (True, False))
    return _with_more(_WithWholeIds(*tables), more)


def _sessions_table(sessions: Iterable[Navigation], *, with_room: bool) -> Table:
    room = ["room"] if with_room else []
    table = _table("session", *room, "messages", "events", "status", "last activity", "last message")
    for each in sessions:
        table.add_row(
            _whole(each.session),
            *([_one_line(each.room)] if with_room else []),
            f"{each.last_message:,}",
            f"{each.last_sequence:,}",
            _one_line(each.status),
            _when(each.activity_ms),
            _one_line(each.preview),
        )
    return table


class _WithWholeIds:
    """The first of some tables that has space for its last column, else the last of them.

    Its first column, the ids, is never cut, since commands take them: it is folded where it is wider than the terminal.
    """

    def __init__(self, *tables: Table) -> None:
        self._tables = tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(max_width=WIDTH_MAX)

        def width(table: Table, number: int) -> int:
            cells = table.columns[number].cells
            return max((Measurement.get(console, unbounded, cell).maximum for cell in cells), default=0)

        def needed(table: Table) -> int:
            cut = max(0, width(table, -1) - LAST_CHARS_MIN)
            return Measurement.get(console, unbounded, table).maximum - cut

        fitting = (table for table in self._tables if needed(table) <= options.max_width)
        table = next(fitting, self._tables[-1])
        table.columns[0].min_width = min(width(table, 0), options.max_width - 2)
        yield table


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(
            heading,
            justify="right" if heading in ("messages", "events") else "left",
            # Those that may wrap are the first to be made narrower.
            no_wrap=number == 0 or heading not in FREE_TEXTS,
        )
    return table


def _whole(name: str) -> Text:
    """An id on as many lines as it takes."""
    return Text(_one_line_text(name), no_wrap=False, overflow="fold")


def _with_more(view: RenderableType, more: str) -> RenderableType:
    return Group(view, Text(more, style="dim")) if more else view


ReadText = Callable[[PayloadRef], str | None]
"""Reads a text from the payload store, None where it cannot be read."""


def conversation_view(events: Iterable[Historic], read_text: ReadText | None) -> Iterator[RenderableType]:
    """Each event of a session: messages with their text, everything else folded to one line.

    With `read_text` no text is cut and nothing is left out; it is asked for each text when its message is shown.
    """
    shown = list(events)
    if not shown:
        yield Text("no events")
    hidden = 0
    for historic in shown:
        if historic.message is not None:
            yield _message(historic.event, historic.message, read_text)
        elif read_text is None and historic.event.type in _OF_IMPORTS:
            hidden += 1
        else:
            yield _folded(historic.event)
    if hidden:
        yield Text(f"       {_count(hidden, 'record')} of the import not shown: --full", style="dim")


def _message(event: Event, said: Said, read_text: ReadText | None) -> Text:
    who = said.role if said.sender_label in ("", said.role) else f"{said.role} {said.sender_label}"
    thread = "" if said.thread_root is None else f"  in the thread of {said.thread_root:,}"
    view = Text()
    view.append(f"{event.sequence:>5}  ", style="dim")
    view.append(_one_line_text(who), style=f"bold {_COLOURS.get(said.role, 'blue')}")
    view.append(f"  {_when(event.created_ms)}{thread}", style="dim")
    body = event.body
    if isinstance(body, PayloadRef):
        found = None if read_text is None else read_text(body)
        text, whole = (event.preview if found is None else found), f"{body.bytes:,} bytes"
        is_cut = found is None
    else:
        text = (body or "")[:TEXT_CHARS_SHOWN] if read_text is None else (body or "")
        whole = f"{len(body or ''):,} characters"
        is_cut = len(text) < len(body or "")
    if text.strip():
        view.append("\n" + _indented(printable(_as_lines(text))))
    if is_cut:
        more = "--full shows them" if read_text is None else "which cannot be read"
        view.append(f"\n       … cut; {whole} in all, {more}", style="dim")
    return view


def _as_lines(text: str) -> str:
    """A text whose lines end as a terminal's do, and whose tabs are spaces: both are no control characters to tell of."""
    return text.replace("\r\n", "\n").expandtabs(TAB_CHARS)


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
    return Text(_one_line_text(text)[: 2 * LINE_CHARS_SHOWN], no_wrap=True, overflow="ellipsis")


def _one_line_text(text: str) -> str:
    return printable(text.replace("\r\n", " ").replace("\n", " ").replace("\t", " "))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _when(milliseconds: int) -> str:
    try:
        return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return f"{milliseconds:,} ms"


def import_view(summary: Summary) -> RenderableType:
    """What an import did, by format, and what it could not."""
    table = _table("format", "new or grown", "there before", "records", "events", "added", "size")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = [*sorted(summary.formats.items()), *([("all", summary.total)] if len(summary.formats) > 1 else [])]
    for name, count in rows:
        table.add_row(
            name,
            *(
                f"{each:,}"
                for each in (
                    count.sessions - count.known,
                    count.known,
                    count.records,
                    count.events,
                    count.added,
                )
            ),
            size(count.size_bytes),
            style="bold" if name == "all" else "",
        )
    parts: list[RenderableType] = [table] if rows else [Text("nothing to import")]
    links = sum(each.reason == WITH_ITS_LOG for each in summary.skipped)
    if links:
        are = "is read with its log" if links == 1 else "are read with their logs"
        parts.append(Text(f"{_count(links, 'file')} of links {are}", style="dim"))
    skipped = [each for each in summary.skipped if each.reason != WITH_ITS_LOG]
    if skipped:
        names = [printable(each.path) for each in skipped[:SKIPPED_SHOWN_MAX]]
        more = [f"… and {len(skipped) - len(names):,} more; --json names all"]
        lines = names + (more if len(skipped) > len(names) else [])
        are = "that is no transcript" if len(skipped) == 1 else "that are no transcripts"
        told = f"skipped {_count(len(skipped), 'file')} {are}:"
        parts.append(Text("\n  ".join([told, *lines]), style="dim"))
    shown = summary.problems[:PROBLEMS_SHOWN_MAX]
    parts += [Text(printable(str(problem)), style="yellow") for problem in shown]
    if summary.problem_count > PROBLEMS_SHOWN_MAX:
        parts.append(Text(f"{summary.problem_count:,} problems in all; --json tells more", style="yellow"))
    parts += [Text(printable(failure), style="red") for failure in summary.failures]
    return Group(*parts)

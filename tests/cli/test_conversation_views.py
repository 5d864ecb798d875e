"""Lists of rooms and sessions at the width of a terminal."""

import io

import pytest
from rich.console import Console, RenderableType

from storage_worker.conversation.records import Event, Historic, Navigation, Room, Said
from storage_worker.conversation_views import conversation_view, import_view, rooms_view, sessions_view
from storage_worker.import_fleet import Summary
from storage_worker.transcripts.formats import WITH_ITS_LOG, Skipped

IDS = [f"chat-0123456789abcdef0123456789abcdef-{number}" for number in range(3)]


def lines(view: RenderableType, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None).print(view)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def sessions(room: str = "a-room-of-some-length", names: list[str] = IDS) -> RenderableType:
    preview = "the last message, which says a lot and is on one line all the same " * 3
    return sessions_view(
        [Navigation(number, name, room, "idle", preview, 0, 12, 10) for number, name in enumerate(names)],
        more="",
    )


@pytest.mark.parametrize("width", [80, 100, 200])
def test_an_id_is_whole_and_a_session_has_one_line(width: int) -> None:
    shown = lines(sessions(), width)
    rows = shown[-len(IDS) :]
    assert [name in line for name, line in zip(IDS, rows, strict=True)] == [True] * len(IDS)
    assert all(len(line) <= width for line in shown)


def test_rooms_are_shown_where_the_last_message_has_room_too() -> None:
    narrow, wide = ("\n".join(lines(sessions(), width)) for width in (100, 160))
    assert ("a-room-of" in narrow, "a-room-of-some-length" in wide) == (False, True)
    assert "the last" in narrow
    assert "the last message, which says" in wide


def test_an_id_that_is_wider_than_the_terminal_is_folded() -> None:
    name = "x" * 250 + "end"
    shown = lines(sessions(names=[name]), 100)
    assert sum(line.count("x") for line in shown) >= 250
    assert any("end" in line for line in shown)


def test_a_rooms_id_is_whole() -> None:
    [room] = [Room(1, IDS[0] * 2, "a title " * 20, False, 7, 0, None)]
    shown = lines(rooms_view([room], more=""), 120)
    assert any(room.id in line for line in shown)


def test_what_is_empty_says_so() -> None:
    assert lines(rooms_view([], more=""), 80) == ["no rooms"]
    assert lines(sessions_view([], more=""), 80) == ["no sessions"]
    assert [lines(view, 80) for view in conversation_view([], None)] == [["no events"]]


def test_links_are_told_apart_from_what_was_skipped() -> None:
    links = [Skipped(f"/{name}.annotation.txt", WITH_ITS_LOG) for name in "ab"]
    assert lines(import_view(Summary(skipped=links[:1])), 80)[1:] == ["1 file of links is read with its log"]
    shown = lines(import_view(Summary(skipped=[*links, Skipped("/README", "no known format")])), 80)
    assert shown[1:] == [
        "2 files of links are read with their logs",
        "skipped 1 file that is no transcript:",
        "  /README",
    ]


def test_lines_of_other_systems_and_tabs_are_shown_as_they_are_meant() -> None:
    text = "if x:\r\n\tgo\r\x1b[2J"
    event = Event(
        1, "s", 1, "r", "ann", "note", None, "session", "s", 1, None, None, None, "{}", "text/plain", text, text,
        "history", 0, None, True,
    )  # fmt: skip
    said = Said("m", 1, 1, "user", None, "user", None, None, None, "complete", None)
    shown = [lines(view, 80) for view in conversation_view([Historic(event, said)], None)]
    assert shown[0][1:] == ["       if x:", "               go\\r\\x1b[2J"]
    [folded] = [lines(view, 80) for view in conversation_view([Historic(event, None)], None)]
    assert folded[0].endswith("if x:  go\\r\\x1b[2J")

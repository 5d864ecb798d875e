"""What several files hold of one session is one piece of work, and each record of it is one record."""

import json
from pathlib import Path
from typing import Any

from storage_worker.transcripts import formats
from storage_worker.transcripts.files import content_of
from storage_worker.transcripts.records import Part, Problem, Record, Transcript, records_of

from .originals import pieces_of, rebuilt, records_in, sessions_in
from .samples import AGENT_LOG, CHAT, LOG_LINES, agent_record, write, write_lines

NOTE = {"type": "note"}


def said(own: str, when: str, **more: Any) -> dict[str, Any]:
    return agent_record(own, None, {"role": "user", "content": own}, **more) | {"timestamp": when}


def one_session(*paths: Path) -> Transcript:
    [found] = (each for each in formats.transcripts(*map(str, paths)) if isinstance(each, Transcript))
    return found


def ids(*paths: Path) -> set[str]:
    return {record.id for record in records_in(one_session(*paths))}


def test_the_file_that_began_first_comes_first_however_they_are_named(tmp_path: Path) -> None:
    late = write_lines(tmp_path, "a.jsonl", [said("late", "2026-01-02T00:00:00Z")])
    early = write_lines(tmp_path, "b.jsonl", [NOTE, said("early", "2026-01-02T01:00:00+02:00")])
    same = write_lines(tmp_path, "c.jsonl", [said("same", "2026-01-02T00:00:00Z")])
    for paths in ((late, early, same), (same, late, early), (tmp_path,)):
        found = one_session(*paths)
        assert [part.path for part in found.parts] == [str(early), str(late), str(same)]
        assert found.size_bytes == sum(each.stat().st_size for each in (late, early, same))
        assert [(record.id, record.path, record.line) for record in records_in(found)][1:] == [
            ("early", str(early), 2),
            ("late", str(late), 1),
            ("same", str(same), 1),
        ]


def test_equal_lines_without_an_id_are_known_wherever_they_stand(tmp_path: Path) -> None:
    one = write_lines(
        tmp_path, "one.jsonl", [NOTE, said("a", "2026-01-01"), NOTE, NOTE, said("b", "2026-01-01")]
    )
    other = write_lines(
        tmp_path, "other.jsonl", [NOTE, said("c", "2026-01-03"), NOTE, said("d", "2026-01-03")]
    )
    apart = [ids(one), ids(other)]
    assert [len(each) for each in apart] == [5, 4]
    assert ids(one, other) == apart[0] | apart[1]
    assert not apart[0] & apart[1]
    assert len(rebuilt(records_in(one_session(one, other)))) == 9


def test_a_copy_of_a_file_and_a_file_named_twice_add_nothing(tmp_path: Path) -> None:
    path = write_lines(tmp_path, "one.jsonl", AGENT_LOG)
    copy = write_lines(tmp_path, "two.jsonl", [dict(reversed(each.items())) for each in AGENT_LOG[1:-1]])
    before = rebuilt(records_in(one_session(path)))
    for paths in ((path, path), (path, tmp_path), (path, copy)):
        assert rebuilt(records_in(one_session(*paths))) == before == AGENT_LOG
    assert not [each for each in formats.read(one_session(path, copy)) if isinstance(each, Problem)]


def test_an_id_with_other_content_is_told_with_its_place(tmp_path: Path) -> None:
    one = write_lines(tmp_path, "one.jsonl", [said("a", "2026-01-01"), said("b", "2026-01-01")])
    other = write_lines(tmp_path, "two.jsonl", [said("c", "2026-01-02"), said("b", "2026-01-02")])
    found = list(formats.read(one_session(one, other)))
    assert [each for each in found if isinstance(each, Problem)] == [
        Problem(str(other), 2, "record b was there before with other content")
    ]
    assert [record.id for record in records_in(one_session(one, other))] == ["a", "b", "c"]


def test_sessions_of_a_file_with_several_are_joined_each_by_itself(tmp_path: Path) -> None:
    lines = [said("a", "2026-01-01"), said("x", "2026-01-05", sessionId="session-2")]
    both = write_lines(tmp_path, "both.jsonl", lines)
    more = write_lines(tmp_path, "more.jsonl", [said("y", "2026-01-02", sessionId="session-2")])
    found = [each for each in formats.transcripts(str(both), str(more)) if isinstance(each, Transcript)]
    assert [(each.session, [record.id for record in records_in(each)]) for each in found] == [
        ("session-1", ["a"]),
        ("session-2", ["y", "x"]),
    ]


def test_the_content_of_several_files_has_its_borders(tmp_path: Path) -> None:
    lines = [said(own, "2026-01-01") for own in ("a", "b", "c")]
    contents = set()
    for count in (0, 1, 2):
        one = write_lines(tmp_path, "one.jsonl", lines[:count]) if count else None
        two = write_lines(tmp_path, "two.jsonl", lines[count:])
        contents.add(content_of(one_session(*filter(None, (one, two)))))
    assert len(contents) == 3


def test_other_sessions_are_known_by_content_and_stay_by_themselves(tmp_path: Path) -> None:
    for name, texts in (("a", CHAT), ("b", [*CHAT, CHAT[1]])):
        write_lines(tmp_path, f"{name}.jsonl", [{"id": "same", "session_id": "same", "messages": texts}])
        tree = {"message_id": "m", "text": name, "role": "prompter", "replies": []}
        write(tmp_path, f"{name}.json", json.dumps({"message_tree_id": "same", "prompt": tree}))
        write(tmp_path, f"{name}.ascii.txt", "\n".join([*LOG_LINES, f"[12:20] <a> {name}"]))
    found = sessions_in(tmp_path)
    assert len({each.session for each in found}) == len(found) == 6
    assert all(not each.beside for each in found)


def test_events_of_records_that_stand_between_each_other_are_told_apart() -> None:
    parts = [Part(type="x", path=(place,)) for place in (0, 1)]
    records = [Record(id=own, line=1, value=[own, "y"], parts=parts) for own in ("a", "b")]
    first, second, third, fourth = pieces_of(records)
    assert dict(records_of([first, third, fourth, second])) == {"a": ["a", "y"], "b": ["b", "y"]}


def test_two_logs_that_went_on_from_one_keep_what_each_says(tmp_path: Path) -> None:
    common = [said("a", "2026-01-01"), NOTE]
    one = write_lines(tmp_path, "one.jsonl", [*common, said("b", "2026-01-02"), NOTE])
    other = write_lines(tmp_path, "other.jsonl", [*common, said("c", "2026-01-03"), NOTE])
    found = rebuilt(records_in(one_session(one, other)))
    assert found == [*common, said("b", "2026-01-02"), NOTE, said("c", "2026-01-03"), NOTE]

import hashlib
import importlib
import itertools
from typing import Any, ClassVar

import msgspec
import pytest

from storage_worker.conversation import Provenance, fingerprint_v1
from storage_worker.conversation import identity as identities
from storage_worker.conversation.identity import (
    ALGORITHMS,
    Algorithm,
    Arrival,
    field_differences,
    older_keys,
    output_key,
    read_digests,
    reduced_provenance,
    take_fingerprint,
)
from storage_worker.conversation.records import PayloadRef
from storage_worker.conversation.vocabulary import EVENT_TYPES
from storage_worker.protocol.limits import INLINE_BYTES_MAX

from .desk import ROOM, Desk, reference_to

SECRET = "a secret that no diagnostic may tell"
MESSAGE = {"type": "assistant_message", "event_id": "e", "text": SECRET, "turn_id": "t", "model": "m"}


def diagnostics(desk: Desk, session: str = "s") -> list[dict[str, Any]]:
    return [event.attributes for event in desk.events(session) if event.type == "output_identity_collision"]


class TestCollisions:
    def test_other_content_under_the_same_identity(self, desk: Desk) -> None:
        first = desk.ingest(MESSAGE, room=ROOM, provenance=Provenance("p" * 100, "q"))
        before = (desk.events(), desk.messages(), desk.session())
        error = desk.collide(
            {"type": "assistant_message", "event_id": "e", "text": "other", "turn_id": "t", "added": 1},
            room=ROOM,
        )
        assert error.code == "output_identity_collision"
        assert error.details["stream_id"] == first.stream_id
        assert error.details["fields"] == "added, model, text"
        old, new = desk.events()
        assert [old] == before[0]
        assert (desk.messages(), desk.session()) == before[1:]
        assert (new.type, new.sequence, new.stream_id) == (
            "output_identity_collision",
            2,
            error.details["diagnostic_stream_id"],
        )
        (told,) = diagnostics(desk)
        assert told["differences"] == [
            {"field": "added", "change": "added"},
            {"field": "model", "change": "removed"},
            {"field": "text", "change": "changed"},
        ]
        assert told["differences_cut"] is False
        assert told["stored"]["provenance"] == {"producer": "p" * 64, "projection": "q", "phase": "direct"}
        assert told["incoming"]["provenance"] == {
            "producer": "direct-ingest",
            "projection": "product-history",
            "phase": "direct",
        }
        assert len({told["stored"]["fingerprint"], told["incoming"]["fingerprint"]}) == 2
        assert SECRET not in new.attributes_json
        assert SECRET not in error.message

    def test_the_first_one_is_still_known(self, desk: Desk) -> None:
        first = desk.ingest(MESSAGE)
        desk.collide({**MESSAGE, "text": "other"})
        assert desk.ingest(MESSAGE).stream_id == first.stream_id

    def test_the_same_collision_is_told_once(self, desk: Desk) -> None:
        desk.ingest(MESSAGE)
        errors = [desk.collide({**MESSAGE, "text": text}) for text in ("a", "a", "b")]
        told = [error.details["diagnostic_stream_id"] for error in errors]
        assert told == [2, 2, 3]
        assert len(desk.events()) == 3

    def test_at_most_24_fields_are_named(self, desk: Desk) -> None:
        desk.ingest({**MESSAGE, **{f"f{n:02}": n for n in range(30)}})
        error = desk.collide({**MESSAGE, **{f"f{n:02}": -1 - n for n in range(30)}})
        (told,) = diagnostics(desk)
        assert [each["field"] for each in told["differences"]] == [f"f{n:02}" for n in range(24)]
        assert told["differences_cut"] is True
        assert error.details["fields_cut"] is True

    def test_exactly_24_fields_are_not_cut(self, desk: Desk) -> None:
        desk.ingest({**MESSAGE, **{f"f{n:02}": n for n in range(24)}})
        desk.collide({**MESSAGE, **{f"f{n:02}": -1 - n for n in range(24)}})
        (told,) = diagnostics(desk)
        assert (len(told["differences"]), told["differences_cut"]) == (24, False)

    def test_beyond_64_stored_digests_nothing_is_known(self, desk: Desk) -> None:
        fields = {f"f{n:03}": n for n in range(100)}
        desk.ingest({"type": "x", "event_id": "e", **fields})
        desk.collide({"type": "x", "event_id": "e", **fields, "f005": -1, "f099": -1})
        (told,) = diagnostics(desk)
        assert [each["field"] for each in told["differences"]] == ["f005"]
        assert told["differences_cut"] is True

    @pytest.mark.parametrize("count", [63, 64])
    def test_up_to_64_fields_are_all_known(self, desk: Desk, count: int) -> None:
        fields = {"type": "x", "event_id": "e", **{f"f{n:03}": n for n in range(count - 2)}}
        desk.ingest(fields)
        desk.collide({**fields, "f005": -1, "z": 1})
        (told,) = diagnostics(desk)
        assert [each["field"] for each in told["differences"]] == ["f005", "z"]
        assert told["differences_cut"] is False

    def test_of_64_digests_of_an_older_store_it_is_not_known_whether_there_were_more(
        self, desk: Desk
    ) -> None:
        fields = {"type": "x", "event_id": "e", **{f"f{n:03}": n for n in range(62)}}
        desk.ingest(fields)
        digests = read_digests(desk.tx.scalar("select field_digests from conversation_events"))[0]
        older = msgspec.json.encode(digests).decode()
        desk.tx.execute("update conversation_events set field_digests = ?", (older,))
        desk.collide({**fields, "f005": -1, "z": 1})
        (told,) = diagnostics(desk)
        assert [each["field"] for each in told["differences"]] == ["f005"]
        assert told["differences_cut"] is True

    def test_long_names_are_cut(self, desk: Desk) -> None:
        desk.ingest(MESSAGE)
        desk.collide({**MESSAGE, "n" * 1000: 1})
        (told,) = diagnostics(desk)
        assert told["differences"] == [{"field": "n" * 64, "change": "added"}]

    def test_a_diagnostic_stands_in_a_row_whatever_the_names_are(self, desk: Desk) -> None:
        names = [chr(1) * 63 + chr(2 + number) for number in range(24)]
        event = {"type": chr(1) * 512, "event_id": chr(1) * 512}
        provenance = Provenance(chr(1) * 512, chr(1) * 512, chr(1) * 512)
        desk.ingest(event | dict.fromkeys(names, 1), provenance=provenance)
        error = desk.collide(event | dict.fromkeys(names, 2), provenance=provenance)
        (told,) = diagnostics(desk)
        named = [each["field"] for each in told["differences"]]
        assert 0 < len(named) < 24
        assert named == names[: len(named)]
        assert told["differences_cut"] is True
        assert len(desk.events()[-1].attributes_json) <= INLINE_BYTES_MAX
        assert error.details["diagnostic_stream_id"] == 2

    def test_a_collision_without_a_session_leaves_it_so(self, desk: Desk) -> None:
        desk.ingest(MESSAGE)
        desk.collide({**MESSAGE, "text": "other"})
        assert desk.session() is None


class TestFingerprints:
    def test_volatile_fields_do_not_count(self, desk: Desk) -> None:
        volatile = dict.fromkeys(fingerprint_v1.VOLATILE, 1)
        desk.ingest({**MESSAGE, **volatile})
        assert desk.ingest({**MESSAGE, **dict.fromkeys(volatile, 2)}).duplicate
        assert desk.ingest(MESSAGE).duplicate

    def test_the_order_of_fields_does_not_count(self, desk: Desk) -> None:
        desk.ingest({**MESSAGE, "x": {"a": 1, "b": 2}})
        turned = dict(reversed({**MESSAGE, "x": {"b": 2, "a": 1}}.items()))
        assert desk.ingest(turned).duplicate

    @pytest.mark.parametrize(
        ("one", "other"), [("1", 1), (1, 1.0), ("null", None), ({}, []), (True, 1), ("", None), ("a", "a\0")]
    )
    def test_kinds_of_values_count(self, desk: Desk, one: object, other: object) -> None:
        desk.ingest({**MESSAGE, "x": one})
        error = desk.collide({**MESSAGE, "x": other})
        assert error.details["fields"] == "x"

    @pytest.mark.parametrize(
        ("type_", "field", "value", "content_type"),
        [
            ("assistant_message", "text", "a text", "text/plain"),
            ("tool_call", "arguments", {"b": 1, "a": 2}, "application/json"),
        ],
    )
    def test_a_payload_counts_as_the_same_body_inline(
        self,
        desk: Desk,
        committed: list[PayloadRef],
        type_: str,
        field: str,
        value: object,
        content_type: str,
    ) -> None:
        raw = value.encode() if isinstance(value, str) else msgspec.json.encode(value, order="deterministic")
        ref = reference_to(content_type, hashlib.sha256(raw).hexdigest())
        event = {"type": type_, "event_id": "e"}
        desk.ingest({**event, field: value})
        assert desk.ingest(event, payload=ref).duplicate
        assert committed == []

    def test_version_1_gives_what_it_always_gave(self) -> None:
        fields = {"type": "x", "event_id": "e", "text": "ä\0", "n": [1, 2.5, None], "timestamp": 5}
        digests = fingerprint_v1.field_digests(fields, "text", None)
        assert digests["text"] == "t" + hashlib.sha256("ä\0".encode()).hexdigest()
        assert digests["n"] == "j" + hashlib.sha256(b"[1,2.5,null]").hexdigest()
        assert sorted(digests) == ["event_id", "n", "text", "type"]
        assert fingerprint_v1.fingerprint(digests) == (
            "aa4c9590b9fe7ab8cd670650134e47acb212f758b1357dc8f9007c5c419e85f2"
        )

    def test_statistics_do_not_count(self, desk: Desk) -> None:
        event = {"type": "compaction_end", "event_id": "e", "index": 1}
        desk.ingest(event)
        assert "statistics" in desk.events()[0].attributes
        assert desk.ingest(event).duplicate


class TestOlderVersions:
    @pytest.fixture
    def newer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A version 2, which is the present one, that gives everything another fingerprint."""

        def digests(fields: Any, body_field: str, payload: PayloadRef | None) -> dict[str, str]:
            found = fingerprint_v1.field_digests(fields, body_field, payload)
            return {name: f"2{digest}" for name, digest in found.items()}

        monkeypatch.setitem(ALGORITHMS, 2, Algorithm(digests, fingerprint_v1.fingerprint))

    def rewrite(self, desk: Desk, **columns: str | int | None) -> None:
        for name, value in columns.items():
            desk.tx.execute(f"update conversation_events set {name} = ?", (value,))

    def test_an_older_fingerprint_is_compared_by_its_own_version(
        self, desk: Desk, newer: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        desk.ingest(MESSAGE)
        monkeypatch.setattr(identities, "VERSION", 2)
        assert desk.ingest(MESSAGE).duplicate
        error = desk.collide({**MESSAGE, "text": "other"})
        assert error.details["fields"] == "text"
        (told,) = diagnostics(desk)
        assert told["fingerprint_version"] == 1
        desk.ingest({**MESSAGE, "event_id": "f"})
        rows = desk.tx.query("select fingerprint_version from conversation_events order by stream_id").rows
        assert [row[0] for row in rows] == [1, None, 2]

    def test_no_fingerprint_is_a_duplicate(self, desk: Desk) -> None:
        desk.ingest(MESSAGE)
        self.rewrite(desk, fingerprint=None)
        assert desk.ingest({**MESSAGE, "text": "other"}).duplicate

    def test_a_fingerprint_without_version_is_of_version_1(self, desk: Desk, newer: None) -> None:
        desk.ingest(MESSAGE)
        self.rewrite(desk, fingerprint_version=None)
        assert desk.ingest(MESSAGE).duplicate
        desk.collide({**MESSAGE, "text": "other"})

    def test_a_version_that_is_not_known_is_a_duplicate(self, desk: Desk) -> None:
        desk.ingest(MESSAGE)
        self.rewrite(desk, fingerprint_version=99)
        assert desk.ingest({**MESSAGE, "text": "other"}).duplicate

    @pytest.mark.parametrize("digests", [None, "", "[]", "[1]", "[{},{}]", "{", '{"a":1}'])
    def test_digests_that_cannot_be_read(self, desk: Desk, digests: str | None) -> None:
        desk.ingest(MESSAGE)
        self.rewrite(desk, field_digests=digests)
        desk.collide({**MESSAGE, "text": "other"})
        (told,) = diagnostics(desk)
        assert (told["differences"], told["differences_cut"]) == ([], True)


class TestProvenance:
    @pytest.mark.parametrize("text", [None, "", "x", "[]", "{}", "null", '{"producer":5,"phase":""}'])
    def test_what_cannot_be_read_is_unknown(self, text: str | None) -> None:
        assert reduced_provenance(text) == dict.fromkeys(("producer", "projection", "phase"), "unknown")

    def test_each_part_is_cut(self) -> None:
        text = msgspec.json.encode({"producer": "x" * 65, "projection": "y", "extra": SECRET}).decode()
        assert reduced_provenance(text) == {
            "producer": "x" * 64,
            "projection": "y",
            "phase": "unknown",
        }


class TestExecutionResults:
    EVENT: ClassVar[dict[str, Any]] = {
        "type": "execution_result",
        "event_id": "e",
        "action": "run",
        "result": {"out": 1},
    }
    QUEUED: ClassVar[dict[str, Any]] = {**EVENT, "result": {"status": "queued"}}

    def as_older_form(self, desk: Desk) -> None:
        """Give the only stored event the key that an older release gave it."""
        (key,) = older_keys("s", "execution_result", "e", {"action": "run"})
        desk.tx.execute("update conversation_events set idempotency_key = ?", (key,))

    @pytest.mark.parametrize(
        "queued",
        [
            {"result": {"status": "queued"}},
            {"result": {"phase": "queued"}},
            {"result": {"queued": True}},
            {"status": "queued"},
            {"phase": "queued"},
        ],
    )
    def test_a_result_has_two_phases(self, desk: Desk, queued: dict[str, object]) -> None:
        first = desk.ingest({**self.EVENT, **queued})
        second = desk.ingest(self.EVENT)
        assert (first.duplicate, second.duplicate) == (False, False)
        assert desk.ingest({**self.EVENT, **queued}).stream_id == first.stream_id
        assert desk.ingest(self.EVENT).stream_id == second.stream_id
        assert [each.status for each in desk.observations()] == ["queued", "complete"]

    def test_actions_are_told_apart(self, desk: Desk) -> None:
        assert [desk.ingest({**self.EVENT, "action": action}).duplicate for action in "ab"] == [False, False]

    @pytest.mark.parametrize("event", [EVENT, QUEUED])
    def test_an_older_key_matches_the_same_phase(self, desk: Desk, event: dict[str, Any]) -> None:
        first = desk.ingest(event)
        self.as_older_form(desk)
        again = desk.ingest(event)
        assert (again.duplicate, again.stream_id) == (True, first.stream_id)
        assert again.observation_id == first.observation_id
        desk.collide({**event, "more": 1})

    @pytest.mark.parametrize(("stored", "arriving"), [(EVENT, QUEUED), (QUEUED, EVENT)])
    def test_an_older_key_of_the_other_phase_is_another_output(
        self, desk: Desk, stored: dict[str, Any], arriving: dict[str, Any]
    ) -> None:
        first = desk.ingest(stored)
        self.as_older_form(desk)
        second = desk.ingest(arriving)
        assert (second.duplicate, second.stream_id) == (False, first.stream_id + 1)
        assert desk.ingest(arriving).stream_id == second.stream_id
        assert desk.ingest(stored).stream_id == first.stream_id

    def test_the_same_fingerprint_matches_whatever_the_phase(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = desk.ingest(self.EVENT)
        self.as_older_form(desk)
        ingest = importlib.import_module("storage_worker.conversation.ingest")
        monkeypatch.setattr(ingest, "_phase_of", lambda *_: "queued")
        assert desk.ingest(self.EVENT).stream_id == first.stream_id


class TestKeys:
    def test_each_part_of_an_identity_counts(self) -> None:
        def key(session: str = "s", type_: str = "tool_call", event_id: str = "e", **fields: object) -> str:
            return output_key(session, type_, event_id, Arrival(fields, EVENT_TYPES[type_].body))

        keys = [
            key(),
            key(session="t"),
            key(event_id="f"),
            key(type_="compaction_end"),
            key(type_="compaction_end", index=1),
            key(type_="compaction_start", index=1),
            key(type_="execution_result", action="a"),
            key(type_="execution_result", action="a", status="queued"),
            key(type_="reasoning"),
            key(tool_call_id="c"),
            key(tool_call_id="c", invocation=1),
            key(tool_call_id="c", invocation="1"),
            key(arguments={}),
            key(arguments="{}"),
            key(arguments_complete=False),
            key(session="s,e", event_id=""),
        ]
        same = {keys.index(each) for each in keys}
        assert len(same) == len(keys) - 1  # a text of JSON is the same arguments as the JSON
        assert key(type_="reasoning", text="a") == key(type_="reasoning", text="b")

    def test_the_keys_of_a_session_stand_together(self) -> None:
        arrival = Arrival({}, "text")
        keys = sorted(
            (output_key(session, "reasoning", str(n), arrival), session)
            for session in ("one", "two", "three")
            for n in range(50)
        )
        changes = sum(a != b for (_, a), (_, b) in itertools.pairwise(keys))
        assert changes == 2

    def test_digests_are_bounded_when_stored_and_when_read(self) -> None:
        stored = take_fingerprint(Arrival({f"f{n:03}": n for n in range(200)}, "text"))
        found, are_all = read_digests(stored.digests)
        assert found is not None
        assert not are_all
        assert list(found) == [f"f{n:03}" for n in range(64)]
        many = {f"f{n:03}": "0" * 16 for n in range(200)}
        for told in (many, [many]):
            read, are_all = read_digests(msgspec.json.encode(told).decode())
            assert read is not None
            assert len(read) == 64
            assert field_differences(read, are_all, dict.fromkeys(read, "0" * 64)) == ([], True)

"""What statements give, and what is known of a request key."""

import msgspec
import pytest

from storage_worker.protocol.errors import ProtocolError
from storage_worker.protocol.statements import EXECUTE, STATUS, KnownOutcome, Rows


class Point(msgspec.Struct):
    x: int
    name: str


ROWS = Rows(("x", "name"), [(1, "a"), (2, "b")], 0, 7)


class TestRows:
    def test_iterates_over_tuples(self) -> None:
        assert (list(ROWS), len(ROWS)) == ([(1, "a"), (2, "b")], 2)

    def test_one_and_scalar_want_exactly_one_row(self) -> None:
        single = Rows(("x",), [(5,)])
        assert (single.one(), single.scalar()) == ((5,), 5)
        for rows in (Rows(("x",)), ROWS):
            with pytest.raises(LookupError, match=f"found {len(rows)}"):
                rows.one()
            with pytest.raises(LookupError):
                rows.scalar()

    def test_as_dicts(self) -> None:
        assert ROWS.as_dicts() == [{"x": 1, "name": "a"}, {"x": 2, "name": "b"}]

    def test_a_row_that_does_not_fit_its_columns_is_no_dict(self) -> None:
        with pytest.raises(ValueError, match="argument 2"):
            Rows(("x", "name"), [(1, "a", "surplus")]).as_dicts()

    def test_into_structs(self) -> None:
        assert ROWS.into(Point) == [Point(1, "a"), Point(2, "b")]
        with pytest.raises(msgspec.ValidationError):
            Rows(("x", "name"), [("no number", "a")]).into(Point)

    def test_no_two_results_share_their_rows(self) -> None:
        first, second = Rows(), Rows()
        first.rows.append((1,))
        assert second.rows == []

    def test_round_trips_with_every_kind_of_value(self) -> None:
        rows = Rows(("a", "b", "c", "d", "e"), [(None, -(2**63), 1.5, "nul\0inside", b"\xff")], 3, 4)
        assert EXECUTE.decode_result(msgspec.msgpack.encode(rows)) == rows


class TestKnownOutcome:
    def test_a_kept_result_decodes_as_its_operations(self) -> None:
        kept = KnownOutcome("committed", "sql.execute", msgspec.msgpack.encode(ROWS))
        assert kept.committed
        assert kept.result_as(EXECUTE) == ROWS

    def test_another_operations_result_is_a_protocol_error(self) -> None:
        with pytest.raises(ProtocolError):
            KnownOutcome("committed", "notes.add", msgspec.msgpack.encode(5)).result_as(EXECUTE)

    @pytest.mark.parametrize("outcome", [KnownOutcome("not_found"), KnownOutcome("fenced")])
    def test_nothing_is_kept_of_what_was_not_committed(self, outcome: KnownOutcome) -> None:
        assert not outcome.committed
        with pytest.raises(LookupError):
            outcome.result_as(EXECUTE)


def test_status_stays_encoded_until_its_own_decoder_takes_it() -> None:
    assert bytes(STATUS.decode_result(msgspec.msgpack.encode({"a": 1}))) == msgspec.msgpack.encode({"a": 1})

from typing import Any

import pytest

from storage_worker.conversation.bounds import BASIS_CHARS_MAX
from storage_worker.protocol.errors import InvalidRequestError

from .desk import Desk


def tool(desk: Desk, tokens: object = None, basis: object = "counted", session: str = "s") -> None:
    metrics = {} if tokens is None else {"metrics": {"output_tokens": tokens, "output_tokens_basis": basis}}
    desk.output("tool_execution_finished", session=session, output="x", **metrics)


def compact(desk: Desk, session: str = "s", **fields: Any) -> Any:
    """End a compaction; the statistics that are stored with it."""
    desk.output("compaction_end", session=session, **fields)
    return desk.events(session)[-1].attributes.get("statistics")


def test_a_compaction_gets_its_statistics(desk: Desk) -> None:
    for tokens, basis in ((10, "counted"), (500, "estimated"), (20, "counted")):
        tool(desk, tokens, basis)
    tool(desk)
    assert compact(desk, result={"tokens_before": 9_000}) == {
        "tools_finished": 4,
        "largest_tool_output_tokens": 500,
        "largest_tool_output_basis": "estimated",
        "tokens_before": 9_000,
    }


def test_a_successful_compaction_is_a_boundary(desk: Desk) -> None:
    tool(desk, 500)
    compact(desk)
    tool(desk, 7)
    assert compact(desk) == {
        "tools_finished": 1,
        "largest_tool_output_tokens": 7,
        "largest_tool_output_basis": "counted",
    }
    assert compact(desk) == {"tools_finished": 0}


@pytest.mark.parametrize(
    "fields",
    [
        {"aborted": True},
        {"status": "aborted"},
        {"status": "cancelled"},
        {"status": "failed"},
        {"error": "no room"},
        {"error": {"message": "no"}},
        {"is_error": True},
        {"success": False},
        {"canceled": True},
        {"interrupted": True},
        {"status": "canceled"},
        {"status": "Interrupted"},
        {"status": "timeout"},
        {"status": "no such word"},
        {"result": {"aborted": True}},
        {"result": {"success": False, "tokens_before": 5}},
        {"result": {"error": "no room"}},
        {"status": "complete", "result": {"status": "failed"}},
        {"statistics": {"own": 1}, "aborted": True},
    ],
)
def test_what_did_not_succeed_is_no_boundary(desk: Desk, fields: dict[str, Any]) -> None:
    tool(desk, 500)
    assert compact(desk, **fields) == fields.get("statistics")
    tool(desk, 7)
    assert compact(desk)["tools_finished"] == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "complete"},
        {"status": "Completed"},
        {"status": "success"},
        {"status": "ok", "result": {"status": "done"}},
        {"status": ""},
        {"status": 5},
        {"is_error": False, "success": True, "aborted": False, "error": None},
        {"result": "a text"},
    ],
)
def test_what_succeeded_is_a_boundary_however_it_says_so(desk: Desk, fields: dict[str, Any]) -> None:
    tool(desk)
    assert compact(desk, **fields) == {"tools_finished": 1}
    assert compact(desk) == {"tools_finished": 0}


def test_statistics_that_are_told_stay_and_are_a_boundary(desk: Desk) -> None:
    tool(desk, 5)
    assert compact(desk, statistics={"own": 1}) == {"own": 1}
    assert compact(desk) == {"tools_finished": 0}


@pytest.mark.parametrize(
    "figure", [-1, -0.5, "12", "", True, False, None, [1], {"output_tokens": 1}, 2**64, -(2**70), 10**400]
)
def test_a_figure_that_is_none_is_left_out(desk: Desk, figure: object) -> None:
    desk.output("tool_execution_finished", metrics={"output_tokens": figure, "output_tokens_basis": "x"})
    assert compact(desk, result={"tokens_before": figure}) == {"tools_finished": 1}


@pytest.mark.parametrize("fields", [{}, {"metrics": None}, {"metrics": {}}, {"metrics": [1]}])
def test_figures_that_are_missing_are_left_out(desk: Desk, fields: dict[str, Any]) -> None:
    desk.output("tool_execution_finished", **fields)
    assert compact(desk, result={}) == {"tools_finished": 1}


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), float("-inf")])
def test_what_json_cannot_say_is_refused_and_counts_nothing(desk: Desk, figure: float) -> None:
    with pytest.raises(InvalidRequestError):
        tool(desk, figure)
    with pytest.raises(InvalidRequestError):
        compact(desk, result={"tokens_before": figure})
    assert compact(desk) == {"tools_finished": 0}


def test_a_basis_is_cut(desk: Desk) -> None:
    tool(desk, 5, "é" * 8_000)
    found = compact(desk)
    assert found["largest_tool_output_basis"] == "é" * BASIS_CHARS_MAX


@pytest.mark.parametrize("figure", [0, 0.0, 1.5, 2**63, 2**64 - 1, 1e300])
def test_a_finite_figure_stays_exactly_what_it_is(desk: Desk, figure: float) -> None:
    tool(desk, figure, basis=None)
    found = compact(desk, result={"tokens_before": figure})
    assert repr(found) == repr(
        {"largest_tool_output_tokens": figure, "tokens_before": figure, "tools_finished": 1}
    )


def test_a_replay_counts_once(desk: Desk) -> None:
    for _ in range(3):
        desk.output("tool_execution_finished", event_id="e", output="x")
    assert compact(desk) == {"tools_finished": 1}


def test_a_replayed_compaction_changes_nothing(desk: Desk) -> None:
    tool(desk)
    first = compact(desk, event_id="c")
    tool(desk)
    desk.output("compaction_end", event_id="c")
    assert compact(desk, event_id="d") == first == {"tools_finished": 1}


def test_sessions_count_apart(desk: Desk) -> None:
    tool(desk, session="other")
    tool(desk)
    assert compact(desk) == {"tools_finished": 1}
    assert compact(desk, session="other") == {"tools_finished": 1}


@pytest.mark.parametrize("result", [None, 5, "x", [], {"tokens_before": "many"}])
def test_a_result_without_figures(desk: Desk, result: object) -> None:
    assert compact(desk, result=result) == {"tools_finished": 0}


def test_statistics_do_not_count_against_the_bound(desk: Desk) -> None:
    tool(desk, 5)
    text = "x" * 16_000
    desk.output("compaction_end", note=text, more="y" * 350)
    assert desk.events()[-1].attributes["statistics"]["tools_finished"] == 1

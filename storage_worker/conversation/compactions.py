"""What a compaction says of the tools before it: counted as they finish, so that no history is read for it."""

import math
from typing import Any, Final

import msgspec

from ..transaction import Transaction
from .canonical import encode_json
from .vocabulary import COMPLETE, Fields, compaction_outcome, text_of

STATISTICS: Final = "statistics"
"""The field of a `compaction_end` that holds them."""

_COUNT = (
    "insert into conversation_tallies(session_id, tools_finished, output_tokens, output_basis) values (?, 1, ?, ?)"
    " on conflict (session_id) do update set tools_finished = conversation_tallies.tools_finished + 1"
    " returning output_tokens"
)
_LARGEST = "update conversation_tallies set output_tokens = ?, output_basis = ? where session_id = ?"
_READ = "select tools_finished, output_tokens, output_basis from conversation_tallies where session_id = ?"
_RESET = (
    "update conversation_tallies set tools_finished = 0, output_tokens = null, output_basis = null"
    " where session_id = ?"
)


def count_tool(tx: Transaction, session: str, fields: Fields) -> None:
    """Count a tool that finished, and keep the size of its output where it is the largest since the last compaction."""
    metrics = fields.get("metrics")
    metrics = metrics if isinstance(metrics, dict) else {}
    tokens, basis = _figure(metrics.get("output_tokens")), text_of(metrics, "output_tokens_basis")
    if tokens is None:
        tx.execute(_COUNT, (session, None, None))
        return
    text = encode_json(tokens).decode()
    largest = tx.execute(_COUNT, (session, text, basis)).rows[0][0]
    if largest is None or tokens > _number(largest):
        tx.execute(_LARGEST, (text, basis, session))


def end_compaction(tx: Transaction, session: str, fields: Fields) -> dict[str, Any] | None:
    """Note a `compaction_end`; the statistics that it gets, None where it gets none.

    A successful one is a boundary: what finished before it counts no more for the next one. It gets statistics
    unless it has some. Aborted and failed ones are no boundary.
    """
    if compaction_outcome(fields) != COMPLETE:
        return None
    rows = tx.query(_READ, (session,)).rows
    tx.execute(_RESET, (session,))
    if fields.get(STATISTICS) is not None:
        return None
    finished, largest, basis = rows[0] if rows else (0, None, None)
    result = fields.get("result")
    before = _figure(result.get("tokens_before")) if isinstance(result, dict) else None
    statistics: dict[str, Any] = {"tools_finished": finished}
    if largest is not None:
        statistics["largest_tool_output_tokens"] = _number(largest)
    if basis is not None:
        statistics["largest_tool_output_basis"] = basis
    if before is not None:
        statistics["tokens_before"] = before
    return statistics


def _figure(value: object) -> int | float | None:
    """A finite number of 0 or more, or None."""
    if type(value) is not int and type(value) is not float:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _number(text: str) -> int | float:
    return msgspec.json.decode(text, type=int | float)

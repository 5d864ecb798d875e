"""What a compaction says of the tools before it: counted as they finish, so that no history is read for it.

The largest output is kept as JSON text: exactly the number that was measured.
"""

import math
from typing import Any, Final

import msgspec

from .bounds import BASIS_CHARS_MAX
from .canonical import encode_json
from .standing import Standing
from .vocabulary import COMPLETE, Fields, compaction_outcome, text_of

_INTEGER_MAX: Final = 2**64 - 1
"""The largest integer that crosses the pipe: a larger one would stand in no event that is imported again."""

STATISTICS: Final = "statistics"
"""The field of a `compaction_end` that holds them."""


def count_tool(standing: Standing, fields: Fields) -> None:
    """Count a tool that finished, and keep the size of its output where it is the largest since the last compaction."""
    standing.tools_finished += 1
    metrics = fields.get("metrics")
    if not isinstance(metrics, dict):
        return
    tokens = _figure(metrics.get("output_tokens"))
    if tokens is None:
        return
    largest = standing.largest_output_tokens
    if largest is None or tokens > _number(largest):
        standing.largest_output_tokens = encode_json(tokens).decode()
        basis = text_of(metrics, "output_tokens_basis")
        standing.largest_output_basis = None if basis is None else basis[:BASIS_CHARS_MAX]


def end_compaction(standing: Standing, fields: Fields) -> dict[str, Any] | None:
    """Note a `compaction_end`; the statistics that it gets, None where it gets none.

    A successful one is a boundary: what finished before it counts no more for the next one. It gets statistics
    unless it has some. Aborted and failed ones are no boundary.
    """
    if compaction_outcome(fields) != COMPLETE:
        return None
    statistics: dict[str, Any] = {"tools_finished": standing.tools_finished}
    if standing.largest_output_tokens is not None:
        statistics["largest_tool_output_tokens"] = _number(standing.largest_output_tokens)
    if standing.largest_output_basis is not None:
        statistics["largest_tool_output_basis"] = standing.largest_output_basis
    result = fields.get("result")
    before = _figure(result.get("tokens_before")) if isinstance(result, dict) else None
    if before is not None:
        statistics["tokens_before"] = before
    standing.tools_finished = 0
    standing.largest_output_tokens = standing.largest_output_basis = None
    return None if fields.get(STATISTICS) is not None else statistics


def _figure(value: object) -> int | float | None:
    """A finite number of 0 or more that an event can hold, or None."""
    if type(value) is int:
        return value if 0 <= value <= _INTEGER_MAX else None
    return value if type(value) is float and math.isfinite(value) and value >= 0 else None


def _number(text: str) -> int | float:
    return msgspec.json.decode(text, type=int | float)

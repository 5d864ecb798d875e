"""The events that an agent's output is made of: what each type leaves in the store, and what its fields mean.

Fields are read leniently: one that is missing or of another kind counts as not there, and whatever an event says
stays in its attributes.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from .bounds import STATUS_CHARS_MAX

RUNNING: Final = "running"
IDLE: Final = "idle"
ERROR: Final = "error"

COMPLETE: Final = "complete"
PARTIAL: Final = "partial"
FAILED: Final = "failed"

USER_MESSAGE: Final = "user_message"
COLLISION: Final = "output_identity_collision"

BODY_FIELD_DEFAULT: Final = "body"

_ABORTED: Final = frozenset(("aborted", "canceled", "cancelled", "interrupted"))
_SUCCEEDED: Final = frozenset(
    ("complete", "completed", "done", "finished", "ok", "succeeded", "success", "successful")
)
_FAILED_FLAGS: Final = ("is_error", "failed")
_SUCCEEDED_FLAGS: Final = ("success", "succeeded", "ok")

Fields = Mapping[str, Any]


class EventType(msgspec.Struct, frozen=True):
    """What a type of output leaves beside its event.

    `body` is the field that holds its body; `leaves` says which record is made of it, `kind` of which kind an
    observation is; `session_status` is what its session's status becomes, None where it stays.
    """

    body: str = BODY_FIELD_DEFAULT
    leaves: Literal["message", "observation", "nothing"] = "nothing"
    kind: str = ""
    session_status: str | None = None


EVENT_TYPES: Final[Mapping[str, EventType]] = {
    "message_queued": EventType(),
    "message_started": EventType(session_status=RUNNING),
    "message_finished": EventType(session_status=IDLE),
    "message_steered": EventType(),
    "session_error": EventType("error", "observation", "error", ERROR),
    "assistant_message": EventType("text", "message"),
    "assistant_delta": EventType("text", session_status=RUNNING),
    "reasoning": EventType("text", "observation", "reasoning", RUNNING),
    "tool_call": EventType("arguments", "observation", "tool_call", RUNNING),
    "tool_execution_started": EventType("arguments", "observation", "tool_started", RUNNING),
    "tool_execution_finished": EventType("output", "observation", "tool_result", RUNNING),
    "assistant_usage": EventType("usage", "observation", "usage"),
    "execution_result": EventType("result", "observation", "execution_result"),
    "compaction_start": EventType("summary", "observation", "compaction_started"),
    "compaction_end": EventType("summary", "observation", "compaction"),
    "attachment": EventType("data"),
    "transcript_record": EventType(),
    "import_finished": EventType(session_status=IDLE),
}

UNKNOWN: Final = EventType()


def body_field(type_: str) -> str:
    """The field that holds the body of an event of a type."""
    return EVENT_TYPES.get(type_, UNKNOWN).body


def text_of(fields: Fields, name: str) -> str | None:
    """A field that is a text and not empty, or None."""
    value = fields.get(name)
    return value if type(value) is str and value else None


def status_of(kind: str, fields: Fields) -> str:
    """The status of an observation: what the event says, or what its type means."""
    if kind == "tool_call" and fields.get("arguments_complete") is False:
        return PARTIAL
    told = text_of(fields, "status")
    if told is not None:
        return told[:STATUS_CHARS_MAX]
    if kind in ("tool_started", "compaction_started"):
        return "started"
    if kind == "compaction":
        return compaction_outcome(fields)
    if kind == "execution_result":
        return execution_phase(fields)
    return FAILED if kind == "error" or fields.get("is_error") is True else COMPLETE


def execution_phase(fields: Fields) -> Literal["queued", "complete"]:
    """The phase of an execution result: `queued` where it says so, by a status or by a flag in its result."""
    result = fields.get("result")
    said = [fields.get("status"), fields.get("phase")]
    if isinstance(result, Mapping):
        said += [
            result.get("status"),
            result.get("phase"),
            "queued" if result.get("queued") is True else None,
        ]
    return "queued" if "queued" in said else "complete"


def compaction_outcome(fields: Fields) -> Literal["complete", "aborted", "failed"]:
    """Whether a compaction that ended did what it should, by what the event and its result say.

    A status that is told says so only where it is a word for success.
    """
    result = fields.get("result")
    said = (fields, result) if isinstance(result, Mapping) else (fields,)
    outcomes = {_outcome(each) for each in said}
    if "aborted" in outcomes:
        return "aborted"
    return "failed" if "failed" in outcomes else "complete"


def _outcome(said: Fields) -> Literal["complete", "aborted", "failed"]:
    status = (text_of(said, "status") or COMPLETE).casefold()
    if status in _ABORTED or any(said.get(word) is True for word in _ABORTED):
        return "aborted"
    has_failed = said.get("error") or any(said.get(flag) is True for flag in _FAILED_FLAGS)
    if status not in _SUCCEEDED or has_failed or any(said.get(flag) is False for flag in _SUCCEEDED_FLAGS):
        return "failed"
    return "complete"

"""The store's bounds, units last in their names."""

from ..protocol.limits import DEFAULT_LIMITS, INLINE_BYTES_MAX, KIB, MIB

NAME_CHARS_MAX = 512
"""The longest id, actor, type or label."""

RETENTION_DEFAULT = "conversation"
"""The retention class of what names none."""

BINDING_CHARS_MAX = 4 * KIB
"""The longest runtime binding."""

PREVIEW_BYTES_MAX = 256
"""The longest preview, in UTF-8."""

DIGESTS_COUNT_MAX = 64
"""Field digests that are kept with an event, and read of it."""

DIGEST_CHARS = 16
"""How much of a field's digest is kept: it only names what differs, the fingerprint decides whether."""

DIFFERENCES_COUNT_MAX = 24
"""Fields that a diagnostic names."""

PROVENANCE_CHARS_MAX = 64
"""How much of each part of a provenance, and of each field's name, a diagnostic holds."""

STATUS_CHARS_MAX = 64
"""The longest status of a session, a message or an observation."""

BASIS_CHARS_MAX = 64
"""How much is kept of the text that says how the size of a tool's output was measured."""

TIME_MS_MAX = 253_402_300_799_999
"""The latest time that an event can be said to have, in milliseconds since 1970: the end of the year 9999 in UTC. What
is said in a smaller unit by mistake is far beyond it."""

SESSIONS_MOVED_COUNT_MAX = 10_000
"""How many sessions below one may get another root with it in one request."""

SESSION_MARKS_COUNT_MAX = 4_096
"""How many sessions' beginnings of keys are remembered by a worker."""

SESSION_DEPTH_MAX = 10_000
"""How many sessions above one are gone through to see whether another one stands there."""

LOOK_AHEAD_COUNT_MAX = 1_000
"""How many events without a key that a session has in one millisecond are looked at to find one of them."""

READ_BYTES_MAX = 64 * MIB
"""The largest payload that is read whole unless the call allows more."""

STEP_BYTES = 8 * MIB
"""How much of a payload that is held in memory is written in one step: milliseconds, before it can be ended."""

STATES_COUNT_MAX = 20
"""How many sessions one call says the state of."""

PAGE_ROWS_MAX = 1_000
PAGE_ROWS_DEFAULT = 200
PAGE_BYTES_MAX = 4 * MIB
PAGE_BYTES_DEFAULT = 512 * KIB

ROW_BYTES_MAX = 4 * INLINE_BYTES_MAX + 12 * 4 * NAME_CHARS_MAX
"""More than any record takes: attributes, body and the columns around them, each character of 4 bytes."""

assert DEFAULT_LIMITS.result_bytes_default > PAGE_BYTES_DEFAULT + ROW_BYTES_MAX, (
    "a page of the default size is a result of the default size, its last row included"
)
assert DEFAULT_LIMITS.result_bytes_max > PAGE_BYTES_MAX + ROW_BYTES_MAX, "the largest page can be asked for"

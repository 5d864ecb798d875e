"""Every bound that can be set, its unit last in its name, with the relations between them."""

import msgspec

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

FRAME_HEADER_BYTES = 4
"""A frame's length field: signed, 32 bit, big-endian, as multiprocess connections write it."""

READ_BYTES = 64 * KIB
"""How much one read of a pipe takes at the most."""

FRAME_BYTES_MAX = 2**31 - 1
"""The largest body whose length the header can say."""

PROTOCOL_ENVELOPE_BYTES = 1024
"""Room in a frame for the envelope around arguments or a result."""

INLINE_BYTES_MAX = 16 * KIB
"""Text or JSON up to this stands in its row; a larger body goes to the payload store, and its row names it."""


class Limits(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The bounds in force in one worker; reported by Welcome and status.

    Each can be set when the worker is started. `check` holds the relations between them.
    """

    # Protocol
    request_bytes_max: int = 1 * MIB
    result_bytes_default: int = 1 * MIB
    result_bytes_max: int = 8 * MIB
    result_memory_bytes_max: int = 512 * MIB
    chunked_bytes_max: int = 64 * MIB
    chunk_bytes_max: int = 128 * KIB
    chunks_ahead_max: int = 16
    nesting_depth_max: int = 64
    connections_max: int = 1024
    handshakes_unfinished_max: int = 64
    handshake_ms_max: int = 5_000
    client_name_chars_max: int = 128
    message_chars_max: int = 2_000

    # Admission
    queue_requests_max: int = 4096
    queue_bytes_max: int = 64 * MIB
    client_requests_max: int = 256
    client_bytes_max: int = 8 * MIB
    unread_total_bytes_max: int = 512 * MIB
    partial_bytes_max: int = 64 * MIB
    unread_bytes_max: int = 16 * MIB
    unread_ms_max: int = 10_000
    spool_bytes_max: int = 1 * GIB
    spools_max: int = 512
    client_spool_bytes_max: int = 128 * MIB
    client_spools_max: int = 128
    retry_after_ms_min: int = 5
    retry_after_ms_max: int = 5_000

    # Time
    deadline_ms_default: int = 30_000
    deadline_ms_max: int = 600_000
    reply_grace_ms: int = 100
    handler_overrun_ms_max: int = 30_000
    takeover_ms: int = 10
    stop_grace_ms: int = 5_000
    orphan_grace_ms: int = 1_000
    shared_idle_ms: int = 5_000

    # SQL
    sql_bytes_max: int = 256 * KIB
    bind_values_max: int = 32_766
    value_bytes_max: int = 64 * MIB
    sqlite_heap_bytes_max: int = 512 * MIB
    expression_depth_max: int = 200
    compound_selects_max: int = 100
    columns_max: int = 500
    like_pattern_bytes_max: int = 1_000
    analysis_rows_max: int = 1_000
    request_write_bytes_max: int = 512 * MIB
    batch_statements_max: int = 10_000
    progress_steps: int = 1_000
    statement_cache_count: int = 200

    # Writer
    writer_cache_bytes: int = 16 * MIB
    group_requests_max: int = 512
    group_bytes_max: int = 8 * MIB
    group_work_ms_max: int = 5
    replays_max: int = 2
    busy_ms: int = 10
    busy_retry_ms_min: int = 5
    busy_retry_ms_max: int = 15
    fence_ms_max: int = 5_000
    wal_switch_ms_max: int = 5_000
    after_commit_calls_max: int = 100

    # Readers
    reader_threads: int = 2
    quick_read_us_max: int = 1_000
    quick_reads_remembered: int = 1_024

    # Interactive transactions
    lease_ms_default: int = 5_000
    lease_ms_max: int = 60_000
    savepoints_max: int = 64

    # Snapshots
    snapshot_ms_default: int = 10_000
    snapshot_ms_max: int = 60_000
    snapshots_max: int = 128

    # Receipts
    request_key_bytes_max: int = 256
    receipt_result_bytes_max: int = 64 * KIB
    receipts_count_max: int = 1_000_000
    receipts_age_ms_max: int = 7 * 24 * 3_600_000
    receipts_trim_rows: int = 200

    # Checkpoints and disk
    wal_checkpoint_bytes: int = 4 * MIB
    wal_live_frames_max: int = 2_000
    wal_hold_ms_max: int = 50
    wal_degraded_bytes: int = 64 * MIB
    wal_refuse_bytes: int = 1 * GIB
    wal_idle_ms: int = 1_000
    disk_reserve_bytes_max: int = 64 * MIB
    disk_reserve_percent: int = 5
    disk_check_ms: int = 250

    # Background
    background_slice_ms_max: int = 12
    background_starved_ms_max: int = 250
    background_work_ms_max: int = 1_000
    background_tasks_max: int = 64

    # Host side
    start_ms_max: int = 10_000
    restart_backoff_ms_min: int = 50
    restart_backoff_ms_max: int = 5_000
    crash_loop_deaths: int = 5
    crash_loop_window_ms: int = 30_000
    retries_default: int = 3
    retry_backoff_ms_min: int = 5
    retry_backoff_ms_max: int = 1_000
    pipeline_window: int = 128
    page_rows_default: int = 500

    def check(self) -> None:
        """Raise `ValueError` where a bound is no positive number or two bounds contradict each other."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is not int:
                raise ValueError(f"the limit {name} must be a whole number, not {value!r}")
            if not 1 <= value < 2**63:
                raise ValueError(f"the limit {name} must be at least 1 and below 2^63, not {value}")
        for name in ("request_bytes_max", "result_bytes_max"):
            if getattr(self, name) > FRAME_BYTES_MAX - PROTOCOL_ENVELOPE_BYTES:
                raise ValueError(f"the limit {name} must leave room in a frame of {FRAME_BYTES_MAX} bytes")
        if self.chunk_bytes_max <= PROTOCOL_ENVELOPE_BYTES:
            raise ValueError(
                f"the limit chunk_bytes_max must leave room beside {PROTOCOL_ENVELOPE_BYTES} bytes"
            )
        if self.disk_reserve_percent > 100:
            raise ValueError("the limit disk_reserve_percent must not exceed 100")
        for small, large, reason in RELATIONS:
            if getattr(self, small) > getattr(self, large):
                raise ValueError(f"the limit {small} must not exceed {large}: {reason}")


RELATIONS = (
    ("chunk_bytes_max", "request_bytes_max", "a part of arguments travels in a frame as a request does"),
    ("chunk_bytes_max", "result_bytes_max", "a part of a result travels in a frame as a result does"),
    ("request_bytes_max", "client_bytes_max", "a client could never place its largest request"),
    ("client_bytes_max", "queue_bytes_max", "one client's place is part of the worker's"),
    ("client_requests_max", "queue_requests_max", "one client's places are part of the worker's"),
    ("request_bytes_max", "group_bytes_max", "a group takes at least one request of any size"),
    ("result_bytes_default", "result_bytes_max", "the default is an allowed value"),
    ("result_bytes_max", "unread_bytes_max", "a result must fit behind one that is not read yet"),
    ("unread_bytes_max", "unread_total_bytes_max", "what one client leaves unread is part of what all do"),
    ("request_bytes_max", "partial_bytes_max", "one client's unfinished frame is part of those of all"),
    ("request_bytes_max", "chunked_bytes_max", "chunks are for what one frame does not take"),
    ("chunked_bytes_max", "result_memory_bytes_max", "the rows of a result take more than their encoding"),
    ("result_bytes_max", "chunked_bytes_max", "chunks are for what one frame does not take"),
    ("chunked_bytes_max", "client_spool_bytes_max", "a client could never send its largest arguments"),
    ("client_spools_max", "spools_max", "one client's spools are part of the worker's"),
    ("client_spool_bytes_max", "spool_bytes_max", "one client's spools are part of the worker's"),
    ("sql_bytes_max", "request_bytes_max", "the statement travels in a request"),
    ("value_bytes_max", "sqlite_heap_bytes_max", "SQLite holds a value in its memory"),
    ("deadline_ms_default", "deadline_ms_max", "the default is an allowed value"),
    ("lease_ms_default", "lease_ms_max", "the default is an allowed value"),
    ("snapshot_ms_default", "snapshot_ms_max", "the default is an allowed value"),
    ("busy_retry_ms_min", "busy_retry_ms_max", "jitter lies between them"),
    ("retry_after_ms_min", "retry_after_ms_max", "an estimate is cut to lie between them"),
    ("retry_backoff_ms_min", "retry_backoff_ms_max", "a back-off grows from one to the other"),
    ("restart_backoff_ms_min", "restart_backoff_ms_max", "a back-off grows from one to the other"),
    ("pipeline_window", "client_requests_max", "a full pipeline must never be refused"),
    ("receipt_result_bytes_max", "result_bytes_max", "a kept result is answered again in one frame"),
    ("handshakes_unfinished_max", "connections_max", "an unfinished hand-shake is a connection"),
    ("wal_checkpoint_bytes", "wal_degraded_bytes", "a routine checkpoint comes long before an alarm"),
    ("wal_degraded_bytes", "wal_refuse_bytes", "an alarm comes before refusals"),
)

DEFAULT_LIMITS = Limits()
DEFAULT_LIMITS.check()

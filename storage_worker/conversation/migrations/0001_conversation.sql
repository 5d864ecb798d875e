-- Rooms, sessions, the event log and what is written beside it. Times are milliseconds since 1970 in UTC.

-- The next stream id follows from the newest event, and the next number in a room from its newest message: these
-- two are never deleted. That costs each event a look instead of the change of one more row.

create table conversation_rooms(
    number integer primary key,
    id text not null unique,
    title text not null,
    is_default integer not null,
    created_ms integer not null,
    archived_ms integer
);
-- Two default rooms cannot be, whatever the code does.
create unique index conversation_rooms_default on conversation_rooms(is_default) where is_default = 1;

-- A row for every session that was ever named, and in it the session, its navigation and the counters that its next
-- event needs: one event changes one row. Output that names no room leaves the session alone; where only such was
-- seen of it, the row has no `session_number` yet and what stands behind that is empty. Such a session may still come
-- into another room. `listed_number` grows with that, too, so that who pages through a room meets it there.
create table conversation_sessions(
    number integer primary key,
    id text not null unique,
    room_id text not null references conversation_rooms(id),
    listed_number integer not null unique,
    session_number integer unique,
    parent_id text,
    root_id text,
    status text,
    runtime_binding text,
    first_preview text,
    activity_ms integer,
    created_ms integer,
    shown_status text not null,
    shown_preview text not null,
    shown_activity_ms integer not null,
    last_sequence integer not null,
    last_message integer not null,
    tools_finished integer not null,
    largest_output_tokens text,
    largest_output_basis text
);
create index conversation_sessions_room on conversation_sessions(room_id, session_number);
create index conversation_sessions_shown on conversation_sessions(room_id, listed_number);
-- To find the sessions below one that gets another root.
create index conversation_sessions_root on conversation_sessions(root_id) where parent_id is not null;
create index conversation_sessions_parent on conversation_sessions(parent_id) where parent_id is not null;

-- A body stands in `body`, or in the payload store: then its identity there is `payload_sha256`, `content_type`
-- and `retention_class`. `attributes` are what arrived; what the store says beside them, a JSON object, is `added`.
-- `room_named` is 1 where the caller named the room: only such output changes its session.
create table conversation_events(
    stream_id integer primary key,
    session_id text not null,
    sequence integer not null,
    room_id text not null,
    room_named integer not null,
    actor text not null,
    type text not null,
    event_id text,
    aggregate_kind text not null,
    aggregate_id text not null,
    version integer not null,
    client_transaction_id text,
    idempotency_key text,
    fingerprint text,
    fingerprint_version integer,
    field_digests text,
    provenance text,
    attributes text not null,
    added text,
    content_type text,
    body text,
    payload_sha256 text,
    payload_bytes integer,
    payload_stored_bytes integer,
    payload_encoding text,
    preview text not null,
    retention_class text not null,
    created_ms integer not null,
    unique (session_id, sequence)
);
create unique index conversation_events_key on conversation_events(idempotency_key)
    where idempotency_key is not null;
create unique index conversation_events_transaction on conversation_events(room_id, actor, client_transaction_id)
    where client_transaction_id is not null;
-- To know an event again that has no key. Such are few, so that other events pay nothing for it.
create index conversation_events_keyless on conversation_events(session_id, created_ms, sequence)
    where idempotency_key is null and client_transaction_id is null;

create table conversation_messages(
    stream_id integer primary key,
    id text not null,
    room_id text not null,
    number integer not null,
    session_id text not null,
    sequence integer not null,
    role text not null,
    turn_id text,
    actor text not null,
    sender_label text not null,
    source text,
    agent_key text,
    thread_root integer,
    status text not null,
    content_type text not null,
    body text,
    payload_sha256 text,
    payload_bytes integer,
    payload_stored_bytes integer,
    payload_encoding text,
    preview text not null,
    retention_class text not null,
    created_ms integer not null,
    unique (room_id, number)
);

-- Messages and observations of a session are found through its events: an index by session of their own would be one
-- more page that each event changes.

-- What an observation says beyond this stands in its event.
create table conversation_observations(
    stream_id integer primary key,
    id text not null,
    session_id text not null,
    kind text not null,
    turn_id text,
    tool_call_id text,
    invocation integer,
    status text not null
);
create index conversation_observations_tool on conversation_observations(session_id, tool_call_id, invocation)
    where tool_call_id is not null;

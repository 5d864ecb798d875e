-- Bodies that are too large for a row. Each row stands for one file beside the database; the file's name is derived
-- from the row's identity (SHA-256 of the body, content type, retention class) and is the row's key.

-- `state` is 'committed' while something refers to the payload, else 'released', since `changed_ms`.
create table conversation_payloads(
    name text primary key,
    sha256 text not null,
    content_type text not null,
    retention_class text not null,
    bytes integer not null,
    stored_bytes integer not null,
    encoding text not null,
    state text not null,
    reference_count integer not null check (reference_count >= 0),
    created_ms integer not null,
    changed_ms integer not null
);
create index conversation_payloads_released on conversation_payloads(name) where state = 'released';
create index conversation_payloads_large on conversation_payloads(bytes) where encoding = 'identity';

-- To count the references to a payload anew.
create index conversation_events_payload on conversation_events(payload_sha256, content_type, retention_class)
    where payload_sha256 is not null;
create index conversation_messages_payload on conversation_messages(payload_sha256, content_type, retention_class)
    where payload_sha256 is not null;

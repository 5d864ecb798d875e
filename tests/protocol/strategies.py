"""What hypothesis makes for the protocol's tests: values, envelopes, and bytes that are nearly right."""

from typing import Any, get_args

from hypothesis import strategies as st

from storage_worker.protocol.envelope import (
    Cancel,
    Chunk,
    Credit,
    Failure,
    Goodbye,
    Hello,
    OutgoingReply,
    OutgoingRequest,
    Role,
    Welcome,
)
from storage_worker.protocol.errors import Outcome
from storage_worker.protocol.limits import DEFAULT_LIMITS

unsigned = st.integers(0, 2**64 - 1)
request_ids = st.integers(1, 2**64 - 1)
texts = st.text(max_size=20)
roles = st.sampled_from(get_args(Role))

plain_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    texts,
    st.binary(max_size=20),
)
nested_values: st.SearchStrategy[Any] = st.recursive(
    plain_values,
    lambda below: st.lists(below, max_size=4) | st.dictionaries(texts, below, max_size=4),
    max_leaves=12,
)

hellos = st.builds(
    Hello,
    version=unsigned,
    name=texts,
    pid=unsigned,
    role=roles,
    clock_ns=unsigned,
    grant=st.binary(max_size=32),
)
requests = st.builds(
    OutgoingRequest,
    id=request_ids,
    operation=texts,
    deadline_ns=unsigned,
    result_bytes=unsigned,
    key=st.none() | texts,
    transaction=unsigned,
    flags=unsigned,
    arguments=nested_values,
)
cancels = st.builds(Cancel, id=request_ids)
chunks = st.builds(Chunk, id=request_ids, sequence=unsigned, part=st.binary(max_size=40))
credits_ = st.builds(Credit, id=request_ids, count=st.integers(1, 2**64 - 1))
goodbyes = st.builds(Goodbye, reason=texts)
welcomes = st.builds(
    Welcome,
    version=unsigned,
    worker=texts,
    pid=unsigned,
    role=roles,
    limits=st.just(DEFAULT_LIMITS),
    sqlite_version=texts,
    journal_mode=texts,
    synchronous=texts,
    clock_ns=unsigned,
)
replies = st.builds(OutgoingReply, id=request_ids, result=nested_values)
failures = st.builds(
    Failure,
    id=unsigned,
    code=st.text(min_size=1, max_size=20),
    message=texts,
    retryable=st.booleans(),
    outcome=st.sampled_from(get_args(Outcome)),
    retry_after_ms=st.none() | st.integers(0, 2**31),
    details=st.dictionaries(
        texts,
        st.one_of(
            st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), texts
        ),
        max_size=4,
    ),
)

from_client = st.one_of(hellos, requests, cancels, chunks, credits_, goodbyes)
from_worker = st.one_of(welcomes, replies, failures, chunks, credits_, goodbyes)


def damaged(encoded: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Encoded envelopes with a part cut out, put in or replaced."""

    def damage(body: bytes, start: int, length: int, inserted: bytes) -> bytes:
        place = start % (len(body) + 1)
        return body[:place] + inserted + body[place + length :]

    return st.builds(damage, encoded, st.integers(0, 1_000), st.integers(0, 6), st.binary(max_size=6))


def bomb(levels: int, kind: str) -> bytes:
    """MessagePack of one number inside so many arrays, or inside so many maps."""
    return {"arrays": b"\x91", "maps": b"\x81\xa1k", "array32": b"\xdd\x00\x00\x00\x01"}[
        kind
    ] * levels + b"\x07"

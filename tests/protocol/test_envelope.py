"""Envelopes round-trip, and whatever else arrives is a ProtocolError and nothing else."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_worker.protocol.envelope import (
    Cancel,
    Chunk,
    Credit,
    Failure,
    Goodbye,
    Hello,
    OutgoingChunk,
    OutgoingReply,
    OutgoingRequest,
    Reply,
    Request,
    Welcome,
    decode_from_client,
    decode_from_worker,
    encode,
    request_id_of,
)
from storage_worker.protocol.errors import ProtocolError

from .strategies import bomb, damaged, from_client, from_worker, replies, request_ids, requests

LEVELS = 100_000
KINDS = ["arrays", "maps", "array32"]


def request_with(arguments: bytes, request_id: int = 7) -> bytes:
    """The bytes of a request whose arguments are already encoded."""
    return encode(OutgoingRequest(request_id, "sql.query", 0, 0, None, 0, 0, msgspec.Raw(arguments)))


class TestRoundTrip:
    @given(requests)
    def test_request(self, sent: OutgoingRequest) -> None:
        read = decode_from_client(encode(sent))
        assert isinstance(read, Request)
        assert msgspec.msgpack.decode(read.arguments) == sent.arguments
        for name in ("id", "operation", "deadline_ns", "result_bytes", "key", "transaction", "flags"):
            assert getattr(read, name) == getattr(sent, name)

    @given(replies)
    def test_reply(self, sent: OutgoingReply) -> None:
        read = decode_from_worker(encode(sent))
        assert isinstance(read, Reply)
        assert (read.id, msgspec.msgpack.decode(read.result)) == (sent.id, sent.result)

    @given(from_client)
    def test_what_clients_send(self, sent: Any) -> None:
        if not isinstance(sent, OutgoingRequest):
            assert decode_from_client(encode(sent)) == sent

    @given(from_worker)
    def test_what_workers_send(self, sent: Any) -> None:
        if not isinstance(sent, OutgoingReply):
            assert decode_from_worker(encode(sent)) == sent


class TestGarbage:
    @given(st.binary(max_size=100))
    def test_random_bytes(self, body: bytes) -> None:
        for decode in (decode_from_client, decode_from_worker):
            try:
                found = decode(body)
            except ProtocolError:
                continue
            assert isinstance(found, msgspec.Struct)

    @given(damaged(st.one_of(from_client, from_worker).map(encode)))
    def test_damaged_envelopes(self, body: bytes) -> None:
        for decode in (decode_from_client, decode_from_worker):
            try:
                found = decode(body)
            except ProtocolError:
                continue
            assert isinstance(found, msgspec.Struct)

    @pytest.mark.parametrize("kind", KINDS)
    def test_bombs(self, kind: str) -> None:
        with pytest.raises(ProtocolError):
            decode_from_client(request_with(bomb(LEVELS, kind)))
        with pytest.raises(ProtocolError):
            decode_from_worker(encode(OutgoingReply(7, msgspec.Raw(bomb(LEVELS, kind)))))
        for decode in (decode_from_client, decode_from_worker):
            with pytest.raises(ProtocolError):
                decode(bomb(LEVELS, kind))

    @pytest.mark.parametrize("header", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"])
    def test_huge_lengths_without_content(self, header: bytes) -> None:
        for decode in (decode_from_client, decode_from_worker):
            with pytest.raises(ProtocolError):
                decode(header + b"\xff\xff\xff\xff")
        with pytest.raises(ProtocolError):
            decode_from_client(request_with(header + b"\xff\xff\xff\xff"))

    @pytest.mark.parametrize("name", [b"\xa1\xff", b"\xa3\xed\xa0\x80"])
    def test_texts_that_are_no_utf8(self, name: bytes) -> None:
        body = encode(Goodbye("x")).replace(b"\xa1x", name)
        for decode in (decode_from_client, decode_from_worker):
            with pytest.raises(ProtocolError, match="UTF-8"):
                decode(body)

    @pytest.mark.parametrize("field", ["id", "deadline_ns", "result_bytes", "transaction", "flags"])
    @pytest.mark.parametrize("value", [-1, 1.5, None, "1", -(2**63)])
    def test_numbers_that_are_not_unsigned(self, field: str, value: object) -> None:
        request = OutgoingRequest(1, "sql.query", 0, 0, None, 0, 0, [])
        setattr(request, field, value)
        with pytest.raises(ProtocolError):
            decode_from_client(encode(request))

    def test_the_connections_own_id_is_no_requests(self) -> None:
        for body in (encode(OutgoingRequest(0, "sql.query", 0, 0, None, 0, 0, [])), encode(Cancel(0))):
            with pytest.raises(ProtocolError):
                decode_from_client(body)
        with pytest.raises(ProtocolError):
            decode_from_worker(encode(OutgoingReply(0, None)))
        failure = Failure(0, "storage_protocol", "", False, "unknown", None, {})
        assert decode_from_worker(encode(failure)) == failure

    @given(from_client, from_worker)
    def test_one_sides_envelopes_are_not_the_others(self, client: Any, worker: Any) -> None:
        of_both = (Goodbye, Chunk, Credit)
        if not isinstance(client, of_both):
            with pytest.raises(ProtocolError):
                decode_from_worker(encode(client))
        if not isinstance(worker, of_both):
            with pytest.raises(ProtocolError):
                decode_from_client(encode(worker))

    def test_an_unknown_role_is_refused(self) -> None:
        body = encode(Hello(1, "n", 1, "read", 0)).replace(b"\xa4read", b"\xa4root")
        with pytest.raises(ProtocolError, match="root"):
            decode_from_client(body)

    def test_nothing_may_follow_an_envelope(self) -> None:
        with pytest.raises(ProtocolError):
            decode_from_client(encode(Cancel(1)) + b"\x00")


class TestRequestId:
    @given(request_ids, st.sampled_from(KINDS))
    def test_is_found_in_front_of_a_bomb(self, request_id: int, kind: str) -> None:
        body = request_with(bomb(2_000, kind), request_id)
        assert request_id_of(body) == request_id

    @pytest.mark.parametrize("kind", KINDS)
    def test_is_found_in_front_of_the_deepest_bomb(self, kind: str) -> None:
        assert request_id_of(request_with(bomb(LEVELS, kind), 2**64 - 1)) == 2**64 - 1

    @given(requests, st.integers(0, 1_000))
    def test_is_whole_or_none_in_a_cut_request(self, request: OutgoingRequest, cut: int) -> None:
        body = encode(request)
        assert request_id_of(body[: cut % (len(body) + 1)]) in {None, request.id}

    @given(
        st.binary(max_size=20).map(
            lambda rest: encode(OutgoingRequest(1, "", 0, 0, None, 0, 0, 0))[:2] + rest
        )
    )
    def test_garbage_has_an_id_that_a_request_may_have_or_none(self, body: bytes) -> None:
        found = request_id_of(body)
        assert found is None or 1 <= found < 2**64

    @given(from_worker)
    def test_no_other_envelope_has_one(self, envelope: Any) -> None:
        assert request_id_of(encode(envelope)) is None
        assert request_id_of(encode(Cancel(5))) is None


def test_a_hello_of_a_later_version_may_carry_more() -> None:
    later = msgspec.msgpack.encode([1, 99, "name", 5, "write", 7, b"", "new", ["field"]])
    assert decode_from_client(later) == Hello(99, "name", 5, "write", 7)


def test_a_request_costs_few_bytes_beyond_its_arguments() -> None:
    arguments = b"\x92" + msgspec.msgpack.encode("select 1") + b"\x90"
    body = encode(
        OutgoingRequest(2**64 - 1, "sql.query", 2**63, 2**32, None, 2**32, 255, msgspec.Raw(arguments))
    )
    assert len(body) - len(arguments) < 64
    assert isinstance(decode_from_client(body), Request)


def test_every_tag_is_of_its_own() -> None:
    tags = [
        kind.__struct_config__.tag
        for kind in (Hello, Welcome, Request, Reply, Failure, Cancel, Chunk, Credit, Goodbye)
    ]
    assert len(set(tags)) == len(tags)
    assert OutgoingRequest.__struct_config__.tag == Request.__struct_config__.tag
    assert OutgoingChunk.__struct_config__.tag == Chunk.__struct_config__.tag
    assert OutgoingReply.__struct_config__.tag == Reply.__struct_config__.tag

"""Frames: the same under any split, and garbage is a ProtocolError and nothing else."""

import os
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multiprocess.connection import Connection

from storage_worker.protocol.errors import ProtocolError
from storage_worker.protocol.framing import FrameReader, frame

BODY_BYTES_MAX = 1_000

bodies_lists = st.lists(st.binary(max_size=40), max_size=8)
bad_headers = st.one_of(st.integers(-(2**31), -1), st.integers(BODY_BYTES_MAX + 1, 2**31 - 1)).map(
    lambda size: size.to_bytes(4, "big", signed=True)
)


def pieces_of(stream: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[start:end] for start, end in pairwise(places)]


def read_all(reader: FrameReader, pieces: Sequence[bytes]) -> tuple[list[bytes], ProtocolError | None]:
    found = []
    for piece in pieces:
        try:
            found += reader.feed(piece)
        except ProtocolError as error:
            return found, error
    return found, reader.error


class TestSplits:
    @given(bodies_lists, st.lists(st.integers(0, 10_000), max_size=20))
    def test_any_split_gives_the_same_frames(self, bodies: list[bytes], cuts: list[int]) -> None:
        reader = FrameReader(BODY_BYTES_MAX)
        pieces = pieces_of(b"".join(map(frame, bodies)), cuts)
        assert read_all(reader, pieces) == (bodies, None)
        assert reader.bytes_kept == 0

    @given(bodies_lists)
    def test_byte_by_byte(self, bodies: list[bytes]) -> None:
        stream = b"".join(map(frame, bodies))
        pieces = [stream[place : place + 1] for place in range(len(stream))]
        assert read_all(FrameReader(BODY_BYTES_MAX), pieces) == (bodies, None)

    @given(bodies_lists, st.binary(min_size=1, max_size=40), st.data())
    def test_trailing_data_waits_for_its_rest(
        self, bodies: list[bytes], last: bytes, data: st.DataObject
    ) -> None:
        reader = FrameReader(BODY_BYTES_MAX)
        tail = frame(last)
        cut = data.draw(st.integers(1, len(tail) - 1))
        assert reader.feed(b"".join(map(frame, bodies)) + tail[:cut]) == bodies
        assert reader.bytes_kept == cut
        assert reader.feed(b"") == []
        assert reader.feed(tail[cut:] + frame(b"next")) == [last, b"next"]
        assert reader.bytes_kept == 0

    def test_a_large_frame_in_small_pieces_is_not_copied_with_each_of_them(self) -> None:
        reader = FrameReader(1_000_000)
        stream = frame(bytes(1_000_000))
        assert reader.feed(stream[:500_000]) == []
        assert reader.feed(stream[500_000:500_001]) == []  # the buffer grows here
        tracemalloc.start()
        try:
            assert reader.feed(stream[500_001:500_002]) == []
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()

    def test_empty_bodies_are_frames(self) -> None:
        assert FrameReader(1).feed(frame(b"") * 3) == [b"", b"", b""]

    def test_a_body_at_the_limit_is_taken(self) -> None:
        assert FrameReader(5).feed(frame(b"12345")) == [b"12345"]


@pytest.mark.parametrize("size", [0, 1, 100, 16_384, 20_000])
def test_frames_are_those_of_multiprocess_connections(size: int) -> None:
    read_end, write_end = os.pipe()
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    with os.fdopen(read_end, "rb") as stream, Connection(write_end, readable=False) as connection:
        connection.send_bytes(body)
        assert stream.read(size + 4) == frame(body)


class TestBadLengths:
    @pytest.mark.parametrize(
        ("header", "said"),
        [
            (b"\xff\xff\xff\xff", "-1 bytes, which is no length"),  # announces a 64-bit length
            (b"\x80\x00\x00\x00", "which is no length"),
            (b"\x7f\xff\xff\xff", f"the limit is {BODY_BYTES_MAX}"),
            ((BODY_BYTES_MAX + 1).to_bytes(4, "big"), f"announces {BODY_BYTES_MAX + 1} bytes"),
        ],
    )
    def test_are_refused_as_soon_as_they_are_there(self, header: bytes, said: str) -> None:
        reader = FrameReader(BODY_BYTES_MAX)
        assert reader.feed(header[:3]) == []
        with pytest.raises(ProtocolError, match=said) as caught:
            reader.feed(header[3:])
        assert caught.value.details["frame_bytes"] == int.from_bytes(header, "big", signed=True)

    @given(bodies_lists, bad_headers, st.binary(max_size=20), st.lists(st.integers(0, 10_000), max_size=20))
    def test_any_split_gives_the_frames_before_them(
        self, bodies: list[bytes], header: bytes, rest: bytes, cuts: list[int]
    ) -> None:
        reader = FrameReader(BODY_BYTES_MAX)
        pieces = pieces_of(b"".join(map(frame, bodies)) + header + rest, cuts)
        found, error = read_all(reader, pieces)
        assert found == bodies
        assert isinstance(error, ProtocolError)
        assert reader.error is error

    def test_break_the_stream_for_good(self) -> None:
        reader = FrameReader(BODY_BYTES_MAX)
        assert reader.feed(frame(b"good") + b"\xff\xff\xff\xff") == [b"good"]
        for _ in range(2):
            with pytest.raises(ProtocolError, match="no length"):
                reader.feed(frame(b"after"))

    def test_nothing_of_an_announced_size_is_allocated(self) -> None:
        reader = FrameReader(2**31 - 1)
        tracemalloc.start()
        try:
            assert reader.feed((2**31 - 1).to_bytes(4, "big") + bytes(100)) == []
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()


@given(st.lists(st.binary(max_size=30), max_size=10))
def test_garbage_gives_frames_or_a_protocol_error_and_nothing_else(pieces: list[bytes]) -> None:
    reader = FrameReader(BODY_BYTES_MAX)
    found, error = read_all(reader, pieces)
    assert all(len(body) <= BODY_BYTES_MAX for body in found)
    if error is None:
        read = sum(len(body) + 4 for body in found) + reader.bytes_kept
        assert read == sum(map(len, pieces))

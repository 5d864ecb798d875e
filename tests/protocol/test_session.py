"""The session's table: what is not in it is a ProtocolError, whatever came before."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_worker.protocol.envelope import (
    PROTOCOL_VERSION,
    Cancel,
    Chunk,
    Credit,
    Failure,
    FromClient,
    FromWorker,
    Goodbye,
    Hello,
    Reply,
    Request,
    Welcome,
    decode_from_client,
    decode_from_worker,
    encode,
)
from storage_worker.protocol.errors import ProtocolError
from storage_worker.protocol.limits import DEFAULT_LIMITS
from storage_worker.protocol.session import (
    FROM_CLIENT,
    FROM_WORKER,
    Session,
    State,
    check_hello,
    check_welcome,
)

from .strategies import cancels, chunks, credits_, failures, goodbyes, hellos, replies, requests, welcomes

SAMPLES: dict[Any, Any] = {
    Hello: Hello(PROTOCOL_VERSION, "client", 1, "write", 0),
    Request: Request(1, "sql.query", 0, 0, None, 0, 0, msgspec.Raw(b"\x90")),
    Cancel: Cancel(1),
    Chunk: Chunk(1, 0, b"part"),
    Credit: Credit(1, 1),
    Goodbye: Goodbye("over"),
    Welcome: Welcome(PROTOCOL_VERSION, "worker", 1, "write", DEFAULT_LIMITS, "3.54.1", "wal", "full", 0),
    Reply: Reply(1, msgspec.Raw(b"\xc0")),
    Failure: Failure(1, "storage_busy", "", True, "not_committed", None, {}),
}
CLIENT_KINDS: tuple[Any, ...] = get_args(FromClient)
WORKER_KINDS: tuple[Any, ...] = get_args(FromWorker)

moves_of_both = st.one_of(
    st.one_of(hellos, requests, cancels, chunks, credits_, goodbyes).map(
        lambda sent: ("client", decode_from_client(encode(sent)))
    ),
    st.one_of(welcomes, replies, failures, chunks, credits_, goodbyes).map(
        lambda sent: ("worker", decode_from_worker(encode(sent)))
    ),
)


def session_in(state: State) -> Session:
    session = Session()
    session.state = state
    return session


@pytest.mark.parametrize("state", State)
class TestTable:
    @pytest.mark.parametrize("kind", CLIENT_KINDS)
    def test_from_client(self, state: State, kind: Any) -> None:
        self.moves_or_refuses(session_in(state), "from_client", kind, FROM_CLIENT.get((state, kind)))

    @pytest.mark.parametrize("kind", WORKER_KINDS)
    def test_from_worker(self, state: State, kind: Any) -> None:
        self.moves_or_refuses(session_in(state), "from_worker", kind, FROM_WORKER.get((state, kind)))

    def moves_or_refuses(self, session: Session, side: str, kind: Any, expected: State | None) -> None:
        before = session.state
        if expected is not None:
            getattr(session, side)(SAMPLES[kind])
            assert session.state is expected
            return
        with pytest.raises(
            ProtocolError, match=f"{kind.__name__} may not come in state {before.name.lower()}"
        ):
            getattr(session, side)(SAMPLES[kind])
        assert session.state is before


class TestRules:
    def test_hello_comes_once_and_first(self) -> None:
        assert [state for state, kind in FROM_CLIENT if kind is Hello] == [State.HANDSHAKE]
        assert [kind for state, kind in FROM_CLIENT if state is State.HANDSHAKE] == [Hello]

    def test_welcome_comes_once_and_answers_it(self) -> None:
        assert [state for state, kind in FROM_WORKER if kind is Welcome] == [State.GREETED]
        assert {kind for state, kind in FROM_CLIENT if state is State.GREETED} == set()

    def test_nothing_leaves_closed(self) -> None:
        assert State.CLOSED not in {state for state, _ in [*FROM_CLIENT, *FROM_WORKER]}

    def test_every_state_is_reached_and_every_envelope_has_a_place(self) -> None:
        assert {*FROM_CLIENT.values(), *FROM_WORKER.values(), State.HANDSHAKE} == set(State)
        assert {kind for _, kind in FROM_CLIENT} == set(CLIENT_KINDS)
        assert {kind for _, kind in FROM_WORKER} == set(WORKER_KINDS)

    @given(st.lists(moves_of_both, max_size=30))
    def test_any_sequence_moves_along_the_table_or_is_refused(self, moves: list[tuple[str, Any]]) -> None:
        session = Session()
        greeted = 0
        for side, envelope in moves:
            before = session.state
            try:
                session.from_client(envelope) if side == "client" else session.from_worker(envelope)
            except ProtocolError:
                assert session.state is before
                continue
            assert before is not State.CLOSED
            greeted += isinstance(envelope, Hello)
            if isinstance(envelope, Request | Cancel | Chunk | Credit):
                assert before in {State.OPEN, State.DRAINING}
            if isinstance(envelope, Goodbye) and side == "client":
                assert session.state is State.CLOSED
        assert greeted <= 1


def welcome(version: int = PROTOCOL_VERSION, clock_ns: int = 50) -> Welcome:
    return Welcome(version, "worker", 1, "write", DEFAULT_LIMITS, "3.54.1", "wal", "full", clock_ns)


class TestHandShake:
    def test_equal_versions_and_one_clock_pass(self) -> None:
        check_hello(Hello(PROTOCOL_VERSION, "client", 1, "write", 0))
        for clock_ns in (40, 50, 60):
            check_welcome(welcome(clock_ns=clock_ns), 40, 60)

    @pytest.mark.parametrize("theirs", [0, PROTOCOL_VERSION + 1, 2**64 - 1])
    def test_another_version_is_refused_with_both_named(self, theirs: int) -> None:
        with pytest.raises(
            ProtocolError, match=f"version {theirs}, the worker {PROTOCOL_VERSION};"
        ) as caught:
            check_hello(Hello(theirs, "client", 1, "write", 0))
        assert caught.value.details == {"client_version": theirs, "worker_version": PROTOCOL_VERSION}
        with pytest.raises(
            ProtocolError, match=f"version {PROTOCOL_VERSION}, the worker {theirs};"
        ) as caught:
            check_welcome(welcome(theirs), 40, 60)
        assert caught.value.details == {"client_version": PROTOCOL_VERSION, "worker_version": theirs}
        assert caught.value.outcome == "not_committed"

    @pytest.mark.parametrize("clock_ns", [0, 39, 61, 2**64 - 1])
    def test_a_clock_of_another_machine_is_refused(self, clock_ns: int) -> None:
        with pytest.raises(ProtocolError, match="monotonic clock") as caught:
            check_welcome(welcome(clock_ns=clock_ns), 40, 60)
        assert caught.value.details == {"sent_ns": 40, "worker_ns": clock_ns, "received_ns": 60}
        assert caught.value.outcome == "not_committed"

"""Operations and calls: how a typed function travels, the same for the worker's own and a host's."""

import re
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import msgspec

from .errors import InvalidRequestError, ProtocolError
from .nesting import check_depth, is_open, may_be_deep

P = ParamSpec("P")
R = TypeVar("R")

_PLACE = re.compile(r"`\$\[(\d+)\]")
"""The beginning of a place as msgspec tells it, of an array's element."""

Kind = Literal["read", "write", "control"]
"""Which lane serves it: the readers, the writer, or the pipes' own thread."""


class Operation(Generic[P, R]):
    """A named operation with typed arguments and a typed result.

    `arguments` is a positional struct (`array_like`) whose fields are the parameters; `result` the
    type that the result is decoded to. A `solo` operation never shares a transaction with others. An
    `admin` operation asks for that role, and one `for_writers` for the role write, as every write does. A `pooled`
    read never runs on the thread that serves all clients. One that `checks_values` refuses nested values itself.
    """

    def __init__(
        self,
        name: str,
        kind: Kind,
        arguments: type[msgspec.Struct],
        result: Any,
        *,
        solo: bool = False,
        admin: bool = False,
        pooled: bool = False,
        for_writers: bool = False,
        checks_values: bool = False,
    ) -> None:
        self.name = name
        self.kind: Kind = kind
        self.arguments = arguments
        self.solo = solo
        self.admin = admin
        self.pooled = pooled
        self.for_writers = for_writers or kind == "write"
        self._open = not checks_values and is_open(arguments)
        self._decode_arguments = msgspec.msgpack.Decoder(arguments).decode
        self._decode_result = msgspec.msgpack.Decoder(result).decode

    def __repr__(self) -> str:
        return f"<{self.kind} operation {self.name}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> "Call[R]":
        """A call with these arguments, for `Client.call`, a pipeline or an asynchronous client."""
        try:
            return Call(self, self.arguments(*args, **kwargs))
        except TypeError as error:
            raise InvalidRequestError(f"{self.name}: {error}") from error

    def decode_arguments(self, raw: bytes | msgspec.Raw, depth_max: int) -> Any:
        """The arguments' struct, or `InvalidRequestError` where they are not this operation's."""
        try:
            arguments = self._decode_arguments(raw)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            told = _PLACE.sub(self._name_of, str(error), count=1)
            raise InvalidRequestError(f"the arguments of {self.name} do not decode: {told}") from error
        if self._open and may_be_deep(bytes(raw), depth_max):
            check_depth(arguments, depth_max)
        return arguments

    def _name_of(self, place: re.Match[str]) -> str:
        """The parameter of an argument that travels by its place."""
        names, number = self.arguments.__struct_fields__, int(place[1])
        return f"`{names[number]}" if number < len(names) else place[0]

    def decode_result(self, raw: bytes | msgspec.Raw) -> R:
        """The result, or `ProtocolError` where worker and client disagree about its type."""
        try:
            return self._decode_result(raw)  # type: ignore[no-any-return]
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(
                f"the result of {self.name} does not decode: {error}; worker and client differ"
            ) from error


class Call(msgspec.Struct, Generic[R], frozen=True, eq=False, gc=False):
    """One operation with its arguments: what a client sends."""

    operation: Operation[Any, R]
    arguments: msgspec.Struct

    def __repr__(self) -> str:
        return f"<call of {self.operation.name}>"

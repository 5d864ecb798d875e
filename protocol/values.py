"""Values that SQLite stores unchanged, and what is refused because it would be altered."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from .errors import InvalidRequestError

Value = None | int | float | str | bytes
"""What a column holds. A bool is taken as an int."""

Parameters = Sequence[Value] | Mapping[str, Value]
"""What a statement binds: by position, or by name."""

INTEGER_MIN = -(2**63)
INTEGER_MAX = 2**63 - 1

# msgspec cannot tell str from bytes in a union, so bound values travel as open types; both ends check
# each of them.
WireParameters = list[Any] | dict[str, Any]

_UNCHANGED = frozenset((type(None), str, bytes))


def check_value(value: object, where: str | int) -> Value:
    """The value as it is sent, or `InvalidRequestError` naming the parameter `where` it stands."""
    kind = type(value)
    if kind in _UNCHANGED:
        return cast(Value, value)
    if kind is int:
        if INTEGER_MIN <= cast(int, value) <= INTEGER_MAX:
            return cast(int, value)
        raise InvalidRequestError(f"parameter {where}: the integer {_brief(value)} needs more than 64 bit")
    if kind is float:
        if not math.isnan(cast(float, value)):
            return cast(float, value)
        raise InvalidRequestError(f"parameter {where}: SQLite would store NaN as NULL; send None instead")
    if kind is bool:
        return int(cast(bool, value))
    raise InvalidRequestError(
        f"parameter {where}: a {kind.__name__} is no value of SQLite; send None, int, float, str or bytes"
    )


def check_parameters(parameters: Parameters, count_max: int) -> list[Value] | dict[str, Value]:
    """The parameters as they are sent and as they are bound, or `InvalidRequestError` that names the one at fault."""
    kind = type(parameters)
    if kind is not tuple and kind is not list:
        if isinstance(parameters, str | bytes | bytearray | memoryview):
            raise InvalidRequestError(
                "the parameters must be a sequence or a mapping of values, not one text"
            )
        if isinstance(parameters, Mapping):
            return _check_named(parameters, count_max)
        if not isinstance(parameters, Sequence):
            raise InvalidRequestError(
                f"the parameters must be a sequence or a mapping of values, not a {kind.__name__}"
            )
    if len(parameters) > count_max:
        raise InvalidRequestError(f"{len(parameters)} bound values; one statement takes {count_max}")
    sent: list[Any] = list(parameters)
    for value in sent:
        found = type(value)
        if found not in _UNCHANGED and not (found is int and INTEGER_MIN <= value <= INTEGER_MAX):
            break
    else:
        return sent
    return [check_value(value, place) for place, value in enumerate(parameters, 1)]


def _check_named(parameters: Mapping[str, Value], count_max: int) -> dict[str, Value]:
    if len(parameters) > count_max:
        raise InvalidRequestError(f"{len(parameters)} bound values; one statement takes {count_max}")
    for name in parameters:
        if type(name) is not str:
            raise InvalidRequestError(f"the parameter name {name!r} is no str")
    return {name: check_value(value, repr(name)) for name, value in parameters.items()}


def _brief(value: object) -> str:
    # str() of a huge integer is refused by Python or takes seconds; its size says enough.
    bits = cast(int, value).bit_length()
    return str(value) if bits <= 128 else f"of {bits} bit"


def lone_surrogate_place(arguments: msgspec.Struct) -> str | None:
    """Where in a call's arguments a text holds a lone surrogate, which UTF-8 cannot carry; None where none does.

    The place is the field, then positions from 1 or names: "text", "parameters 3", "statements 2 parameters 'a'".
    Looked for only after encoding failed: to look at each text beforehand would cost as much as sending it.
    """
    stack: list[tuple[object, str]] = [(arguments, "")]
    while stack:
        value, place = stack.pop()
        below: Iterable[tuple[object, object]] = ()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                return place.lstrip()
        elif isinstance(value, msgspec.Struct):
            below = ((name, getattr(value, name)) for name in value.__struct_fields__)
        elif isinstance(value, Mapping):
            stack.extend((name, f"{place} name {name!r}") for name in value)
            below = ((repr(name), item) for name, item in value.items())
        elif isinstance(value, list | tuple):
            below = enumerate(value, 1)
        stack.extend((item, f"{place} {name}") for name, item in below)
    return None

"""How deep open values are nested, found without recursion."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import msgspec

from .errors import InvalidRequestError

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))

_NO_CONTAINERS = bytes(byte for byte in range(256) if not (0x80 <= byte <= 0x9F or 0xDC <= byte <= 0xDF))
"""The bytes with which MessagePack begins no array and no map."""


def may_be_deep(encoded: bytes, depth_max: int) -> bool:
    """Whether an encoded value could be nested more than `depth_max` deep.

    Each container costs a byte of its own kind, so that few such bytes are a proof; many may stand in texts and
    numbers. Counting them costs a tenth of walking the value.
    """
    return len(encoded.translate(None, _NO_CONTAINERS)) > depth_max


def check_depth(value: object, depth_max: int) -> None:
    """Raise `InvalidRequestError` where containers stand in each other more than `depth_max` deep."""
    stack: list[tuple[object, int]] = [(value, 1)]
    while stack:
        found, depth = stack.pop()
        children = _children(found)
        if children is None:
            continue
        if depth > depth_max:
            raise InvalidRequestError(
                f"the arguments are nested more than {depth_max} deep",
                details={"nesting_depth_max": depth_max},
            )
        # Only containers are kept: a million plain items are no reason for a million entries.
        stack.extend((child, depth + 1) for child in children if type(child) not in _PLAIN)


def _children(value: object) -> Any:
    if isinstance(value, Mapping):
        return chain(value, value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return value
    names = getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", None)
    return None if names is None else [getattr(value, name, None) for name in names]


def is_open(kind: Any) -> bool:
    """Whether values of a type may be nested without end: it holds `Any`, or itself.

    A class that is met twice counts as one that holds itself; walking its values then is needless, not
    wrong. Raises `TypeError` where msgspec does not take the type.
    """
    stack: list[msgspec.inspect.Type] = [msgspec.inspect.type_info(kind)]
    met: set[type] = set()
    while stack:
        info = stack.pop()
        if isinstance(info, msgspec.inspect.AnyType | msgspec.inspect.RawType):
            return True
        cls = getattr(info, "cls", None)
        if cls is not None and getattr(info, "fields", None) is not None:
            if cls in met:
                return True
            met.add(cls)
        stack.extend(types_below(info))
    return False


def types_below(info: Any) -> list[msgspec.inspect.Type]:
    """The types that a type of `msgspec.inspect` is made of."""
    found: list[msgspec.inspect.Type] = [field.type for field in getattr(info, "fields", ())]
    for name in ("type", "item_type", "key_type", "value_type"):
        below = getattr(info, name, None)
        if isinstance(below, msgspec.inspect.Type):
            found.append(below)
    for name in ("types", "item_types"):
        found.extend(getattr(info, name, ()))
    return found

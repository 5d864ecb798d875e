"""A handler's signature as its wire type: what can travel, what is refused, and the positional struct."""

import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from .protocol.nesting import types_below
from .transaction import Transaction

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


# Most parameters have one of these types, and declarations are run by every client that imports them.
_PLAIN: tuple[Any, ...] = (bool, int, float, str, bytes, type(None))

_NO_FUNCTION_THAT_RETURNS: tuple[Callable[[object], bool], ...] = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)


class Parameter(msgspec.Struct, frozen=True):
    """One parameter as it travels. `default` is `msgspec.NODEFAULT` where it has none."""

    name: str
    type: Any
    default: Any
    keyword_only: bool


class Signature(msgspec.Struct, frozen=True):
    """What a handler takes behind its transaction, positional parameters first, and what it returns."""

    parameters: tuple[Parameter, ...]
    result: Any


def read_signature(handler: Callable[..., Any], label: str, scope: Mapping[str, Any]) -> Signature:
    """The signature of a handler, its annotations resolved.

    Arguments: `label`, the operation's name for messages; `scope`, the local names where the handler is
    declared. Raises `TypeError` that names the parameter where the signature cannot be a wire type.
    """
    if not isinstance(handler, types.FunctionType):
        raise TypeError(f"{label}: a handler is a plain function, not a {type(handler).__name__}")
    if any(is_other(handler) for is_other in _NO_FUNCTION_THAT_RETURNS):
        raise TypeError(f"{label}: a handler returns its result; it is no coroutine and no generator")
    try:
        found = inspect.signature(handler)
    except NameError as error:
        raise TypeError(f"{label}: an annotation cannot be resolved: {error}") from error
    names = inspect.unwrap(handler).__globals__
    given = list(found.parameters.values())
    if not given:
        raise TypeError(f"{label}: a handler's first parameter takes the transaction")
    first, *rest = given
    _check_transaction(first, label, names, scope)
    parameters = [_parameter(each, f"{label}: the parameter {each.name}", names, scope) for each in rest]
    result = _wire_type(found.return_annotation, f"{label}: the result", names, scope)
    return Signature(tuple(parameters), result)


def arguments_struct(name: str, module: str, signature: Signature) -> type[msgspec.Struct]:
    """The struct of a signature's arguments: an array on the wire, surplus elements refused.

    Keyword-only parameters are positional on the wire too, behind the others; only the struct's
    constructor tells them apart.
    """
    struct: type[msgspec.Struct] = msgspec.Struct
    for keyword_only in (False, True):
        fields = [
            (each.name, each.type, msgspec.field(default=each.default))
            for each in signature.parameters
            if each.keyword_only == keyword_only
        ]
        if fields or not keyword_only:
            struct = msgspec.defstruct(
                name,
                fields,
                bases=(struct,),
                module=module,
                array_like=True,
                forbid_unknown_fields=True,
                frozen=True,
                kw_only=keyword_only,
            )
    return struct


def _check_transaction(
    first: inspect.Parameter, label: str, names: dict[str, Any], scope: Mapping[str, Any]
) -> None:
    if first.kind not in _POSITIONAL or first.default is not inspect.Parameter.empty:
        raise TypeError(f"{label}: a handler's first parameter takes the transaction")
    if first.annotation is inspect.Parameter.empty:
        raise TypeError(f"{label}: the parameter {first.name} has no annotation; it is the Transaction")
    try:
        kind = _resolve(first.annotation, names, scope)
    except NameError:
        # Imported for type checkers only; nothing is decoded to it, so its name is enough.
        return
    except Exception as error:
        raise TypeError(f"{label}: the annotation of {first.name} cannot be resolved: {error}") from error
    if (
        isinstance(kind, type)
        and not getattr(kind, "_is_protocol", False)
        and not issubclass(Transaction, kind)
    ):
        raise TypeError(
            f"{label}: the first parameter, {first.name}, takes the Transaction, not a {kind.__name__}"
        )


def _parameter(
    found: inspect.Parameter, label: str, names: dict[str, Any], scope: Mapping[str, Any]
) -> Parameter:
    if found.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        raise TypeError(f"{label} takes any number of arguments; name each, or take one tuple or dict")
    if found.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise TypeError(f"{label} is positional-only; a call takes every argument by its name too")
    if found.name == "self" or found.name.startswith("__"):
        raise TypeError(f"{label} has a name that means something else to Python")
    kind = _wire_type(found.annotation, label, names, scope)
    default = msgspec.NODEFAULT if found.default is inspect.Parameter.empty else found.default
    if default is not msgspec.NODEFAULT:
        _check_default(default, kind, label)
    return Parameter(found.name, kind, default, found.kind is inspect.Parameter.KEYWORD_ONLY)


def _wire_type(annotation: Any, label: str, names: dict[str, Any], scope: Mapping[str, Any]) -> Any:
    """The resolved annotation, or `TypeError` where msgspec could not decode it without doubt."""
    if annotation is inspect.Parameter.empty:
        raise TypeError(f"{label} has no annotation")
    try:
        kind = _resolve(annotation, names, scope)
    except Exception as error:
        raise TypeError(
            f"{label} has an annotation that cannot be resolved: {annotation!r}: {error}"
        ) from error
    if kind in _PLAIN:
        return kind
    try:
        msgspec.msgpack.Decoder(kind)
        for info in types_within(kind):
            if isinstance(info, msgspec.inspect.CustomType):
                raise TypeError(
                    f"{info.cls.__qualname__} is no type that msgspec encodes and decodes by itself"
                )
    except Exception as error:
        raise TypeError(f"{label} cannot travel: {error}") from error
    return kind


def _resolve(annotation: Any, names: dict[str, Any], scope: Mapping[str, Any]) -> Any:
    carrier = types.SimpleNamespace(__annotations__={"it": annotation})
    return typing.get_type_hints(carrier, names, scope, include_extras=True)["it"]


def types_within(kind: Any) -> Iterator[msgspec.inspect.Type]:
    """All types that a type is made of, as msgspec sees them, itself first."""
    seen: set[type] = set()
    stack = [msgspec.inspect.type_info(kind)]
    while stack:
        info = stack.pop()
        yield info
        cls = getattr(info, "cls", None)
        if cls is None or cls not in seen:
            stack.extend(types_below(info))
            if cls is not None:
                seen.add(cls)


def _check_default(default: Any, kind: Any, label: str) -> None:
    try:
        hash(default)
    except TypeError as error:
        raise TypeError(f"{label} has a mutable default; use a tuple, a frozen struct or None") from error
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(default), type=kind)
    except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeError) as error:
        raise TypeError(f"{label} has a default that does not fit its annotation: {error}") from error

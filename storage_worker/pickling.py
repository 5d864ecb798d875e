"""Stores by value: dill's pickler, and what it lacks for msgspec structs, stores and modules.

It imports dill, so `shipping` imports it only where a store is shipped.
"""

import copyreg
import enum
import importlib
import inspect
import io
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import dill
import msgspec

from .signature import types_within
from .store import MAIN_MODULES, Store, StoreOperation

_StructMeta = type(msgspec.Struct)

_CONFIG = """frozen eq order array_like gc omit_defaults repr_omit_defaults forbid_unknown_fields weakref dict
    cache_hash tag tag_field""".split()

_META = """gt ge lt le multiple_of pattern min_length max_length tz title description examples
    extra_json_schema extra""".split()

# A class makes these by itself, or they are handed over in other ways.
_NO_ATTRIBUTES = frozenset(
    """__annotate__ __annotate_func__ __annotations__ __annotations_cache__ __dict__ __doc__ __firstlineno__
    __match_args__ __module__ __orig_bases__ __parameters__ __post_init__ __slots__ __static_attributes__
    __weakref__""".split()
)

_NOT_BY_VALUE = (msgspec.inspect.DataclassType, msgspec.inspect.TypedDictType, msgspec.inspect.NamedTupleType)
_METHODS = (types.FunctionType, property, classmethod, staticmethod)
_ENUM_OWN = ("__new__", "_new_member_", "_generate_next_value_")


def dumps(value: object) -> bytes:
    """Pickle stores, handlers and what they refer to; `Exception` of any kind where that is impossible.

    What can be imported is named, everything else is written by value. Functions bring along those of
    their globals that they use.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        with warnings.catch_warnings():
            # dill only warns where what it writes cannot be read again.
            warnings.simplefilter("error", dill.PicklingWarning)
            pickler.dump(value)
    finally:
        for found in pickler.renamed:
            found.__module__ = "__mp_main__"
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """What `dumps` pickled, made anew."""
    return dill.loads(data)  # noqa: S301 - the host that starts the worker is the only one to send it


class _Pickler(dill.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, recurse=True)
        self.renamed: list[Any] = []

    def save(self, obj: Any, *args: Any, **kwargs: Any) -> None:
        # A child that multiprocessing spawned knows its program as `__mp_main__`, which dill takes for a
        # module that can be imported.
        if isinstance(obj, types.FunctionType | type) and obj.__module__ == "__mp_main__":
            obj.__module__ = "__main__"
            self.renamed.append(obj)
        super().save(obj, *args, **kwargs)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Store):
            return _reduced(
                obj,
                ("name", "version", "__module__", "_operations", "_background"),
                _migrations=obj.migrations(),
            )
        if isinstance(obj, StoreOperation):
            _check_wire_types(obj)
            return _reduced(obj, ("store", "kind", "handler", "signature", "solo", "admin", "pooled"))
        if isinstance(obj, types.ModuleType):
            return _reduced_module(obj)
        if isinstance(obj, _StructMeta) and not _is_importable(obj):
            return _reduced_struct(obj)
        if isinstance(obj, enum.EnumMeta) and not _is_importable(obj):
            return _reduced_enum(cast(type[enum.Enum], obj))
        if isinstance(obj, TypeVar) and obj.__module__ in MAIN_MODULES:
            return _made_type_var, (obj.__name__, obj.__constraints__, obj.__bound__)
        if isinstance(obj, msgspec.Meta):
            given = {name: getattr(obj, name) for name in _META if getattr(obj, name) is not None}
            return _made_meta, (given,)
        return NotImplemented


def _reduced(obj: object, names: Sequence[str], **others: Any) -> tuple[Any, ...]:
    """The object is made first and filled later, so that it may be part of what it holds."""
    state = {name: getattr(obj, name) for name in names} | others
    return copyreg.__newobj__, (type(obj),), state  # type: ignore[attr-defined]


def _check_wire_types(operation: StoreOperation[..., Any]) -> None:
    # Made anew from their content these would decode, but no longer check what their fields are.
    signature = operation.signature
    for kind in [signature.result, *(each.type for each in signature.parameters)]:
        for info in types_within(kind):
            if isinstance(info, _NOT_BY_VALUE) and not _is_importable(info.cls):
                raise pickle.PicklingError(
                    f"{info.cls.__qualname__} is no msgspec.Struct and no enum, so that its module must be importable"
                )


def _reduced_module(module: types.ModuleType) -> tuple[Any, ...]:
    # dill would write the whole content of a module that is not installed.
    if module.__name__ in MAIN_MODULES or module.__spec__ is None:
        raise pickle.PicklingError(f"the module {module.__name__} cannot be imported by another process")
    return importlib.import_module, (module.__name__,)


def _is_importable(cls: type) -> bool:
    if cls.__module__ in MAIN_MODULES:
        return False
    found: object = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls


def _made_type_var(name: str, constraints: tuple[Any, ...], bound: Any) -> Any:
    make: Any = TypeVar
    return make(name, *constraints, bound=bound)


def _made_meta(given: dict[str, Any]) -> msgspec.Meta:
    return msgspec.Meta(**given)


class _PostInit:
    """Stands for `__post_init__` while its class is made, since msgspec looks it up only then."""

    function: Callable[[Any], None]

    def __call__(self, struct: Any) -> None:
        self.function(struct)

    def __get__(self, struct: object, owner: object = None) -> Any:
        return self if struct is None else types.MethodType(self.function, struct)


def _reduced_struct(cls: type[msgspec.Struct]) -> tuple[Any, ...]:
    own = inspect.get_annotations(cls)
    known = [each for each in msgspec.structs.fields(cls) if each.name in own]
    signature = inspect.signature(cls).parameters
    config = {name: getattr(cls.__struct_config__, name) for name in _CONFIG}
    config["kw_only"] = any(signature[each.name].kind is inspect.Parameter.KEYWORD_ONLY for each in known)
    fields = [(each.name, each.encode_name, each.default, each.default_factory) for each in known]
    space = {name: cls.__dict__[name] for name in ("__doc__", "__orig_bases__") if name in cls.__dict__}
    post_init = cls.__dict__.get("__post_init__")
    attributes = {
        name: value
        for name, value in cls.__dict__.items()
        if name not in _NO_ATTRIBUTES and name not in cls.__struct_fields__
    }
    state = (cls.__qualname__, {each.name: each.type for each in known}, attributes, post_init)
    made = (cls.__name__, cls.__module__, cls.__bases__, fields, config, space, post_init is not None)
    return _made_struct, made, state, None, None, _filled_struct


def _made_struct(
    name: str,
    module: str,
    bases: tuple[type, ...],
    fields: Sequence[tuple[str, str, Any, Any]],
    config: dict[str, Any],
    space: dict[str, Any],
    has_post_init: bool,
) -> type[msgspec.Struct]:
    """The class without its types and methods, which may refer to the class itself."""
    if has_post_init:
        space = {**space, "__post_init__": _PostInit()}
    # Whichever of the two is not given is `msgspec.NODEFAULT`, which only the types do not allow for.
    field: Any = msgspec.field
    specified = [
        (each, Any, field(name=encoded, default=default, default_factory=factory))
        for each, encoded, default, factory in fields
    ]
    return msgspec.defstruct(name, specified, bases=bases, namespace=space, module=module, **config)


def _reduced_enum(cls: type[enum.Enum]) -> tuple[Any, ...]:
    if any(isinstance(vars(cls).get(name), types.FunctionType) for name in ("__init__", "_new_member_")):
        raise pickle.PicklingError(f"the members of {cls.__qualname__} are made by a function of their own")
    members = [(name, member.value) for name, member in cls.__members__.items()]
    inherited = {name: value for base in reversed(cls.__mro__[1:]) for name, value in vars(base).items()}
    attributes = {
        name: value
        for name, value in vars(cls).items()
        if isinstance(value, _METHODS) and inherited.get(name) is not value and name not in _ENUM_OWN
    }
    made = (type(cls), cls.__name__, cls.__module__, cls.__bases__, members)
    return _made_enum, made, (cls.__qualname__, attributes), None, None, _filled_enum


def _made_enum(
    meta: Any, name: str, module: str, bases: tuple[type, ...], members: Sequence[tuple[str, Any]]
) -> Any:
    space = meta.__prepare__(name, bases)
    for member, value in [("__module__", module), *members]:
        space[member] = value
    return meta(name, bases, space)


def _filled_enum(cls: type[enum.Enum], state: tuple[str, dict[str, Any]]) -> None:
    cls.__qualname__, attributes = state
    for name, value in attributes.items():
        setattr(cls, name, value)


def _filled_struct(
    cls: type[msgspec.Struct], state: tuple[str, dict[str, Any], dict[str, Any], Callable[[Any], None] | None]
) -> None:
    qualname, annotations, attributes, post_init = state
    cls.__qualname__ = qualname
    # msgspec reads them when the first decoder of the class is made.
    cls.__annotations__ = annotations
    for name, value in attributes.items():
        setattr(cls, name, value)
    if post_init is not None:
        cls.__dict__["__post_init__"].function = post_init

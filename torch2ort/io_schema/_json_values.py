"""JSON form of constants, keys and metadata, and of the classes that a schema names."""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from torch2ort.errors import SchemaError
from torch2ort.io_schema._kv_caches import is_cache
from torch2ort.io_schema._leaves import type_name

_SAFE_INTEGER: Final = 2**53  # the largest integer that other readers of JSON represent exactly
_FACTORIES: Final = frozenset({dict, list, set, tuple, str, int, float, bool})
_HIDDEN_CLASSES: Final = (MappingProxyType,)  # not found under their own qualified name

# In hexadecimal digits: Python writes no int of more than 4,300 decimal ones, not even into a message.
_LONGEST_INT: Final = 3500


def encode_value(value: Any) -> Any:
    """Return the JSON form of a value: itself if JSON knows it, otherwise ``{type: content}``.

    Raises:
        SchemaError: There is no JSON form for its type.
    """
    cls = type(value)
    if value is None or cls in (bool, str):
        return value
    if cls is int:
        return value if abs(value) <= _SAFE_INTEGER else {"int": hex(value)}
    if cls is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if cls is bytes:
        return {"bytes": value.hex()}
    if cls in (tuple, list):
        return {cls.__name__: [encode_value(item) for item in value]}
    if cls is dict:
        return {"dict": [[encode_value(key), encode_value(item)] for key, item in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, type) and is_cache(value):
        return {"cache": encode_object(value)}
    if isinstance(value, enum.Enum):
        return {"enum": encode_object(cls), "member": value.name}
    raise SchemaError(
        f"a key or metadata of type {type_name(cls)} has no JSON form. Use None, str, bool, int, float, "
        "bytes, torch.dtype, an Enum member, or a tuple, list or dict of them"
    )


def encode_object(value: Any) -> str:
    """Return the name under which a class or a factory is written: ``module:qualified name``.

    Raises:
        SchemaError: It has no such name.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise SchemaError(
            f"a factory of type {type_name(type(value))} has no name by which a JSON form can refer to it. "
            "Use a class or a function"
        )
    return f"{module}:{name}"


class Decoder:
    """Decoder of values and classes, which finds classes among imported modules and those that are passed.

    Args:
        classes: Classes and factories that a name may refer to; they precede all others.
    """

    def __init__(self, classes: Iterable[Any]) -> None:
        self._passed: Mapping[str, Any] = {encode_object(cls): cls for cls in (*_HIDDEN_CLASSES, *classes)}

    def find_class(self, name: str, expected: str, accepts: Callable[[type], bool]) -> Any:
        """Return the class of a name that :func:`encode_object` wrote.

        Args:
            name: ``module:qualified name``.
            expected: Kind of class that the schema states, for the message.
            accepts: Returns whether a class is of that kind.

        Raises:
            SchemaError: No such class is known, or it is of another kind.
        """
        found = self._passed[name] if name in self._passed else _imported(name)
        if found is None:
            raise SchemaError(
                f"the schema needs {expected} {name}, which is not imported here. Import its module before, "
                "or pass it: Schema.from_json(text, classes=[...])"
            )
        if not isinstance(found, type) or not accepts(found):
            raise SchemaError(f"the schema needs {expected} {name}, but here that name is something else")
        return found

    def find_factory(self, name: str) -> Any:
        """Return the factory of a defaultdict; only builtin containers and numbers need not be passed.

        Raises:
            SchemaError: The factory was not passed.
        """
        if name in self._passed:
            return self._passed[name]
        for factory in _FACTORIES:
            if encode_object(factory) == name:
                return factory
        # The next missing key calls the factory, so a file must not choose it freely.
        raise SchemaError(
            f"the schema needs the defaultdict factory {name}. Pass it: Schema.from_json(text, classes=[...])"
        )

    def decode_value(self, form: Any) -> Any:
        """Return the value whose JSON form is `form`.

        Raises:
            SchemaError: It names a class that is not known.
            ValueError: It is not a form that :func:`encode_value` writes; also TypeError, KeyError.
        """
        if form is None or type(form) in (bool, str, int, float):
            return form
        content = dict(form)
        if content.keys() == {"enum", "member"}:
            cls = self.find_class(content["enum"], "the Enum", lambda cls: issubclass(cls, enum.Enum))
            return cls.__members__[content["member"]]
        ((kind, item),) = content.items()
        if kind == "int":
            if len(item) > _LONGEST_INT:
                raise ValueError(f"an int of {len(item)} hexadecimal digits")
            return int(item, 16)
        if kind == "float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[item]
        if kind == "bytes":
            return bytes.fromhex(item)
        if kind == "dtype":
            return decode_dtype(item)
        if kind == "device":
            return torch.device(item)
        if kind == "cache":
            return self.find_class(item, "the cache", is_cache)
        if kind == "dict":
            return {self.decode_value(key): self.decode_value(value) for key, value in item}
        return {"tuple": tuple, "list": list}[kind](map(self.decode_value, item))


def decode_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name such as ``float32``.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return dtype


def _imported(name: str) -> Any:
    """Look a name up without running code: ``getattr`` on a lazy module would import."""
    module_name, _, qualified_name = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualified_name.split("."):
        try:
            found = vars(found).get(part)
        except TypeError:  # None, or something without attributes
            return None
    return found

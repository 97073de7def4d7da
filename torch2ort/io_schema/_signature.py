"""Conversion between the arguments of a call and a mapping by the names of the callable's parameters."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import torch

from torch2ort.errors import SchemaError
from torch2ort.io_schema._flatten import flatten
from torch2ort.io_schema._leaves import CONSTANT_TYPES, exact
from torch2ort.io_schema._schema import Schema, unflatten

_FORMAT: Final = "torch2ort.io_schema.Signature"
_VERSION: Final = 1
_UNSET: Final = object()
_KINDS: Final = {
    kind.name: kind
    for kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    )
}


class CallForm(NamedTuple):
    """The form in which the arguments of a call were passed: by position or by keyword.

    Attributes:
        positional: Number of arguments passed by position.
        keywords: Names of the others, in order.
    """

    positional: int
    keywords: tuple[str, ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallForm:
        """Return the form of the call ``function(*args, **kwargs)``."""
        return cls(len(args), tuple(kwargs))


class Signature:
    """The parameters of a callable, which convert the arguments of a call to one mapping by name, and back.

    The tensors in the mapping get the names that the user gave the arguments:

        >>> import torch
        >>> from torch2ort import io_schema
        >>> def forward(x, *more, scale=1.0, **options): ...
        >>> signature = io_schema.Signature.of(forward)
        >>> bound = signature.bind((torch.ones(2), torch.ones(3)), {"bias": torch.zeros(2)})
        >>> tensors, schema = io_schema.flatten(bound)
        >>> [leaf.name for leaf in schema.leaves]
        ['x', 'more_0', 'bias']
        >>> signature.unbind(bound)
        ((tensor([1., 1.]), tensor([1., 1., 1.])), {'bias': tensor([0., 0.])})

    An argument that is left at its default is in the mapping too, so that another value makes another schema.
    Only a default that cannot be flattened (a function, a dtype) is left out, until a call passes another
    value.
    """

    def __init__(self, signature: inspect.Signature) -> None:
        self._signature = signature
        parameters = signature.parameters.values()
        self._positional = tuple(
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        )
        self._positional_only = frozenset(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY)
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self._options = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        # The mapping that a call's arguments are written into, in the order of the parameters.
        self._template = {p.name: _initial(p) for p in parameters if p.kind is not p.VAR_KEYWORD}
        unset = [name for name, value in self._template.items() if value is _UNSET]
        self._required = [
            name for name in unset if signature.parameters[name].default is inspect.Parameter.empty
        ]
        self._left_out = [name for name in unset if name not in self._required]
        # Keyword -> the position of an argument that would be passed to the same parameter.
        self._by_keyword = {
            name: self._positional.index(name) if name in self._positional else len(self._positional)
            for name in self._template
            if name != self._rest and name not in self._positional_only
        }

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        """Return the signature of a callable; for a module, that of its ``forward``.

        A callable without a known signature counts as ``function(*args, **kwargs)``.

        Args:
            function: A function, a bound method, a module, or any other callable.
        """
        if isinstance(function, torch.nn.Module):
            function = function.forward
        try:
            return cls(inspect.signature(function))
        except ValueError:  # many builtins have none
            return cls(inspect.signature(lambda *args, **kwargs: None))

    def to_json(self) -> str:
        """Return a text from which :meth:`from_json` makes a signature that binds in the same way.

        A default that contains a tensor or cannot be flattened is not written: :meth:`bind` of the signature
        that is read back leaves such an argument out, unless it is passed.

        Raises:
            SchemaError: A default contains a key of a type that has no JSON form.
        """
        parameters = []
        for parameter in self._signature.parameters.values():
            form: dict[str, Any] = {"name": parameter.name, "kind": parameter.kind.name}
            if parameter.default is not parameter.empty:
                form["default"] = _encode_default(self._template[parameter.name])
            parameters.append(form)
        return json.dumps({"format": _FORMAT, "version": _VERSION, "parameters": parameters}, indent=1)

    @classmethod
    def from_json(cls, text: str, *, classes: Iterable[Any] = ()) -> Signature:
        """Return the signature that :meth:`to_json` wrote.

        Args:
            text: Text that :meth:`to_json` returned, in this process or another.
            classes: As for :meth:`Schema.from_json`, for the defaults.

        Raises:
            SchemaError: The text is something else, of another version, or a default is of a class that is
                not known.
        """
        try:
            document = json.loads(text)
            if (document["format"], document["version"]) != (_FORMAT, _VERSION):
                raise ValueError(f"it is {document['format']!r} of version {document['version']!r}")
            return cls(inspect.Signature([_decode_parameter(p, classes) for p in document["parameters"]]))
        except SchemaError:
            raise
        except Exception as error:
            raise SchemaError(
                f"this is not the JSON form of a signature ({type(error).__name__}: {error}). Write one with "
                "Signature.to_json()."
            ) from error

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the call ``function(*args, **kwargs)`` by name.

        The order is that of the parameters, however an argument is passed. ``*xs`` becomes the entry ``xs``,
        a tuple. The arguments that ``**options`` collects follow under their own names, in the order of the
        call; a name that is also a parameter's, or starts with ``options.``, becomes ``options.<name>``.

        Args:
            args: Arguments passed by position.
            kwargs: Arguments passed by keyword.

        Raises:
            TypeError: The callable does not accept these arguments. The message names them.
        """
        bound = self._template.copy()
        bound.update(zip(self._positional, args, strict=False))
        if len(args) > len(self._positional):
            if self._rest is None:
                self._refuse(args, kwargs)
            bound[self._rest] = tuple(args[len(self._positional) :])
        for name, value in kwargs.items():
            position = self._by_keyword.get(name)
            if position is None:
                if self._options is None:
                    self._refuse(args, kwargs)
                bound[self._option_key(name)] = value
            elif position < len(args) and position < len(self._positional):
                self._refuse(args, kwargs)
            else:
                bound[name] = value
        for name in self._required:
            if bound[name] is _UNSET:
                self._refuse(args, kwargs)
        for name in self._left_out:
            if bound[name] is _UNSET:
                del bound[name]
        return bound

    def unbind(
        self, bound: Mapping[str, Any], form: CallForm | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments ``(args, kwargs)`` of a call that :meth:`bind` turns into `bound`.

        Args:
            bound: A mapping that :meth:`bind` returned, or one with the same keys.
            form: Form in which to pass the arguments. An argument that it does not mention is left out if
                it has its default, and passed by keyword otherwise. If None, arguments are passed by position
                up to the first one that has its default, and by keyword after it.

        Raises:
            SchemaError: `bound` lacks an argument that has no default.
        """
        passed = {
            name for name in self._template if name in bound and not self._is_default(name, bound[name])
        }
        rest = tuple(bound.get(self._rest, ())) if self._rest is not None else ()
        count = self._positional_count(passed, form, all_of_them=bool(rest))
        args = (*(self._argument(name, bound) for name in self._positional[:count]), *rest)
        done = {*self._positional[:count], self._rest}
        kwargs = {}
        for name in form.keywords if form is not None else ():
            key = name if name in self._by_keyword else self._option_key(name)
            if key in bound and key not in done:
                kwargs[name] = bound[key]
                done.add(key)
        for key, value in bound.items():
            if key not in done and (key in passed or key not in self._template):
                kwargs[key if key in self._template else key.removeprefix(f"{self._options}.")] = value
        return args, kwargs

    def _positional_count(self, passed: set[str], form: CallForm | None, *, all_of_them: bool) -> int:
        """Return how many parameters are passed by position."""
        if all_of_them:
            return len(self._positional)
        least = max(
            (
                index + 1
                for index, name in enumerate(self._positional)
                if name in passed & self._positional_only
            ),
            default=0,
        )
        if form is not None:
            return max(least, min(form.positional, len(self._positional)))
        leading = next(
            (i for i, name in enumerate(self._positional) if name not in passed), len(self._positional)
        )
        return max(least, leading)

    def _argument(self, name: str, bound: Mapping[str, Any]) -> Any:
        value = bound.get(name, self._signature.parameters[name].default)
        if value is inspect.Parameter.empty:
            raise SchemaError(
                f"unbind: expected an entry {name!r}, got {', '.join(map(repr, bound)) or 'none'}. Pass a "
                "mapping that bind returned."
            )
        return value

    def _is_default(self, name: str, value: Any) -> bool:
        default = self._template[name]
        return default is value or (default is not _UNSET and _same_constants(default, value))

    def _option_key(self, name: str) -> str:
        prefix = f"{self._options}."
        return prefix + name if name in self._template or name.startswith(prefix) else name

    def _refuse(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
        self._signature.bind(*args, **kwargs)  # raises the TypeError of Python
        # Python 3.13.0 accepts a keyword for `**options` with the name of a required
        # positional-only parameter.
        missing = next(name for name in self._positional[len(args) :] if name in self._required)
        raise TypeError(f"{missing!r} parameter is positional only, but was passed as a keyword")


def _initial(parameter: inspect.Parameter) -> Any:
    """Return the value of an argument that is not passed: its default if that can be flattened."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        return ()
    if parameter.default is parameter.empty:
        return _UNSET
    try:
        flatten(parameter.default)
    except SchemaError:
        return _UNSET
    return parameter.default


def _encode_default(value: Any) -> Any:
    """Return the JSON form of a default's schema, or None if there is more to the default than that."""
    if value is _UNSET:
        return None
    tensors, schema = flatten(value)
    return None if tensors else json.loads(schema.to_json())


def _decode_parameter(form: Any, classes: Iterable[Any]) -> inspect.Parameter:
    default: Any = inspect.Parameter.empty
    if "default" in form:
        written = form["default"]
        default = (
            _UNSET
            if written is None
            else unflatten((), Schema.from_json(json.dumps(written), classes=classes))
        )
    return inspect.Parameter(form["name"], _KINDS[form["kind"]], default=default)


def _same_constants(a: Any, b: Any) -> bool:
    """Return True if two values contain no tensors and are equal in structure and constants."""
    if type(a) in CONSTANT_TYPES or type(b) in CONSTANT_TYPES:
        return type(a) is type(b) and exact(a) == exact(b)
    (a_tensors, a_schema), (b_tensors, b_schema) = flatten(a), flatten(b)
    return not a_tensors and not b_tensors and a_schema == b_schema

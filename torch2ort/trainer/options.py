"""The documented options of a trainer, validated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch2ort import OptionError
from torch2ort.trainer.options_schema import OPTIONS, OptionsValidator, faults


class OptionGroup:
    """A group of options, as attributes that cannot be set."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update({name: _wrapped(name, value) for name, value in values.items()})

    def __getattr__(self, name: str) -> Any:
        # Called for missing names only; it tells type checkers that the names come from a schema.
        raise AttributeError(f"there is no option {name!r}; there are {', '.join(name for name, _ in self)}")

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{name} cannot be set: options are validated once; make new ORTTrainerOptions")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(vars(self).items())

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name!r}: {value!r}" for name, value in self) + "}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OptionGroup) and dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment]


# Dicts whose keys are the user's, and not options.
_PLAIN = frozenset({"provider_options", "sliced_schema", "sliced_axes"})


def _wrapped(name: str, value: Any) -> Any:
    return OptionGroup(value) if isinstance(value, dict) and name not in _PLAIN else value


class ORTTrainerOptions(OptionGroup):
    """Options of a trainer, validated and completed with defaults.

    >>> ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 4}}).batch.gradient_accumulation_steps
    4
    >>> ORTTrainerOptions().device.id
    'cuda'
    >>> ORTTrainerOptions({"mixed_precision": {"enabled": 1}})
    Traceback (most recent call last):
    ...
    torch2ort.errors.OptionError: Invalid options: mixed_precision.enabled: must be of boolean type, and is 1.

    docs/orttrainer.md lists what each option does.

    Args:
        options: a dict of dicts, as in the reference.

    Raises:
        OptionError: a ``ValueError`` that lists the path of each option that is unknown or has a value that
            is not allowed.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        options = {} if options is None else options
        if not isinstance(options, Mapping):
            raise OptionError(f"options is a {type(options).__name__}; allowed is a dict of dicts, or None.")
        validator = OptionsValidator(OPTIONS)
        validated = validator.validated(dict(options))
        if validated is None:
            raise OptionError(f"Invalid options: {'; '.join(faults(validator.errors, options))}.")
        super().__init__(validated)
        vars(self)["_given_paths"] = frozenset(_paths(options))

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in vars(self).items() if name != "_given_paths")

    def _is_given(self, path: str) -> bool:
        """Return True if the user set the option ``a.b``, False if it has its default."""
        return path in self._given_paths


def _paths(options: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in options.items():
        yield f"{before}{name}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{before}{name}.")

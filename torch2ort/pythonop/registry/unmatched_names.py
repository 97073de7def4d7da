"""Names that were registered and never matched: a typo is the most common error with a registry.

A process may export several models, so a name is not suspect because one of them lacks it. A name is suspect
if no such Function can exist (its module is imported and contains no class of that name), or if the export
met a Function of a similar name that has no entry.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torch2ort.pythonop.registry._table import Registration, Table, did_you_mean, nearest
from torch2ort.pythonop.registry.exporters import exporters
from torch2ort.pythonop.registry.inferers import inferers
from torch2ort.pythonop.registry.inline import inlined
from torch2ort.pythonop.registry.inplace import inplace_maps
from torch2ort.pythonop.registry.operators import known_operators, overloads, symbolics
from torch2ort.pythonop.site import qualified_name
from torch2ort.support.user_warnings import warn

_TABLES: tuple[Table[Any], ...] = (exporters, inferers, inplace_maps, inlined)
_ALIKE = 0.9


def report_unmatched(functions: Iterable[type[torch.autograd.Function]]) -> None:
    """Warn once of each name that an export shows to be registered by mistake.

    Args:
        functions: the classes of the calls that the export met.
    """
    met = {qualified_name(function): function for function in functions}
    for operator in _missing_operators():
        warn(operator)
    for table in _TABLES:
        suspects = table.take_unmatched()
        known: dict[str, type] = dict(_all_functions()) if suspects else {}
        for entry in suspects:
            sentence = _fault(entry, table, met, known)
            if sentence is not None and not table.mark_reported(entry.name):
                warn(f"{table.verb}: {sentence}")


def _fault(
    entry: Registration[Any], table: Table[Any], met: dict[str, Any], known: dict[str, type]
) -> str | None:
    name = entry.name
    if entry.function is not None:
        if name not in met or met[name] is entry.function:
            return None
        return (
            f"'{name}' was registered for another class of that name than the one in the exported model (a "
            f"class that was defined again?); register the new class with override=True"
        )
    if name in known:
        return None
    without_entry = [other for other in met if not table.has(other)]
    if not _cannot_exist(name) and not any(_alike(name, other) for other in without_entry):
        return None
    offers = nearest(name, without_entry) or nearest(name, known)
    hint = f"the nearest names that exist are {', '.join(map(repr, offers))}" if offers else (
        "no Function has a similar name"
    )  # fmt: skip
    return f"'{name}' matches no Function of the exported model, and none of that name is defined; {hint}"


def _missing_operators() -> list[str]:
    """Return one sentence for each translation of an operator that its library does not define."""
    sentences = []
    for entry in symbolics.take_unmatched():
        namespace = entry.name.partition("::")[0]
        names = known_operators(namespace)
        if names and not overloads(entry.name) and not symbolics.mark_reported(entry.name):
            sentences.append(
                f"register_symbolic: the library '{namespace}' has no operator '{entry.name}'"
                f"{did_you_mean(nearest(entry.name, names))}"
            )
    return sentences


def _alike(name: str, other: str) -> bool:
    same = name.rpartition(".")[2].lower() == other.rpartition(".")[2].lower()
    return same or difflib.SequenceMatcher(None, name, other).ratio() >= _ALIKE


def _cannot_exist(name: str) -> bool:
    """Return True if the module of ``name`` is imported and contains no class of that qualified name."""
    if "<locals>" in name:
        return False
    parts = name.split(".")
    imported = [n for n in range(1, len(parts)) if ".".join(parts[:n]) in sys.modules]
    if not imported:
        return False
    count = imported[-1]
    module = ".".join(parts[:count])
    held: Any = sys.modules[module]
    for part in parts[count:]:
        # A module may define names when they are read, and this check must not run its code.
        if "__getattr__" in vars(held):
            return False
        if part not in vars(held):
            # Only a package can have modules that are not imported yet.
            last = count + 1 == len(parts)
            package = held is sys.modules[module] and hasattr(held, "__path__") and not last
            return not package or importlib.util.find_spec(f"{module}.{part}") is None
        held = vars(held)[part]
        if not isinstance(held, (type, types.ModuleType)):
            return True
    return True


def _all_functions() -> Iterator[tuple[str, type]]:
    """Yield every live Function class by name, except for those of torch and torch2ort."""
    stack: list[type] = [torch.autograd.Function]
    seen: set[type] = set()
    while stack:
        subclasses: list[type] = type.__subclasses__(stack.pop())
        for function in subclasses:
            if function in seen:
                continue
            seen.add(function)
            stack.append(function)
            name = qualified_name(function)
            if not name.startswith(("torch.", "torch2ort.")):
                yield name, function

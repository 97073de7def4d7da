"""Side effects of forward, found by comparing the state that its code reaches, and undone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from torch2ort.cache.key.packages import package_of_module
from torch2ort.effects.reachable_state import (
    HOOKS_OF_ALL,
    ContextVariable,
    IteratorPosition,
    NativeState,
    ReachableState,
    readable,
)
from torch2ort.effects.side_effects import ContentsWritten, ItemsWritten, KeysWritten, Write
from torch2ort.effects.value_templates import NotReproducibleError, ValueTemplates
from torch2ort.pythonop.abstract_run.object_rollback import Generators, Unknown
from torch2ort.pythonop.abstract_run.object_snapshot import Holder, Items, Named
from torch2ort.pythonop.abstract_run.opaque_objects import is_computed_when_asked, last_results

# Private state of torch: the parameters of a recurrent layer once more.
_OF_TORCH = frozenset({"_flat_weights", "_flat_weight_refs"})
# Attributes that transformers sets in a model's first call; forward computes the same with and without them.
_NOTES = {"transformers": frozenset({"problem_type"})}
# Names by which a library records that it has put hooks on modules; the hooks act only on request.
_INSTALLED = {"transformers": frozenset({"_output_capturing_hooks_installed"})}
# Containers in which modules store their parts.
_OF_MODULES = re.compile(rf"\._(modules|parameters|\w*_hooks(_\w+)?)$|^{HOOKS_OF_ALL}$")
_GONE: Any = object()


class EffectError(Exception):
    """Forward had an effect that a run of a graph cannot repeat.

    Attributes:
        what: the effect, as ``changes X``.
        remedy: the advice.
        key: key of the place that shows when it happens; ``None`` if there is none.
        matters: True if forward computes other results in each call because of it.

    Args:
        what, remedy, key, matters: see above.
    """

    def __init__(self, what: str, remedy: str, key: tuple[int, str] | None, *, matters: bool = False) -> None:
        super().__init__(what)
        self.what, self.remedy, self.key, self.matters = what, remedy, key, matters


@dataclass
class Changed:
    """A place that forward changed.

    Attributes:
        holder: the place, with its previous contents.
        contents: its contents now.
    """

    holder: Holder[Any]
    contents: Any

    def changed_keys(self) -> list[Any]:
        """Return the keys with changed values, for a place with keys."""
        before, now = self.holder.before, self.contents
        return [k for k in {**before, **now} if before.get(k, _GONE) is not now.get(k, _GONE)]

    @property
    def place(self) -> str:
        """The place of the first change, as users write it."""
        holder = self.holder
        return readable(holder.label(self.changed_keys()[0]) if isinstance(holder, Named) else holder.path)


class Watch:
    """The state around one call of a model's forward.

    Args:
        model: the model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.reached = ReachableState(model)
        self._generators = Generators()
        self._settings = settings()
        named = (*model.named_parameters(), *model.named_buffers())
        self._tensors = [(name, t, t.requires_grad, _attributes(t)) for name, t in named]

    def changes(self, *, guarded: bool) -> list[Changed]:
        """Return the changes that the call made, without those that have no effect.

        Args:
            guarded: True if guards handle iterators, which are then ignored here.

        Raises:
            EffectError: the call made a change that no graph can make.
        """
        generators = self._generators.restore()
        if generators:
            raise EffectError(
                f"draws from {generators[0]}",
                "and a graph would repeat the numbers of its export. Draw with torch, as torch.rand(()), or "
                "pass the number as an argument",
                (id(_PROCESS), generators[0]),
                matters=True,
            )
        if settings() != self._settings:
            raise EffectError(
                "switches a setting of torch (default dtype, deterministic algorithms)",
                "which a graph cannot do. Switch it before the call",
                (id(_PROCESS), SETTINGS),
            )
        for name, tensor, required, attributes in self._tensors:
            place = f"{type(self._model).__name__}.{name}"
            if tensor.requires_grad and not tensor.is_leaf:
                raise EffectError(
                    f"writes a value that requires a gradient into {place}",
                    "which a graph does not carry from call to call. Write its detach()",
                    None,
                )
            if tensor.requires_grad != required:
                tensor.requires_grad_(required)
                raise EffectError(
                    f"switches the requires_grad of {place}",
                    "which a graph cannot do. Switch it before the call",
                    (id(self._model), REQUIRES_GRAD),
                )
            if _attributes(tensor) != attributes:
                raise EffectError(
                    f"sets an attribute of the tensor {place}",
                    "which a graph cannot do. Keep it in an attribute of the module",
                    None,
                )
        found = [Changed(*pair) for pair in self.reached.changes() if type(pair[0]).__name__ != "_Memo"]
        found = [changed for one in found for changed in _relevant(one)]
        found = [
            changed for changed in found if not (guarded and isinstance(changed.holder, IteratorPosition))
        ]
        for changed in found:
            _refuse(changed)
        return found

    def restore(self) -> None:
        """Restore the whole state."""
        self._generators.restore()
        switch_back(self._settings)
        for holder, contents in self.reached.changes():
            if isinstance(holder, Named):
                # A Function's writes are hidden from the model until the export ends.
                hidden = {k: v for k, v in contents.items() if isinstance(v, Unknown)}
                holder.write({**holder.before, **hidden})
            elif not _is_unknown(contents) and type(holder).__name__ != "_Memo":
                holder.write(holder.before)


_PROCESS = object()
REQUIRES_GRAD = "requires_grad"
SETTINGS = "settings"


def settings() -> tuple[torch.dtype, bool, bool]:
    """Return the settings that code may switch for the whole process."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return torch.get_default_dtype(), deterministic, torch.is_deterministic_algorithms_warn_only_enabled()


def switch_back(before: tuple[torch.dtype, bool, bool]) -> None:
    """Set torch's settings to ``before``."""
    if settings() != before:
        torch.set_default_dtype(before[0])
        torch.use_deterministic_algorithms(before[1], warn_only=before[2])


def _attributes(tensor: torch.Tensor) -> dict[str, int]:
    """Return the identities of the attributes that a user set on a tensor."""
    return {name: id(value) for name, value in vars(tensor).items() if not name.startswith("_")}


def _is_unknown(contents: Any) -> bool:
    """Return True if a Function wrote there, as its writes are not repeated by the graph."""
    values = contents.values() if isinstance(contents, dict) else contents
    return isinstance(contents, (dict, list)) and any(isinstance(value, Unknown) for value in values)


def _relevant(changed: Changed) -> list[Changed]:
    """Return ``changed`` without writes of Functions, and without private state of libraries."""
    holder, contents = changed.holder, changed.contents
    if isinstance(holder, Named):
        skipped = {
            k for k in changed.changed_keys() if isinstance(contents.get(k), Unknown) or _is_own(holder, k)
        }
        before = {k: v for k, v in holder.before.items() if k not in skipped}
        contents = {k: v for k, v in contents.items() if k not in skipped}
        if contents.keys() == before.keys() and all(contents[k] is v for k, v in before.items()):
            return []
        for key in skipped:
            if key in holder.before:
                contents[key] = holder.before[key]
        return [Changed(holder, contents)]
    if _is_unknown(contents) or _is_flat(holder):
        return []
    return [changed]


def _is_own(holder: Named, key: Any) -> bool:
    value = holder.value
    if isinstance(value, torch.nn.Module) and key in _OF_TORCH:
        return True
    if key in last_results(type(value)):
        return True
    if key not in holder.before and is_computed_when_asked(type(value), str(key)):
        return True
    names = _INSTALLED.get(_package(type(value)), ())
    if key in names:
        return True
    # A hook of a library that has recorded that its hooks are installed.
    hook = holder.value.get(key) if isinstance(value, dict) else None
    return holder.path.endswith("._forward_hooks") and _home(hook) in _INSTALLED


def _home(function: Any) -> str:
    return str(getattr(function, "__module__", None) or "").partition(".")[0]


def _package(cls: type) -> str:
    package = package_of_module(cls.__module__)
    return "" if package is None else package.name


def _is_flat(holder: Holder[Any]) -> bool:
    return any(holder.path.endswith(name) for name in _OF_TORCH)


def _refuse(changed: Changed) -> None:
    """Refuse a change that only forward itself can make.

    Raises:
        EffectError: the change is one of these.
    """
    holder = changed.holder
    key = holder.key
    if isinstance(holder, ContextVariable):
        raise EffectError(
            f"sets {readable(holder.path)}, a ContextVar",
            "which a graph cannot do. Set it before the call",
            key,
        )
    if isinstance(holder, NativeState):
        raise EffectError(
            f"draws from {readable(holder.path)}, a {type(holder.value).__name__}",
            "and a graph would repeat what its export got. Draw with torch, as torch.rand(()), or pass the "
            "number as an argument",
            key,
            matters=True,
        )
    if isinstance(holder, Named):
        if "training" in changed.changed_keys() and isinstance(holder.value, torch.nn.Module):
            raise EffectError(
                f"switches the mode of {readable(holder.path)}",
                "which a graph cannot do. Call train() or eval() before the call",
                key,
            )
        if _OF_MODULES.search(holder.path):
            raise EffectError(
                f"changes {readable(holder.path)}",
                "which a graph cannot do. Make modules, parameters and hooks before the call",
                key,
            )
    elif not isinstance(holder, Items) and not isinstance(changed.contents, set):
        raise EffectError(
            f"writes to {readable(holder.path)}, a {type(holder.value).__name__}",
            "and a graph writes to tensors alone. Make it a buffer",
            key,
        )


def writes_of(found: Iterable[Changed], templates: ValueTemplates) -> tuple[list[Write], list[Write]]:
    """Return the writes for each run of the graph, and those that are made once.

    Args:
        found: the changes of the call.
        templates: the templates to add the values to.

    Raises:
        EffectError: a run cannot make one of the values.
    """
    writes: list[Write] = []
    taken: list[Write] = []
    for changed in found:
        holder, contents = changed.holder, changed.contents
        templates.place = changed.place
        try:
            if isinstance(holder, Named):
                keys = changed.changed_keys()
                gone = tuple(k for k in keys if k not in contents)
                sets = {k: templates.of(contents[k]) for k in keys if k in contents}
                write: Write = KeysWritten(changed.place, holder, sets, gone)
                notes = _NOTES.get(_package(type(holder.value)), ())
                (taken if all(k in notes for k in keys) else writes).append(write)
            elif isinstance(holder, Items):
                new, whole = added(holder, contents)
                writes.append(ItemsWritten(changed.place, holder, list(map(templates.of, new)), whole))
            else:
                templates.of(contents)
                writes.append(ContentsWritten(changed.place, holder, contents))
        except NotReproducibleError as error:
            raise EffectError(
                f"puts {error} into {changed.place}",
                "and a graph returns only tensors. Put tensors there, or lists, tuples and dicts of them, or "
                "return it",
                holder.key,
            ) from None
    return writes, taken


def added(holder: Items, contents: list[Any]) -> tuple[list[Any], bool]:
    """Return the items that were appended, and True if other items were changed, too."""
    before, most = holder.before, getattr(holder.value, "maxlen", None)
    if most is None:
        kept = len(contents) >= len(before) and all(a is b for a, b in zip(before, contents, strict=False))
        return (contents[len(before) :], False) if kept else (contents, True)
    for count in range(len(contents) + 1):
        new = contents[len(contents) - count :]
        expected = [*before, *new][-most:] if most else []
        if len(expected) == len(contents) and all(a is b for a, b in zip(expected, contents, strict=True)):
            return new, False
    return contents, True

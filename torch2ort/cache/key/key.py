"""The key of an export: everything that the graph depends on, as components that are hashed one by one.

Values of parameters and buffers are no part of it, because they are inputs of a graph.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch2ort import io_schema
from torch2ort._native import Switches
from torch2ort._torch import global_state as private
from torch2ort.cache.key.bytecode_names import KNOWN_PYTHONS
from torch2ort.cache.key.constant_bytes import words
from torch2ort.cache.key.export_lock import exclusive
from torch2ort.cache.key.guards import ActiveGuards, FunctionWrittenPlaces, Guard
from torch2ort.cache.key.key_builder import Unkeyable, Walk
from torch2ort.cache.key.module_encoder import module
from torch2ort.cache.key.object_encoder import ObjectEncoder
from torch2ort.cache.key.packages import own_digest, version
from torch2ort.cache.key.tensor_encoders import describe, digest_of
from torch2ort.cache.key.user_registrations import walk_registrations
from torch2ort.cache.key.write_only_state import NOTHING, WriteOnlyState
from torch2ort.log import logger

__all__ = ["Key", "Unkeyable", "dependencies"]

_SIZES = "sizes of "

# Packages whose code makes the graph, besides torch and torch2ort.
_MAKERS = ("onnx", "onnx-ir", "onnxscript", "onnx-shape-inference", "optree", "sympy", "numpy")


# Code that asks a tensor for its offset or its strides reads one of these names. Code can also depend on the
# strides without such a name, by whether a view of the tensor is possible.
_OF_OFFSETS = words("as_strided data_ptr set_ storage storage_offset untyped_storage")
_OF_STRIDES = _OF_OFFSETS | words("dim_order is_contiguous is_non_overlapping_and_dense stride")


@dataclass(frozen=True)
class Key:
    """Key of an entry of the cache.

    Attributes:
        name: class of the model, for people.
        digest: 64 hexadecimal digits.
        components: the components that the digest covers, in the order of the walk.
        functions: the Functions that the model's code refers to, by qualified name, in the order of the walk.
    """

    name: str
    digest: str
    components: Mapping[str, str]
    functions: Mapping[str, Sequence[type[torch.autograd.Function]]]

    @classmethod
    def of(
        cls, name: str, components: Mapping[str, str], functions: Mapping[str, Sequence[Any]] | None = None
    ) -> Key:
        """Return the key of ``components``."""
        text = json.dumps(list(components.items()))
        return cls(name, hashlib.sha256(text.encode()).hexdigest(), components, functions or {})

    @functools.cached_property
    def family(self) -> str:
        """Digest of all but the sizes: the same for all graphs of one model and kind of call."""
        others = {name: text for name, text in self.components.items() if not name.startswith(_SIZES)}
        return Key.of(self.name, others).digest

    @functools.cached_property
    def sizes(self) -> list[str]:
        """The descriptions of the inputs' sizes, in their order."""
        return [text for name, text in self.components.items() if name.startswith(_SIZES)]


@dataclass(frozen=True)
class Dependencies:
    """Everything that a graph is made from besides the values of its inputs.

    Attributes:
        name: class of the model, for people.
        inputs: names of the call's tensors.
        components: name -> content or digest; the same in each process.
        unseen: reasons why something may change without being detected by a guard; empty if all is guarded.
        is_partial: True if another walk finds more once the model has run.
        reads_strides: True if the model's code may read the strides of a tensor.
        reads_offsets: True if it may read the offset of a tensor in its storage.
        asks_types: True if it may ask for the exact type of a value.
        asks_parameters: True if it may ask which tensors are parameters.
        guards: the places of all dependencies in this process.
        pinned: values that only their identity and version identify, in the order of the walk, each with its
            component's name.
        names: every attribute name that the model's code reads; ``None`` if it may read any.
        traced_names: the attribute names that its code outside of Functions reads.
        walk: the walk that found all this, and that continues when a key is made; it holds every value that
            it met.
    """

    name: str
    inputs: Sequence[str]
    components: Mapping[str, str]
    unseen: Sequence[str]
    is_partial: bool
    reads_strides: bool
    reads_offsets: bool
    asks_types: bool
    asks_parameters: bool
    guards: Sequence[Guard]
    pinned: Sequence[tuple[str, Any, int]]
    names: frozenset[str] | None
    traced_names: frozenset[str] | None
    walk: Walk | None

    @exclusive.looking()
    def key(self, sizes: Sequence[str], settings: Mapping[str, Any]) -> Key:
        """Return the key of an export.

        Args:
            sizes: for each tensor of the call, the part of its sizes and memory order that the graph
                depends on.
            settings: other plain values that the graph depends on (opset, mode, ...).

        Raises:
            Unkeyable: something that the graph depends on cannot be compared between processes; the message
                names it, and the remedy where that is known.
        """
        assert self.walk is not None, "its values were let go"
        components = {**self._portable, **_as_components({**surroundings(), **settings})}
        components |= {f"{_SIZES}{name}": size for name, size in zip(self.inputs, sizes, strict=True)}
        return Key.of(self.name, components, dict(self.walk.functions))

    @functools.cached_property
    def _portable(self) -> Mapping[str, str]:
        """All components, including those that count only between processes."""
        assert self.walk is not None
        return _portable(self.walk)

    def changes(self, before: Dependencies, written: FunctionWrittenPlaces | None = None) -> list[str]:
        """Return the names of the components that differ from ``before`` in this process.

        Args:
            before: another state.
            written: places that Functions write to, which do not count.
        """
        ours, theirs = self.components, before.components
        passed = written.components if written is not None else ()
        changed = [
            name
            for name in dict.fromkeys((*ours, *theirs))
            if name not in passed and ours.get(name) != theirs.get(name)
        ]
        if not changed and self._pins(passed) != before._pins(passed):
            changed.append("an object that cannot be looked into")
        return changed

    def _pins(self, passed: Container[str]) -> list[tuple[int, int]]:
        return [(id(value), version) for label, value, version in self.pinned if label not in passed]

    def arm_guards(self, written: FunctionWrittenPlaces | None = None) -> ActiveGuards:
        """Return the guards, which compare with the state of this moment from now on.

        Args:
            written: places that Functions write to; further ones are noted there.
        """
        return ActiveGuards(self.guards, self.names, self.traced_names, written or FunctionWrittenPlaces())


@exclusive.looking()
def dependencies(
    model: torch.nn.Module,
    tensors: Sequence[torch.Tensor],
    schema: io_schema.Schema,
    *,
    with_hooks: bool = True,
    inlines_functions: bool = False,
    unread: WriteOnlyState = NOTHING,
) -> Dependencies:
    """Return the dependencies of the graph of one call of ``model``, found by a walk over its reachable code.

    Args:
        model: the model, in its present state.
        tensors: the call's tensors, flat.
        schema: the structure around them.
        with_hooks: whether hooks of the model itself are part of the graph.
        inlines_functions: whether the code of every Function is part of the graph, as that of modules is.
        unread: places that the graph does not depend on, though the code names them.

    Raises:
        Unkeyable: an object of the user raised while it was inspected.
    """
    _check_python()
    weights = named_tensors(model)
    walk = Walk(
        {id(tensor): name for name, tensor in weights.items()},
        {id(module): path for path, module in model.named_modules()},
        inlines_functions=inlines_functions,
    )
    values = ObjectEncoder(walk, () if with_hooks else {id(model)}, unread)
    walk.components.update(_as_components(surroundings()))
    modes = private.active_modes()
    if modes:
        mode = type(modes[0]).__qualname__
        walk.refuse(f"the mode {mode} is active, which may change what every operator does", modes[0])
    with _looking_at("the model"):
        _walk_model(model, weights, walk, values)
        _walk_call(tensors, schema, walk, values)
        walk.refer("hooks of all modules", "hooks", lambda: _write_global_hooks(walk, values))
        walk_registrations(walk, values)
        walk.components.update(_topics(walk))
    values.definitions.installed.guard_classes()
    walk.guards.value(_settings_in_a_step, torch, "torch's settings")
    traced, traced_names = walk.reads_of_export()
    return Dependencies(
        type(model).__qualname__,
        tuple(map(_name, schema.leaves)),
        dict(walk.components),
        tuple(walk.unseen),
        walk.is_partial,
        not _OF_STRIDES.isdisjoint(walk.names),
        not _OF_OFFSETS.isdisjoint(walk.names),
        walk.asks_types,
        walk.asks_parameters,
        walk.guards.guards_of_export(traced),
        [(finder.label, value, version) for finder, value, version in walk.guards.pinned],
        None if walk.any_name else frozenset(walk.names),
        traced_names,
        walk,
    )


def _portable(walk: Walk) -> Mapping[str, str]:
    """Return the components that are the same in each process, with those that no inspected code reads.

    Raises:
        Unkeyable: the walk found something that cannot be compared between processes; the message names it.
    """
    with _looking_at("what the model refers to"):
        walk.run_on()
    if walk.refusals:
        raise Unkeyable(walk.refusals[0])
    digests: dict[str, list[str]] = {}
    for component, value in walk.contents:
        digests.setdefault(f"large values of {component.label}", []).append(digest_of(value))
    return {**walk.components, **_topics(walk), **{name: " ".join(all_) for name, all_ in digests.items()}}


def _topics(walk: Walk) -> dict[str, str]:
    return {topic: _TOPICS[topic]() for topic in sorted(walk.topics)}


def _as_components(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


@contextlib.contextmanager
def _looking_at(what: str) -> Iterator[None]:
    """Convert exceptions of the user's properties and methods to :class:`Unkeyable`."""
    try:
        yield
    except Unkeyable:
        raise
    except Exception as error:
        logger.debug("looking at %s failed", what, exc_info=True)
        raise Unkeyable(f"looking at {what} raised {type(error).__name__}: {error}") from error


@exclusive.looking()
def code_components(classes: Iterable[type]) -> Mapping[str, str]:
    """Return the components of classes and of users' registrations, for a graph that each process traces.

    Args:
        classes: Functions that the graph calls.

    Returns:
        Name -> content or digest; the same in each process.

    Raises:
        Unkeyable: some content cannot be compared between processes; the message names it.
    """
    _check_python()
    walk = Walk({}, {})
    values = ObjectEncoder(walk)
    with _looking_at("a Function"):
        for cls in classes:
            values.definitions.class_(cls)
        walk_registrations(walk, values)
    return _portable(walk)


def _check_python() -> None:
    """Raise :class:`Unkeyable` for a Python whose compiled code torch2ort cannot read."""
    if sys.version_info[:2] not in KNOWN_PYTHONS:
        raise Unkeyable(
            f"compiled code of Python {sys.version_info[0]}.{sys.version_info[1]} is not known to torch2ort, "
            f"which reads what a model uses out of it (known: {_known_pythons()})"
        )


def _write_global_hooks(walk: Walk, values: ObjectEncoder) -> None:
    for table in private.global_hook_tables():
        walk.guards.items(table, "hooks of all modules")
    values.write(private.global_hooks())


# The settings of torch that programs change between steps; reading them is cheap.
_settings_in_a_step = Switches(
    (
        (torch.get_default_dtype, ()),
        (torch.are_deterministic_algorithms_enabled, ()),
        (torch.backends.mha.get_fastpath_enabled, ()),
        (private.active_modes, ()),
    ),
    lambda *settings: settings,
).now


def _known_pythons() -> str:
    return ", ".join(".".join(map(str, version)) for version in KNOWN_PYTHONS)


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name; a tied one has several names."""
    return {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }


def tensor_of(model: torch.nn.Module, name: str) -> torch.Tensor | None:
    """Return the tensor at an attribute of one of the model's modules; ``None`` if there is none."""
    path, _, attribute = name.rpartition(".")
    try:
        tensor = getattr(model.get_submodule(path), attribute)
    except AttributeError:
        return None
    return tensor if isinstance(tensor, torch.Tensor) else None


def _walk_model(
    model: torch.nn.Module, weights: Mapping[str, torch.Tensor], walk: Walk, values: ObjectEncoder
) -> None:
    walk.reads(("forward",))
    first: dict[int, str] = {}
    for name, tensor in weights.items():
        walk.components[f"tensor {name}"] = _describe_weight(name, tensor, first)
        walk.guards.attributes(tensor.__dict__, name)
        if tensor.__dict__:
            fill = functools.partial(values.write, dict(tensor.__dict__))
            walk.refer(f"attributes of {name}", ("attributes", name), fill)
    modes = "".join("t" if module.training else "e" for module in model.modules())
    walk.components["modes of the modules"] = modes
    # All code calls methods of tensors, and need not name their class.
    tensors = functools.partial(values.definitions.inspect_package_class, torch.Tensor)
    walk.refer("changes to torch.Tensor", "changes to torch.Tensor", tensors)
    module(values, model)


def _describe_weight(name: str, tensor: torch.Tensor, first: dict[int, str]) -> str:
    # Tensors that share memory are recognized by its address, and are named after the first of them.
    shared = first.setdefault(private.address_of(tensor), name)
    return describe(tensor) + (f" the same memory as {shared}" if shared != name else "")


def _walk_call(
    tensors: Sequence[torch.Tensor],
    schema: io_schema.Schema,
    walk: Walk,
    values: ObjectEncoder,
) -> None:
    for leaf, tensor in zip(schema.leaves, tensors, strict=True):
        dtype = str(tensor.dtype).removeprefix("torch.")
        walk.components[f"input {_name(leaf)}"] = (
            f"{type(tensor).__name__} {dtype} of rank {tensor.dim()} on {tensor.device} "
            f"requires_grad={tensor.requires_grad}"
        )
    for leaf, tensor in zip(schema.leaves, tensors, strict=True):
        walk.weights.setdefault(id(tensor), f"input {leaf.index}")
    # Structure and constants, and the classes whose methods forward may call.
    arguments = [io_schema.unflatten(tensors, schema), [type(tensor) for tensor in tensors]]
    walk.refer("arguments", "arguments", lambda: values.write_arguments(arguments))


def _name(leaf: io_schema.TensorSpec) -> str:
    return leaf.name or "(the tensor)"


def surroundings() -> dict[str, Any]:
    """Return the dependencies of every graph, whatever the model is: versions, and settings of torch."""
    return {**_versions(), **_torch_settings()}


def _versions() -> dict[str, str]:
    return {
        "python": f"{sys.version}, optimize {sys.flags.optimize}",
        "torch": torch.__version__,
        "torch2ort": own_digest(),
        **{name: version(name) for name in _MAKERS},
    }


def _ranks() -> str:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return "none"
    return f"{distributed.get_rank()} of {distributed.get_world_size()}"


def _devices() -> str:
    if not torch.cuda.is_available():
        return "none"
    count, current = torch.cuda.device_count(), torch.cuda.current_device()
    kinds = [(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(count)]
    return f"{current} of {kinds}"


# Only models whose code asks for these have them in their key; other keys are the same on each rank.
_TOPICS = {"ranks": _ranks, "devices": _devices}


def _torch_settings() -> dict[str, Any]:
    """Return the part of torch's global state that tracing reads."""
    devices = ("cpu", "cuda")
    return {
        "torch.get_default_dtype": torch.get_default_dtype(),
        "torch.get_default_device": torch.get_default_device(),
        "torch.is_grad_enabled": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled": torch.is_inference_mode_enabled(),
        "autocast": [(torch.is_autocast_enabled(d), str(torch.get_autocast_dtype(d))) for d in devices],
        "torch.cuda.is_available": torch.cuda.is_available(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fast path of attention": torch.backends.mha.get_fastpath_enabled(),
        "kernels of attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ),
        "order of an einsum": (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy),
        "settings of torch's own": private.changed_settings(),
        "mkldnn": torch.backends.mkldnn.enabled,
    }

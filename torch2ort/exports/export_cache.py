"""Exports in the cache: the content of an entry, and its restoration in another process.

Nothing is traced on a hit. The weights are the live model's tensors. Each PythonOp node calls the class that
is in the live model's code at the place that the entry records; keys are equal only if the classes at these
places are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx
import torch

from torch2ort import io_schema
from torch2ort.cache.key.export_lock import exclusive
from torch2ort.cache.key.key import Dependencies, Key, Unkeyable, tensor_of
from torch2ort.cache.report import CacheReport
from torch2ort.cache.store.explain import on_miss, sentence_of_miss
from torch2ort.cache.store.graph_entries import EntryContent, GraphEntries, store_entry
from torch2ort.cache.store.location import opened_store
from torch2ort.cache.store.store import Entry, RefusedError, Store
from torch2ort.capture.output_ties import Ties
from torch2ort.capture.sample_call import Call
from torch2ort.errors import ExportError, SchemaError, Torch2OrtError
from torch2ort.exports.function_lookup import bind_places, places_of
from torch2ort.graph.graph import Graph
from torch2ort.graph.graph_json import record, recorded_graph, recorded_interface, recorded_signature
from torch2ort.graph.graph_traversal import load_sites
from torch2ort.log import logger
from torch2ort.options import Options
from torch2ort.program.program import Program
from torch2ort.sizes.memory_layout import memory_form
from torch2ort.support.startup_timing import LOOK_UP, timed

_FILE = "graph.onnx"
_KIND = "graph"
_FAILED = "failed export"
_VARIES = "varies like"
_IN_MEMORY = " in memory "


@timed(LOOK_UP)
def reuse_or_build(
    model: torch.nn.Module,
    call: Call,
    found: Callable[[], Dependencies],
    settings: Mapping[str, Any],
    options: Options,
    build: Callable[[], Program],
    *,
    any_sizes: bool,
) -> Program:
    """Return the program of ``call`` from the cache of ``options``; build and store it if it is not there.

    Args:
        model: the model.
        call: the sample call.
        found: returns the dependencies of the graph.
        settings: further plain values that the graph depends on.
        options: folder of the cache, and its limit.
        build: exports the model.
        any_sizes: whether a graph with more varying sizes than the call requests is accepted.

    Raises:
        ExportError: as ``build`` does.
    """
    try:
        store = opened_store(options)
    except RefusedError as error:
        return _bypassed(build(), str(error))
    if store is None:
        return build()
    if options.save_onnx_dir is not None:
        reason = "save_onnx_dir requests the graph of every stage, which only an export makes."
        return _bypassed(build(), reason)
    try:
        keys = _keys(found(), call, settings)
    except Unkeyable as unkeyable:
        return _bypassed(build(), f"{unkeyable}.")
    program, key = _find(store, keys, model, call, any_sizes=any_sizes)
    if program is not None:
        return program
    with exclusive.looking(), store.lock(keys[0].digest) as locked:
        if locked:
            # Another process may have built it while this one waited.
            program, key = _find(store, keys, model, call, any_sizes=any_sizes)
            if program is not None:
                return program
        _log_miss(store, key)
        # A caller that accepts any sizes falls back to fixed ones if an export with varying sizes fails.
        failures = _Failures(store, keys[0]) if any_sizes and any(call.dim_specs) else None
        program = build() if failures is None else failures.build(build)
        try:
            kept = _pack(program, model, key)
        except Unkeyable as unkeyable:
            return _bypassed(program, f"{unkeyable}.")
        refused = store_entry(store, key, _KIND, kept)
    if refused is not None:
        return replace(program, report=CacheReport(bypass_reason=refused))
    return replace(program, report=CacheReport(False, key.digest), graph_entries=GraphEntries(store, key))


class _Failures:
    """A record of failed exports, for callers with a fallback.

    Args:
        store: contains the record.
        key: of the export.
    """

    def __init__(self, store: Store, key: Key) -> None:
        self._store = store
        self._key = Key.of(key.name, {"graph": key.digest, "kind": _FAILED})

    def build(self, build: Callable[[], Program]) -> Program:
        """Return the result of ``build``, unless it is known to fail.

        Raises:
            ExportError: it fails, or failed before.
        """
        known = self._store.read(self._key.digest)
        if known is not None:
            raise ExportError(str(known.manifest.data["reason"]))
        try:
            return build()
        except ExportError as error:
            store_entry(self._store, self._key, _FAILED, EntryContent({"reason": str(error)}, {}))
            raise


def _bypassed(program: Program, reason: str) -> Program:
    logger.info("the export is not cached: %s", reason)
    return replace(program, report=CacheReport(bypass_reason=reason))


def _keys(found: Dependencies, call: Call, settings: Mapping[str, Any]) -> tuple[Key, ...]:
    """Return the keys of the look-up: for any size of the varying dimensions, and for exactly these sizes."""
    sizes = [_describe_sizes(t, spec) for t, spec in zip(call.tensors, call.dim_specs, strict=True)]
    strides, offset = found.reads_strides, found.reads_offsets
    memory = [memory_form(tensor, strides=strides, offset=strides and offset) for tensor in call.tensors]
    key = found.key(_together(sizes, memory), settings)
    if not any(call.dim_specs):
        return (key,)
    these = [f"{text} for {list(tensor.shape)}" for text, tensor in zip(sizes, call.tensors, strict=True)]
    return key, found.key(_together(these, memory), settings)


def _together(sizes: Sequence[str], memory: Sequence[Hashable]) -> list[str]:
    return [f"{size}{_IN_MEMORY}{lies}" for size, lies in zip(sizes, memory, strict=True)]


def _memory_of(key: Key) -> list[str]:
    return [text.partition(_IN_MEMORY)[2] for text in key.sizes]


def _describe_sizes(tensor: torch.Tensor, spec: Any) -> str:
    """Return the fixed sizes of a tensor, and the rules for the varying ones."""
    rules = dict(spec.items() if isinstance(spec, Mapping) else enumerate(spec or ()))
    rules = {axis: rule for axis, rule in rules.items() if rule is not None}
    dims = []
    for axis, size in enumerate(tensor.shape):
        rule = rules.get(axis)
        if rule is None:
            dims.append(str(size))
        else:
            # torch.export treats sizes 0 and 1 apart.
            bounds = [getattr(rule, name, None) for name in ("min", "max")]
            dims.append(f"{type(rule).__name__} {rule} {bounds} {_VARIES} {min(size, 2)}")
    return f"[{', '.join(dims)}]"


def _find(
    store: Store, keys: Sequence[Key], model: torch.nn.Module, call: Call, *, any_sizes: bool
) -> tuple[Program | None, Key]:
    """Return the first program that accepts the call's sizes, and its key; else ``None`` and a free key."""
    free = keys[-1]
    for key in keys:
        entry = store.read(key.digest)
        if entry is None:
            free = key
            break
        found = _use(store, entry, key, model, call)
        if found is not None:
            return found, key
    for key in _relatives(store, keys[0]) if any_sizes else ():
        entry = store.read(key.digest)
        found = None if entry is None else _use(store, entry, key, model, call)
        if found is not None:
            return found, key
    return None, free


def _relatives(store: Store, key: Key) -> Iterator[Key]:
    """Yield the keys of the graphs with varying sizes of the same model and kind of call."""
    for manifest in store.find(key.family):
        relative = Key(manifest.name, manifest.digest, manifest.components, key.functions)
        if manifest.kind != _KIND or relative.family != key.family:
            continue
        varying = [_VARIES in size for size in relative.sizes]
        if any(varying) and _memory_of(relative) == _memory_of(key):
            yield relative


def _use(store: Store, entry: Entry, key: Key, model: torch.nn.Module, call: Call) -> Program | None:
    """Return the program of an entry if it accepts the call's sizes."""
    try:
        program = _unpack(EntryContent(entry.manifest.data, entry.files), model, call, key)
    except (Torch2OrtError, Unkeyable) as error:
        logger.info("the cache entry %s does not fit this process: %s", key.digest, error)
        return None
    if program.interface.sizes.mismatch([tensor.shape for tensor in call.tensors]) is not None:
        return None
    logger.debug("took the graph of %s out of the export cache (%s)", key.name, key.digest)
    return replace(program, report=CacheReport(True, key.digest), graph_entries=GraphEntries(store, key))


def _log_miss(store: Store, key: Key) -> None:
    for name, content in key.components.items():
        logger.debug("  %s: %s", name, content)
    if not (on_miss or logger.isEnabledFor(logging.INFO)):
        return
    sentence = sentence_of_miss(_KIND, key.name, key.digest, key.components, store)
    logger.info(sentence)
    for call in on_miss:
        call(sentence)


# --- an entry's content


def _pack(program: Program, model: torch.nn.Module, key: Key) -> EntryContent:
    graph, interface = program.signature, program.interface
    if program.effects:
        raise Unkeyable(f"forward changes {program.effects.places[0]}, an object of this process")
    for name, tensor in _weights(model, graph.weights).items():
        if tensor.data_ptr() != program.weights[name].data_ptr():
            raise Unkeyable(f"the tensor {graph.weights[name]} is not the same in the graph and in the model")
    data = {
        **record(graph, interface),
        "family": key.family,
        "training": program.training,
        "outputs": _stored_schema(interface.outputs),
        "weights": dict(graph.weights),
        **program.ties.to_json(),
        "writer": program.writer,
    }
    if not isinstance(graph, Graph):
        return EntryContent(data, {})
    functions = places_of(graph.sites, key)
    return EntryContent({**data, "functions": functions}, {_FILE: graph.proto.SerializeToString()})


def _unpack(kept: EntryContent, model: torch.nn.Module, call: Call, key: Key) -> Program:
    data = kept.data
    graph = recorded_signature(data, data["weights"])
    if _FILE in kept.files:
        proto = onnx.load_from_string(kept.files[_FILE])
        sites = load_sites(proto.graph)
        bind_places(sites, data["functions"], key)
        graph = recorded_graph(data, proto, sites, data["weights"])
    outputs = io_schema.Schema.from_json(data["outputs"])
    interface = recorded_interface(data, call.signature, call.schema, outputs)
    return Program(
        graph,
        _weights(model, graph.weights),
        interface,
        bool(data["training"]),
        Ties.from_json(data),
        writer=data["writer"],
    )


def _stored_schema(schema: io_schema.Schema) -> str:
    try:
        text = schema.to_json()
        if io_schema.Schema.from_json(text) == schema:
            return text
        reason = "it differs after it is read back"
    except SchemaError as error:
        reason = str(error).rstrip(".")
    raise Unkeyable(f"the structure of the model's outputs cannot be stored: {reason}")


def _weights(model: torch.nn.Module, origins: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the model's parameters, buffers and tensor attributes that are fed to a graph."""
    weights: dict[str, torch.Tensor] = {}
    for name, origin in origins.items():
        tensor = tensor_of(model, origin)
        if tensor is None:
            raise Unkeyable(
                f"the tensor {origin} of the graph is not a parameter, buffer or attribute of the model"
            )
        weights[name] = tensor
    return weights

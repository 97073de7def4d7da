"""What an export gives: a graph, its calls of Functions, and the structure around it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnx.external_data_helper
import onnx.numpy_helper
import torch

from torch2ort import io_schema
from torch2ort.errors import ExportError, ModelLoadError, SchemaError, SchemaMismatchError
from torch2ort.graph import checksum as _seal
from torch2ort.graph.accepted_sizes import Sizes
from torch2ort.graph.file_checks import check_functions, check_interface
from torch2ort.graph.graph import Graph, Mutation
from torch2ort.graph.large import content_of
from torch2ort.graph.nodes import load_sites
from torch2ort.kernels.resolve import bind_classes
from torch2ort.options import Options, with_arguments
from torch2ort.pythonop import ONNX_TYPES, PythonOpSite, unstorable
from torch2ort.runtime import InferenceEngine, inference_session

METADATA_KEY = "torch2ort"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class CacheReport:
    """What the export cache did for one export.

    Attributes:
        hit: whether the graph came from the cache.
        key: name of the cache entry; ``None`` if none was computed.
        bypass_reason: why the export was not cached, in a sentence; ``None`` if it was.
    """

    hit: bool = False
    key: str | None = None
    bypass_reason: str | None = None


@dataclass(frozen=True)
class Interface:
    """How a call of the model maps to tensors.

    Attributes:
        signature: names and defaults of the model's arguments.
        inputs: schema of the bound arguments.
        outputs: schema of what the model returns.
        sizes: the input sizes that the graph accepts.
        returned: which caches among the outputs are caches of the call.
    """

    signature: io_schema.Signature
    inputs: io_schema.Schema
    outputs: io_schema.Schema
    sizes: Sizes
    returned: io_schema.Returned = ()

    def result(self, bound: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
        """What the call of these arguments returns, out of the graph's outputs."""
        return io_schema.unflatten_into(bound, self.returned, tensors, self.outputs)

    def tensors(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """The call's tensors, in the order of the graph's inputs, and its arguments by name.

        Raises:
            SchemaMismatchError: structure, dtype, rank, a constant or a size differs.
        """
        try:
            bound = self.signature.bind(args, kwargs)
            tensors = self.inputs.match(bound)
            if tensors is None:
                _, schema = io_schema.flatten(bound)
                difference = self.inputs.difference(schema, root="inputs")
                raise SchemaMismatchError(f"the call does not fit the exported model: {difference}")
        except SchemaMismatchError:
            raise
        except (SchemaError, TypeError) as error:
            raise SchemaMismatchError(f"the call does not fit the exported model: {error}") from error
        mismatch = self.sizes.mismatch([t.shape for t in tensors])
        if mismatch is not None:
            raise SchemaMismatchError(
                f"the call does not fit the exported model: {mismatch}; export with dynamic_shapes if this "
                f"size varies"
            )
        return tensors, bound


class ExportedModel:
    """An exported model: an ONNX graph, the Functions it calls, and how to call it.

    Attributes:
        training: the mode that was exported.
        cache: what the export cache did.
    """

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, torch.Tensor],
        interface: Interface,
        *,
        training: bool,
        options: Options,
        cache: CacheReport | None = None,
    ) -> None:
        self._graph = graph
        self._weights = weights
        self._interface = interface
        self._options = options
        # By whether PyTorch's flag of determinism was set.
        self._engines: dict[bool, InferenceEngine] = {}
        self._proto: onnx.ModelProto | None = None
        self.training = training
        self.cache = cache or CacheReport()

    @property
    def proto(self) -> onnx.ModelProto:
        """The model with its weights as initializers, and its state as it is now.

        State, the buffers that the model itself updates, is an input, too: its initializer is what a session
        starts from that is not given another value.

        That of :attr:`torch2ort.ORTModule.exported` holds the weights as they are at each access.
        """
        if self._graph.weights:
            return _with_weights(self._graph, self._weights)
        return self._graph.proto

    @property
    def input_schema(self) -> io_schema.Schema:
        """Schema of the arguments, bound to their names."""
        return self._interface.inputs

    @property
    def output_schema(self) -> io_schema.Schema:
        """Schema of what the model returns."""
        return self._interface.outputs

    @property
    def python_ops(self) -> tuple[PythonOpSite, ...]:
        """Every PythonOp node of the graph, in the order of the nodes."""
        return tuple(
            PythonOpSite(site.func_name, site.function, name, site.constants)
            for name, site in self._graph.sites.items()
            if not site.internal
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to one ``.onnx`` file, atomically; past 2 GiB its weights go beside it.

        Args:
            path: the file; one that exists is replaced.

        Raises:
            ExportError: an argument of a Function is an object that a file cannot hold.
            OSError: the file cannot be written.
        """
        for site in self._graph.sites.values():
            found = unstorable(site)
            if found is not None:
                position, value = found
                raise ExportError(
                    f"{site.func_name}: argument {position} is an object of type "
                    f"{type(value).__qualname__}, which a file cannot hold; "
                    f"pass numbers, strings, None, dtypes or tuples, lists and dicts of them instead"
                )
        model = onnx.ModelProto()
        model.CopyFrom(self.proto)
        del model.metadata_props[:]
        onnx.helper.set_model_props(model, {METADATA_KEY: self._metadata()})
        _write(model, Path(path))

    def _metadata(self) -> str:
        graph, interface = self._graph, self._interface
        return json.dumps(
            {
                "version": FORMAT_VERSION,
                "training": self.training,
                "signature": interface.signature.to_json(),
                "inputs": interface.inputs.to_json(),
                "outputs": interface.outputs.to_json(),
                "dims": [list(d) for d in interface.sizes.dims],
                "ranges": {name: list(bounds) for name, bounds in interface.sizes.ranges.items()},
                "guards": list(interface.sizes.guards),
                "returned": [list(pair) for pair in interface.returned],
                "graph_inputs": list(graph.inputs),
                "graph_outputs": list(graph.outputs),
                "state": state_of(graph),
                "mutations": [[m.output, m.kind, m.target] for m in graph.mutations],
            }
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on ONNX Runtime, without gradients, in the mode that was exported.

        Buffers that the model updates are state, as in the model: a call starts from what the last one left.
        Calls of :attr:`torch2ort.ORTModule.exported` update the module's own buffers.

        Raises:
            SchemaMismatchError: the call differs from the exported one.
            EngineError: ONNX Runtime failed. An exception of a Function arrives as it is.
        """
        tensors, bound = self._interface.tensors(args, kwargs)
        feeds = [*tensors, *(self._weights[name] for name in self._graph.weights)]
        fetched = self._engine().run(feeds)
        count = len(self._graph.outputs)
        inputs = dict(zip(self._graph.inputs, tensors, strict=True))
        state = {origin: self._weights[name] for name, origin in state_of(self._graph).items()}
        with torch.no_grad():
            for mutation, value in zip(self._graph.mutations, fetched[count:], strict=True):
                # A buffer that is written and never read is no state.
                target = (inputs if mutation.kind == "input" else state).get(mutation.target)
                if target is not None:
                    target.copy_(value)
        return self._interface.result(bound, fetched[:count])

    def _engine(self) -> InferenceEngine:
        deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic not in self._engines:
            options = with_arguments(self._options, deterministic=deterministic or None)
            self._engines[deterministic] = InferenceEngine(self._graph, options)
        return self._engines[deterministic]

    def session(self, *, providers: Sequence[Any] | None = None, session_options: Any = None) -> Any:
        """An ``onnxruntime.InferenceSession`` over the graph, PythonOp nodes included.

        Args:
            providers: as for ``InferenceSession``; the CPU by default.
            session_options: as for ``InferenceSession``.

        Raises:
            RuntimeNotFoundError: no onnxruntime is installed.
            EngineError: onnxruntime refuses the model.
        """
        return inference_session(
            self.proto, self._graph.sites, providers=providers, session_options=session_options
        )

    def __repr__(self) -> str:
        mode = "training" if self.training else "inference"
        nodes = len(self._graph.proto.graph.node)
        return f"ExportedModel({mode}, {nodes} nodes, {len(self.python_ops)} PythonOps)"


def state_of(graph: Graph) -> dict[str, str]:
    """Graph input -> name, of the buffers that the model reads and updates."""
    updated = {m.target for m in graph.mutations if m.kind == "buffer"}
    return {name: origin for name, origin in graph.weights.items() if origin in updated}


def frozen(graph: Graph, weights: Mapping[str, torch.Tensor]) -> tuple[Graph, dict[str, torch.Tensor]]:
    """``graph`` with the present values of its weights in it, but for its state, which is beside it."""
    state = state_of(graph)
    fixed = replace(graph, weights={name: o for name, o in graph.weights.items() if name not in state})
    with torch.inference_mode(False):
        values = {name: weights[name].detach().clone() for name in state}
    return replace(graph, proto=_with_weights(fixed, weights), weights=state), values


def load(
    path: str | os.PathLike[str], *, functions: Iterable[type[torch.autograd.Function]] = ()
) -> ExportedModel:
    """Read a model that :meth:`ExportedModel.save` wrote.

    A name in the file resolves only to one of ``functions`` or to what :func:`register_function` was
    given: nothing is imported, and no address of a file is ever used.

    Args:
        path: the ``.onnx`` file.
        functions: the classes that the model's PythonOp nodes call.

    Raises:
        ModelLoadError: the file is damaged, was not written by torch2ort, or calls a class with other
            arguments than it takes.
        FunctionNotFoundError: a name is not resolved; lists all of them.
    """
    file = Path(path)
    try:
        model = _seal.read(file)
        onnx.checker.check_model(content_of(model) or os.fspath(file))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{file}: there is no such file") from error
    except ModelLoadError as error:
        raise ModelLoadError(f"{file}: {error}") from error
    except Exception as error:
        raise ModelLoadError(
            f"{file}: not a readable ONNX model ({error}); save it again with ExportedModel.save"
        ) from error
    texts = {p.key: p.value for p in model.metadata_props}
    if METADATA_KEY not in texts:
        raise ModelLoadError(
            f"{file}: an ONNX model, but not one that torch2ort saved (it has no '{METADATA_KEY}' metadata); "
            f"run it with onnxruntime.InferenceSession, or export the PyTorch model with torch2ort.export"
        )
    try:
        data = json.loads(texts[METADATA_KEY])
        if data["version"] != FORMAT_VERSION:
            raise ModelLoadError(
                f"written in format {data['version']!r}, this torch2ort reads {FORMAT_VERSION}"
            )
        interface = _load_interface(data)
        sites = load_sites(model.graph)
        state = dict(data.get("state", {}))
        values = _take_state(model, state)
        graph = Graph(
            proto=model,
            inputs=tuple(data["graph_inputs"]),
            weights=state,
            outputs=tuple(data["graph_outputs"]),
            mutations=tuple(Mutation(*entry) for entry in data["mutations"]),
            sites=sites,
        )
        check_functions(model)
        check_interface(graph, interface.inputs, interface.outputs, interface.sizes, interface.returned)
        training = bool(data["training"])
    except ModelLoadError as error:
        raise ModelLoadError(f"{file}: {error}") from error
    except Exception as error:  # whatever a text that somebody else wrote leads to
        raise ModelLoadError(f"{file}: its torch2ort metadata is damaged ({error})") from error
    try:
        bind_classes(sites.values(), functions)
    except ModelLoadError as error:
        raise ModelLoadError(f"{file}: {error}") from error
    return ExportedModel(graph, values, interface, training=training, options=Options())


def _load_interface(data: Mapping[str, Any]) -> Interface:
    inputs = io_schema.Schema.from_json(data["inputs"])
    ranges = {name: (low, high) for name, (low, high) in data["ranges"].items()}
    return Interface(
        signature=io_schema.Signature.from_json(data["signature"]),
        inputs=inputs,
        outputs=io_schema.Schema.from_json(data["outputs"]),
        sizes=Sizes(data["graph_inputs"], data["dims"], ranges, data["guards"]),
        returned=tuple((int(output), int(given)) for output, given in data.get("returned", ())),
    )


def _with_weights(graph: Graph, weights: Mapping[str, torch.Tensor]) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.CopyFrom(graph.proto)
    state = state_of(graph)
    inputs = [v for v in model.graph.input if v.name not in graph.weights or v.name in state]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(_initializer(name, weights[name]) for name in graph.weights)
    return model


def _take_state(model: onnx.ModelProto, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The values that ``model`` starts from, taken out of it: they are fed in each call.

    Raises:
        KeyError: one is missing.
    """
    initializers = {value.name: value for value in model.graph.initializer}
    if not names.keys() <= {value.name for value in model.graph.input}:
        raise KeyError("state")
    values = {name: _tensor(initializers[name]) for name in names}
    for name in names:
        model.graph.initializer.remove(initializers[name])
    return values


_DTYPES = {number: dtype for dtype, number in ONNX_TYPES.items()}


def _tensor(initializer: onnx.TensorProto) -> torch.Tensor:
    content = onnx.numpy_helper.to_array(initializer).tobytes()
    dtype = _DTYPES[initializer.data_type]
    if not content:
        return torch.empty(list(initializer.dims), dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(list(initializer.dims))


def _initializer(name: str, tensor: torch.Tensor) -> onnx.TensorProto:
    tensor = tensor.detach().cpu().contiguous()
    return onnx.TensorProto(
        name=name,
        dims=list(tensor.shape),
        data_type=ONNX_TYPES[tensor.dtype],
        raw_data=tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"",
    )


def _write(model: onnx.ModelProto, path: Path) -> None:
    """Write beside ``path`` and rename: a reader sees the old file or the new one."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        file = Path(folder, path.name)
        content = content_of(model)
        if content is None:
            content = _write_data(model, file.with_name(f"{path.name}.data"))
        with file.open("wb") as opened:
            opened.writelines(_seal.sealed(content))
        for written in sorted(Path(folder).iterdir(), reverse=True):
            # The data before the model that refers to it.
            os.replace(written, path.with_name(written.name))


def _write_data(model: onnx.ModelProto, path: Path) -> bytes:
    """Move the weights of ``model`` to the file ``path``; what is left, serialized."""
    onnx.external_data_helper.convert_model_to_external_data(model, location=path.name)
    onnx.external_data_helper.write_external_data_tensors(model, str(path.parent))
    _seal.seal_data(model, path)
    content: bytes = model.SerializeToString()
    return content

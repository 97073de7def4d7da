"""ORTModule: a module whose forward and backward run on ONNX Runtime."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch2ort import io_schema
from torch2ort._boundary import Boundary
from torch2ort._built import Built, Call
from torch2ort._trace import DimSpec
from torch2ort._verify import Verification
from torch2ort._watch import Watch
from torch2ort.errors import EngineError, ExportError, Torch2OrtWarning
from torch2ort.export import build
from torch2ort.exported_model import ExportedModel
from torch2ort.log import apply_level, logger
from torch2ort.options import Options, with_arguments
from torch2ort.runtime import InferenceEngine, TrainingEngine

Shapes = tuple[torch.Size, ...]
# A call's schema, what Watch says of the model, and which of its inputs require gradients.
_Key = tuple[io_schema.Schema, tuple[Any, ...], tuple[bool, ...]]
_MANY_SETTINGS = 5


class ORTModule(torch.nn.Module):
    """Runs ``model`` on ONNX Runtime, gradients too.

    The new module *is* the model in all but ``forward``: it shares the model's attributes, parameters,
    buffers, submodules, hooks and mode (the very same objects), and is an instance of its class.

    Args:
        model: the module to run. It stays usable by itself, in eager PyTorch.
        options: settings; see :class:`torch2ort.Options`.

    Raises:
        OptionError: ``options`` is not an :class:`Options`.
        ExportError: ``model`` is no module.

    The first call exports. A later call exports again if the structure, a dtype, rank or constant of its
    arguments, the mode of a module, or which tensors require gradients is another than before.

    Calls raise:
        UnsupportedOperatorError: the engine cannot run an operator correctly; before any step has run.
        EngineError: ONNX Runtime failed. Exceptions of the user's own code arrive as they are.
    """

    _runner: _Runner

    def __new__(cls, model: torch.nn.Module, *, options: Options | None = None) -> ORTModule:
        """Make an instance of a class of its own, below both ORTModule and the model's class."""
        if isinstance(model, ORTModule):
            raise ExportError("ORTModule: the model is already an ORTModule; wrap the original model once")
        if not isinstance(model, torch.nn.Module):
            raise ExportError(f"ORTModule: expected a torch.nn.Module, got {type(model).__name__}")
        runner = _Runner(model, with_arguments(options))
        namespace = {"_runner": runner, "__doc__": type(model).__doc__, "__module__": type(model).__module__}
        kind = types.new_class(
            "ORTModule", (ORTModule, type(model)), exec_body=lambda body: body.update(namespace)
        )
        module: ORTModule = object.__new__(kind)
        # One dictionary for both: whatever is set on one is set on the other.
        object.__setattr__(module, "__dict__", model.__dict__)
        return module

    def __init__(self, model: torch.nn.Module, *, options: Options | None = None) -> None:
        """See the class; everything was done in ``__new__``, and the shared attributes stay as they are."""

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """The model's forward on ONNX Runtime; same signature, same outputs."""
        # A property, so that an instance attribute `forward` of the model cannot stand in front of it.
        return type(self)._runner.forward

    @property
    def exported(self) -> ExportedModel | None:
        """The exported model behind the last forward; ``None`` before the first."""
        return type(self)._runner.exported

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles carry the model and the options; the graphs are built again."""
        runner = type(self)._runner
        return _rebuild, (runner.model, runner.options)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """See :meth:`__reduce__`."""
        return self.__reduce__()


def _rebuild(model: torch.nn.Module, options: Options) -> ORTModule:
    return ORTModule(model, options=options)


@dataclass
class _Variant:
    """One exported graph with the engines built for it."""

    built: Built
    exported: ExportedModel
    requires_grad: frozenset[str]
    options: Options
    verified: bool = False
    _training: TrainingEngine | None = None
    _inference: InferenceEngine | None = None
    _picks: tuple[tuple[str, ...], list[int | torch.Tensor]] | None = None

    def pick(self, names: tuple[str, ...], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The graph's weights out of the module's present tensors, and its constants."""
        if self._picks is None or self._picks[0] is not names:
            graph, constants = self.built.graph, self.built.weights
            where = {name: i for i, name in enumerate(names)}
            picks = [where.get(origin, constants[name]) for name, origin in graph.weights.items()]
            self._picks = (names, picks)
        return [tensors[p] if isinstance(p, int) else p for p in self._picks[1]]

    def training_engine(self) -> TrainingEngine:
        if self._training is None:
            self._training = TrainingEngine(
                self.built.graph, self.requires_grad, self.options, self.built.shelf
            )
        return self._training

    def inference_engine(self) -> InferenceEngine:
        if self._inference is None:
            self._inference = InferenceEngine(self.built.graph, self.options, self.built.shelf)
        return self._inference


@dataclass
class _Family:
    """The variants that differ only in the sizes they were exported for."""

    variants: list[_Variant] = field(default_factory=list)
    by_shapes: dict[Shapes, _Variant] = field(default_factory=dict)
    seen: list[Shapes] = field(default_factory=list)

    def find(self, shapes: Shapes) -> _Variant | None:
        known = self.by_shapes.get(shapes)
        if known is not None:
            return known
        for variant in reversed(self.variants):
            if variant.built.interface.sizes.mismatch(shapes) is None:
                self.by_shapes[shapes] = variant
                return variant
        return None

    def varying(self, shapes: Shapes) -> list[DimSpec]:
        """Per input, the dimensions whose size was another in an earlier call."""
        return [
            {
                axis: torch.export.Dim.AUTO
                for axis, size in enumerate(shape)
                if any(earlier[i][axis] != size for earlier in self.seen)
                or any(a[i][axis] != b[i][axis] for a in self.seen for b in self.seen)
            }
            or None
            for i, shape in enumerate(shapes)
        ]


class _Runner:
    """Chooses the graph for a call, exports when there is none, and runs it."""

    def __init__(self, model: torch.nn.Module, options: Options) -> None:
        self.model = model
        self.options = options
        self.exported: ExportedModel | None = None
        apply_level(options)
        self._signature = io_schema.Signature.of(model.forward)
        self._watch = Watch(model)
        self._families: dict[_Key, _Family] = {}
        # Per all else that a graph depends on: the settings of the modules that were met.
        self._settings: dict[Hashable, list[Any]] = {}
        self._last_schema: io_schema.Schema | None = None

        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(args, kwargs)

        self.forward = forward

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_autocast_enabled("cpu"):
            raise EngineError(
                "ORTModule was called under torch.autocast, which chooses dtypes call by call while a "
                "graph has fixed "
                "ones. Convert the model and its inputs with .to(dtype), or call it outside of autocast"
            )
        bound = self._signature.bind(args, kwargs)
        tensors, schema = self._flatten(bound)
        weights = self._watch.tensors()
        variant = self._variant(tensors, schema, weights)
        self.exported = variant.exported
        built = variant.built
        feeds = [*tensors, *variant.pick(self._watch.names, weights)]
        verification = self._verification(variant, schema, tensors)
        if variant.requires_grad and torch.is_grad_enabled() and variant.training_engine().differentiable:
            fetched = Boundary.apply(variant.training_engine(), verification, *feeds)
        else:
            fetched = variant.inference_engine().run(feeds)
        count = len(built.graph.outputs)
        if verification is not None:
            verification.check_outputs(fetched[:count])
        if len(fetched) > count:
            self._write_back(built, tensors, fetched[count:])
        return built.interface.result(bound, fetched[:count])

    def _verification(
        self, variant: _Variant, schema: io_schema.Schema, tensors: list[torch.Tensor]
    ) -> Verification | None:
        """The eager run that the first run of a graph is compared with, if that was asked for."""
        if not self.options.verify or variant.verified:
            return None
        variant.verified = True
        return Verification(self.model, self._signature, schema, tensors)

    def _flatten(self, bound: dict[str, Any]) -> tuple[list[torch.Tensor], io_schema.Schema]:
        """The call's tensors and their schema; a call like the last one is only compared, not described."""
        if self._last_schema is not None:
            tensors = self._last_schema.match(bound)
            if tensors is not None:
                return tensors, self._last_schema
        tensors, self._last_schema = io_schema.flatten(bound)
        return tensors, self._last_schema

    def _variant(
        self, tensors: list[torch.Tensor], schema: io_schema.Schema, weights: list[torch.Tensor]
    ) -> _Variant:
        key = self._key(tensors, schema, weights)
        family = self._families.get(key)
        if family is None:
            family = self._families[key] = _Family()
            self._warn_of_settings(key)
        shapes: Shapes = tuple([t.shape for t in tensors])
        variant = family.find(shapes)
        if variant is None:
            variant = self._export(family, tensors, schema, shapes)
            # Tracing runs forward, which may count its calls in an attribute.
            self._families.setdefault(self._key(tensors, schema, weights), family)
        return variant

    def _warn_of_settings(self, key: _Key) -> None:
        """Say that an attribute of a module makes an export of every call."""
        schema, (settings, *rest), gradients = key
        before = self._settings.setdefault((schema, tuple(rest), gradients), [])
        before.append(settings)
        if len(before) == _MANY_SETTINGS:
            warnings.warn(
                f"{type(self.model).__name__}: the attribute {self._watch.changed(before[-2])} changes from "
                f"call to call, and each of its values gets a graph of its own, {len(before)} so far. Pass "
                f"what varies as a tensor, or keep it out of the model",
                Torch2OrtWarning,
                stacklevel=6,
            )

    def _key(
        self, tensors: list[torch.Tensor], schema: io_schema.Schema, weights: list[torch.Tensor]
    ) -> _Key:
        """All that a graph depends on, apart from the sizes of its inputs."""
        return schema, self._watch.state(weights), tuple([t.requires_grad for t in tensors])

    def _export(
        self, family: _Family, tensors: Sequence[torch.Tensor], schema: io_schema.Schema, shapes: Shapes
    ) -> _Variant:
        samples = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        varying = family.varying(shapes)
        family.seen.append(shapes)
        built = None
        if any(varying):
            try:
                built = self._build(samples, schema, varying)
            except ExportError as error:
                logger.info("no graph for varying sizes (%s); exporting for %s alone", error, shapes)
            else:
                if built.interface.sizes.mismatch(shapes) is not None:
                    built = None
        if built is None:
            built = self._build(samples, schema, [None] * len(samples))
        exported = ExportedModel(
            built.graph,
            built.weights,
            built.interface,
            training=built.training,
            options=self.options,
            cache=built.report,
        )
        requires_grad = {n for n, t in zip(built.graph.inputs, tensors, strict=True) if t.requires_grad}
        requires_grad |= {n for n, t in built.weights.items() if t.requires_grad}
        variant = _Variant(built, exported, frozenset(requires_grad), self.options)
        family.variants.append(variant)
        family.by_shapes[shapes] = variant
        return variant

    def _build(
        self, samples: Sequence[torch.Tensor], schema: io_schema.Schema, dim_specs: Sequence[DimSpec]
    ) -> Built:
        call = Call(self._signature, samples, schema, dim_specs)
        # The wrapper's own __call__ runs the model's hooks around forward, so the graph must not.
        trained = any(t.requires_grad for t in (*samples, *self.model.parameters()))
        return build(
            self.model, call, training=None, differentiate=trained, options=self.options, with_hooks=False
        )

    def _write_back(
        self, built: Built, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        if not values:
            return
        targets = dict(zip(built.graph.inputs, tensors, strict=True))
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for mutation, value in zip(built.graph.mutations, values, strict=True):
                target = buffers[mutation.target] if mutation.kind == "buffer" else targets[mutation.target]
                target.copy_(value)

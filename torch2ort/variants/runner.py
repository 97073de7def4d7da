"""What an ORTModule does with a call: chooses the graph, exports when there is none, and runs it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from torch2ort import io_schema
from torch2ort.cache.key.key import tensor_of
from torch2ort.capture.call import Call, DimSpec
from torch2ort.capture.modes import Modes
from torch2ort.capture.numbers import Numbers, ReadInPythonError
from torch2ort.capture.ordinary import ordinary, refuse_tensors
from torch2ort.capture.origins import put_back
from torch2ort.capture.views import put_views
from torch2ort.engines.autograd import Boundary
from torch2ort.engines.choose import target_of, training_target
from torch2ort.engines.verification import Verification
from torch2ort.errors import ExportError, Torch2OrtWarning
from torch2ort.exported_model import ExportedModel
from torch2ort.exports.build import build
from torch2ort.exports.built import Built
from torch2ort.graph.graph import with_outputs
from torch2ort.log import apply_level, logger
from torch2ort.options import Options, with_arguments
from torch2ort.variants import _torch_private as private
from torch2ort.variants.assumptions import Assumed, Assumptions
from torch2ort.variants.family import Family, Shapes, Variant

# A call's schema, which of its inputs require gradients, PyTorch's switches, which inputs stand for numbers.
_Key = tuple[io_schema.Schema, tuple[bool, ...], Modes, frozenset[int]]
_MANY_SETTINGS = 5


class Given(NamedTuple):
    """A call, as a graph takes it.

    Attributes:
        tensors: its tensors, flat.
        schema: the structure around them.
        modes: PyTorch's switches.
        numbers: positions of the tensors that stand for numbers.
    """

    tensors: list[torch.Tensor]
    schema: io_schema.Schema
    modes: Modes
    numbers: frozenset[int] = frozenset()


class Runner:
    """Runs calls of a model on ONNX Runtime.

    Attributes:
        model: the model.
        options: settings.
        exported: the exported model behind the last call; ``None`` before the first.
    """

    def __init__(self, model: torch.nn.Module, options: Options) -> None:
        self.model = model
        self.options = options
        self.exported: ExportedModel | None = None
        apply_level(options)
        self._own_forward = model.__dict__.get("forward")
        self._signature = io_schema.Signature.of(model.forward)
        self._assumptions = Assumptions(model, trust=options.guards == "trust")
        # Per all else that a graph depends on: the constants that were met.
        self._constants: dict[Hashable, list[io_schema.Schema]] = {}
        self._last_schema: io_schema.Schema | None = None
        self._numbers = Numbers()
        # Those whose numbers are constants of a graph that there is.
        self._with_constants: set[io_schema.Schema] = set()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns for these arguments."""
        _refuse_surroundings()
        if self.model.__dict__.get("forward") is not self._own_forward:
            self._own_forward = self.model.__dict__.get("forward")
            self._signature = io_schema.Signature.of(self.model.forward)
        bound = self._signature.bind(args, kwargs)
        tensors, schema = self._flatten(bound)
        if any(isinstance(tensor, private.TRACED) for tensor in tensors):
            # As a part of a model that is exported whole, it is the module that it wraps.
            return self.model.forward(*args, **kwargs)
        refuse_tensors(tensors, schema)
        given = Given(tensors, schema, Modes.now())
        tensors, assumed, variant = self._chosen(given)
        names, weights = self._assumptions.weights(assumed)
        self.exported = variant.exported
        built = variant.built
        feeds = [*tensors, *variant.pick(names, weights)]
        verification = self._verification(variant, given)
        fetched: list[torch.Tensor] = []
        if not built.graph.fetches:
            pass  # A model of no tensors, for which there is no session.
        elif variant.requires_grad and variant.differentiable:
            engine, around = variant.training_engine(), assumed.while_functions_run
            fetched = list(Boundary.apply(engine, verification, around, *feeds))
        else:
            inference = variant.inference_engine()
            with assumed.while_functions_run():
                fetched = inference.run(feeds)
        count = len(built.graph.outputs)
        if len(fetched) > count:
            self._write_back(built, tensors, fetched[count:])
        outputs = fetched[:count]
        if any(built.origins) or any(built.views):
            known = dict(zip(names, weights, strict=True))
            put_back(outputs, built.origins, tensors, known)
            put_views(outputs, built.views, built.tracked, tensors, known, built.interface.sizes.dims)
        if verification is not None:
            verification.check_outputs(outputs)
        returned = len(built.interface.outputs.leaves)
        if built.effects:
            built.effects.leave(outputs[returned:])
            assumed.guards.accept(built.effects.owners)
        return built.interface.result(bound, outputs[:returned])

    def _verification(self, variant: Variant, given: Given) -> Verification | None:
        """The eager run that the first run of a graph is compared with, if that was asked for."""
        if not self.options.verify or variant.verified:
            return None
        variant.verified = True
        return Verification(self.model, self._signature, given.schema, given.tensors)

    def _flatten(self, bound: dict[str, Any]) -> tuple[list[torch.Tensor], io_schema.Schema]:
        """The call's tensors and their schema; a call like the last one is only compared, not described."""
        if self._last_schema is not None:
            tensors = self._last_schema.match(bound)
            if tensors is not None:
                return tensors, self._last_schema
        tensors, self._last_schema = io_schema.flatten(bound)
        return tensors, self._last_schema

    def _chosen(self, given: Given) -> tuple[list[torch.Tensor], Assumed, Variant]:
        """The tensors to feed, the present state and its graph: for numbers that vary, if there is one."""
        tensors, schema, numbers = self._numbers.lift(given.tensors, given.schema)
        if numbers and given.schema not in self._with_constants and not self._assumptions.asks_types:
            try:
                assumed, variant = self._variant(Given(tensors, schema, given.modes, numbers))
                # What the engine cannot do with a number as an input shows when it is built.
                if variant.requires_grad:
                    variant.training_engine()
            except (Exception, ReadInPythonError) as error:
                # Not only torch2ort's: a number that is an input breaks code that runs with any value.
                logger.info("no graph for varying numbers (%s)", error or type(error).__name__)
                self._numbers.refuse(given.schema)
            else:
                return tensors, assumed, variant
        if given.schema.constants:
            self._with_constants.add(given.schema)
        return given.tensors, *self._variant(given)

    def _variant(self, given: Given) -> tuple[Assumed, Variant]:
        tensors, schema, modes, numbers = given
        key = schema, tuple([t.requires_grad for t in tensors]), modes, numbers
        assumed, count = self._assumptions.now(key, tensors, schema)
        if count == 1:
            self._warn_of_constants(key)
        elif count == _MANY_SETTINGS:
            self._warn(
                f"{self._assumptions.change} changes from call to call, and each of its values gets a "
                f"graph of its own, {count} so far. Pass what varies as a tensor, or keep it out of the model"
            )
        shapes: Shapes = tuple([t.shape for t in tensors])
        variant = assumed.family.find(shapes)
        if variant is None:
            variant = self._export(assumed, given, shapes)
            self._assumptions.after_export(assumed, tensors, schema, variant.built.effects.unread)
        return assumed, variant

    def _warn_of_constants(self, key: _Key) -> None:
        """Say that a number or text among the arguments makes an export of every call."""
        schema, *other = key
        before = self._constants.setdefault((schema.form, *other), [])
        before.append(schema)
        if len(before) == _MANY_SETTINGS:
            path = before[-2].differing_path(schema, root="inputs")
            self._warn(
                f"the argument {path} is no tensor and changes from call to call, and each of its values "
                f"gets a graph of its own, {len(before)} so far. Pass it as a tensor, as torch.tensor(value)"
            )

    def _warn(self, sentence: str) -> None:
        warnings.warn(
            f"{type(self.model).__name__}: {sentence}", Torch2OrtWarning, stacklevel=_levels_to_the_user()
        )

    def _export(self, assumed: Assumed, given: Given, shapes: Shapes) -> Variant:
        tensors, modes, family = given.tensors, given.modes, assumed.family
        built = self._build(family, given, shapes)
        if not modes.gradients and any(
            tracked and origin is None and view is None
            for tracked, origin, view in zip(built.tracked, built.origins, built.views, strict=True)
        ):
            raise ExportError(
                f"{type(self.model).__name__}: forward was called with gradients switched off, switches them "
                f"on itself and returns a tensor that requires one, which a graph cannot do. Call the model "
                f"with gradients switched on, or return the detach() of what needs none"
            )
        requires_grad = {n for n, t in zip(built.graph.inputs, tensors, strict=True) if t.requires_grad}
        requires_grad |= {n for n, t in built.weights.items() if t.requires_grad}
        # The module's tensors are looked up in each call: other ones may stand in their place by then.
        constants = {
            n: t for n, t in built.weights.items() if tensor_of(self.model, built.graph.weights[n]) is None
        }
        weights = PresentWeights(self.model, built.graph.weights, constants)
        built = replace(built, weights=constants)
        options = with_arguments(self.options, deterministic=True if modes.deterministic else None)
        built.effects.take()
        returned = len(built.interface.outputs.leaves)
        exported = ExportedModel(
            with_outputs(built.graph, returned),
            weights,
            built.interface,
            training=built.training,
            options=options,
            cache=built.report,
        )
        wanted = frozenset(requires_grad) if modes.gradients else frozenset()
        variant = Variant(built, weights, exported, wanted, options)
        family.variants.append(variant)
        family.by_shapes[shapes] = variant
        return variant

    def _build(self, family: Family, given: Given, shapes: Shapes) -> Built:
        """A graph for varying sizes if some vary and there is one, else one for these sizes alone."""
        varying = family.varying(shapes)
        family.seen.append(shapes)
        if any(varying) and varying not in family.refused:
            try:
                built = self._built(given, varying)
            except Exception as error:
                # Not only torch2ort's: a size that is a symbol breaks code that runs with each of its values.
                logger.info("no graph for varying sizes (%s); exporting for %s alone", error, shapes)
                family.refused.append(varying)
            else:
                if built.interface.sizes.mismatch(shapes) is None:
                    return built
        return self._built(given, [None] * len(shapes))

    def _built(self, given: Given, dim_specs: Sequence[DimSpec]) -> Built:
        # Of its own for each attempt: torch.export leaves marks on them when it fails.
        samples = [ordinary(t) for t in given.tensors]
        call = Call(self._signature, samples, given.schema, dim_specs, given.numbers)
        # The wrapper's own __call__ runs the model's hooks around forward, so the graph must not.
        trained = given.modes.gradients and any(
            t.requires_grad for t in (*samples, *self.model.parameters(), *self.model.buffers())
        )
        target = training_target(self.options) if trained else target_of(self.options, differentiate=False)
        return build(self.model, call, training=None, target=target, options=self.options, with_hooks=False)

    def _write_back(
        self, built: Built, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        targets = dict(zip(built.graph.inputs, tensors, strict=True))
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for mutation, value in zip(built.graph.mutations, values, strict=True):
                target = buffers[mutation.target] if mutation.kind == "buffer" else targets[mutation.target]
                target.copy_(value)


class PresentWeights(Mapping[str, torch.Tensor]):
    """A graph's weights as they are in the model at each access.

    Args:
        model: the model.
        origins: graph input -> name of the model's tensor.
        constants: graph input -> tensor, of those that are none of the model's.
    """

    def __init__(
        self, model: torch.nn.Module, origins: Mapping[str, str], constants: Mapping[str, torch.Tensor]
    ) -> None:
        self._model = model
        self._origins = origins
        self._constants = constants

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor that is fed to the graph's input ``name``."""
        if name in self._constants:
            return self._constants[name]
        tensor = tensor_of(self._model, self._origins[name])
        if tensor is None:
            raise ExportError(
                f"{type(self._model).__name__}: this graph was exported when the model had a "
                f"tensor '{self._origins[name]}', which it has no longer. Call the module, and use its new "
                f"attribute 'exported'"
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        """The graph's inputs."""
        return iter(self._origins)

    def __len__(self) -> int:
        """How many."""
        return len(self._origins)


def _refuse_surroundings() -> None:
    """Refuse a call inside of what changes the meaning of operators and does not reach a graph.

    Raises:
        ExportError: it is inside of autocast, a torch.func transform or forward-mode differentiation.
    """
    if torch.is_autocast_enabled("cpu"):
        raise ExportError(
            "ORTModule was called under torch.autocast, which chooses dtypes call by call while a graph has "
            "fixed ones. Convert the model and its inputs with .to(dtype), or call it outside of autocast"
        )
    if private.in_transform():
        raise ExportError(
            "ORTModule was called inside a torch.func transform (vmap, grad, jvp, ...), which does not reach "
            "into a graph. Transform the original model, ORTModule(...).module, or use loss.backward()"
        )
    if private.in_forward_mode():
        raise ExportError(
            "ORTModule was called inside torch.autograd.forward_ad.dual_level(), and a graph has no "
            "forward-mode derivative. Call the original model, ORTModule(...).module, there"
        )


def _levels_to_the_user() -> int:
    """For a warning out of the function that calls this: the level of the first frame that is the user's."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        "torch2ort",
        "torch",
    ):
        frame, level = frame.f_back, level + 1
    return level

"""The run of an ORTModule call: it has the results and side effects of the model's forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from torch2ort import io_schema
from torch2ort._native import Switches
from torch2ort._torch import call_context as private
from torch2ort.capture.plain_tensors import are_plain, refuse_tensors
from torch2ort.capture.sample_call import Call
from torch2ort.capture.torch_modes import Modes
from torch2ort.errors import ExportError
from torch2ort.exported_model import ExportedModel
from torch2ort.log import apply_level
from torch2ort.options import Options
from torch2ort.program.program import Program
from torch2ort.support.lazy import Lazy
from torch2ort.support.startup_timing import DIFFERENTIATE, FIRST_RUN, Startup
from torch2ort.training import autograd_function
from torch2ort.training.verification import Verification
from torch2ort.variants.dispatch import VariantSelector
from torch2ort.variants.guarded_state import GuardedState
from torch2ort.variants.parallel.deepspeed import DeepSpeedModel, deepspeed_model
from torch2ort.variants.parallel.fsdp import gathered, has_process_group, sharded_below
from torch2ort.variants.profile import Profile
from torch2ort.variants.shape_variants import Variant


class Runner:
    """A model whose calls run on ONNX Runtime.

    Attributes:
        model: the model.
        options: settings.
        startup: timings of exports and first runs.
        profile: the profile of the next calls; ``None`` if there is none.
        hidden_forward: the wrapper's ``forward`` as torch.compile calls it.
        counted_in_keys: the attributes that are a part of an export's key, where the code of a model reaches
            its own ORTModule, as inside of accelerate's autocast; the other attributes change in every call.
    """

    hidden_forward: Lazy[Callable[..., Any]]
    counted_in_keys = frozenset({"model", "options"})

    def __init__(self, model: torch.nn.Module, options: Options) -> None:
        self.model = model
        self.options = options
        self._served_by: Variant | None = None
        self._is_sharded = False
        apply_level(options)
        self._own_forward = model.__dict__.get("forward")
        self._signature = io_schema.Signature.of(model.forward)
        self.startup = Startup(type(model).__name__)
        self._selector = VariantSelector(model, options, self.startup)
        self._last_schema: io_schema.Schema | None = None
        self.profile: Profile | None = None
        self._watched: dict[int, Variant] = {}

    @property
    def exported(self) -> ExportedModel | None:
        """The exported model that served the last call; ``None`` before the first."""
        return None if self._served_by is None else self._served_by.exported

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model's outputs for these arguments."""
        if not _in_usual_surroundings():
            _refuse_surroundings()
        if torch.compiler.is_exporting() or not has_process_group():
            # While a model that contains this one is exported, the weights of all of it are gathered.
            return self._run(args, kwargs, None)
        modules, parted = sharded_below(self.model), deepspeed_model(self.model)
        if not modules and parted is None:
            return self._run(args, kwargs, None)
        self._is_sharded = True
        with gathered(modules), parted.restore_original() if parted else nullcontext():
            return self._run(args, kwargs, parted)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], parted: DeepSpeedModel | None) -> Any:
        if self.model.__dict__.get("forward") is not self._own_forward:
            self._own_forward = self.model.__dict__.get("forward")
            self._signature = io_schema.Signature.of(self.model.forward)
        modes = Modes.now()
        unbound = self._selector.select_unbound(args, kwargs, modes)
        if unbound is not None:
            return self._serve(unbound, None, modes, {}, parted)
        bound = self._signature.bind(args, kwargs)
        tensors, schema = self._flatten(bound)
        call = Call(self._signature, tensors, schema, modes)
        chosen = self._selector.select_repeated(call)
        if chosen is None:
            if not are_plain(tensors) and any(isinstance(tensor, private.TRACED) for tensor in tensors):
                # In the export of a model that contains this one, the wrapped module is called.
                return self.model.forward(*args, **kwargs)
            refuse_tensors(tensors, schema)
            chosen = self._selector.select(call)
            self._selector.record_form(args, kwargs, bound, call)
        return self._serve(chosen, call, modes, bound, parted)

    def _serve(
        self,
        chosen: tuple[list[torch.Tensor], GuardedState, Variant],
        call: Call | None,
        modes: Modes,
        bound: dict[str, Any],
        parted: DeepSpeedModel | None,
    ) -> Any:
        """Return the model's outputs for a call.

        Args:
            chosen: the tensors to feed, the model's state, and the graph.
            call: the call; ``None`` for one of the same form as the last one.
            modes: PyTorch's modes.
            bound: the arguments by name; empty where all are tensors.
            parted: DeepSpeed's changes to the model.
        """
        tensors, assumed, variant = chosen
        names, weights = self._selector.guarded_states.weights(assumed)
        self._served_by = variant
        program = variant.program
        if program.writer is not None and private.in_checkpoint():
            _refuse_to_write_twice(program, type(self.model).__name__)
        if variant.written is not None:
            variant.written.refuse_shared(type(self.model).__name__, tensors, names, weights)
        feeds = [*tensors, *variant.pick(names, weights)]
        verification = None if call is None else self._verification(variant, call)
        if self.profile is not None and variant.fetches:
            fetched = self._fetch_profiled(self.profile, variant, assumed, verification, feeds)
        elif variant.started:
            if self.startup.awaits_other_half:
                self.startup.log()
            fetched = self._fetch(variant, assumed, verification, feeds)
        else:
            fetched = self._first_run(variant, assumed, verification, feeds)
        if parted is not None:
            parted.gather_in_backward(fetched)
        count = len(program.signature.outputs)
        if len(fetched) > count:
            _write_back(program, tensors, dict(zip(names, weights, strict=True)), fetched[count:])
        outputs = fetched[:count]
        if program.is_tied:
            known = dict(zip(names, weights, strict=True))
            program.ties.tie(outputs, tensors, known, program.interface.sizes.dims)
        if verification is not None:
            verification.check_outputs(outputs)
        returned = len(program.interface.outputs.leaves)
        if program.effects:
            program.effects.apply(outputs[returned:])
            assumed.guards.accept_entries(program.effects.owners)
        return program.interface.result(bound, outputs[:returned])

    def _fetch_profiled(
        self,
        profile: Profile,
        variant: Variant,
        assumed: GuardedState,
        verification: Verification | None,
        feeds: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Do the same as :meth:`_fetch` with sessions that onnxruntime profiles."""
        if not profile.wants_more:
            self.profile, self._watched = None, {}
            return self._fetch(variant, assumed, verification, feeds)
        profile.seen += 1
        if id(variant) not in self._watched:
            if variant.requires_grad:
                with self.startup.recording(DIFFERENTIATE):
                    variant.training_engine()
            with profile.tracer.tracing():
                self._watched[id(variant)] = variant.with_new_sessions()
        with profile.tracer.tracing():
            return self._fetch(self._watched[id(variant)], assumed, verification, feeds)

    def _first_run(
        self,
        variant: Variant,
        assumed: GuardedState,
        verification: Verification | None,
        feeds: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Do the same as :meth:`_fetch`, which builds the engine, and log the time of the start."""
        with self.startup.recording(FIRST_RUN):
            fetched = self._fetch(variant, assumed, verification, feeds)
        variant.started = True
        if not self.startup.awaits_other_half:
            self.startup.log()
        return fetched

    def _fetch(
        self,
        variant: Variant,
        assumed: GuardedState,
        verification: Verification | None,
        feeds: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Run a graph once, and return its outputs in the order of its fetches."""
        if not variant.fetches:
            return []  # A model of no tensors, for which there is no session.
        if variant.requires_grad:
            engine = variant.training_step(feeds, self.startup, is_sharded=self._is_sharded)
            if engine.differentiable:
                return autograd_function.run(engine, verification, assumed.while_functions_run, feeds)
            with assumed.while_functions_run():
                return engine.forward(feeds)[0]
        variant.inference_engine()  # Built before Functions run.
        with assumed.while_functions_run():
            return variant.infer(feeds)

    @property
    def density(self) -> dict[str, Any]:
        """The rows that the last training step needed; see :meth:`torch2ort.ORTModule.density`."""
        rows = None if self._served_by is None else self._served_by.rows
        return {"labels": None, "tokens": None, "plan": "dense"} if rows is None else rows.report()

    def watch(self, steps: int) -> Profile:
        """Profile the next steps; see :meth:`torch2ort.ORTModule.profile`."""
        if self.profile is not None:
            self.profile.finish()
        self.profile, self._watched = Profile(steps), {}
        return self.profile

    def _verification(self, variant: Variant, call: Call) -> Verification | None:
        """Return the eager run to compare with a graph's first run, if the options ask for this."""
        if not self.options.verify or variant.verified:
            return None
        variant.verified = True
        return Verification(self.model, call.signature, call.schema, call.tensors)

    def _flatten(self, bound: dict[str, Any]) -> tuple[list[torch.Tensor], io_schema.Schema]:
        """Return the call's tensors and their schema; a call of the last one's schema is only compared."""
        if self._last_schema is not None:
            tensors = self._last_schema.match(bound)
            if tensors is not None:
                return tensors, self._last_schema
        tensors, self._last_schema = io_schema.flatten(bound)
        return tensors, self._last_schema


def _write_back(
    program: Program,
    tensors: Sequence[torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    values: Sequence[torch.Tensor],
) -> None:
    targets = dict(zip(program.signature.inputs, tensors, strict=True))
    with torch.no_grad():
        for mutation, value in zip(program.signature.mutations, values, strict=True):
            target = buffers[mutation.target] if mutation.kind == "buffer" else targets[mutation.target]
            target.copy_(value)


_OURS = ("torch", "torch2ort")

# Returns True if the next function would find nothing to refuse; cheap, as each step calls it.
_in_usual_surroundings = Switches(private.SURROUNDINGS, lambda *now: now == private.USUAL_SURROUNDINGS).now


def _refuse_surroundings() -> None:
    """Raise an error for a call inside of a context that changes operators and does not apply to a graph.

    Raises:
        ExportError: the call is inside of a torch.func transform, forward-mode differentiation,
            torch.jit.trace, or a dispatch mode or hooks on saved tensors that are not torch's own.
    """
    for mode in private.dispatch_modes():
        if type(mode).__module__.partition(".")[0] not in _OURS:
            raise ExportError(
                f"ORTModule was called inside the TorchDispatchMode {type(mode).__qualname__}, which does "
                f"not reach into a graph. Call the original model, ORTModule(...).module, there"
            )
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise ExportError(
            "ORTModule was called inside torch.jit.trace, which sees nothing of what a graph computes. Trace "
            "the original model, ORTModule(...).module, or call torch2ort.export(module, sample)"
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
    packs = private.packing_hook()
    if torch.is_grad_enabled() and packs is not None and packs.__module__.partition(".")[0] not in _OURS:
        name = getattr(packs, "__qualname__", type(packs).__qualname__)
        raise ExportError(
            f"ORTModule was called inside torch.autograd.graph.saved_tensors_hooks, whose {name} would get "
            f"nothing of what a graph saves for backward. Call the original model, ORTModule(...).module, "
            f"there, or have a torch.autograd.Function in the model pack what it saves"
        )


def _refuse_to_write_twice(program: Program, model: str) -> None:
    """Raise an error for a checkpointed call whose recomputation in backward writes again in eager PyTorch.

    Args:
        program: a graph that writes to buffers, arguments or Python objects.
        model: the name of the model's class.

    Raises:
        ExportError: always.
    """
    mutations = program.signature.mutations
    where = repr(mutations[0].target) if mutations else "Python objects"
    raise ExportError(
        f"ORTModule was called inside torch.utils.checkpoint with use_reentrant=False, which runs forward "
        f"again in backward, and {program.writer or model} writes to {where} each time it runs; a graph's "
        f"backward does not run forward again. Call the checkpoint in the model, or pass use_reentrant=True"
    )

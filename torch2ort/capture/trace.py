"""Trace of a model and one call of it to an ``ExportedProgram`` over flat tensors.

The model is traced inside :class:`FlatModel`, whose inputs and outputs are tensors only. So only
``io_schema`` handles nested data, and torch.export's own pytrees are never involved.
"""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch2ort import io_schema
from torch2ort._torch import export as private
from torch2ort.capture.aliased_outputs import Origin, output_origins
from torch2ort.capture.autocast import recording_autocast
from torch2ort.capture.dim_specs import advice
from torch2ort.capture.eager_sample_run import eager_runs, run_on_sample
from torch2ort.capture.export_patches import TracedCode, assigned_buffers_written, traceable_modules
from torch2ort.capture.find_views import views_of
from torch2ort.capture.named_sizes import NamedSizes
from torch2ort.capture.orphan_grad_outputs import dead_ends_of, has_dead_end
from torch2ort.capture.output_ties import Ties
from torch2ort.capture.plain_tensors import plain_leaf_tensors
from torch2ort.capture.sample_call import PREFIX, Call, Purpose
from torch2ort.capture.tensor_attributes import TensorAttributes
from torch2ort.capture.torch_modes import same_grad_mode
from torch2ort.capture.unlift_constants import connect_constants
from torch2ort.effects import (
    NO_EFFECTS,
    EffectError,
    Effects,
    ReadRecorder,
    SideEffectRecorder,
    line_of,
    refused_calls,
    verify_effects_in_eager,
)
from torch2ort.errors import ExportError, Torch2OrtError
from torch2ort.graph.identical_inputs import as_passed
from torch2ort.graph.scalar_inputs import with_numbers
from torch2ort.log import DEVINFO, logger
from torch2ort.pythonop import Site
from torch2ort.pythonop.abstract_run import inferer_validation
from torch2ort.pythonop.abstract_run.fake_run import has_output_of_size_one
from torch2ort.pythonop.abstract_run.forward_probe import UserError
from torch2ort.pythonop.abstract_run.object_rollback import restoring_state
from torch2ort.pythonop.abstract_run.original_tensors import Originals
from torch2ort.pythonop.abstract_run.sample_tensors import NeedsSample, Sample
from torch2ort.pythonop.interception import Capture
from torch2ort.pythonop.self_test import check_interception
from torch2ort.sizes.unbacked_sizes import (
    Conditions,
    assumes_equal_sizes,
    conditions,
    expands_unknown,
    readable_condition,
)
from torch2ort.support.source_lines import line_in, users_line, way_out
from torch2ort.support.user_warnings import warn

# Advice in torch.export's errors that a caller of torch2ort cannot follow.
_DRAFT = "The error above occurred when calling torch.export.export"
_LOGS = ' For more information, run with TORCH_LOGS="+dynamic".'


@dataclass(frozen=True)
class Trace:
    """The result of one trace.

    Attributes:
        program: inputs and outputs are flat tensors.
        output_schema: structure of the model's result.
        sites: every Function call, by key.
        guards: conditions on the sizes of inputs that the trace assumed, as texts over
            ``size(input, dimension)``.
        conditions: number of conditions that torch recorded until the end of the trace. Later passes over the
            program may add conditions, and the difference shows the added ones.
        hooked: the line where the model's code registers a hook on a gradient; empty if there is none.
        outside: the line where it uses a tensor that requires a gradient and does not belong to the model;
            empty if there is none.
        returned: the outputs that are caches of the call.
        ties: ties of the outputs.
        effects: effects of the call on Python objects; their tensors are the last outputs.
    """

    program: torch.export.ExportedProgram
    output_schema: io_schema.Schema
    sites: dict[str, Site]
    guards: tuple[str, ...]
    conditions: Conditions
    hooked: str
    outside: str
    returned: io_schema.Returned
    ties: Ties
    effects: Effects


class FlatModel(torch.nn.Module):
    """Module that calls ``model`` with arguments from flat tensors, and flattens its result and effects.

    torch.export calls :meth:`forward` and returns only a program. The class attributes below contain the rest
    of the last run of :meth:`forward`, from which :func:`_described` builds the :class:`Trace`. Two are set
    before the run: ``capture``, and ``reads`` if the run records the places that forward reads.
    """

    output_schema: io_schema.Schema | None = None
    capture: Capture | None = None
    returned: io_schema.Returned = ()
    origins: tuple[Origin, ...] = ()
    tracked: tuple[bool, ...] = ()
    ends_nowhere: tuple[bool, ...] = ()
    leaves: tuple[bool, ...] = ()
    effects: Effects = NO_EFFECTS
    dropped: str = ""
    reads: ReadRecorder | None = None

    def __init__(
        self,
        model: torch.nn.Module,
        call: Call,
    ) -> None:
        super().__init__()
        self.model = model
        # The tensors are left out, as torch.export would treat them as constants of the module.
        self._call = call._replace(tensors=[])
        self._keeps_casts = torch.is_autocast_cache_enabled()
        self._attributes = TensorAttributes(model)
        self.code = TracedCode(model)
        self.training = model.training

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model on ``tensors``, one per leaf of its input schema."""
        tensors = tuple(as_passed(tensors, self._call.same))
        if self.capture is not None:
            self.capture.restart(tensors)
        self._attributes.hang_on(self.model)
        bound = io_schema.unflatten(with_numbers(tensors, self._call.numbers), self._call.schema)
        caches = io_schema.GivenCaches(bound)
        args, kwargs = self._call.signature.unbind(bound)
        is_module = self._call.purpose is Purpose.MODULE
        run = self.model.forward if is_module else self.model
        required = [t.requires_grad for t in tensors]
        with SideEffectRecorder(self.model, self.reads, left=is_module) as watched:
            with (
                refused_calls(self.model),
                self.code,
                assigned_buffers_written(self.model),
                same_grad_mode(self.model),
                recording_autocast(cache=self._keeps_casts),
            ):
                result = run(*args, **kwargs)
                outputs, self.output_schema = io_schema.flatten(result)
                self.returned = caches.returned_in(result)
            watched.find()
        self.effects, self.dropped = watched.effects, watched.dropped
        outputs = [*outputs, *watched.tensors]
        self._refuse_gradients_in_inputs(tensors, required)
        self.origins = output_origins(outputs, tensors, self.model)
        self.tracked = tuple(t.requires_grad for t in outputs)
        self.ends_nowhere = tuple(map(has_dead_end, outputs))
        self.leaves = tuple(t.is_leaf for t in outputs)
        return tuple(outputs)

    def _refuse_gradients_in_inputs(self, tensors: Sequence[torch.Tensor], before: Sequence[bool]) -> None:
        """Refuse a write that makes a tensor of the caller's depend on one that requires a gradient."""
        for leaf, tensor, required in zip(self._call.schema.leaves, tensors, before, strict=True):
            if tensor.requires_grad and not required:
                raise ExportError(
                    f"{type(self.model).__name__}: forward writes a value that requires a gradient into its "
                    f"argument '{leaf.name}', and a graph cannot pass that gradient on. Return the value "
                    f"instead, or write its detach()"
                )


def _apart(tensors: Sequence[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Return each tensor as an object of its own: for one object twice, torch.export would make one input.

    Each gets its own memory, too: torch.export cannot trace a write to memory that two of them share.
    """
    seen = {id(t) for t in (*model.parameters(), *model.buffers())}
    memory: set[int] = set()
    found: list[torch.Tensor] = []
    for tensor in tensors:
        again = id(tensor) in seen
        seen.add(id(tensor))
        place = tensor.untyped_storage().data_ptr()
        shared = place in memory
        memory.add(place)
        if again or shared:
            other = tensor.detach()
            other = _copied(other) if shared else other
            tensor = other.requires_grad_(tensor.requires_grad)
        found.append(tensor)
    return tuple(found)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor with the same strides, in its own memory."""
    (first, end) = tensor.storage_offset(), tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = tensor.as_strided((end,), (1,), 0).clone()
    return memory.as_strided(tensor.shape, tensor.stride(), first)


def trace(
    model: torch.nn.Module,
    call: Call,
    *,
    training: bool | None,
    fixed_sizes: bool = False,
) -> Trace:
    """Trace a call of ``model``.

    Args:
        model: the model.
        call: the call.
        training: the mode; ``None`` for ``model.training``.
        fixed_sizes: True to fix the sizes of untraceable Functions' results to those in the sample.

    Raises:
        ExportError: the model cannot be traced; the message says where and why. An exception of the model's
            own code is raised unchanged.
    """
    check_interception()
    sizes, tensors = NamedSizes(call.dim_specs), call.tensors
    sample = Sample()
    sample.sizes_needed, sample.has_originals = fixed_sizes, call.purpose is Purpose.MODULE

    def flat() -> FlatModel:
        return FlatModel(model, call)

    def eager() -> contextlib.AbstractContextManager[Callable[[], Any]]:
        return eager_runs(model, call)

    with _in_mode(model, training), _same_rng():
        while True:
            try:
                traced = _trace(flat(), tensors, sizes.dynamic, sample)
                if sample.calls and not sample.sizes_needed and _guesses_a_size(traced):
                    sample.sizes_needed = True
                    continue
                sizes.settle(type(model).__name__, traced.program, traced.guards)
                if not traced.effects:
                    return traced
                reads = ReadRecorder(traced.effects.writes)
                effects = _with_reads(traced.effects, reads, flat(), tensors, sizes.dynamic, sample)
                return replace(traced, effects=_tried(model, effects, eager))
            except NeedsSample as need:
                sample.calls[need.function] = []
            except EffectError as error:
                raise _refused(model, error, eager) from None
            except Exception as error:
                if sizes.relax_bounds(error):
                    continue
                if sample.sizes_needed or not sample.calls:
                    with eager() as run:
                        refused = _in_eagers_words(model, error, run)
                    if refused is None:
                        raise
                    raise refused from (error if isinstance(refused, ExportError) else None)
                # An unknown size breaks code that works with any number.
                sample.sizes_needed = True
                continue
            run_on_sample(type(model).__name__, model, sample, eager())


def sample_calls(
    model: torch.nn.Module, call: Call, functions: Iterable[type], *, training: bool | None
) -> dict[type, list[list[torch.Tensor]]]:
    """Copy the tensors of each call of some Functions, in order, in an eager run of the sample.

    Args:
        model: the model.
        call: the call.
        functions: the Functions.
        training: the mode; ``None`` for ``model.training``.
    """
    sample = Sample()
    sample.calls.update({function: [] for function in functions})
    with _in_mode(model, training), _same_rng():
        run_on_sample(type(model).__name__, model, sample, eager_runs(model, call))
    return sample.calls


_EagerRuns = Callable[[], contextlib.AbstractContextManager[Callable[[], Any]]]


def _tried(model: torch.nn.Module, effects: Effects, eager: _EagerRuns) -> Effects:
    """Return ``effects`` after the trial run that they need."""
    if effects.needs_eager_check:
        with eager() as run:
            writes = verify_effects_in_eager(model, effects.writes, effects.unread, run)
        effects = effects.of(writes)
    effects.forget()
    return effects


def _refused(model: torch.nn.Module, error: EffectError, eager: _EagerRuns) -> ExportError:
    """Return the error with the line of the effect."""
    with eager() as run:
        line = line_of(model, error.key, run)
    return ExportError(f"{type(model).__name__}: {line or 'forward'} {error.what}, {error.remedy}")


def _in_eagers_words(model: torch.nn.Module, error: Exception, run: Callable[[], Any]) -> Exception | None:
    """Return the error to raise for ``error`` of the model's own code; ``None`` to raise it unchanged.

    Eager PyTorch may raise another error, as its operators check differently from those of a trace, or none.

    Args:
        model: the model.
        error: the error in the trace.
        run: runs the model on its sample.
    """
    if isinstance(error, (Torch2OrtError, UserError)) or not _is_of_forward(error):
        return None
    try:
        with restoring_state(type(model).__name__, model, code=True):
            run()
    except Exception as own:
        return None if type(own) is type(error) and str(own) == str(error) else own
    return ExportError(
        f"{type(model).__name__}: forward raises {type(error).__name__}{users_line(error)} while "
        f"torch.export traces it, and not in eager PyTorch ({_first_line(error)}). Code that asks whether it "
        f"is compiled does something else then: pass the arguments that it makes itself in eager PyTorch, "
        f"such as a mask, or put that part of the model into a torch.autograd.Function"
    )


def _is_of_forward(error: Exception) -> bool:
    """Return True if the model's forward raised it, and not a shape inferer that a user registered."""
    files = {(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)}
    registered = any(file == inferer_validation.__file__ for file, _ in files)
    return not registered and (__file__, FlatModel.forward.__name__) in files


def _guesses_a_size(traced: Trace) -> bool:
    """Return True if the trace may have guessed the size of a Function that runs on real tensors only."""
    if expands_unknown(traced.program) is not None:
        return True
    return assumes_equal_sizes(traced.program) and any(map(has_output_of_size_one, traced.sites.values()))


def _with_reads(
    effects: Effects,
    reads: ReadRecorder,
    flat_model: FlatModel,
    tensors: Sequence[torch.Tensor],
    dynamic: Any,
    sample: Sample,
) -> Effects:
    """Return ``effects`` with the places that forward reads, found by one more trace."""
    flat_model.reads = reads
    try:
        _trace(flat_model, tensors, dynamic, sample)
    except NeedsSample:
        raise
    except Exception as error:
        logger.info("the places that forward reads are unknown, as recording them failed: %s", error)
        return effects
    return effects.with_reads(*reads.unread())


def _trace(flat_model: FlatModel, tensors: Sequence[torch.Tensor], dynamic: Any, sample: Sample) -> Trace:
    """Trace the call once.

    Raises:
        ExportError: see :func:`trace`.
        NeedsSample: the arguments of a Function in a run on the sample are needed.
    """
    model = flat_model.model
    with contextlib.ExitStack() as stack:
        # torch.export replaces values of the model's attributes by copies.
        stack.enter_context(restoring_state(type(model).__name__, model, code=False))
        stack.enter_context(plain_leaf_tensors(model))
        stack.enter_context(traceable_modules(model))
        stack.enter_context(private.no_hooks_left())
        if logger.getEffectiveLevel() > DEVINFO:
            stack.enter_context(private.no_graph_printed())
        capture = stack.enter_context(
            Capture(
                training=model.training,
                model=model,
                sample=sample,
                originals=Originals(model, tensors) if sample.has_originals else None,
            )
        )
        flat_model.capture = capture
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                program = torch.export.export(
                    flat_model, _apart(tensors, model), dynamic_shapes=dynamic, strict=False
                )
        except private.DATA_DEPENDENT as error:
            raise ExportError(
                f"{type(model).__name__}: the model's Python code depends on a value inside a "
                f"tensor{users_line(error)}, "
                f"so one graph is not valid for every input ({_first_line(error)}). {way_out(error)}"
            ) from error
        except Exception as error:
            failure = _failure(model, flat_model, error)
            if failure is None:
                raise
            raise failure from error
        if not any(isinstance(node.meta.get("val"), torch.Tensor) for node in program.graph.nodes):
            raise ExportError(
                f"{type(model).__name__}: forward takes no tensor and makes none, so there is nothing "
                f"to export. Call the model itself"
            )
        connect_constants(program, flat_model, flat_model.code.used)
    return _described(program, flat_model, capture)


def _described(program: torch.export.ExportedProgram, flat_model: FlatModel, capture: Capture) -> Trace:
    """Return the trace with result ``program``; warn of effects that calls of it do not have."""
    assert flat_model.output_schema is not None
    if flat_model.dropped:
        warn(
            f"{type(flat_model.model).__name__}: forward {flat_model.dropped}, and calls of the exported "
            f"model do not. Return the new value from forward instead"
        )
    guards = tuple(map(readable_condition, private.size_guards(program)))
    return Trace(
        program,
        flat_model.output_schema,
        capture.sites,
        guards,
        conditions(program.graph),
        line_in(flat_model.code.hooked),
        line_in(flat_model.code.outside),
        flat_model.returned,
        Ties(
            flat_model.origins,
            views_of(program, flat_model.origins, flat_model.tracked, PREFIX),
            flat_model.tracked,
            dead_ends_of(program, flat_model.ends_nowhere, flat_model.leaves, PREFIX),
        ),
        flat_model.effects,
    )


def _failure(model: torch.nn.Module, flat_model: FlatModel, error: Exception) -> ExportError | None:
    """Return the error for an export that failed with ``error``; ``None`` if the model's code raised it."""
    name = type(model).__name__
    if isinstance(error, NotImplementedError) and "Sparse" in str(error):
        return ExportError(
            f"{name}: forward makes a sparse tensor{users_line(error)}, which a graph cannot hold. Use "
            f"dense tensors, or put that part of the model into a torch.autograd.Function"
        )
    if isinstance(error.__context__, ExportError):
        # Dynamo adds lines to the error and wraps it in one of its own.
        return ExportError(_first_line(error.__context__))
    unknown = private.without_fake_kernel(error)
    if unknown is not None:
        return ExportError(
            f"{name}: the operator {unknown}{users_line(error)} has no kernel for tensors without data, "
            f"from which a trace gets the types and sizes of its results. Register one with "
            f"torch.library.register_fake({unknown!r})"
        )
    if not _is_of_torch_export(error):
        return None
    if ".numpy() is not supported" in str(error):
        return ExportError(
            f"{name}: forward calls .numpy() on a tensor{users_line(error)}, and a trace has no values for "
            f"NumPy. Compute with torch, or put that part of the model into a torch.autograd.Function"
        )
    if flat_model.code.derived:
        return ExportError(
            f"{name}: {line_in(flat_model.code.derived)} lets a tensor of forward's own require a gradient, "
            f"and a graph cannot compute a derivative inside of forward. Put that part of the model into a "
            f"torch.autograd.Function"
        )
    said = readable_condition(str(error).partition(_DRAFT)[0].replace(_LOGS, "").rstrip())
    return ExportError(f"{name}: torch.export failed{users_line(error)}: {said}{advice(error)}")


@contextlib.contextmanager
def _in_mode(model: torch.nn.Module, training: bool | None) -> Iterator[None]:
    """Set the mode of the model; restore the flag of every submodule afterwards."""
    if training is None or training == model.training:
        yield
        return
    flags = {module: module.training for module in model.modules()}
    try:
        model.train(training)
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


@contextlib.contextmanager
def _same_rng() -> Iterator[None]:
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield


def _is_of_torch_export(error: Exception) -> bool:
    """Return True if tracing failed, and not the model's own code or an operator that it called."""
    raised = traceback.extract_tb(error.__traceback__)[-1].filename.replace("\\", "/")
    return type(error).__module__.startswith("torch.") or bool(
        re.search(r"/torch/(_?export|_functorch|fx/experimental)/", raised)
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]

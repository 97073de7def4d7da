"""The choice of the graph that serves a call of an ORTModule; a call that no graph serves is exported."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch2ort import io_schema
from torch2ort.cache.key.export_lock import exclusive
from torch2ort.capture.sample_call import Call
from torch2ort.capture.torch_modes import Modes
from torch2ort.graph.identical_inputs import Identical, identical
from torch2ort.graph.scalar_inputs import Numbers, ReadInPythonError
from torch2ort.log import logger
from torch2ort.options import Options
from torch2ort.pythonop.native import native
from torch2ort.support.startup_timing import DIFFERENTIATE, TRACE, Startup
from torch2ort.support.user_warnings import warn
from torch2ort.variants.export_variant import export_variant
from torch2ort.variants.guarded_state import GuardedState, GuardedStates
from torch2ort.variants.module_call import TensorCallForm
from torch2ort.variants.shape_variants import Shapes, Variant

# A call's schema, the inputs that require gradients, PyTorch's modes, the inputs that are lifted numbers, and
# the inputs that are the same tensor.
_Key = tuple[io_schema.Schema, tuple[bool, ...], Modes, frozenset[int], Identical]
_MANY_SETTINGS = 5


class _Last(NamedTuple):
    """The last call, and the graph that served it.

    Attributes:
        direct: the form of its arguments, if all are tensors.
        schema: the structure around its tensors.
        form: the form of its tensors, from ``native.form``.
        modes: PyTorch's modes.
        assumed: the model's state.
        variant: the graph.
    """

    direct: TensorCallForm | None
    schema: io_schema.Schema
    form: bytes
    modes: Modes
    assumed: GuardedState
    variant: Variant

    def select_repeated(
        self, tensors: list[torch.Tensor], modes: Modes
    ) -> tuple[list[torch.Tensor], GuardedState, Variant] | None:
        """Return the graph for a call of the same structure with these tensors, ``None`` if more differs.

        The graph comes with the tensors to feed and the model's state.
        """
        if (
            modes is self.modes
            and native.form(tensors, torch.nn.Parameter) == self.form
            and self.assumed.guards.accept() is None
        ):
            return tensors, self.assumed, self.variant
        return None


class VariantSelector:
    """The graphs of a model, and the choice among them.

    Args:
        model: the model.
        options: settings.
        startup: receives the time of exports.

    Attributes:
        guarded_states: the states of the model and its context for which graphs are valid.
    """

    def __init__(self, model: torch.nn.Module, options: Options, startup: Startup) -> None:
        self._model = model
        self._options = options
        self._startup = startup
        self.guarded_states = GuardedStates(
            model, trust=options.guards == "trust", inlines_functions=options.is_on("inline_functions")
        )
        # The schemas with their constants seen so far, by all else that a graph depends on.
        self._constants: dict[Hashable, list[io_schema.Schema]] = {}
        self._numbers = Numbers()
        # The schemas whose numbers are constants of an existing graph.
        self._with_constants: set[io_schema.Schema] = set()
        self._last: _Last | None = None

    def select_unbound(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], modes: Modes
    ) -> tuple[list[torch.Tensor], GuardedState, Variant] | None:
        """Do the same as :meth:`select_repeated` for arguments that are not bound to names yet.

        The result is ``None``, too, if an argument of this call or of the last one is no tensor.
        """
        last = self._last
        if last is None or last.direct is None:
            return None
        tensors = last.direct.tensors(args, kwargs)
        return None if tensors is None else last.select_repeated(tensors, modes)

    def select_repeated(self, call: Call) -> tuple[list[torch.Tensor], GuardedState, Variant] | None:
        """Do the same as :meth:`select` for a call of the same form as the last one; ``None`` for others."""
        last = self._last
        if last is None or call.schema is not last.schema:
            return None
        return last.select_repeated(call.tensors, call.modes)

    def record_form(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], bound: Mapping[str, Any], call: Call
    ) -> None:
        """Record the form of the arguments of the call that was passed to :meth:`select`."""
        last = self._last  # which another thread may replace meanwhile
        if last is not None and last.schema is call.schema:
            self._last = last._replace(direct=TensorCallForm.of(args, kwargs, bound, call))

    def select(self, call: Call) -> tuple[list[torch.Tensor], GuardedState, Variant]:
        """Return the tensors to feed, the present state and its graph, for varying numbers if possible."""
        if not call.schema.constants:
            return self._select_and_note(call)
        tensors, schema, numbers = self._numbers.lift(call.tensors, call.schema)
        if numbers and call.schema not in self._with_constants and not self.guarded_states.asks_types:
            try:
                assumed, variant = self._variant(
                    call._replace(tensors=tensors, schema=schema, numbers=numbers)
                )
                # The engine's build raises an error if it does not support a number as an input.
                if variant.requires_grad and not variant.started:
                    with self._startup.recording(DIFFERENTIATE):
                        variant.training_engine()
            except (Exception, ReadInPythonError) as error:
                # Not only torch2ort's errors: a number that is an input breaks code that runs with any value.
                logger.info("no graph for varying numbers (%s)", error or type(error).__name__)
                self._numbers.refuse(call.schema)
            else:
                return tensors, assumed, variant
        self._with_constants.add(call.schema)
        return self._select_and_note(call)

    def _select_and_note(self, call: Call) -> tuple[list[torch.Tensor], GuardedState, Variant]:
        """Do the same as :meth:`select`; save it for :meth:`select_repeated` if code reads only forms."""
        assumed, variant = self._variant(call)
        form = None if self.guarded_states.reads_memory else native.form(call.tensors, torch.nn.Parameter)
        self._last = None
        if form is not None:
            self._last = _Last(None, call.schema, form, call.modes, assumed, variant)
        return call.tensors, assumed, variant

    def _variant(self, call: Call) -> tuple[GuardedState, Variant]:
        tensors, schema, same = call.tensors, call.schema, identical(call.tensors)
        key = schema, tuple([t.requires_grad for t in tensors]), call.modes, call.numbers, same
        assumed, count = self.guarded_states.now(key, tensors, schema)
        if count == 1:
            self._warn_of_constants(key)
        elif count == _MANY_SETTINGS:
            self._warn(
                f"{self.guarded_states.change} changes from call to call, and each of its values gets a "
                f"graph of its own, {count} so far. Pass what varies as a tensor, or keep it out of the model"
            )
        shapes: Shapes = tuple([t.shape for t in tensors])
        variant = assumed.family.find(shapes)
        if variant is not None:
            return assumed, variant
        return self._export(key, call._replace(same=same), shapes)

    @exclusive.looking()
    def _export(self, key: _Key, call: Call, shapes: Shapes) -> tuple[GuardedState, Variant]:
        """Export the graph for :meth:`_variant`, unless another thread did so while this one waited."""
        tensors, schema = call.tensors, call.schema
        assumed, _ = self.guarded_states.now(key, tensors, schema)
        variant = assumed.family.find(shapes)
        if variant is None:
            found = functools.partial(self.guarded_states.for_key, assumed, tensors, schema)
            with self._startup.recording(TRACE):
                variant = export_variant(self._model, self._options, assumed.family, call, shapes, found)
            self.guarded_states.after_export(assumed, tensors, schema, variant.program.effects.unread)
        return assumed, variant

    def _warn_of_constants(self, key: _Key) -> None:
        """Warn that a number or text among the arguments causes an export in every call."""
        schema, *other = key
        before = self._constants.setdefault((schema.form, *other), [])
        if schema in before:
            return  # a tensor has another memory layout
        before.append(schema)
        if len(before) == _MANY_SETTINGS:
            path = before[-2].differing_path(schema, root="inputs")
            self._warn(
                f"the argument {path} is no tensor and changes from call to call, and each of its values "
                f"gets a graph of its own, {len(before)} so far. Pass it as a tensor, as torch.tensor(value)"
            )

    def _warn(self, sentence: str) -> None:
        warn(f"{type(self._model).__name__}: {sentence}")

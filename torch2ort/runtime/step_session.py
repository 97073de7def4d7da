"""The session of one half of a step."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import onnx
import torch

from torch2ort.cache.store.graph_entries import GraphEntries
from torch2ort.graph.debug_dumps import save_optimized, save_stage
from torch2ort.graph.external_weights import loadable
from torch2ort.graph.lowered_graph import Lowered
from torch2ort.log import onnxruntime_severity
from torch2ort.options import Options
from torch2ort.providers import CPU, session_providers
from torch2ort.pythonop import Site
from torch2ort.pythonop.native import native, note_savings
from torch2ort.runtime import drop_model_bytes, onnxruntime, stock
from torch2ort.runtime.custom_op.in_place import follows_maps, plan_of, share_memory
from torch2ort.runtime.custom_op.output_allocator import forget_output_sizes, lent_allocator
from torch2ort.runtime.determinism import name_undeterministic
from torch2ort.runtime.donation import donate_inputs
from torch2ort.runtime.native_sites import Callee, OriginalFeeds, directly, native_site, runs_directly
from torch2ort.runtime.optimized_model import Optimization, identity
from torch2ort.runtime.ortvalues import bool_outputs, shares_memory
from torch2ort.runtime.profiling import active_tracer, describe
from torch2ort.runtime.python_op_chains import join_python_op_grads, join_python_ops
from torch2ort.runtime.session import make_session
from torch2ort.runtime.step_io import Passing, PythonSession, native_half
from torch2ort.runtime.workarounds import apply_workarounds
from torch2ort.support.startup_timing import SESSION, timed

# The model of a session, available while the session is created.
Source = AbstractContextManager[bytes | str]


class Bindings:
    """Native sites of one step, which its forward and backward sessions share.

    Args:
        providers: the sessions' providers; ``None`` for the CPU.

    Attributes:
        in_place: whether in-place maps are supported there.
        names: key of a native site -> key of the site whose counterpart it is.
    """

    def __init__(self, providers: Sequence[Any] | None) -> None:
        self.in_place = follows_maps(providers)
        self._originals: dict[str, Mapping[int, int]] = {}
        self._sites: dict[str, native.Site] = {}
        self.names: dict[str, str] = {}

    def set_originals(self, originals: OriginalFeeds) -> None:
        """Pass fed tensors themselves to Functions; see :mod:`torch2ort.runtime.native_sites`."""
        self._originals.update(originals)

    def of(self, site: Site) -> native.Site:
        """Return the native counterpart of ``site``, which saves contexts if a backward may follow."""
        if site.key not in self._sites:
            key = f"{site.key}/{secrets.token_hex(4)}"
            training = any(site.needs_input_grad)
            plan = plan_of(site, in_place=self.in_place)
            originals = self._originals.get(site.key)
            self._sites[site.key] = native_site(site, key, training=training, plan=plan, originals=originals)
            self.names[key] = site.key
        return self._sites[site.key]


def bind_half(graph: onnx.GraphProto, lowered: Lowered, bindings: Bindings) -> list[Callee]:
    """Bind nodes to their sites, and join chains of calls into one node each.

    Args:
        graph: a session's copy of a half, or of a whole step; changed in place.
        lowered: the half that it is a copy of.
        bindings: gets the native sites.

    Returns:
        The callees of the nodes, which the caller must keep alive.
    """
    sites: Mapping[str, Site] = {**lowered.calls, **lowered.derivatives}
    saved = share_memory(graph, sites) if bindings.in_place else {}
    for node, site in sites.items():
        note_savings(bindings.of(site), saved.get(node, ()))
    callees: dict[str, Callee] = {node: directly(site, bindings.of(site)) for node, site in sites.items()}
    names = {node: site.func_name for node, site in sites.items()}
    joined = {node: site for node, site in lowered.calls.items() if not runs_directly(site)}
    chains = join_python_ops(graph, joined) + join_python_op_grads(graph, lowered.derivatives)
    for chain in chains:
        members = tuple(bindings.of(sites[node]) for node in chain.members)
        callees[chain.name] = native.Chain(key=secrets.token_hex(16), sites=members, links=chain.links)
        names[chain.name] = ", ".join(names[node] for node in chain.members)
    return stock.bind_callees(graph, callees, names)


class HalfSession:
    """The session of one half of a step.

    Args:
        name: name of the half, for debugging.
        lowered: the half.
        bindings: the native sites of its nodes.
        options: threads, providers and debugging.
        passing: its feeds, and the use of its results. Donations are dropped where this session cannot donate
            values to the other half's: then all of these values are the other half's feeds.
        frees_early: whether to order nodes so that inputs, which are unused afterwards, are free early.
        donated: positions of inputs that the run owns: they are free after their last use. Other inputs are
            fed, and live until the run ends.
        readable: names of some of its values for debugging.
        graph_entries: where its optimised graph is stored for the next process.

    Attributes:
        passing: the given one, without donations where they are not supported.
    """

    @timed(SESSION)
    def __init__(
        self,
        name: str,
        lowered: Lowered,
        bindings: Bindings,
        options: Options,
        passing: Passing,
        *,
        frees_early: bool = False,
        donated: Sequence[int] = (),
        readable: Mapping[str, str] | None = None,
        graph_entries: GraphEntries | None = None,
    ) -> None:
        self._inputs, self._outputs = lowered.inputs, list(lowered.outputs)
        settings = onnxruntime().SessionOptions()
        settings.log_severity_level = onnxruntime_severity()
        settings.intra_op_num_threads = options.intra_op_threads or torch.get_num_threads()
        settings.inter_op_num_threads = 1
        settings.enable_mem_pattern = False
        settings.use_deterministic_compute = options.deterministic
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Weights are inputs that every step changes: a packed copy would be outdated.
        settings.add_session_config_entry("session.disable_prepacking", "1")
        stock.register_library(settings)
        registered = native.registered_options()
        model = onnx.ModelProto()
        model.CopyFrom(apply_workarounds(lowered.proto))
        self._bound = bind_half(model.graph, lowered, bindings)
        save_stage(options, name, model, readable)
        self._name, self._options = name, options
        sites = {**lowered.calls, **lowered.derivatives}
        owned = [self._inputs[i] for i in donated]
        self._fed = [name for name in self._inputs if name not in owned]
        self._bools = bool_outputs(lowered.proto.graph, self._outputs)
        with self._lent_allocator(settings) as lent:
            # Values of another session can be donated to such a session without a copy.
            takes_memory = lent and shares_memory()
            self.passing = passing if takes_memory else passing.without_donations()
            if lent:
                forget_output_sizes(model.graph)
            name_undeterministic(lowered.proto.graph, sites, options)
            describe(lowered.proto.graph, sites)
            optimization = Optimization(settings, self._providers(), owned, frees_early)
            source = self._source(model, optimization, graph_entries)
            self._passes = self._create_session(source, settings, registered if lent else None)

    # Replaced by sessions on another device.
    _lent_allocator = staticmethod(lent_allocator)

    def _providers(self) -> list[Any]:
        return session_providers(self._options.providers)

    def _by_python(self, session: Any) -> PythonSession:
        return PythonSession(session, self._fed, self._outputs, self.passing, self._bools)

    def _source(
        self, model: onnx.ModelProto, optimization: Optimization, graph_entries: GraphEntries | None
    ) -> Source:
        """Return the model that the session is created from."""
        better: onnx.ModelProto | None = None
        if graph_entries is not None:
            better = optimization.obtain(
                model, f"optimised {self._name}", graph_entries, identity(self._options)
            )
        elif optimization.frees_early:
            better = optimization.of(model)
        if better is None:
            donate_inputs(model.graph, optimization.donated)
        return loadable(model if better is None else better)

    def _create_session(self, source: Source, settings: Any, registered: Any) -> native.Half | PythonSession:
        """Create the session, with the way in which values pass through it.

        Args:
            source: the model.
            settings: the session's settings.
            registered: the same settings in C++; ``None`` where values pass by onnxruntime's Python
                interface.
        """
        save_optimized(self._options, f"{self._name}_optimized", settings)
        providers = self._providers()
        with source as model:
            if registered is not None and providers == [CPU] and active_tracer() is None:
                return native_half(model, self._fed, self._outputs, self.passing, settings, registered)
            session = make_session(model, self._bound, settings, providers)
        drop_model_bytes(session)
        return self._by_python(session)

    def run(
        self, kept: Any, tensors: Sequence[torch.Tensor], run: native.Run
    ) -> tuple[list[torch.Tensor], Any]:
        """Compute the half; without outputs, nothing runs.

        Args:
            kept: the values that the other half saved; ``None`` for none.
            tensors: the caller's tensors.
            run: the contexts of the step's Functions, and the donated values.

        Returns:
            The fetched tensors, and the values for the other half.

        Raises:
            EngineError: ONNX Runtime failed, or a tensor is not on the CPU. An exception of a Function is
                raised unchanged.
        """
        return self._passes.run(kept, tensors, run) if self._outputs else ([], None)

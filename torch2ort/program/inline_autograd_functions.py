"""Inlining of Functions' calls as their operators, in a graph that is not differentiated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from torch2ort.errors import ExportError
from torch2ort.log import logger
from torch2ort.program.fx_inline import inline
from torch2ort.program.fx_insert import replace_call
from torch2ort.program.kernel_sites import is_random
from torch2ort.program.purity_check import IrreversibleCallError, PurityObserver
from torch2ort.pythonop import TENSOR, Site, site_by_key
from torch2ort.pythonop.interception import suspended
from torch2ort.pythonop.registry import exporter_of, is_inlined
from torch2ort.support.provenance import origin_of

_PYTHON_OP = torch.ops.torch2ort.python_op.default


class NotInlinedError(Exception):
    """Reason why a call stays opaque; the end of a sentence that begins with the Function's name."""

    def settle(self, site: Site) -> None:
        """Raise an error if the Function is registered for inlining, else log the reason.

        Raises:
            ExportError: the Function is registered.
        """
        if is_inlined(site):
            raise ExportError(
                f"{site.func_name} is registered with register_inline, but {self}. Take that back with "
                f"torch2ort.unregister({site.func_name.partition('#')[0]!r}), so that its calls stay opaque"
            ) from self.__cause__
        logger.info("%s stays opaque, as %s", site.func_name, self)


def inline_calls(graph_module: torch.fx.GraphModule, *, every: bool = False) -> None:
    """Replace each call of a Function that is registered for inlining by the operators of its forward.

    Args:
        graph_module: module of a traced program; changed in place, with its subgraphs. It must not be
            differentiated, as the derivative would be that of forward.
        every: True to inline every Function that can be inlined, besides the registered ones.

    Raises:
        ExportError: a Function that is registered cannot be inlined.
    """
    for module in graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.find_nodes(op="call_function", target=_PYTHON_OP):
            site = site_by_key(str(node.args[1]))
            if not is_chosen(site, every=every) or exporter_of(site) is not None:
                continue
            try:
                _inline(node, site)
            except NotInlinedError as reason:
                reason.settle(site)
        module.recompile()


def is_chosen(site: Site, *, every: bool) -> bool:
    """Return True if a call is inlined: its Function is registered, or ``every`` one without an exporter."""
    return is_inlined(site) or (every and not site.internal and exporter_of(site) is None)


def refuse_to_inline(site: Site) -> None:
    """Refuse a call that has effects beyond computing tensors from tensors.

    Raises:
        NotInlinedError: with the effect.
    """
    result = site.known_result
    if site.function is None or site.internal:
        reason = "it is not called as itself here"
    elif not result.observed:
        reason = "its forward could not be run at export to observe its effects"
    elif result.mutated or result.hidden:
        reason = "its forward writes to an argument"
    elif result.uses_rng:
        reason = "its forward draws random numbers"
    elif result.effects or site.keeps_state or site.remembers:
        reason = "its forward does more than compute"
    elif site.autocast is not None:
        reason = "it is called under autocast"
    else:
        return
    raise NotInlinedError(reason)


def _not_traced(error: Exception) -> NotInlinedError:
    """Return the reason for a call that PyTorch failed to trace."""
    return NotInlinedError(
        f"PyTorch does not trace it without data ({type(error).__name__}: {str(error).splitlines()[0]})"
    )


def refuse_random(node: torch.fx.Node) -> None:
    """Refuse an operator that draws random numbers, as the order of draws is that of calls.

    Raises:
        NotInlinedError: the operator draws random numbers.
    """
    if is_random(node):
        raise NotInlinedError(f"it draws random numbers ({node.target})")


@contextlib.contextmanager
def applied(site: Site, *, counts: bool = False) -> Iterator[Callable[..., Any]]:
    """Yield a function that calls the Function of a site, for a trace; its results alias no arguments.

    Args:
        site: the call.
        counts: see :class:`torch2ort.program.purity_check.PurityObserver`.

    Raises:
        NotInlinedError: the Function does more than compute; also raised where PyTorch failed to trace it.
    """
    watched = PurityObserver(site, counts=counts)

    def call(*tensors: torch.Tensor) -> Any:
        with suspended():
            result = watched.function.apply(*site.call_arguments(list(tensors)))
        if isinstance(result, tuple):
            return tuple(_own(value, tensors) for value in result)
        return _own(result, tensors)

    try:
        with watched.observing():
            yield call
    except NotInlinedError:
        raise
    except IrreversibleCallError:
        pass
    except Exception as error:
        raise (
            NotInlinedError(watched.observed_effect) if watched.observed_effect else _not_traced(error)
        ) from error
    if watched.observed_effect:
        raise NotInlinedError(watched.observed_effect)


def _own(result: Any, arguments: Sequence[torch.Tensor]) -> Any:
    if not isinstance(result, torch.Tensor):
        return result
    return result.clone() if any(result is t for t in arguments) or result._is_view() else result


def _inline(node: torch.fx.Node, site: Site) -> None:
    """Replace one call by its operators.

    Raises:
        NotInlinedError: the call does more than its operators.
    """
    refuse_to_inline(site)
    if any(value is not TENSOR for value in site.known_result.outputs):
        raise NotInlinedError("it returns other values than tensors")
    needed = [site.needs_input_grad[p] for p in site.tensor_positions]

    graph = node.graph
    known = set(graph.nodes)

    def made() -> list[torch.fx.Node]:
        return [n for n in graph.nodes if n not in known]

    try:
        with applied(site) as call, graph.inserting_before(node):

            def forward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
                # A Function may read which of its arguments need a gradient.
                with torch.enable_grad():
                    given = [t.detach().requires_grad_(n) for t, n in zip(tensors, needed, strict=True)]
                    result = call(*given)
                return tuple(t.detach() for t in (result if isinstance(result, tuple) else (result,)))

            results = inline(graph, forward, cast("list[torch.fx.Node]", node.args[0]))
        for operator in made():
            refuse_random(operator)
    except NotInlinedError:
        for operator in reversed(made()):
            graph.erase_node(operator)
        raise
    for operator in made():
        operator.meta.update(origin_of(node))
    replace_call(node, results)

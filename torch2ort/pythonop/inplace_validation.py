"""Validation of in-place maps at export: the map declared for a call is compared with an observed run."""

from __future__ import annotations

from dataclasses import replace

from torch2ort.errors import InplaceMapError
from torch2ort.pythonop.abstract_run.forward_probe import Observation
from torch2ort.pythonop.registry import InplaceMap, inplace_map_of
from torch2ort.pythonop.site import TENSOR, Result, Site


def with_inplace_map(site: Site, result: Result, seen: Observation | None) -> Result:
    """Return ``result`` with the in-place map that applies to ``site``.

    Args:
        site: the call.
        result: the result of the call, without the map.
        seen: a run of ``forward``; ``None`` if none was possible; the map is trusted then.

    Raises:
        InplaceMapError: the map names a position that is not a tensor, or the run contradicts it.
    """
    site.result = result
    declared = inplace_map_of(site)
    if declared is None:
        return result
    _check_positions(site, result, declared)
    if seen is None:
        written = tuple(sorted(declared.forward.values()))
        result = replace(result, mutated=written, returned_inputs=tuple(sorted(declared.forward.items())))
    else:
        _check_run(site, declared, seen)
    return replace(
        result,
        forward_map=tuple(sorted(declared.forward.items())),
        backward_map=tuple(sorted(declared.backward.items())),
    )


def _check_positions(site: Site, result: Result, declared: InplaceMap) -> None:
    outputs = {i for i, value in enumerate(result.outputs) if value is TENSOR}
    arguments = set(site.tensor_positions)
    pairs = [("forward", o, a, o, a) for o, a in declared.forward.items()]
    pairs += [("backward", o, a, a, o) for a, o in declared.backward.items()]
    for which, output, argument, key, value in pairs:
        if output not in outputs:
            raise InplaceMapError(
                f"{site.func_name}: the in-place map {which}={{{key}: {value}}} names output {output}; the "
                f"tensors among the {len(result.outputs)} outputs are {_listed(outputs)}"
            )
        if argument not in arguments:
            raise InplaceMapError(
                f"{site.func_name}: the in-place map {which}={{{key}: {value}}} names argument {argument}; "
                f"the tensors among the {len(site.arguments)} arguments are {_listed(arguments)}"
            )


def _check_run(site: Site, declared: InplaceMap, seen: Observation) -> None:
    for output, argument in declared.forward.items():
        if argument in seen.contiguous and (output, argument) not in seen.aliases:
            raise InplaceMapError(
                f"{site.func_name}: the in-place map says that output {output} of forward is the memory of "
                f"argument {argument}, but forward returned other memory: correct the map or unregister it"
            )


def _listed(positions: set[int]) -> str:
    return ", ".join(map(str, sorted(positions))) or "none"

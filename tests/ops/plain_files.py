"""Operators that torch.onnx.export writes as correct ONNX operators, while files here call PyTorch's kernels.

``python -m tests.ops.plain_files`` runs one sample of each of PyTorch's operators and modules in float32,
int64 and bool, and prints those that are plain and correct there and not here. ``--all`` prints each that is
not plain here; ``torch.int64`` runs one dtype alone.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import onnx
import onnxruntime
import torch
from torch.utils import _pytree as pytree

import torch2ort
from tests.ops import opinfo

DTYPES = (torch.float32, torch.int64, torch.bool)
_STANDARD = frozenset({"", "ai.onnx"})
# Plain and correct by torch.onnx alone, and the reason.
KNOWN = {
    "float32": {
        # An export refuses an operator that needs a tensor's value, or that draws in another order.
        *("item", "nn.functional.multi_head_attention_forward"),
        # Correct for this sample alone: torch.onnx ignores align_corners and scales, padding_idx, and
        # windows behind the input.
        *("_upsample_bilinear2d_aa", "nn.functional.embedding_bag", "max_pool2d_with_indices_backward"),
        *("nn.functional.max_pool1d", "nn.functional.max_pool2d", "nn.functional.max_pool3d"),
    },
    "int64": {
        "item",
        # The oldest onnxruntime has no kernels for these.
        *("argmax", "argmin", "masked.argmax", "masked.argmin", "max.reduction_with_dim"),
        *("min.reduction_with_dim", "nn.functional.relu"),
        # torch.onnx confuses a mean with no reduction.
        "scatter_reduce.mean",
    },
    "bool": {"item"},
}


def models(dtype: torch.dtype) -> Iterator[tuple[str, torch.nn.Module, tuple[torch.Tensor, ...]]]:
    """Name, module and arguments of a call of each operator; in float32 of torch's modules, too."""
    for name, described in opinfo.operators(dtype):
        found = opinfo._samples(described, dtype, opinfo.WAYS["export"])
        if found:
            call = opinfo.Call(described.op, found[:1])
            yield name, call.eval(), tuple(call.inputs())
    if dtype == torch.float32:
        yield from _modules()


def _modules() -> Iterator[tuple[str, torch.nn.Module, tuple[Any, ...]]]:
    from torch.testing._internal.common_modules import module_db

    for described in module_db:
        torch.manual_seed(0)
        samples = described.module_inputs_func(described, "cpu", torch.float32, False, training=False)
        for sample in samples[:1]:
            made, given = sample.constructor_input, sample.forward_input
            if given is None or not given.args:
                continue
            module = described.module_cls(*made.args, **made.kwargs).eval()
            call = opinfo.Call(module, [_Sample(given)])
            call.add_module("module", module)
            if _is_taken(call.eval()):
                yield described.name, call, tuple(call.inputs())


def _is_taken(call: opinfo.Call) -> bool:
    try:
        call(*call.inputs())
    except Exception:
        # Some samples are meant to be refused.
        return False
    return True


class _Sample:
    def __init__(self, given: Any) -> None:
        self.input, *self.args = given.args
        self.kwargs = given.kwargs


def is_plain(proto: onnx.ModelProto) -> bool:
    """Return True if a file contains ONNX operators alone."""
    return all(node.domain in _STANDARD for part in (proto.graph, *proto.functions) for node in part.node)


def is_right(proto: onnx.ModelProto, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> bool:
    """Return True if a plain session gives eager PyTorch's results."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), settings)
    names = [value.name for value in session.get_inputs()]
    # torch.onnx omits unused inputs.
    by_name = dict(zip([f"tensors_{i}" for i in range(len(inputs))], inputs, strict=True))
    given = [by_name[n] for n in names] if by_name.keys() >= set(names) else inputs
    results = session.run(None, {n: t.numpy() for n, t in zip(names, given, strict=True)})
    # Copies, as some models write to their inputs; a file returns the written inputs behind the results.
    called = model(*(tensor.clone() for tensor in inputs))
    expected = [r for r in pytree.tree_leaves(called) if isinstance(r, torch.Tensor)]
    rtol, atol = opinfo.TOLERANCES[torch.float32]
    try:
        for result, tensor in zip(results[: len(expected)], expected, strict=True):
            found = torch.from_numpy(result)
            torch.testing.assert_close(found, tensor, rtol=rtol, atol=atol, equal_nan=True)
    except (AssertionError, ValueError):
        return False
    return True


def ours(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> str:
    """Return ``plain``, ``wrong`` (plain, with other results than eager), ``kernels`` or the error."""
    try:
        proto = torch2ort.export(model, inputs, cache_dir=False).proto
    except torch2ort.Torch2OrtError as error:
        return type(error).__name__
    if not is_plain(proto):
        return "kernels"
    try:
        return "plain" if is_right(proto, model, inputs) else "wrong"
    except Exception as error:
        return f"no session: {str(error)[:100]}"


def theirs(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> str:
    """Return the same for torch.onnx.export."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            exported = torch.onnx.export(model, inputs, dynamo=True, verbose=False, opset_version=18)
        proto = exported.model_proto
        if not is_plain(proto):
            return "not plain"
        return "plain" if is_right(proto, model, inputs) else "wrong"
    except Exception as error:
        return type(error).__name__


def outcomes(dtype: torch.dtype) -> Iterator[tuple[str, str, str]]:
    """Yield name, outcome here and outcome by torch.onnx of each operator that is not ``plain`` here."""
    for name, model, inputs in models(dtype):
        found = ours(model, inputs)
        if found != "plain":
            yield name, found, theirs(model, inputs)


def main() -> None:
    """Print the operators."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    for dtype in [dtype for dtype in DTYPES if str(dtype) in sys.argv] or DTYPES:
        for name, found, other in outcomes(dtype):
            if other == "plain" or "--all" in sys.argv:
                print(f"{str(dtype).removeprefix('torch.')} {name}: {found}, torch.onnx {other}", flush=True)


if __name__ == "__main__":
    main()

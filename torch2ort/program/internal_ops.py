"""torch2ort's own operators, used in a program between decomposition and translation."""

from __future__ import annotations

from typing import Any

import torch

from torch2ort._torch.dispatch import OpOverload
from torch2ort.kernels.index_check import refuse_index
from torch2ort.kernels.packed_attention import sum_dtype
from torch2ort.kernels.scalar_expressions import computed_number

_library = torch.library.Library("torch2ort", "FRAGMENT")
_library.define("dropout_noise(Tensor like, float p) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
_library.define(
    "dropout(Tensor self, float p, ScalarType dtype) -> (Tensor, Tensor)",
    tags=[torch.Tag.nondeterministic_seeded],
)
_library.define("bernoulli(Tensor like, float p) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
_library.define(
    "cross_entropy(Tensor input, Tensor target, Tensor? weight, int reduction, int ignore_index) -> Tensor"
)
_library.define("checked_index(Tensor index, Tensor[] tensors, str check) -> Tensor")
_library.define("exact(Tensor plain, Tensor exact) -> Tensor")
_library.define("must_compute(Tensor value) -> Tensor")
_library.define("extreme(Tensor self, bool largest) -> Tensor")
_library.define("of_sizes(Tensor self, SymInt[] sizes) -> Tensor")
_library.define("number_as_sizes(Tensor number, int? low, int? high) -> Tensor")
_library.define("take_rows(Tensor self, Tensor rows) -> Tensor")
_library.define("fill_rows(Tensor self, Tensor inverse, Tensor rows) -> Tensor")
_library.define("put_rows(Tensor self, Tensor rows, SymInt size) -> Tensor")
_library.define(
    "packed_attention(Tensor query, Tensor key, Tensor value, Tensor query_ends, Tensor key_ends, "
    "bool is_causal, float? scale) -> (Tensor, Tensor)"
)
_library.define(
    "packed_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor result, "
    "Tensor sums, Tensor query_ends, Tensor key_ends, bool is_causal, float? scale) "
    "-> (Tensor, Tensor, Tensor)"
)
_library.define("python_number(Tensor[] numbers, ScalarType dtype, str formula) -> Tensor")

# Noise of dropout, which is multiplied by the input: the product is ONNX's, the noise is PyTorch's.
dropout_noise: OpOverload = torch.ops.torch2ort.dropout_noise.default
# Dropout as one operator and the mask of kept elements, drawn as eager does in a type that may be narrower.
dropout: OpOverload = torch.ops.torch2ort.dropout.default
# Ones with a probability, else zeros, as a contiguous tensor.
bernoulli: OpOverload = torch.ops.torch2ort.bernoulli.default
# Cross entropy of class indices without label smoothing, which ONNX's SoftmaxCrossEntropyLoss supports.
cross_entropy: OpOverload = torch.ops.torch2ort.cross_entropy.default
# The same indices, if eager's operator accepts them; see torch2ort.program.index_checks.
checked_index: OpOverload = torch.ops.torch2ort.checked_index.default
# The result of operators of ONNX, for files, and that of PyTorch's kernel, for sessions.
exact: OpOverload = torch.ops.torch2ort.exact.default
# Follows a value that is computed even if it is unused; see torch2ort.program.keep_raising_ops.
must_compute: OpOverload = torch.ops.torch2ort.must_compute.default
torch.fx.node.has_side_effect(must_compute)
# The largest or the smallest of all numbers, with the same derivative in a trace as in eager PyTorch.
extreme: OpOverload = torch.ops.torch2ort.extreme.default
# The same tensor, with other names of its sizes in a trace.
of_sizes: OpOverload = torch.ops.torch2ort.of_sizes.default
# An integer between two bounds as a tensor without elements, of the sizes (number, 0), or, if it may be
# negative, (number, 0, 0) or (0, -number, 0): a number that is read twice has two names in a trace.
number_as_sizes: OpOverload = torch.ops.torch2ort.number_as_sizes.default
# Rows of a tensor, each at most once. Its derivative is `put_rows`, where `index_select`'s is a sum.
take_rows: OpOverload = torch.ops.torch2ort.take_rows.default
# The rows of a tensor in the order of `inverse`, which has a row of each of `rows`; the others are copies of
# any row, and nothing depends on them, so the derivative is `take_rows`.
fill_rows: OpOverload = torch.ops.torch2ort.fill_rows.default
# A tensor of `size` rows: those of `self` at `rows`, and zeros.
put_rows: OpOverload = torch.ops.torch2ort.put_rows.default
# Attention of packed sequences and its derivative; see kernels/packed_attention.py.
packed_attention: OpOverload = torch.ops.torch2ort.packed_attention.default
packed_attention_backward: OpOverload = torch.ops.torch2ort.packed_attention_backward.default
# A number that Python computes from those of tensors, with Python's errors; see
# kernels/scalar_expressions.py.
python_number: OpOverload = torch.ops.torch2ort.python_number.default


@torch.library.register_fake("torch2ort::dropout_noise", lib=_library)
def _fake_dropout_noise(like: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(like)


@torch.library.register_fake("torch2ort::dropout", lib=_library)
def _fake_dropout(self: torch.Tensor, p: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(self), torch.empty_like(self, dtype=torch.bool)


@torch.library.register_fake("torch2ort::bernoulli", lib=_library)
def _fake_bernoulli(like: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


@torch.library.register_fake("torch2ort::cross_entropy", lib=_library)
def _fake_cross_entropy(
    input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> torch.Tensor:
    return input.new_empty(target.shape if reduction == 0 else ())


@torch.library.register_fake("torch2ort::checked_index", lib=_library)
def _fake_checked_index(index: torch.Tensor, tensors: list[torch.Tensor], check: str) -> torch.Tensor:
    return torch.empty_like(index, memory_format=torch.contiguous_format)


@torch.library.impl("torch2ort::checked_index", "CompositeExplicitAutograd", lib=_library)
def _checked_index(index: torch.Tensor, tensors: list[torch.Tensor], check: str) -> torch.Tensor:
    """Check indices of constants, which a trace computes with."""
    refuse_index(check, tensors)
    return index.clone(memory_format=torch.contiguous_format)


@torch.library.register_fake("torch2ort::exact", lib=_library)
def _fake_exact(plain: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(exact, memory_format=torch.contiguous_format)


@torch.library.register_fake("torch2ort::must_compute", lib=_library)
def _fake_must_compute(value: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=value.device)


@torch.library.impl("torch2ort::must_compute", "CompositeExplicitAutograd", lib=_library)
def _must_compute(value: torch.Tensor) -> torch.Tensor:
    """Compute the token of a constant."""
    return torch.zeros((), dtype=torch.int64, device=value.device)


@torch.library.register_fake("torch2ort::extreme", lib=_library)
def _fake_extreme(self: torch.Tensor, largest: bool) -> torch.Tensor:
    return self.new_empty(())


@torch.library.register_fake("torch2ort::of_sizes", lib=_library)
def _fake_of_sizes(self: torch.Tensor, sizes: list[Any]) -> torch.Tensor:
    return self.new_empty(sizes)


@torch.library.register_fake("torch2ort::number_as_sizes", lib=_library)
def _fake_number_as_sizes(number: torch.Tensor, low: int | None, high: int | None) -> torch.Tensor:
    new_size = torch.library.get_ctx().new_dynamic_size
    if low is not None and low >= 0:
        return number.new_empty((new_size(min=low, max=high), 0))
    return number.new_empty((new_size(), new_size(), 0))


@torch.library.register_fake("torch2ort::take_rows", lib=_library)
def _fake_take_rows(self: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return self.new_empty((rows.shape[0], *self.shape[1:]))


@torch.library.register_fake("torch2ort::fill_rows", lib=_library)
def _fake_fill_rows(self: torch.Tensor, inverse: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return self.new_empty((inverse.shape[0], *self.shape[1:]))


@torch.library.register_fake("torch2ort::put_rows", lib=_library)
def _fake_put_rows(self: torch.Tensor, rows: torch.Tensor, size: Any) -> torch.Tensor:
    return self.new_empty((size, *self.shape[1:]))


@torch.library.register_fake("torch2ort::packed_attention", lib=_library)
def _fake_packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    sums = query.new_empty(query.shape[:2], dtype=sum_dtype(query.dtype))
    return query.new_empty(query.shape), sums


@torch.library.register_fake("torch2ort::packed_attention_backward", lib=_library)
def _fake_packed_attention_backward(
    grad: torch.Tensor, *tensors: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (t.new_empty(t.shape) for t in tensors[:3])
    return query, key, value


@torch.library.register_fake("torch2ort::python_number", lib=_library)
def _fake_python_number(numbers: list[torch.Tensor], dtype: torch.dtype, formula: str) -> torch.Tensor:
    return numbers[0].new_empty((), dtype=dtype)


@torch.library.impl("torch2ort::python_number", "CompositeExplicitAutograd", lib=_library)
def _python_number(numbers: list[torch.Tensor], dtype: torch.dtype, formula: str) -> torch.Tensor:
    return computed_number(numbers, dtype, formula)


def _keep_extreme(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _extreme_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Divide the gradient equally among all elements equal to the extreme; all others get zero."""
    numbers, found = ctx.saved_tensors
    mask = torch.where(torch.isnan(found), torch.isnan(numbers), numbers == found)
    return torch.where(mask, grad / mask.sum(), 0).to(grad.dtype), None


torch.library.register_autograd(
    "torch2ort::extreme", _extreme_backward, setup_context=_keep_extreme, lib=_library
)


def _keep_rows(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[-1])
    ctx.size = inputs[0].shape[0]


def _keep_put_rows(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])


torch.library.register_autograd(
    "torch2ort::take_rows",
    lambda ctx, grad: (put_rows(grad, ctx.saved_tensors[0], ctx.size), None),
    setup_context=_keep_rows,
    lib=_library,
)
torch.library.register_autograd(
    "torch2ort::fill_rows",
    lambda ctx, grad: (take_rows(grad, ctx.saved_tensors[0]), None, None),
    setup_context=_keep_rows,
    lib=_library,
)
torch.library.register_autograd(
    "torch2ort::put_rows",
    lambda ctx, grad: (take_rows(grad, ctx.saved_tensors[0]), None, None),
    setup_context=_keep_put_rows,
    lib=_library,
)


def _keep_packed_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, query_ends, key_ends, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, *output, query_ends, key_ends)
    ctx.mark_non_differentiable(output[1])


def _packed_attention_backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    found = packed_attention_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return (*found, None, None, None, None)


torch.library.register_autograd(
    "torch2ort::packed_attention",
    _packed_attention_backward,
    setup_context=_keep_packed_attention,
    lib=_library,
)

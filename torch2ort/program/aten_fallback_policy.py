"""Choice of the implementation of an ATen operator: ONNX, a decomposition, or PyTorch's kernel."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch2ort._torch import fake_tensors as private
from torch2ort._torch.dispatch import OpOverload
from torch2ort.program.half_precision import HALF
from torch2ort.program.kernel_sites import arguments_of, is_random
from torch2ort.program.pool_padding import padding_at_the_end

aten = torch.ops.aten

# Composites with a translation that has no gradient or a wrong one, while that of their parts is right.
DECOMPOSED: frozenset[OpOverload] = frozenset(
    {
        aten.atleast_1d.Sequence,
        aten.atleast_2d.Sequence,
        aten.atleast_3d.Sequence,
        aten.einsum.default,
        aten.log_sigmoid.default,
        aten.relu6.default,
    }
)

# Operators whose decomposition by torch fixes sizes of the input's last dimensions -> number of these
# dimensions.
OVER_FIXED_SIZES: dict[OpOverload, int] = {
    aten._adaptive_avg_pool2d.default: 2,
    aten._adaptive_avg_pool3d.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
}

# Composites with parts that raise an error for some values.
CHECKING: frozenset[OpOverload] = frozenset(
    {
        aten.inverse.default,
        aten.linalg_cholesky.default,
        aten.linalg_inv.default,
        aten.linalg_ldl_factor.default,
        aten.linalg_lu_factor.default,
        aten.linalg_matrix_power.default,
        aten.linalg_solve.default,
        aten.linalg_tensorinv.default,
        aten.linalg_tensorsolve.default,
    }
)

# Eager PyTorch checks that the argument is a probability; the parts of the composite do not.
_CHECKED = frozenset({aten.binary_cross_entropy.default})

# Composites that PyTorch's kernel computes as a whole: these, and others with many parts.
NOT_DECOMPOSED: frozenset[OpOverload] = (
    CHECKING
    | _CHECKED
    | frozenset(
        {
            aten.linalg_det.default,
            aten.linalg_matrix_exp.default,
            aten.linalg_pinv.default,
            aten.linalg_slogdet.default,
            aten.linalg_svdvals.default,
            aten.linalg_eigvalsh.default,
            aten.cholesky_inverse.default,
            aten.matrix_exp.default,
            aten.rrelu.default,
            # torch's decomposition returns other losses where a list of labels ends early.
            aten.multilabel_margin_loss_forward.default,
        }
    )
)

# torch.onnx's translation is an invalid graph, or returns other values or types than eager.
_MISTRANSLATED: frozenset[OpOverload] = frozenset(
    {
        aten.embedding_bag.padding_idx,
        aten._embedding_bag.default,
        aten.__lshift__.Scalar,
        aten.__rshift__.Scalar,
        aten.__ilshift__.Scalar,
        aten.__irshift__.Scalar,
        aten.bitwise_left_shift.Tensor_Scalar,
        aten.bitwise_right_shift.Tensor_Scalar,
        aten.special_erfcx.default,
        aten.special_log_ndtr.default,
        # torch.onnx's translations ignore align_corners and scales, and weigh other pixels.
        aten._upsample_bilinear2d_aa.default,
        aten._upsample_bilinear2d_aa.vec,
        aten._upsample_bicubic2d_aa.default,
        aten._upsample_bicubic2d_aa.vec,
    }
)

# The parts of these overflow, lose small numbers or signs, or do not propagate NaN.
_INEXACT: frozenset[OpOverload] = frozenset(
    {
        aten.atan2.default,
        aten.erfc.default,
        aten.expm1.default,
        aten.log1p.default,
        aten.lerp.Scalar,
        aten.lerp.Tensor,
        aten.logaddexp.default,
        aten.logaddexp2.default,
        aten.logcumsumexp.default,
        # For negative zero.
        aten.signbit.default,
        aten.logit.default,
        aten.xlogy.Tensor,
        aten.xlogy.Scalar_Self,
        aten.xlogy.Scalar_Other,
    }
)


# Translations of these return results after the first one that differ from eager's.
_WITH_MORE_RESULTS = frozenset(
    {
        # ONNX Runtime has no position for a window that contains NaN, or minus infinity alone.
        aten.max_pool1d_with_indices.default,
        aten.max_pool2d_with_indices.default,
        aten.max_pool3d_with_indices.default,
        # Eager returns no statistics, torch.onnx the running ones.
        aten._native_batch_norm_legit_no_training.default,
        # torch.onnx returns a tensor of another shape.
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)

# torch 2.15 removed this operator.
_CHOLESKY = frozenset({aten.cholesky.default} if hasattr(aten, "cholesky") else ())
# Operators that refuse values of an argument that is no index, so no check of an index covers them.
_RAISING: frozenset[OpOverload] = (
    CHECKING
    | _CHECKED
    | _CHOLESKY
    | frozenset(
        {
            aten.bincount.default,
            aten.ctc_loss.IntList,
            aten.ctc_loss.Tensor,
            aten.embedding_bag.default,
            aten.embedding_bag.padding_idx,
            aten.histc.default,
            aten.linalg_eig.default,
            aten.linalg_eigh.default,
            aten.linalg_eigvals.default,
            aten.linalg_eigvalsh.default,
            aten.linalg_lstsq.default,
            aten.linalg_svd.default,
            aten.linalg_svdvals.default,
            aten.masked_scatter.default,
            aten.quantile.default,
            aten.repeat_interleave.Tensor,
            aten.repeat_interleave.self_Tensor,
        }
    )
)


def may_raise(node: torch.fx.Node) -> bool:
    """Return True if eager PyTorch refuses some values that ``node`` may get, apart from indices."""
    if node.target in _RAISING:
        return True
    name = node.target._schema.name.removesuffix("_") if isinstance(node.target, OpOverload) else ""
    arguments = arguments_of(node) if name in _DIVISIONS else {}
    # Without a rounding mode, integers are divided as floats are.
    if not arguments or (name == "aten::div" and "rounding_mode" not in arguments):
        return False
    return _divides_integers(arguments)


def wants_kernel(node: torch.fx.Node) -> bool:
    """Return True if ``node`` must run in PyTorch's kernel although it has a translation."""
    target = node.target
    if is_random(node) or target in _MISTRANSLATED or target in _INEXACT or target in _CHECKED:
        return True
    if node.target in _WITH_MORE_RESULTS and _reads_more_results(node):
        return True
    return _holds(_MISTRANSLATED_IF, node) or _holds(_INEXACT_IF, node)


def is_plain_in_files(node: torch.fx.Node) -> bool:
    """Return True if files may use operators of ONNX where sessions call PyTorch's kernel for ``node``."""
    if is_random(node) or node.target in _MISTRANSLATED or _holds(_MISTRANSLATED_IF, node):
        return False
    if node.target not in _WITH_MORE_RESULTS or not _reads_more_results(node):
        return True
    # The positions are right except for windows with NaN or minus infinity.
    return not arguments_of(node).get("ceil_mode", True)


def _holds(conditions: Mapping[Any, Callable[[dict[str, Any]], bool]], node: torch.fx.Node) -> bool:
    condition = conditions.get(node.target)
    return condition is not None and condition(arguments_of(node))


def _reads_more_results(node: torch.fx.Node) -> bool:
    return any(user.target is operator.getitem and user.args[1] != 0 for user in node.users)


def _pools_unlike_onnx(arguments: dict[str, Any]) -> bool:
    # ONNX has no divisor_override.
    if arguments.get("divisor_override") is not None:
        return True
    if not arguments["ceil_mode"]:
        return False
    kernel, stride, padding = (arguments[name] for name in ("kernel_size", "stride", "padding"))
    sizes = arguments["self"].meta["val"].shape[-len(kernel) :]
    return padding_at_the_end(sizes, kernel, stride, padding, arguments.get("dilation", [1])) is None


def _has_projection(states: Sequence[torch.fx.Node]) -> bool:
    # ONNX's LSTM has no projection.
    hidden, cell = (state.meta["val"].shape[-1] for state in states)
    return bool(hidden != cell)


def _dtype(argument: Any) -> torch.dtype | None:
    value = argument.meta["val"] if isinstance(argument, torch.fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def _is_of_bytes(arguments: dict[str, Any]) -> bool:
    # For bytes alone, eager's result is no bool.
    return _dtype(arguments["self"]) is torch.uint8


def _has_no_fractions(arguments: dict[str, Any]) -> bool:
    dtype = _dtype(arguments["self"])
    return dtype is not None and not dtype.is_floating_point


def _has_inexact_remainder(arguments: dict[str, Any]) -> bool:
    # The remainder where the quotient is rounded: 3 / 0.3 is 10, but 0.3 fits into 3 nine times.
    return _divides_fractions(arguments) or _divides_integers(arguments)


def _has_inexact_quotient(arguments: dict[str, Any]) -> bool:
    # The floor of a quotient must be exact; a truncated quotient is not in eager either, but in half
    # precision eager truncates before it rounds.
    whole = arguments.get("rounding_mode", "floor") == "floor" or _dtype(arguments["self"]) in HALF
    return (whole and _divides_fractions(arguments)) or _divides_integers(arguments)


def _divides_fractions(arguments: dict[str, Any]) -> bool:
    both = [arguments["self"], arguments["other"]]
    dtypes = [_dtype(one) for one in both]
    return any(isinstance(one, float) for one in both) or any(d and d.is_floating_point for d in dtypes)


def _divides_integers(arguments: dict[str, Any]) -> bool:
    # On a division by zero eager raises an error, and ONNX Runtime crashes. Python numbers are known here.
    other = _dtype(arguments["other"])
    no_fractions = _has_no_fractions(arguments) and arguments.get("rounding_mode", "floor") is not None
    return no_fractions and ((other is not None and not other.is_floating_point) or arguments["other"] == 0)


def _raises_unlike_onnx(arguments: dict[str, Any]) -> bool:
    # ONNX Runtime computes integers in double, and truncates the result. The exponent -0.5 is eager's own
    # inverse root, whose sign at zero differs between few numbers and many.
    if type(arguments["exponent"]) is float and arguments["exponent"] == -0.5:
        return True
    base, exponent = _dtype(arguments["self"]), _dtype(arguments["exponent"])
    return not any(d is not None and d.is_floating_point for d in (base, exponent))


def _scatters_unlike_onnx(arguments: dict[str, Any]) -> bool:
    # ONNX requires one number for each index.
    source, index = arguments["src"].meta["val"], arguments["index"].meta["val"]
    if arguments.get("reduce") == "mean":
        # torch.onnx translates a mean as no reduction.
        return True
    return not all(private.is_known(a == b) for a, b in zip(source.shape, index.shape, strict=True))


def _counts_in_fractions(arguments: dict[str, Any]) -> bool:
    # No decomposition could count these fractions, and torch.onnx counts them in float32.
    numbers = [arguments.get(name, 0) for name in ("start", "end", "step")]
    values = [n.meta["val"] if isinstance(n, torch.fx.Node) else n for n in numbers]
    return any(isinstance(value, (float, torch.SymFloat)) for value in values)


def _is_of_half(arguments: dict[str, Any]) -> bool:
    # Eager rounds the positions to half precision, too; ONNX Runtime's are float32, and lead to other pixels.
    return _dtype(arguments["input"]) in HALF


def _pads_unlike_onnx(arguments: dict[str, Any]) -> bool:
    # A negative pad may cut off all elements before others are repeated.
    return _has_no_elements(arguments) or any(isinstance(p, int) and p < 0 for p in arguments["pad"])


def _has_no_elements(arguments: dict[str, Any]) -> bool:
    return _is_empty(arguments["self"])


def _is_empty(argument: torch.fx.Node) -> bool:
    return any(isinstance(size, int) and size == 0 for size in argument.meta["val"].shape)


def _pads_beyond_strides(arguments: dict[str, Any]) -> bool:
    # Eager allows padding up to the dilation. ONNX Runtime 1.31 reports contradictory sizes.
    padded, strides = arguments["output_padding"], arguments["stride"]
    wide = any(isinstance(p, int) and p >= s for p in padded for s in strides)
    return bool(arguments["transposed"]) and wide


# Names of the operators, without the underscore of those in place.
_DIVISIONS = frozenset({"aten::div", "aten::floor_divide", "aten::fmod", "aten::remainder"})

# Conditions where a translation does not compute eager's result, or fails.
_MISTRANSLATED_IF: dict[Any, Callable[[dict[str, Any]], bool]] = {
    **dict.fromkeys(
        (
            *(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default),
            *(aten.max_pool1d.default, aten.max_pool1d_with_indices.default),
            *(aten.max_pool2d.default, aten.max_pool2d_with_indices.default),
            *(aten.max_pool3d.default, aten.max_pool3d_with_indices.default),
        ),
        _pools_unlike_onnx,
    ),
    torch.ops.torch2ort.lstm.default: lambda arguments: _has_projection(arguments["hx"]),
    # An index without elements may have other dimensions than the tensor.
    aten.gather.default: lambda arguments: _is_empty(arguments["index"]),
    aten.convolution.default: _pads_beyond_strides,
    # They are reshaped with an inferred size, which is ambiguous without elements.
    **dict.fromkeys(
        (aten.group_norm.default, aten.native_group_norm.default),
        lambda arguments: _is_empty(arguments["input"]),
    ),
    aten.im2col.default: _has_no_elements,
    aten.pixel_unshuffle.default: _has_no_elements,
    aten.nonzero.default: lambda arguments: arguments["self"].meta["val"].dim() == 0,
    aten.pad.default: lambda arguments: arguments["mode"] != "constant" and _pads_unlike_onnx(arguments),
    # TopK divides by the number of elements and crashes the process, up to onnxruntime 1.30.
    aten.sort.default: _has_no_elements,
    aten.topk.default: _has_no_elements,
    aten.scatter.src: _scatters_unlike_onnx,
    aten.scatter_add.default: _scatters_unlike_onnx,
    aten.scatter_reduce.two: _scatters_unlike_onnx,
    **dict.fromkeys(
        (
            *(aten.all.default, aten.all.dim, aten.all.dims),
            *(aten.any.default, aten.any.dim, aten.any.dims),
        ),
        _is_of_bytes,
    ),
}

# Conditions where a translation only approximates eager's result, or differs for NaN, infinity or zero.
_INEXACT_IF: dict[Any, Callable[[dict[str, Any]], bool]] = {
    # ONNX Runtime's RNN turns NaN into zero.
    torch.ops.torch2ort.rnn_relu.default: lambda arguments: True,
    aten.embedding.default: lambda arguments: bool(arguments["scale_grad_by_freq"]),
    **dict.fromkeys(
        (
            *(aten.div.Tensor_mode, aten.div.Scalar_mode),
            *(aten.floor_divide.default, aten.floor_divide.Scalar),
        ),
        _has_inexact_quotient,
    ),
    aten.remainder.Tensor: _has_inexact_remainder,
    aten.remainder.Scalar: _has_inexact_remainder,
    # ONNX Runtime computes these in double, too.
    aten.fmod.Tensor: _has_no_fractions,
    aten.fmod.Scalar: _has_no_fractions,
    aten.isclose.default: _has_no_fractions,
    # Onnxruntime 1.31 multiplies integers in double, and saturates on overflow.
    aten.prod.default: _has_no_fractions,
    aten.prod.dim_int: _has_no_fractions,
    **dict.fromkeys(
        (aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default), _is_of_half
    ),
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _counts_in_fractions),
    aten.linspace.default: lambda arguments: arguments["dtype"] is torch.float64,
    aten.pow.Tensor_Scalar: _raises_unlike_onnx,
    aten.pow.Tensor_Tensor: _raises_unlike_onnx,
    aten.pow.Scalar: _raises_unlike_onnx,
}

"""Operators as libraries register them with PyTorch's dispatcher."""

from __future__ import annotations

import numpy as np
import torch

custom_op = torch.library.custom_op
_library = torch.library.Library("kernels_tests", "FRAGMENT")


# --- numpy in forward, and another such operator in backward


@custom_op("kernels_tests::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sin(x.numpy()))


@sine.register_fake
def _(x):
    return torch.empty_like(x)


@custom_op("kernels_tests::cosine", mutates_args=())
def cosine(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.cos(x.numpy()))


@cosine.register_fake
def _(x):
    return torch.empty_like(x)


def keep_first(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


sine.register_autograd(lambda ctx, grad: grad * cosine(ctx.saved_tensors[0]), setup_context=keep_first)


# --- several results, of which some have no gradient


@custom_op("kernels_tests::parts", mutates_args=())
def parts(x: torch.Tensor, power: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x**power, x.argmax(-1), x.abs()


@parts.register_fake
def _(x, power):
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.int64), torch.empty_like(x)


def _keep_parts(ctx, inputs, output):
    x, ctx.power = inputs
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(x)


def _parts_backward(ctx, grad, *others):
    (x,) = ctx.saved_tensors
    return grad * ctx.power * x ** (ctx.power - 1), None


parts.register_autograd(_parts_backward, setup_context=_keep_parts)


# --- lists, optional tensors, and values of each kind


@custom_op("kernels_tests::weighted", mutates_args=())
def weighted(
    tensors: list[torch.Tensor],
    factors: list[float],
    bias: torch.Tensor | None,
    *,
    mode: str = "sum",
    dtype: torch.dtype | None = None,
    times: int = 1,
    negative: bool = False,
) -> torch.Tensor:
    found = sum(t * f for t, f in zip(tensors, factors, strict=True)) * times
    found = found if bias is None else found + bias
    found = -found if negative else found
    return (found / len(tensors) if mode == "mean" else found).to(dtype or found.dtype)


@weighted.register_fake
def _(tensors, factors, bias, *, mode="sum", dtype=None, times=1, negative=False):
    return torch.empty_like(tensors[0], dtype=dtype or tensors[0].dtype)


def _keep_weighted(ctx, inputs, keyword_only_inputs, output):
    tensors, ctx.factors, bias = inputs
    ctx.dtype, ctx.of_bias = tensors[0].dtype, None if bias is None else bias.shape
    scale = keyword_only_inputs["times"] / (len(tensors) if keyword_only_inputs["mode"] == "mean" else 1)
    ctx.scale = -scale if keyword_only_inputs["negative"] else scale


def _weighted_backward(ctx, grad):
    grad = grad.to(ctx.dtype) * ctx.scale
    bias = None if ctx.of_bias is None else grad.sum_to_size(ctx.of_bias)
    return [grad * factor for factor in ctx.factors], None, bias


weighted.register_autograd(_weighted_backward, setup_context=_keep_weighted)


@custom_op("kernels_tests::halves", mutates_args=())
def halves(x: torch.Tensor) -> list[torch.Tensor]:
    return [part.clone() for part in x.chunk(2, -1)]


@halves.register_fake
def _(x):
    return [torch.empty_like(part) for part in x.chunk(2, -1)]


halves.register_autograd(lambda ctx, grads: torch.cat(grads, -1))


# --- random numbers, in forward and in backward


@custom_op("kernels_tests::noisy", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand_like(x)


@noisy.register_fake
def _(x):
    return torch.empty_like(x)


noisy.register_autograd(lambda ctx, grad: noisy(grad))


@custom_op("kernels_tests::noisy_untagged", mutates_args=())
def noisy_untagged(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand_like(x)


noisy_untagged.register_fake(torch.empty_like)
noisy_untagged.register_autograd(lambda ctx, grad: grad)


# --- backward that reads numbers, and omits gradients


@custom_op("kernels_tests::gated", mutates_args=())
def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * gate


@gated.register_fake
def _(x, gate):
    return torch.empty_like(x)


def _gated_backward(ctx, grad):
    (gate,) = ctx.saved_tensors
    return (grad * gate if gate.sum().item() > 0 else None), None


gated.register_autograd(
    _gated_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1])
)


# --- no formula


@custom_op("kernels_tests::no_formula", mutates_args=())
def no_formula(x: torch.Tensor) -> torch.Tensor:
    return x.exp()


@no_formula.register_fake
def _(x):
    return torch.empty_like(x)


# --- a size that depends on values


@custom_op("kernels_tests::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


@positive.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


def _positive_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return torch.zeros_like(x).masked_scatter(x > 0, grad)


positive.register_autograd(_positive_backward, setup_context=keep_first)


# --- products, whose types autocast decides


@custom_op("kernels_tests::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


@product.register_fake
def _(x, weight):
    return x.new_empty(x.shape[0], weight.shape[1])


def _product_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    return grad @ weight.T, x.T @ grad


product.register_autograd(
    _product_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)
torch.library.register_autocast(product, "cpu", torch.bfloat16)


@custom_op("kernels_tests::product_of_types", mutates_args=())
def product_of_types(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


@product_of_types.register_fake
def _(x, weight):
    return x @ weight


def _product_of_types_backward(ctx, grad):
    x, weight = (value.to(grad.dtype) for value in ctx.saved_tensors)
    return (grad @ weight.T).float(), (x.T @ grad).float()


product_of_types.register_autograd(
    _product_of_types_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


# --- one whose derivative tests register


@custom_op("kernels_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)


def times(factor: int):
    return lambda ctx, grad: grad * factor


@custom_op("kernels_tests::custom_without_fake", mutates_args=())
def custom_without_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


# --- by define and impl, as libraries in C++ do


def _defined(schema, kernel, fake=None, key="CPU"):
    _library.define(schema)
    name = schema.partition("(")[0]
    _library.impl(name, kernel, key)
    if fake is not None:
        torch.library.register_fake(f"kernels_tests::{name}", fake, lib=_library)


_defined("cube(Tensor x) -> Tensor", lambda x: x**3, torch.empty_like)
torch.library.register_autograd(
    "kernels_tests::cube",
    lambda ctx, grad: 3 * grad * ctx.saved_tensors[0] ** 2,
    setup_context=keep_first,
    lib=_library,
)
_defined("undifferentiated(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
_defined("composite(Tensor x, Tensor y) -> Tensor", lambda x, y: x.sin() * y, key="CompositeImplicitAutograd")
_defined("without_fake(Tensor x) -> Tensor", lambda x: x * 2)
_defined("writes(Tensor(a!) x) -> ()", lambda x: x.add_(1) and None, lambda x: None)
_defined("view_of(Tensor(a) x) -> Tensor(a)", lambda x: x[:1], lambda x: x[:1])
_defined("count(Tensor x) -> (Tensor, int)", lambda x: (x.clone(), 3), lambda x: (torch.empty_like(x), 3))
_defined("nothing(Tensor x) -> ()", lambda x: None, lambda x: None)
_defined("wrong_type(Tensor x) -> Tensor", lambda x: x.double(), torch.empty_like)
_defined("wrong_size(Tensor x) -> Tensor", lambda x: x[:1].clone(), torch.empty_like)

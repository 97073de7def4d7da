"""Programs whose steps leave out rows, and programs that read all of them, with the reason in the log."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from tests.program.sparsity.padded_encoder import HIDDEN, boolean, of_tokens, share, step, wrap
from tests.support.functions import Centered


def _then(change):
    """Return an ending that changes the hidden states before the loss of tokens."""
    return lambda model, x, keep, labels: of_tokens(model, change(model, x, keep), keep, labels)


def _mean(model, x, keep, labels):
    mask = keep[..., None]
    return (x * mask).sum(1) / mask.sum(1)


def _unreduced(model, x, keep, labels):
    logits = model.head(x)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
    return (losses.view(keep.shape) * keep).sum() / keep.sum()


def _shifted(model, x, keep, labels):
    return F.cross_entropy(model.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _in_place(model, x, keep):
    y = x * 2
    y += 1
    return F.relu(y, inplace=True)


def _likelihood(model, x, keep, labels):
    found = model.head(x).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return -(found * (labels >= 0)).sum()


SPARSE = {
    "loss of tokens": of_tokens,
    "loss of shifted tokens": _shifted,
    "loss of each token times the mask": _unreduced,
    "loss by the likelihood of labels": _likelihood,
    "mean of the tokens that the mask keeps": _mean,
    "maximum of the tokens that the mask keeps": lambda model, x, keep, labels: x.masked_fill(
        ~keep[..., None], -1e4
    ).amax(1),
    "first token": lambda model, x, keep, labels: model.head(x[:, 0]),
    "last valid token": lambda model, x, keep, labels: x[torch.arange(x.shape[0]), keep.sum(1) - 1],
    "output times the mask": lambda model, x, keep, labels: x * keep[..., None],
    "linear layer and activation": _then(lambda model, x, keep: F.gelu(model.linear(x))),
    "norm of a row": _then(lambda model, x, keep: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1)),
    "softmax of a row": _then(lambda model, x, keep: x.softmax(-1)),
    "halves of a row": _then(lambda model, x, keep: torch.cat(x.chunk(2, -1)[::-1], -1)),
    "views of a row": _then(lambda model, x, keep: x.view(*x.shape[:2], 2, -1).softmax(-1).flatten(2)),
    "rows of all sequences in one dimension": _then(
        lambda model, x, keep: model.linear(x.flatten(0, 1)).view(x.shape)
    ),
    "writes in place": _then(_in_place),
    "conversions": _then(lambda model, x, keep: (x.double() * 2).float()),
    "an operand for each place": _then(lambda model, x, keep: x + model.words.weight[: x.shape[1]]),
    "an operand for each sequence": _then(lambda model, x, keep: x / keep.sum(1)[:, None, None]),
}


@pytest.mark.parametrize("end", SPARSE.values(), ids=SPARSE)
def test_a_step_leaves_out_padding_of(end):
    density = step(end).density
    assert (density["plan"], density["tokens"] < 1) == ("padding", True)


def _lstm(model, x, keep):
    # Weights of a graph's own would be another model.
    weights = [model.linear.weight.repeat(4, 1), model.linear.weight.repeat(4, 1)]
    start = torch.zeros(1, x.shape[0], HIDDEN), torch.zeros(1, x.shape[0], HIDDEN)
    return torch.lstm(x, start, weights, False, 1, 0.0, True, False, True)[0]


def _batch_norm(model, x, keep):
    return F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2)


def _convolution(model, x, keep):
    weight = model.linear.weight[..., None].expand(-1, -1, 3)
    return F.conv1d(x.transpose(1, 2), weight, padding=1).transpose(1, 2)


# Endings that read rows of padding, with the operator that reads them.
DENSE = {
    "mean": ("mean", lambda model, x, keep, labels: x.mean(1)),
    "maximum": ("amax", lambda model, x, keep, labels: x.amax(1)),
    "squares of all hidden states": (
        "sum",
        lambda model, x, keep, labels: model.head(x[:, 0]).sum() + x.square().sum(),
    ),
    "batch norm": ("batch_norm", _then(_batch_norm)),
    "convolution": ("conv1d", _then(_convolution)),
    "LSTM": ("torch2ort.lstm.default", _then(_lstm)),
    "Function": ("torch2ort.python_op.default", _then(lambda model, x, keep: Centered.apply(x))),
    "mixer": (
        "matmul",
        _then(lambda model, x, keep: model.words.weight[: x.shape[1], :1].expand(-1, x.shape[1]) @ x),
    ),
    "cumulative sum": ("cumsum", _then(lambda model, x, keep: x.cumsum(1))),
    "softmax over tokens": ("softmax", _then(lambda model, x, keep: x.softmax(1))),
    "norm of a sequence": ("layer_norm", _then(lambda model, x, keep: F.layer_norm(x, x.shape[1:]))),
    "rolled sequence": ("roll", _then(lambda model, x, keep: x.roll(1, 1))),
    "turned sequence": ("flip", _then(lambda model, x, keep: x.flip(1))),
    "boolean index": ("index", lambda model, x, keep, labels: model.head(x[keep])),
    "softmax over sequences": ("softmax", _then(lambda model, x, keep: x.softmax(0))),
    "sequences in another order": ("flip", _then(lambda model, x, keep: x.flip(0))),
}


@pytest.mark.parametrize(("operator", "end"), DENSE.values(), ids=DENSE)
def test_a_step_computes_all_rows_for(operator, end, caplog):
    assert step(end).density["plan"] == "dense"
    reasons = [text for text in caplog.messages if "all rows are computed" in text]
    pattern = rf"Encoder: all rows are computed, as {re.escape(operator)} at .+ reads all rows"
    assert len(reasons) == 1, caplog.messages
    assert re.fullmatch(pattern, reasons[0]), reasons


def test_an_output_of_all_rows_is_named(caplog):
    module = step(lambda model, x, keep, labels: (of_tokens(model, x, keep, labels), x))
    assert module.density["plan"] == "dense"
    assert [text for text in caplog.messages if "an output of the model" in text]


def test_a_model_without_sequences_is_not_inspected(plans):
    wrap(torch.nn.Linear(4, 4), "padding")(torch.randn(3, 4)).sum().backward()
    assert not plans


def _weak(q, k, v, keep):
    scores = (q @ k.transpose(-1, -2)).masked_fill(~keep[:, None, None], -5.0)
    return scores.softmax(-1) @ v


def _divided(q, k, v, keep):
    scores = (q @ k.transpose(-1, -2)).masked_fill(~keep[:, None, None], -1e4) / 1e4
    return scores.softmax(-1) @ v


def _of_queries(q, k, v, keep):
    scores = (q @ k.transpose(-1, -2)).masked_fill(~keep[:, None, None], -1e9)
    return scores.softmax(-2) @ v


def _unnormalized(q, k, v, keep):
    return (q @ k.transpose(-1, -2)).masked_fill(~keep[:, None, None], -1e9).sigmoid() @ v


ATTENTION_TO_PADDING = {
    "a mask of small numbers": _weak,
    "a mask that is divided": _divided,
    "softmax over queries": _of_queries,
    "weights without softmax": _unnormalized,
}


@pytest.mark.parametrize("attend", ATTENTION_TO_PADDING.values(), ids=ATTENTION_TO_PADDING)
def test_a_step_computes_all_keys_for(attend):
    plan, tokens = (step(attend=attend).density[name] for name in ("plan", "tokens"))
    assert plan == "dense" or tokens == 1


def test_attention_without_a_mask_reads_all_tokens():
    def unmasked(q, k, v, keep):
        return F.scaled_dot_product_attention(q, k, v)

    assert step(attend=unmasked).density["tokens"] == 1


def test_a_mask_multiplied_with_weights_alone_reads_all_tokens():
    def multiplied(q, k, v, keep):
        return ((q @ k.transpose(-1, -2)).softmax(-1) * keep[:, None, None]) @ v

    assert step(attend=multiplied).density["tokens"] == 1


def test_a_mask_for_each_head_that_drops_all_valid_keys_is_followed():
    def by_heads(q, k, v, keep):
        dropped = torch.tensor([False, True])[:, None, None].expand(-1, *keep.shape[1:], keep.shape[1])
        scores = (q @ k.transpose(-1, -2)).masked_fill(dropped, -1e9)
        return scores.masked_fill(~keep[:, None, None], -1e9).softmax(-1) @ v

    step(attend=by_heads)


def test_a_number_that_cancels_a_mask_is_followed():
    def cancelled(q, k, v, keep):
        scores = (q @ k.transpose(-1, -2)).masked_fill(~keep[:, None, None], -1e9)
        again = torch.zeros(keep.shape).masked_fill(~keep, 1e9)
        return (scores + again[:, None, None]).softmax(-1) @ v

    step(attend=cancelled)


def test_a_slice_of_one_token_that_is_broadcast_is_followed():
    def end(model, x, keep, labels):
        return of_tokens(model, x[:, :-1] - x[:, :1], keep, labels[:, 1:])

    step(end)


def test_a_view_that_mixes_sequences_is_followed():
    def end(model, x, keep, labels):
        mixed = x.reshape(x.shape[1], x.shape[0], HIDDEN)
        found = F.scaled_dot_product_attention(mixed, mixed, mixed)
        return of_tokens(model, found.reshape(x.shape), keep, labels)

    step(end)


def test_dropout_of_a_slice_draws_eagers_numbers():
    def end(model, x, keep, labels):
        return of_tokens(model, F.dropout(x[:, :-1], 0.5), keep, labels[:, 1:])

    step(end)


def test_the_share_of_tokens_is_that_of_the_mask():
    assert step(attend=boolean).density["tokens"] == share()

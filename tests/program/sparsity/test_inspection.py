"""Counts of the rows of a call, for each kind of mask and for calls at the limits."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from tests.program.sparsity.padded_encoder import (
    IGNORED,
    LENGTH,
    Encoder,
    assert_step_like_eager,
    batch,
    of_tokens,
    share,
    step,
    wrap,
)
from torch2ort.program.sparsity.inspection import Inspection
from torch2ort.training.row_plans import RowPlans

LOW = torch.finfo(torch.float32).min


def _causal(q):
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()


def _fused(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _explicit(lower):
    return lambda q, k, v, keep: lower(q @ k.transpose(-1, -2), keep[:, None, None]).softmax(-1) @ v


MASKS = {
    "boolean": lambda q, k, v, keep: _fused(q, k, v, keep[:, None, None]),
    "boolean and causal": lambda q, k, v, keep: _fused(q, k, v, keep[:, None, None] & _causal(q)),
    "of queries and keys": lambda q, k, v, keep: _fused(
        q, k, v, (keep[:, None] & keep[:, :, None] | torch.eye(q.shape[2], dtype=torch.bool))[:, None]
    ),
    "expanded": lambda q, k, v, keep: _fused(q, k, v, keep[:, None, None].expand(-1, -1, q.shape[2], -1)),
    "added, the smallest number": lambda q, k, v, keep: _fused(
        q, k, v, (1.0 - keep[:, None, None].float()) * LOW
    ),
    "added, -10000": _explicit(lambda s, keep: s + (1.0 - keep.float()) * -10000.0),
    "added, zeros that are filled": _explicit(
        lambda s, keep: s + torch.zeros_like(keep, dtype=s.dtype).masked_fill(~keep, LOW)
    ),
    "filled, infinity": _explicit(lambda s, keep: s.masked_fill(~keep, -torch.inf)),
    "filled, -1e9": _explicit(lambda s, keep: s.masked_fill(~keep, -1e9)),
    "where": _explicit(lambda s, keep: torch.where(keep, s, LOW)),
    "filled, then zeros": lambda q, k, v, keep: (
        (
            (q @ k.transpose(-1, -2))
            .masked_fill(~keep[:, None, None], -1e9)
            .softmax(-1)
            .masked_fill(~keep[:, None, None], 0.0)
        )
        @ v
    ),
}


@pytest.mark.parametrize("attend", MASKS.values(), ids=MASKS)
def test_the_tokens_of_a_mask_are_counted(attend):
    density = step(attend=attend, given=batch(labelled=LENGTH)).density
    assert density == {"plan": "padding", "tokens": share(), "labels": share()}


def test_the_labels_that_are_not_ignored_are_counted():
    assert step(given=batch(labelled=1)).density["labels"] == 1 / LENGTH


def test_causal_attention_reads_the_tokens_before_those_that_are_read():
    def causal(q, k, v, keep):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    # Two tokens of each sequence have a label, and are the first ones.
    assert step(attend=causal, given=batch(labelled=2)).density["tokens"] == 2 / LENGTH


def test_the_first_tokens_alone_are_read_of_a_model_without_attention():
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.linear = torch.nn.Embedding(19, 8), torch.nn.Linear(8, 3)

        def forward(self, ids, mask, labels):
            return self.linear(self.words(ids))[:, 0]

    eager = Plain()
    module = wrap(eager, "labels")
    assert_step_like_eager(eager, module, batch())
    assert module.density == {"plan": "slices", "tokens": 1 / LENGTH, "labels": None}


def test_a_sequence_of_padding_alone_needs_no_rows():
    given = batch((3, 0, 2, 5))
    assert step(given=given).density["tokens"] == share((3, 0, 2, 5))


def test_a_token_all_of_whose_keys_are_masked_reads_all_keys():
    def filled(q, k, v, keep):
        return (q @ k.transpose(-1, -2)).masked_fill(~keep[:, None, None], -1e9).softmax(-1) @ v

    module = step(lambda model, x, keep, labels: x[:, 0], filled, given=batch((3, 0, 2, 5)))
    assert module.density["tokens"] == (3 + LENGTH + 2 + 5) / (4 * LENGTH)


def test_a_batch_without_a_label_gives_eagers_result():
    eager = Encoder()
    module = wrap(eager, "padding")
    given = batch()
    for labels in (given["labels"], torch.full_like(given["labels"], IGNORED)):
        found = []
        for model in (eager, module):
            model.zero_grad()
            loss = model(given["ids"], given["mask"], labels)
            loss.backward()
            found.append([loss, *[p.grad for p in model.parameters()]])
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5, equal_nan=True)
    assert found[1][0].isnan()


def test_labels_of_two_losses_are_counted_for_the_one_with_fewer():
    def end(model, x, keep, labels):
        fewer = labels.masked_fill(torch.arange(x.shape[1]) > 0, IGNORED)
        return of_tokens(model, x, keep, labels) + of_tokens(model, x, keep, fewer)

    assert step(end).density["labels"] == pytest.approx(1 / LENGTH)


@pytest.mark.parametrize("attend", MASKS.values(), ids=MASKS)
def test_an_inspection_from_json_counts_the_same_rows(attend, plans, monkeypatch):
    seen = []
    original = RowPlans.select

    def noted(self, dense, feeds, startup):
        seen.append(feeds)
        return original(self, dense, feeds, startup)

    monkeypatch.setattr(RowPlans, "select", noted)
    wrap(Encoder(attend=attend), "padding")(**batch())
    inspection = plans[-1].density.inspection
    again = Inspection.from_json(json.loads(json.dumps(inspection.to_json())))
    one, other = inspection(seen[-1]), again(seen[-1])
    assert torch.equal(one.read, other.read)
    assert torch.equal(one.attended, other.attended)
    assert one.labels == other.labels


def test_an_inspection_is_read_from_the_cache(tmp_path, plans, monkeypatch):
    eager = Encoder()
    for _ in range(2):
        module = wrap(eager, "padding", cache_dir=tmp_path)
        assert_step_like_eager(eager, module, batch())
        monkeypatch.setattr(
            "torch2ort.program.sparsity.rewrite.opportunity", lambda *args: pytest.fail("analysed again")
        )
    assert plans[1].density.work == plans[0].density.work
    assert plans[1].report() == plans[0].report()

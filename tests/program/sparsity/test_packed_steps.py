"""Steps that leave out rows give eager PyTorch's outputs, gradients and random numbers."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F

from tests.program.sparsity.padded_encoder import (
    HEADS,
    HIDDEN,
    LENGTH,
    WORDS,
    Encoder,
    assert_same_gradients,
    assert_step_like_eager,
    batch,
    of_tokens,
    step,
    wrap,
)
from tests.support.comparison import assert_same
from torch2ort.program.sparsity import packing
from torch2ort.training import row_plans
from torch2ort.training.row_plans import RowPlans

FULL = batch((LENGTH,) * 4, labelled=LENGTH)


def _dropped(model, x, keep, labels):
    return F.dropout(x, 0.5) * keep[..., None]


@pytest.mark.parametrize("sparsity", ["padding", "labels"])
def test_dropout_drops_eagers_elements(sparsity):
    eager = Encoder(_dropped)
    module = wrap(eager, sparsity)
    for seed in range(3):
        found = []
        for model in (eager, module):
            torch.manual_seed(seed)
            found.append((model(**batch()) == 0, torch.get_rng_state()))
        assert_same(found[1], found[0], f"elements that are 0 after seed {seed}")
    assert module.density["plan"] != "dense"


@pytest.mark.parametrize("sparsity", ["padding", "labels"])
def test_dropout_inside_of_a_model_is_eagers(sparsity):
    eager = Encoder(dropout=0.3)
    module = wrap(eager, sparsity)
    for seed in range(3):
        assert_step_like_eager(eager, module, batch(seed=seed), seed=seed)
    assert module.density["plan"] == sparsity


def test_both_plans_at_once_give_eagers_results(monkeypatch):
    monkeypatch.setattr(row_plans, "_SMALL", 0.0)
    eager = Encoder(
        lambda model, x, keep, labels: of_tokens(model, torch.relu(model.linear(x)), keep, labels)
    )
    module = wrap(eager, "auto")
    for seed in range(3):
        assert_step_like_eager(eager, module, batch((8, 6, 7, 5), labelled=1, seed=seed))
    assert module.density["plan"] == "padding, labels"


class Fused(Encoder):
    """An encoder whose queries, keys and values are parts of one product."""

    def __init__(self, parts) -> None:
        super().__init__()
        self.all = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self._parts = parts

    def encode(self, x, keep):
        q, k, v = self._parts(self.all(x).view(*x.shape[:2], 3, HEADS, -1))
        return torch.relu(x + self._attend(q, k, v, keep).transpose(1, 2).flatten(2))


PRODUCTS = {
    "chunk": lambda found: (part.squeeze(2).transpose(1, 2) for part in found.chunk(3, 2)),
    "unbind": lambda found: found.permute(2, 0, 3, 1, 4).unbind(0),
    "select": lambda found: (found[:, :, i].transpose(1, 2) for i in range(3)),
}


@pytest.mark.parametrize("parts", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize(
    ("sparsity", "plan"), [("padding", "padding"), ("labels", "labels"), ("auto", "padding, labels")]
)
def test_queries_keys_and_values_of_one_product_are_packed(parts, sparsity, plan, monkeypatch):
    monkeypatch.setattr(row_plans, "_SMALL", 0.0)
    eager = Fused(parts)
    module = wrap(eager, sparsity)
    for seed in range(3):
        assert_step_like_eager(eager, module, batch((8, 6, 7, 5), labelled=1, seed=seed))
    assert module.density["plan"] == plan


def test_an_embedding_whose_gradient_depends_on_the_number_of_its_tokens_is_followed():
    eager = Encoder()
    eager.words = torch.nn.Embedding(WORDS, HIDDEN, scale_grad_by_freq=True)
    eager.encode = lambda x, keep: x  # type: ignore[method-assign]
    module = wrap(eager, "labels")
    for seed in range(2):
        assert_step_like_eager(eager, module, batch(labelled=2, seed=seed))


def _added(bias):
    """Return attention with a number for each pair of tokens, besides the mask."""

    def attend(q, k, v, keep):
        mask = (1.0 - keep[:, None, None].float()) * torch.finfo(torch.float32).min
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask + bias(q.shape[2]))

    return attend


def _kept(pairs):
    """Return attention to those tokens that the mask and a function of the number of tokens keep."""

    def attend(q, k, v, keep):
        mask = keep[:, None, None] & pairs(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


def _apart(length):
    numbers = torch.arange(length)
    return (numbers[:, None] - numbers[None]).abs()


ATTENTIONS = {
    "to all": _kept(lambda length: torch.ones(length, length, dtype=torch.bool)),
    "causal": _kept(lambda length: torch.ones(length, length, dtype=torch.bool).tril()),
    "to neighbours": _kept(lambda length: _apart(length) < 2),
    "of heads": _kept(lambda length: (_apart(length) < 2) | torch.tensor([True, False])[:, None, None]),
    "less to far tokens": _added(lambda length: -_apart(length) * 0.5),
    "more to later tokens": _added(lambda length: torch.arange(length) * 0.7),
    "less to far tokens, by heads": _added(
        lambda length: -_apart(length) * torch.tensor([0.5, 2.0])[:, None, None]
    ),
    "to as many as there are valid ones": lambda q, k, v, keep: F.scaled_dot_product_attention(
        q, k, v, attn_mask=keep[:, None, None] & (_apart(q.shape[2]) < keep.sum(1)[:, None, None, None])
    ),
}


@pytest.mark.parametrize("attend", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_is_eagers(attend, monkeypatch):
    # Small attention is computed with padding, as a call of the kernel for each sequence costs more.
    monkeypatch.setattr(packing, "_FEWEST_PRODUCTS", 0)
    eager = Encoder(attend=attend)
    module = wrap(eager, "padding")
    for lengths in ((3, 7, 2, 5), (3, 7, 2, 5), (2, 3, 9, 4), (5, 0, 6, 1)):
        assert_step_like_eager(eager, module, batch(lengths, labelled=LENGTH))
    assert module.density["plan"] == "padding"


@pytest.mark.parametrize("sparsity", ["padding", "labels"])
def test_sizes_may_vary_between_calls(sparsity):
    eager = Encoder(dropout=0.3)
    module = wrap(eager, sparsity)
    for lengths, length in (((3, 7, 2, 5), 9), ((4, 6, 12), 12), ((3, 3, 4, 2, 5), 7), ((2, 3), 6)):
        assert_step_like_eager(eager, module, batch(lengths, length))
        assert module.density["plan"] == sparsity


TOKENS = {
    "first": lambda model, x, keep, labels: model.head(x[:, 0]),
    "last": lambda model, x, keep, labels: model.head(x[:, -1]),
    "last valid": lambda model, x, keep, labels: model.head(x[torch.arange(x.shape[0]), keep.sum(1) - 1]),
    "two of each": lambda model, x, keep, labels: model.head(
        x[torch.arange(x.shape[0])[:, None], torch.stack([keep.sum(1) - 1, keep.sum(1) - 2], 1)]
    ),
    "first, twice": lambda model, x, keep, labels: model.head(x[:, 0]) + model.linear(x)[:, 0].sum(),
}


@pytest.mark.parametrize("end", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize(("sparsity", "plan"), [("padding", "padding"), ("labels", "slices")])
def test_tokens_that_are_read_give_eagers_result(end, sparsity, plan):
    module = step(
        lambda *given: end(given[0], torch.tanh(given[0].linear(given[1])), *given[2:]), sparsity=sparsity
    )
    assert module.density["plan"] == plan


def test_logits_beside_a_loss_are_all_computed():
    def end(model, x, keep, labels):
        logits = model.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits

    assert step(end).density["plan"] == "dense"


def test_an_output_times_the_mask_has_eagers_shape():
    eager = Encoder(lambda model, x, keep, labels: model.linear(x) * keep[..., None])
    module = wrap(eager, "padding")
    for _ in range(2):
        output = assert_step_like_eager(eager, module, batch())
        assert output.shape == (4, LENGTH, HIDDEN)
    assert module.density["plan"] == "padding"


def test_a_second_backward_gives_the_same_gradients():
    eager = Encoder()
    module = wrap(eager, "padding")
    for _ in range(2):
        for model in (eager, module):
            model.zero_grad()
            loss = model(**batch())
            loss.backward(retain_graph=True)
            loss.backward()
        assert_same_gradients(eager, module)


@pytest.mark.parametrize("frozen", ["words", "key", "norm", "head"])
def test_frozen_parameters_have_no_gradient(frozen):
    eager = Encoder()
    getattr(eager, frozen).requires_grad_(False)
    module = wrap(eager, "padding")
    for _ in range(2):
        assert_step_like_eager(eager, module, batch())
    assert module.density["plan"] == "padding"
    assert all(p.grad is None for p in getattr(module, frozen).parameters())


def test_embedded_inputs_get_eagers_gradient():
    class Embedded(Encoder):
        def forward(self, x, mask, labels):
            return of_tokens(self, self.encode(x, mask.bool()), mask, labels)

    eager = Embedded()
    module = wrap(eager, "padding")
    given = batch()
    for _ in range(2):
        gradients = []
        x = torch.randn(*given["ids"].shape, HIDDEN)
        for model in (eager, module):
            leaf = x.clone().requires_grad_()
            model.zero_grad()
            model(leaf, given["mask"], given["labels"]).backward()
            gradients.append(leaf.grad)
        assert_same(gradients[1], gradients[0], "gradient of the input")
        assert_same_gradients(eager, module)
    assert module.density["plan"] == "padding"


def test_a_batch_with_one_token_is_computed_in_all_rows():
    eager = Encoder()
    module = wrap(eager, "padding")
    one = batch((1, 0, 0, 0))
    for given, plan in ((batch(), "padding"), (one, "dense"), (batch(), "padding")):
        assert_step_like_eager(eager, module, given)
        assert module.density["plan"] == plan


def _plans_of(module, given, count):
    found = []
    for _ in range(count):
        module(**given).backward()
        found.append(module.density["plan"])
    return found


@pytest.fixture
def builds(monkeypatch):
    """Let "auto" choose plans for small models, and count the engines that are built."""
    monkeypatch.setattr(row_plans, "_SMALL", 0.0)
    found = []
    original = RowPlans._build_engine

    def noted(self, plan, needed):
        found.append(plan)
        return original(self, plan, needed)

    monkeypatch.setattr(RowPlans, "_build_engine", noted)
    return found


def test_a_change_of_density_takes_effect_within_four_steps(builds):
    module = wrap(Encoder(), "auto")
    assert _plans_of(module, FULL, 4) == ["dense"] * 4
    assert "dense" not in _plans_of(module, batch(), 4)[-1]
    assert _plans_of(module, FULL, 4)[-1] == "dense"


def test_changing_over_again_builds_nothing(builds):
    module = wrap(Encoder(), "auto")
    for given in (FULL, batch()):
        _plans_of(module, given, 5)
    before = len(builds)
    assert before > 0
    for given in (FULL, batch(), FULL, batch()):
        _plans_of(module, given, 5)
    assert len(builds) == before


def test_a_full_batch_among_others_does_not_change_the_plan(builds):
    module = wrap(Encoder(), "auto")
    first = _plans_of(module, batch(), 4)
    assert _plans_of(module, FULL, 1) == first[-1:]


def test_a_small_model_is_computed_in_all_rows():
    assert step(sparsity="auto").density["plan"] == "dense"


def test_off_leaves_out_nothing():
    assert step(sparsity="off").density == {"plan": "dense", "tokens": None, "labels": None}


def test_two_modules_run_in_threads():
    eagers = [Encoder() for _ in range(2)]
    modules = [wrap(eager, "padding") for eager in eagers]
    errors = []

    def run(eager, module):
        try:
            for number in range(4):
                given = batch(seed=number)
                for model in (eager, module):
                    model.zero_grad()
                    model(**given).backward()
                assert_same_gradients(eager, module)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(eagers, modules, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [module.density["plan"] for module in modules] == ["padding"] * 2


def test_one_module_runs_in_two_threads():
    eager = Encoder()
    module = wrap(eager, "padding")
    expected = [eager(**batch(seed=number)) for number in range(2)]
    found = {}

    def run(number):
        found[number] = [module(**batch(seed=number)).detach() for _ in range(4)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert_same(found[number], [expected[number].detach()] * 4, f"losses of thread {number}")


def test_gradients_accumulate():
    eager = Encoder()
    module = wrap(eager, "padding")
    for seed in range(4):
        for model in (eager, module):
            model(**batch(seed=seed)).backward()
    assert_same_gradients(eager, module)


def test_two_forwards_may_precede_their_backwards():
    eager = Encoder()
    module = wrap(eager, "padding")
    for _ in range(2):
        for model in (eager, module):
            losses = [model(**batch(seed=seed)) for seed in range(2)]
            for loss in losses:
                loss.backward()
        assert_same_gradients(eager, module)


def test_weights_that_change_between_steps_are_used():
    eager = Encoder()
    module = wrap(eager, "padding")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in (eager, module)]
    for seed in range(4):
        assert_step_like_eager(eager, module, batch(seed=seed))
        for optimizer in optimizers:
            optimizer.step()


def test_a_mask_that_is_written_into_a_viewed_buffer_is_that_of_the_call():
    class Buffered(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.zeros(4, LENGTH, dtype=torch.long))

        def forward(self, ids, mask, labels):
            view = self.mask[:]
            self.mask.copy_(mask)
            keep = view != 0
            return of_tokens(self, self.encode(self.words(ids), keep), keep, labels)

    eager = Buffered()
    module = wrap(eager, "padding")
    for lengths in ((3, 7, 2, 5), (6, 2, 5, 3), (2, 8, 4, 4)):
        assert_step_like_eager(eager, module, batch(lengths, seed=1))


def test_a_copy_of_a_module_leaves_out_rows_too():
    eager = Encoder()
    module = copy.deepcopy(wrap(eager, "padding"))
    for _ in range(2):
        assert_step_like_eager(eager, module, batch())
    assert module.density["plan"] == "padding"

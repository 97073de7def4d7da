"""Varying sizes train in one graph, with eager PyTorch's outputs and gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import torch2ort
from tests.support.comparison import assert_same, assert_trains_like_eager
from tests.support.functions import Numpy, Square, TwoOutputs


class Scores(torch.autograd.Function):
    """A Function with a softmax, which saves its result and reads a size in backward."""

    @staticmethod
    def forward(ctx, scores):
        result = torch.softmax(scores, -1)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        weighted = grad * result
        return weighted - result * weighted.sum(-1, keepdim=True)


class Block(torch.nn.Module):
    """A transformer's block over tokens, whose loss is PyTorch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = torch.nn.Embedding(11, 8), torch.nn.Embedding(16, 8)
        self.mixed, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)
        self.first, self.second = torch.nn.LayerNorm(8), torch.nn.LayerNorm(8)
        self.wide, self.narrow = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.head = torch.nn.Linear(8, 11)

    def forward(self, tokens):
        batch, length = tokens.shape
        h = self.table(tokens) + self.places(torch.arange(length))
        parts = self.mixed(self.first(h)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = parts[0] @ parts[1].transpose(-2, -1) / 2
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = Scores.apply(scores.masked_fill(hidden, float("-inf"))) @ parts[2]
        h = h + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, 8)), 0.1, self.training)
        h = h + self.narrow(Square.apply(F.gelu(self.wide(self.second(h)))))
        logits = self.head(h)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, 11), tokens[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


def graphs_of(model: torch.nn.Module, sizes, make, **settings) -> list[int]:
    """Train on batches of these sizes, compare with eager PyTorch, and return the number of each graph."""
    module = assert_trains_like_eager(model, [make(*size) for size in sizes], steps=len(sizes), **settings)
    seen: list[object] = []
    numbers = []
    for size in sizes:
        module(*make(*size))
        if module.exported not in seen:
            seen.append(module.exported)
        numbers.append(seen.index(module.exported))
    return numbers


@pytest.mark.long
def test_a_transformers_block_trains_in_one_graph_for_all_batches_and_lengths() -> None:
    def tokens(batch: int, length: int) -> tuple[torch.Tensor]:
        return (torch.randint(0, 11, (batch, length)),)

    # The first call has a graph of its own, and so has a size of 1, which torch.export specializes.
    sizes = ((2, 5), (3, 7), (5, 4), (2, 9), (1, 6), (4, 3), (2, 5))
    numbers = graphs_of(Block(), sizes, tokens, loss=lambda output: output["loss"])
    assert numbers == [0, 1, 1, 1, 2, 1, 0]


class Causal(torch.nn.Module):
    """A language model whose loss pads the labels, as transformers' does."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11)

    def forward(self, tokens):
        h = self.table(tokens)
        h = F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], is_causal=True)[:, 0]
        labels = F.pad(tokens, (0, 1), value=-100)[..., 1:].contiguous()
        return F.cross_entropy(self.head(h).view(-1, 11), labels.view(-1), ignore_index=-100)


class Images(torch.nn.Module):
    """Convolutions over images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.Conv2d(4, 3, 3, stride=2)
        self.norm = torch.nn.BatchNorm2d(4)

    def forward(self, images):
        h = F.relu(self.norm(self.first(images)))
        h = F.interpolate(F.max_pool2d(h, 2), size=images.shape[-2:], mode="bilinear")
        return F.adaptive_avg_pool2d(self.second(h), 1).flatten(1)


# The sizes were drawn at random. Each model trains on all of them with the first graph and one more.
RANDOM_SIZES = {
    "tokens": (Causal, ((4, 9), (7, 9), (3, 5), (2, 14), (6, 12), (5, 3), (8, 8), (4, 9))),
    "images": (Images, ((4, 8, 9), (7, 8, 9), (3, 11, 6), (2, 7, 14), (6, 12, 9), (5, 6, 7), (3, 10, 8))),
}


@pytest.mark.parametrize("name", RANDOM_SIZES)
def test_a_size_that_did_not_vary_before_needs_no_graph_of_its_own(name) -> None:
    def batch(*sizes: int) -> tuple[torch.Tensor]:
        if name == "tokens":
            return (torch.randint(0, 11, sizes),)
        return (torch.randn(sizes[0], 2, *sizes[1:]),)

    model, sizes = RANDOM_SIZES[name]
    assert graphs_of(model(), sizes, batch) == [0 if s == sizes[0] else 1 for s in sizes]


class Then(torch.nn.Module):
    """A layer, and a function of its result."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.weight = torch.nn.Parameter(torch.rand(4) + 0.5)
        self.function = function

    def forward(self, x):
        h = self.layer(x)
        return self.function(self, x, h)


class Repeated(torch.autograd.Function):
    """Runs on real tensors only, and returns twice as many rows."""

    @staticmethod
    def forward(ctx, x):
        return torch.tensor([*x.tolist(), *(x + 1).tolist()])

    @staticmethod
    def backward(ctx, grad):
        return sum(grad.chunk(2, 0))


class Looping(torch.autograd.Function):
    """A loop over the rows, which on tensors without data runs as often as the sample has rows."""

    @staticmethod
    def forward(ctx, x):
        return torch.stack([x[i] * 2 for i in range(x.shape[0])])

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class RowSums(torch.autograd.Function):
    """Its inferer names a size of its argument."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy().sum(1))

    @staticmethod
    def backward(ctx, grad):
        return grad[:, None].expand_as(ctx.saved_tensors[0])


@pytest.fixture(autouse=True)
def inferer() -> Iterator[None]:
    torch2ort.register_shape_inferer(RowSums, lambda site, shapes, dtypes: ([[shapes[0][0]]], dtypes))
    yield
    torch2ort.unregister(RowSums)


def missing_gradient(model, x, h):
    return TwoOutputs.apply(h)[1] * model.weight


PROGRAMS = {
    "a Function": lambda m, x, h: Square.apply(h).tanh(),
    "a Function that numpy computes": lambda m, x, h: Numpy.apply(h.tanh()) * m.weight,
    "a Function of which one output is used": missing_gradient,
    "a Function that reads its values": lambda m, x, h: Repeated.apply(h).relu(),
    "a Function that loops over rows": lambda m, x, h: Looping.apply(h).tanh() * h,
    "a Function whose inferer names the size of a view": lambda m, x, h: RowSums.apply(h.view(-1, 2)).mean(),
    "no tensor that backward reads has the size": lambda m, x, h: x.sum(0) * m.weight,
    "mean": lambda m, x, h: h.mean(0) + h.mean(1).sum() + h.mean(),
    "expand": lambda m, x, h: m.weight.expand(x.shape[0], 4) * h.sum(0),
    "views": lambda m, x, h: h.view(-1)[None].t().reshape(x.shape[0], 2, 2).transpose(0, 1).flatten(),
    "slices": lambda m, x, h: (h[1:], h[:-1], h[:, ::2], h[-1]),
    "parts": lambda m, x, h: torch.cat([*h.chunk(2, 1), h.roll(1, 0)], 1).flip(0),
    "stack": lambda m, x, h: torch.stack([h, h * 2]).unbind(0)[1],
    "repeat": lambda m, x, h: h.repeat(2, 1) + h.repeat_interleave(2, 0),
    "outer product": lambda m, x, h: h[:, None] - h[None],
    "gather": lambda m, x, h: (
        h.gather(0, h.detach().argsort(0)) + h.index_select(1, torch.tensor([0, 0, 3, 1]))
    ),
    "scatter": lambda m, x, h: torch.zeros_like(h).index_add(0, torch.arange(x.shape[0]), h),
    "extrema": lambda m, x, h: h.max(0).values + h.amin(0) + h.sort(0).values[0] + h.cumsum(0)[-1],
    "triangle": lambda m, x, h: (h @ h.t()).tril() + torch.eye(x.shape[0]),
    "arange of the size": lambda m, x, h: h * torch.arange(x.shape[0])[:, None] / x.shape[0],
    "normalizations": lambda m, x, h: F.layer_norm(h, (4,)) + F.batch_norm(h, None, None, training=True),
    "convolution": lambda m, x, h: F.conv1d(h.t()[None], m.layer.weight[..., None], padding=1).relu(),
    "convolution of a batch": lambda m, x, h: F.conv2d(h.view(-1, 1, 2, 2), m.weight.view(4, 1, 1, 1)),
    "transposed convolution of a batch": lambda m, x, h: F.conv_transpose1d(
        h[:, None], m.layer.weight.view(1, 4, 4), stride=2
    ),
    "resize by a factor": lambda m, x, h: F.interpolate(h.view(-1, 1, 2, 2), scale_factor=2, mode="bilinear"),
    "resize to a size": lambda m, x, h: F.interpolate(h[:, None], size=7),
    "affine grid": lambda m, x, h: F.affine_grid(
        h.repeat(1, 3).view(-1, 2, 6)[..., :3], (x.shape[0], 1, 2, 3), align_corners=False
    ),
    "affine grid of a volume": lambda m, x, h: F.affine_grid(
        h.repeat(1, 3).view(-1, 3, 4), (x.shape[0], 1, 2, 3, 2), align_corners=True
    ),
    "pooling": lambda m, x, h: F.avg_pool1d(h[None], 2) + F.max_pool1d(h[None], 2),
    "attention": lambda m, x, h: F.scaled_dot_product_attention(h[None], h[None], h[None], is_causal=True),
    "random numbers": lambda m, x, h: F.dropout(h, 0.5) * torch.rand_like(h) + torch.rand(x.shape[0], 1),
    "several outputs": lambda m, x, h: (h, h.view(-1), Square.apply(h).sum(0), (h * 3).detach()),
}
# Cases that are similar to others of the table.
ALIKE = frozenset(
    {
        "affine grid of a volume", "arange of the size", "expand", "extrema", "gather", "mean",
        "outer product", "parts", "pooling", "repeat", "resize to a size", "scatter", "slices", "stack",
        "transposed convolution of a batch", "triangle",
    }
)  # fmt: skip
# Bodies that hold for one size alone.
ALONE = {
    "a size that Python reads": lambda m, x, h: h * int(x.shape[0]),
    "a list of rows": lambda m, x, h: torch.stack(h.unbind(0)[::-1]),
}
SIZES = ((3,), (5,), (7,), (4,), (3,))


def batch(rows: int) -> tuple[torch.Tensor]:
    return (torch.randn(rows, 4, requires_grad=True),)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in ALIKE)) for name in PROGRAMS]
)
def test_two_graphs_serve_all_sizes(name) -> None:
    assert graphs_of(Then(PROGRAMS[name]), SIZES, batch) == [0, 1, 1, 1, 0]


@pytest.mark.parametrize("program", ALONE.values(), ids=ALONE)
def test_what_holds_for_one_size_has_a_graph_for_each(program) -> None:
    assert graphs_of(Then(program), SIZES, batch) == [0, 1, 2, 3, 0]


def test_a_third_graph_says_which_line_takes_a_size_for_a_number(caplog) -> None:
    def doubled(model, x, h):
        return h * int(x.shape[0])

    module = torch2ort.ORTModule(Then(doubled))
    for rows in (3, 5, 7, 4):
        module(torch.randn(rows, 4)).sum().backward()
    line = f"{__file__}:{doubled.__code__.co_firstlineno + 1} in doubled (return h * int(x.shape[0]))"
    assert [r.message for r in caplog.records if "does not serve" in r.message] == [
        f"Then: the graph for sizes that vary does not serve this call: input sizes [[7, 4]]: expected "
        f"size(0, 0) == 5, as it was for the sample and as the model needs at {line}"
    ]


class Shortcut(torch.nn.Module):
    """Its derivative treats maps of one pixel differently, which forward does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(1, 2, 3, stride=2, padding=1)
        self.block = torch.nn.Conv2d(2, 2, 3, stride=2, padding=1)
        self.short = torch.nn.Conv2d(2, 2, 1, stride=2)

    def forward(self, x):
        h = F.max_pool2d(self.first(x).relu(), 3, 2, 1)
        return (self.block(h) + self.short(h)).mean((2, 3))


def images(batch: int, width: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 1, width, width),)


IMAGES = ((4, 16), (3, 16), (5, 24), (2, 4), (3, 12), (4, 16))


def test_sizes_that_the_derivative_alone_tells_apart_have_graphs_of_their_own() -> None:
    assert graphs_of(Shortcut(), IMAGES, images) == [0, 1, 1, 2, 1, 0]


def test_a_graph_out_of_the_cache_serves_the_sizes_of_its_derivative(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH2ORT_CACHE_DIR", str(tmp_path))
    graphs_of(Shortcut(), IMAGES[1:3], images)
    found = graphs_of(Shortcut(), IMAGES[1:], images)
    assert found[2] not in (found[0], found[1], found[3])


# One engine has a graph for all sizes, and the other one per size: it does not support fractions of a size,
# or an assumption of PyTorch's derivative does not hold for all sizes.
EITHER = {
    "a fraction of the size": lambda m, x, h: h * x.shape[0] ** 0.5,
    "padded rows beside filled ones": lambda m, x, h: (
        h.clone().index_fill(1, torch.tensor([1]), 0.0) + F.pad(h[1:], (0, 0, 1, 0))
    ),
}


@pytest.mark.parametrize("program", EITHER.values(), ids=EITHER)
def test_sizes_that_one_engine_tells_apart_are_eagers(program) -> None:
    graphs_of(Then(program), SIZES, batch)


def branching(model, x, h):
    return h * 2 if x.shape[0] > 4 else h.sin()


def test_a_graph_serves_the_sizes_for_which_its_branch_was_taken() -> None:
    sizes = ((5,), (6,), (3,), (7,), (2,), (5,))
    assert graphs_of(Then(branching), sizes, batch) == [0, 1, 2, 1, 2, 0]


def test_gradients_of_some_outputs_are_eagers_in_every_size() -> None:
    def several(model, x, h):
        doubled, summed = TwoOutputs.apply(h * model.weight)
        return doubled.tanh(), summed + doubled.sum(1, keepdim=True), Square.apply(h).mean(0)

    model = Then(several)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    for rows, used in ((3, (0,)), (5, (0, 1, 2)), (7, (1,)), (4, (2,)), (6, (0, 2)), (2, (1,))):
        gradients = []
        x = torch.randn(rows, 4)
        for run in (model, module):
            run.zero_grad()
            given = x.clone().requires_grad_()
            outputs = run(given)
            sum(outputs[i].square().sum() for i in used).backward()
            gradients.append([given.grad, *(p.grad for p in run.parameters())])
        for i, (expected, actual) in enumerate(zip(*gradients, strict=True)):
            assert_same(actual, expected, f"{rows} rows, outputs {used}, gradient {i}")


def test_a_forward_of_one_size_waits_while_another_size_runs() -> None:
    model = Then(lambda m, x, h: Square.apply(h).tanh().sum(0) * m.weight)
    module = torch2ort.ORTModule(copy.deepcopy(model))
    given = [torch.randn(rows, 4) for rows in (3, 5, 7, 4)]
    gradients = []
    for run in (model, module):
        losses = [run(x).sum() for x in given]
        for i in (2, 0, 3, 1):
            losses[i].backward()
        gradients.append([p.grad for p in run.parameters()])
    for expected, actual in zip(*gradients, strict=True):
        assert_same(actual, expected, "gradient")

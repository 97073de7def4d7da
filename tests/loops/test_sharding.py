"""FSDP2 on, under, around and in between: an ORTModule trains as the model does, in two processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import torch2ort
from tests.loops.models import Layer
from tests.support.processes import in_two_processes

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this build of torch has no distributed package"
)


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.last = torch.nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Outer(torch.nn.Module):
    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner
        self.head = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.inner(x))


def shard(module):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


def built(kind: str, wrap):
    """A model that FSDP shards in one of several ways; ``wrap`` wraps the part that runs on ONNX Runtime."""
    torch.manual_seed(1)
    model = Stack()
    if kind == "on":
        model = wrap(model)
        for layer in model.layers:
            shard(layer)
        return shard(model)
    if kind == "under":
        for layer in model.layers:
            shard(layer)
        return wrap(shard(model))
    if kind == "around":
        # Its weights are freed between forward and backward.
        return shard(Outer(shard(wrap(model))))
    for i, layer in enumerate(model.layers):
        model.layers[i] = shard(wrap(layer))
    return shard(model)


def train(model, rank: int, steps: int = 5):
    """Losses, and the trained parameters, unsharded."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), {name: t.full_tensor() for name, t in model.state_dict().items()}


def same_as_in_eager(rank: int, kind: str, cache: str) -> None:
    made = []

    def wrap(model):
        made.append(torch2ort.ORTModule(model, options=torch2ort.Options(cache_dir=cache)))
        return made[-1]

    expected = train(built(kind, lambda model: model), rank)
    torch.testing.assert_close(train(built(kind, wrap), rank), expected, rtol=1e-4, atol=1e-5)
    assert all(module.exported.training for module in made)
    assert {site.func_name.rpartition(".")[2] for site in made[0].exported.python_ops} == {"Square", "Affine"}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("on", marks=pytest.mark.long),
        pytest.param("under", marks=pytest.mark.long),
        "around",
        pytest.param("each layer", marks=pytest.mark.long),
    ],
)
def test_a_sharded_model_trains_as_in_eager(kind, tmp_path):
    in_two_processes(same_as_in_eager, kind, str(tmp_path))


def resume(rank: int, folder: str) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def trained(model, optimizer, first: int, steps: int):
        for step in range(first, first + steps):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step + 100 * rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def new(seed: int, wrap):
        torch.manual_seed(seed)
        model = shard(wrap(Stack()))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    eager, optimizer = new(1, lambda model: model)
    trained(eager, optimizer, 0, 3)
    states = dict(zip(("model", "optimizer"), get_state_dict(eager, optimizer), strict=True))
    checkpoint.save(states, checkpoint_id=folder)
    trained(eager, optimizer, 3, 3)
    module, other = new(2, torch2ort.ORTModule)
    states = dict(zip(("model", "optimizer"), get_state_dict(module, other), strict=True))
    checkpoint.load(states, checkpoint_id=folder)
    set_state_dict(module, other, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    trained(module, other, 3, 3)
    for (name, a), (_, e) in zip(module.named_parameters(), eager.named_parameters(), strict=True):
        torch.testing.assert_close(a.to_local(), e.to_local(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.long
def test_an_ort_module_goes_on_from_a_checkpoint_of_a_sharded_model(tmp_path):
    in_two_processes(resume, str(tmp_path))


def refusals(rank: int) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    x = torch.randn(3, 4)
    alone = Stack()
    shard(alone.layers[0])
    with pytest.raises(
        torch2ort.ExportError, match=r"for its module 'layers.0' and not for the model, whose"
    ):
        torch2ort.ORTModule(alone)(x)
    grouped = Stack()
    fully_shard([*grouped.layers])
    with pytest.raises(torch2ort.ExportError, match=r"called with 'layers.0' and other modules in one list"):
        torch2ort.ORTModule(shard(grouped))(x)
    mixed = Stack()
    fully_shard(mixed.layers[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(torch2ort.ExportError, match=r"'layers.0' with a MixedPrecisionPolicy, whose casts"):
        torch2ort.ORTModule(shard(mixed))(x)
    with pytest.raises(torch2ort.ExportError, match=r"'layers.0' with a MixedPrecisionPolicy, whose casts"):
        torch2ort.export(mixed, x)
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.ORTModule(torch.nn.parallel.DistributedDataParallel(Stack()))
    assert str(caught.value) == (
        "ORTModule: the model is a DistributedDataParallel, which exchanges gradients between processes "
        "around a model's forward and backward; write DistributedDataParallel(torch2ort.ORTModule(model))"
    )


def exported_whole(rank: int) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for wrap in (lambda model: model, torch2ort.ORTModule):
        model = built("on", wrap)
        exported = torch2ort.export(model, x, training=False)
        assert {site.func_name.rpartition(".")[2] for site in exported.python_ops} == {"Square", "Affine"}
        assert all(isinstance(weight, dist.tensor.DTensor) for weight in model.parameters())
        torch.testing.assert_close(exported(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_a_sharded_model_is_exported_whole():
    in_two_processes(exported_whole)


@pytest.mark.long
def test_what_is_parted_in_a_way_that_a_graph_would_not_see_is_refused():
    in_two_processes(refusals)


def test_a_weight_that_was_put_elsewhere_before_backward_is_refused():
    module = torch2ort.ORTModule(Stack())
    loss = module(torch.randn(3, 4)).sum()
    module.last.weight.data = torch.zeros(2, 4)
    with pytest.raises(
        torch2ort.Torch2OrtError,
        match=r"^ORTModule: a tensor of float32 and shape \[2, 4\] that backward reads lies in other memory",
    ):
        loss.backward()


def test_memory_of_weights_can_be_freed_after_an_export(tmp_path):
    model = Stack()
    module = torch2ort.ORTModule(model, options=torch2ort.Options(cache_dir=tmp_path))
    module(torch.randn(3, 4)).sum().backward()
    assert all(parameter.untyped_storage().resizable() for parameter in model.parameters())

"""DeepSpeed trains an ORTModule as it trains the model, in two processes: ZeRO's stages 1, 2 and 3."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist

import torch2ort
from tests.loops.models import Layer
from tests.support.processes import in_two_processes

pytest.importorskip("deepspeed", reason="pip install 'torch2ort[deepspeed]'")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no distributed package"),
]

STEPS, SAVED_AFTER = 6, 3


class Stack(torch.nn.Module):
    def __init__(self, wrap) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(wrap(Layer()), wrap(Layer()))
        self.last = torch.nn.Linear(4, 2)
        # This hook runs beside DeepSpeed's own.
        self.last.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))

    def forward(self, x):
        return self.last(self.layers(x))


def started(rank: int):
    """DeepSpeed in this process, without its own operator, whose compilation takes minutes."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu")
    import deepspeed

    warnings.simplefilter("error", torch2ort.Torch2OrtWarning)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    return deepspeed


def prepared(deepspeed, stage: int, where: str, seed: int, made: list, cache: str):
    """DeepSpeed's engine of a model that runs on ONNX Runtime as a whole, layer by layer, or not at all."""

    def wrap(model):
        made.append(torch2ort.ORTModule(model, options=torch2ort.Options(cache_dir=cache)))
        return made[-1]

    torch.manual_seed(seed)
    model = Stack(wrap if where == "each layer" else lambda layer: layer)
    model = wrap(model) if where == "the whole" else model
    settings = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def losses(engine, rank: int, first: int, last: int) -> list[float]:
    found = []
    for step in range(first, last):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    with torch.no_grad():
        found.append(engine(torch.ones(2, 4)).sum().item())
    return found


def sizes_of(model) -> set[int]:
    return {weight.numel() for weight in model.parameters()}


def train(rank: int, stage: int, where: str, folder: str) -> None:
    deepspeed = started(rank)
    made: list = []
    found = {}
    for kind in ("nowhere", where):
        engine = prepared(deepspeed, stage, kind, 1, made, folder)
        found[kind] = losses(engine, rank, 0, SAVED_AFTER)
        engine.save_checkpoint(f"{folder}/{kind}")
        found[kind] += losses(engine, rank, SAVED_AFTER, STEPS)
    # Eager PyTorch leaves weights unsharded after an evaluation, until a step.
    assert (sizes_of(engine.module) == {0}) == (stage == 3 and where == "the whole")
    # Each of the two resumes from the other's checkpoint.
    for kind, left in (("nowhere", where), (where, "nowhere")):
        engine = prepared(deepspeed, stage, kind, 2, made, folder)
        engine.load_checkpoint(f"{folder}/{left}")
        resumed = losses(engine, rank, SAVED_AFTER, STEPS)
        torch.testing.assert_close(resumed, found["nowhere"][SAVED_AFTER + 1 :], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[where], found["nowhere"], rtol=1e-4, atol=1e-5)
    assert made[-1].exported.cache.hit
    for module in made:
        assert {"Square", "Affine"} <= {
            site.func_name.rpartition(".")[2] for site in module.exported.python_ops
        }


@pytest.mark.parametrize(
    ("stage", "where"),
    [(1, "the whole"), (2, "the whole"), (3, "the whole"), (3, "each layer")],
)
def test_a_stage_trains_saves_and_goes_on_as_in_eager(stage, where, tmp_path):
    in_two_processes(train, stage, where, str(tmp_path))


def exports_and_refusals(rank: int, folder: str) -> None:
    deepspeed = started(rank)
    model = prepared(deepspeed, 3, "nowhere", 1, [], folder).module
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    exported = torch2ort.export(model, x, training=False)
    assert sizes_of(model) == {0}
    torch.testing.assert_close(exported(x), model(x), rtol=1e-5, atol=1e-6)
    module = torch2ort.ORTModule(prepared(deepspeed, 3, "nowhere", 1, [], folder).module)
    module.register_forward_pre_hook(lambda module, given: None)
    hooks = list(module._forward_pre_hooks)
    torch.testing.assert_close(module(x), model(x), rtol=1e-5, atol=1e-6)
    assert list(module._forward_pre_hooks) == hooks
    states = deepspeed.runtime.zero.partition_parameters.ZeroParamStatus
    module.last.bias.ds_status = states.INFLIGHT
    with pytest.raises(
        torch2ort.ExportError,
        match=r"^Stack: DeepSpeed is gathering the weight 'last.bias' ahead of its use, .* to 0$",
    ):
        module(x)
    module.last.bias.ds_status = states.NOT_AVAILABLE
    module.layers[0]._z3_leaf = True
    with pytest.raises(
        torch2ort.ExportError,
        match=r"^Stack: set_z3_leaf_modules was called for its module 'layers.0', whose",
    ):
        module(x)


def test_parted_weights_are_exported_whole_and_what_deepspeed_does_besides_is_refused(tmp_path):
    in_two_processes(exports_and_refusals, str(tmp_path))

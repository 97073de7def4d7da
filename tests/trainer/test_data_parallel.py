"""Two processes train as one with the whole batch, and one process resumes from the checkpoints of two."""

from __future__ import annotations

import gc
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.trainer.models import Net, batches, started, trainer
from torch2ort.errors import TrainerError
from torch2ort.trainer import optim
from torch2ort.trainer.checkpoint import joined
from torch2ort.trainer.data_parallel import adasum

WAYS = {
    "plain": {},
    "overlapped": {"allreduce_post_accumulation": True},
    "zero": {"deepspeed_zero_optimization": {"stage": 1}},
    "adasum": {"enable_adasum": True},
}
STEPS = 4


def _work(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    os.environ["TORCH2ORT_CACHE_DIR"] = f"{folder}/exports"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for name, way in WAYS.items():
        _train(rank, name, way, Path(folder))
    for name in ("plain", "overlapped"):
        _take_branches(rank, name, Path(folder))
    gc.collect()
    dist.destroy_process_group()


def _train(rank: int, name: str, way: dict[str, Any], folder: Path) -> None:
    """Train two halves of each batch; leave checkpoints in the middle and the weights at the end."""
    torch.manual_seed(rank)
    # The first process's weights are used.
    model = started() if rank == 0 else Net()
    tried = trainer(
        model,
        optim.LambConfig(lr=0.05),
        distributed={"world_rank": rank, "world_size": 2, **way},
        batch={"gradient_accumulation_steps": 2},
    )
    for step, (x, y) in enumerate(batches(STEPS)):
        if step == STEPS // 2:
            tried.save_checkpoint(folder / f"{name}_{rank}", {"rank": rank})
        part = slice(2 * rank, 2 * rank + 2)
        tried.train_step(x[part], y[part])
    torch.save(model.state_dict(), folder / f"{name}_{rank}.end")


class Branches(torch.nn.Module):
    """Uses one of two weights of the same size, by the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.few = torch.nn.Parameter(torch.ones(4, 3))
        self.many = torch.nn.Parameter(torch.ones(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.few if x.shape[0] == 1 else self.many)


def _take_branches(rank: int, name: str, folder: Path) -> None:
    """Make an update in which each process has the gradient of another weight."""
    model = Branches()
    tried = trainer(model, distributed={"world_rank": rank, "world_size": 2, **WAYS[name]})
    x, y = next(batches(1))
    tried.train_step(x[rank : 2 * rank + 1], y[rank : 2 * rank + 1])
    torch.save(model.state_dict(), folder / f"{name}_branches_{rank}.end")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("processes")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_work, args=(port, str(path)), nprocs=2)
    return path


def ended(folder: Path, name: str, rank: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"{name}_{rank}.end")


@pytest.mark.parametrize("way", WAYS)
def test_all_processes_have_the_same_weights(folder: Path, way: str) -> None:
    one, other = ended(folder, way, 0), ended(folder, way, 1)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("way", ["plain", "overlapped", "zero"])
def test_two_processes_train_as_one_with_the_whole_batch(folder: Path, way: str) -> None:
    model = started()
    alone = trainer(model, optim.LambConfig(lr=0.05), batch={"gradient_accumulation_steps": 2})
    for x, y in batches(STEPS):
        alone.train_step(x, y)
    torch.testing.assert_close(ended(folder, way, 0), dict(model.state_dict()))


@pytest.mark.parametrize("way", ["overlapped", "zero"])
def test_ways_of_reduction_give_the_same_bits(folder: Path, way: str) -> None:
    one, other = ended(folder, "plain", 0), ended(folder, way, 0)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("way", ["plain", "overlapped"])
def test_a_process_without_some_gradients_is_counted_with_none(folder: Path, way: str) -> None:
    expected, (x, y) = Branches(), next(batches(1))
    for rows in (slice(0, 1), slice(1, 3)):
        (torch.nn.functional.cross_entropy(expected(x[rows]), y[rows]) / 2).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    for rank in (0, 1):
        torch.testing.assert_close(ended(folder, f"{way}_branches", rank), dict(expected.state_dict()))


def test_a_process_keeps_its_part_of_the_optimizer_s_state_alone(folder: Path) -> None:
    parts = [torch.load(folder / f"zero_{rank}")["state"] for rank in (0, 1)]
    names = [set(part["optimizer"]) - {"shared_optimizer_state"} for part in parts]
    assert names[0] & names[1] == set()
    assert names[0] | names[1] == {name for name, _ in Net().named_parameters()}
    assert [set(part["partition_info"]) for part in parts] == names


@pytest.mark.parametrize(("way", "ranks"), [("plain", [0]), ("plain", [1, 0]), ("zero", [1, 0])])
def test_one_process_goes_on_where_two_stopped(folder: Path, way: str, ranks: list[int]) -> None:
    model = Net()
    alone = trainer(model, optim.LambConfig(lr=0.05), batch={"gradient_accumulation_steps": 2})
    user = alone.load_checkpoint(*(folder / f"{way}_{rank}" for rank in ranks))
    assert user == {"rank": min(ranks)}
    for x, y in list(batches(STEPS))[STEPS // 2 :]:
        alone.train_step(x, y)
    torch.testing.assert_close(ended(folder, way, 0), dict(model.state_dict()))


def test_the_state_of_two_processes_is_that_of_one_bit_by_bit(folder: Path) -> None:
    joined, whole = trainer(Net(), optim.LambConfig()), trainer(Net(), optim.LambConfig())
    joined.load_checkpoint(folder / "zero_1", folder / "zero_0")
    whole.load_checkpoint(folder / "plain_0")
    x, y = next(batches(1))
    assert torch.equal(joined.train_step(x, y)[0], whole.train_step(x, y)[0])
    ours, theirs = joined.state_dict(pytorch_format=True), whole.state_dict(pytorch_format=True)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_part_alone_is_refused(folder: Path) -> None:
    with pytest.raises(TrainerError) as caught:
        trainer(Net(), optim.LambConfig()).load_checkpoint(folder / "zero_1")
    assert str(caught.value) == (
        "The checkpoints are of ranks [1] of 2, each with a part of the optimizer's state; give "
        "load_checkpoint the files of all ranks."
    )


def test_files_of_two_trainings_are_refused(folder: Path) -> None:
    with pytest.raises(TrainerError, match=r"adasum_1: 'first\.weight' has other values than in .*plain_0"):
        trainer(Net(), optim.LambConfig()).load_checkpoint(folder / "plain_0", folder / "adasum_1")


def test_adasum_is_the_sum_of_orthogonal_and_the_mean_of_equal_gradients() -> None:
    one, other = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])
    assert adasum(one, other).tolist() == [2.0, 3.0]
    assert adasum(one, one).tolist() == [2.0, 0.0]
    assert adasum(one, torch.zeros(2)).tolist() == [2.0, 0.0]


def test_running_statistics_of_processes_may_differ_and_the_first_one_s_count() -> None:
    one, other = trainer(Net()).state_dict(), trainer(Net()).state_dict()
    for rank, state in enumerate((one, other)):
        state["trainer_options"] |= {"world_rank": rank, "world_size": 2}
        state["model"]["full_precision"] = {"weight": np.ones(2), "running_mean": np.full(2, float(rank))}
    found = joined([other, one], ["b", "a"], {"weight"})
    assert found["model"]["full_precision"]["running_mean"].tolist() == [0.0, 0.0]

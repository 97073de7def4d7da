"""Data parallelism: the communication between the processes of a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from torch2ort import OptionError
from torch2ort.trainer.options import ORTTrainerOptions


class Processes:
    """This process and the others, each with the whole model and a part of the data.

    Args:
        options: the trainer's; ``distributed`` is read.

    Raises:
        OptionError: the sizes do not match each other, or those of torch.distributed.

    Attributes:
        rank: the rank of this process.
        size: the number of processes.
        partitions: True if each process stores only a part of the optimizer's state (ZeRO, stage 1).
    """

    def __init__(self, options: ORTTrainerOptions) -> None:
        given = options.distributed
        self.rank, self.size = given.world_rank, given.world_size
        self.partitions = given.deepspeed_zero_optimization.stage == 1 and self.size > 1
        self._adasum = given.enable_adasum
        # As in the reference: True overlaps the reduction with backward, False waits for all gradients.
        self._overlaps = given.allreduce_post_accumulation and not self._adasum
        # The parameters reduced while backward runs: in the same order in every process, whichever of them
        # have gradients there.
        self._order: list[torch.nn.Parameter] = []
        self._ready: set[int] = set()
        self._begun: list[Any] = []
        _check(options)

    def start_with(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Broadcast the first process's weights and buffers to all processes."""
        if self.size > 1:
            with torch.no_grad():
                for tensor in tensors.values():
                    dist.broadcast(tensor, src=0)

    def watch(self, parameters: Mapping[str, torch.nn.Parameter], is_last: Callable[[], bool]) -> None:
        """Begin each gradient's reduction as soon as backward has computed it, if the options enable this.

        Args:
            parameters: the trained parameters.
            is_last: returns True if the running backward is the last one before an update.
        """
        if self.size == 1 or not self._overlaps:
            return
        # Backward computes the last layer's gradients first.
        self._order = list(parameters.values())[::-1]

        for position, parameter in enumerate(self._order):

            def begin(_: torch.Tensor, position: int = position) -> None:
                if is_last():
                    self._ready.add(position)
                    while len(self._begun) in self._ready:
                        self._begin_next()

            parameter.register_post_accumulate_grad_hook(begin)

    def reduce(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Replace each gradient by the mean of all processes' gradients, or by their Adasum.

        A parameter without a gradient in any process still has none afterwards.
        """
        if self.size == 1:
            return
        present = torch.tensor([p.grad is not None for p in parameters.values()], dtype=torch.int32)
        present = present.to(next(iter(parameters.values())).device)
        self._end_begun()
        dist.all_reduce(present, op=dist.ReduceOp.MAX)
        for parameter, somewhere in zip(parameters.values(), present.tolist(), strict=True):
            if not somewhere:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self._adasum:
                parameter.grad = self._combine(parameter.grad)
                continue
            if not self._overlaps:
                dist.all_reduce(parameter.grad)
            parameter.grad /= self.size

    def _begin_next(self) -> None:
        parameter = self._order[len(self._begun)]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self._begun.append(dist.all_reduce(parameter.grad, async_op=True))

    def _end_begun(self) -> None:
        """Begin the remaining reductions, and wait for all."""
        while len(self._begun) < len(self._order):
            self._begin_next()
        for work in self._begun:
            work.wait()
        self._ready, self._begun = set(), []

    def _combine(self, gradient: torch.Tensor) -> torch.Tensor:
        """Compute the Adasum of all processes' gradients, by pairs, pairs of pairs and so on."""
        distance = 1
        while distance < self.size:
            other = torch.empty_like(gradient)
            partner = self.rank ^ distance
            requests = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, gradient.contiguous(), partner),
                    dist.P2POp(dist.irecv, other, partner),
                ]
            )
            for request in requests:
                request.wait()
            # The order is the same on both sides, so both compute the same bits.
            first, second = (gradient, other) if self.rank < partner else (other, gradient)
            gradient = adasum(first, second)
            distance *= 2
        return gradient

    def owners(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Map each weight to the rank that stores its optimizer state; without ZeRO to this process's rank.

        Large weights are assigned first, each to the process with the smallest load so far.
        """
        if not self.partitions:
            return dict.fromkeys(tensors, self.rank)
        loads = [0] * self.size
        owners = {}
        for name in sorted(tensors, key=lambda name: (-tensors[name].numel(), name)):
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += tensors[name].numel()
        return owners

    def share(self, tensors: Mapping[str, torch.Tensor], owners: Mapping[str, int]) -> None:
        """Broadcast to all processes the weights that their owners have updated."""
        if self.partitions:
            for name, tensor in tensors.items():
                dist.broadcast(tensor, src=owners[name])

    def all_agree(self, flag: bool, device: torch.device) -> bool:
        """Return True if a flag is set in every process."""
        if self.size == 1:
            return flag
        value = torch.tensor(int(flag), dtype=torch.int32, device=device)
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
        return bool(value.item())


def adasum(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the Adasum of two gradients: their sum if they are orthogonal, their mean if equal.

    See https://arxiv.org/abs/2006.02924, equation 4.
    """
    product = torch.sum(first * second)
    squares = torch.sum(first * first), torch.sum(second * second)
    parts = [1 - torch.where(square > 0, product / (2 * square), 0.0) for square in squares]
    return parts[0] * first + parts[1] * second


def _check(options: ORTTrainerOptions) -> None:
    given = options.distributed
    if given.world_rank >= given.world_size:
        raise OptionError(
            f"Option distributed.world_rank is {given.world_rank}; allowed is less than world_size, "
            f"{given.world_size}."
        )
    if given.data_parallel_size not in (1, given.world_size):
        raise OptionError(
            f"Option distributed.data_parallel_size is {given.data_parallel_size}; allowed is world_size, "
            f"{given.world_size}, as there is no other parallelism."
        )
    if given.world_size == 1:
        return
    if not dist.is_available() or not dist.is_initialized():
        raise OptionError(
            f"Option distributed.world_size is {given.world_size}, and torch.distributed is not "
            f"initialised; call "
            f"torch.distributed.init_process_group first."
        )
    there = (dist.get_rank(), dist.get_world_size())
    if there != (given.world_rank, given.world_size):
        raise OptionError(
            f"Options distributed.world_rank and world_size are {given.world_rank} and {given.world_size}; "
            f"torch.distributed has {there[0]} and {there[1]}."
        )
    if given.enable_adasum and given.world_size & (given.world_size - 1):
        raise OptionError(
            f"Option distributed.enable_adasum is True and world_size {given.world_size}; Adasum takes a "
            f"power of 2."
        )

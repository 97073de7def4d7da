"""Two processes on gloo that run a function of a test."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _run(rank: int, port: int, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    work(rank, *arguments)
    # gloo's threads run while the group is referenced; one that frees a tensor after Python has ended aborts.
    gc.collect()
    dist.destroy_process_group()


def in_two_processes(work: Callable[..., None], *arguments: object) -> None:
    """Call ``work(rank, *arguments)`` in two processes of one process group.

    Args:
        work: a function of a module; its assertions are the test.
        arguments: arguments that can be pickled.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_run, args=(port, work, arguments), nprocs=2, join=True)

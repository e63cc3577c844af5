"""Data-parallel training on CPU cores: one process and one thread each, gradients averaged every step."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing
from common import keep_memory
from torch import Tensor


def spawn(train: Callable[[int, argparse.Namespace], None], args: argparse.Namespace, processes: int) -> None:
    """Run train(rank, args) in `processes` processes and wait for them."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    torch.multiprocessing.spawn(train, (args,), processes)


def join(rank: int, processes: int) -> None:
    """Set up a process. Each process calls it first."""
    keep_memory()
    torch.set_num_threads(1)
    if processes > 1:
        dist.init_process_group("gloo", rank=rank, world_size=processes)


def average_gradients(parameters: Sequence[Tensor], word: list[float]) -> list[float]:
    """Average gradients over the processes. Returns the `word` of process 0 in all of them."""
    if not dist.is_initialized():
        return word
    mine = word if dist.get_rank() == 0 else [0.0] * len(word)
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients] + [torch.tensor(mine)])
    dist.all_reduce(flat)
    said = flat[-len(word) :].tolist()
    flat /= dist.get_world_size()
    for gradient, part in zip(
        gradients, flat.split([g.numel() for g in gradients] + [len(word)]), strict=False
    ):
        gradient.copy_(part.view_as(gradient))
    return said

"""Training in several processes: torch's process group as `torchrun` describes it, or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import distributed


@contextmanager
def processes(device: str) -> Iterator[tuple[int, str, Callable[[], AbstractContextManager[None]]]]:
    """(rank, this process's device, `first`): `with first():` runs its body in rank 0 before any other rank.

    Threads: one a process on a CPU, since several processes of one thread beat one process of several at small sizes.
    """
    if device == "cpu":
        torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield 0, device, _at_once
        return
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")

    @contextmanager
    def first() -> Iterator[None]:
        if rank:
            distributed.barrier()
        yield
        if not rank:
            distributed.barrier()

    try:
        yield rank, device, first
    finally:
        distributed.destroy_process_group()


@contextmanager
def _at_once() -> Iterator[None]:
    yield

"""A recording by the processes of `torchrun`: one model over all of them, rank 0 alone computes statistics and writes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from visitlens.errors import InputError, VisitlensError
from visitlens.hooks.loading.load_model import model_type, resolve
from visitlens.hooks.models.checkpoint import load_model
from visitlens.hooks.models.expert_parallel import PeerError, follow
from visitlens.probe.jobs.request import RunRequest

_PATIENCE = timedelta(hours=6)  # the other ranks wait while rank 0 packs text, computes statistics and writes
_WHY = "visitlens/why"


@contextmanager
def ranks(request: RunRequest) -> Iterator[RunRequest | None]:
    """The request with the ranks' mesh in it, in rank 0. In the others: None, once they have served rank 0 to its end.
    Without torchrun: the request as it is.

    Raises:
        PeerError: another rank failed; the message says why, if that rank could.
        InputError: other workers or engines beside torchrun, or a model that isn't the native one.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield request
        return
    if os.environ["RANK"] == "0":
        _check(request)
    device = request.model.device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    store, rank, _ = next(rendezvous("env://", timeout=_PATIENCE))
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_PATIENCE)
    try:
        mesh = init_device_mesh(device.split(":")[0], (world,))
        request = replace(request, model=replace(request.model, device=device), mesh=mesh, threads=request.threads or 1)
        if rank == 0:
            with _said_by_others(store):
                yield request
        else:
            _serve(request, store)
            yield None
    finally:
        distributed.destroy_process_group()


def _check(request: RunRequest) -> None:
    if request.workers > 1 or request.engine != "process":
        raise InputError("torchrun spreads one model over its processes: leave out --workers and --engine")
    if request.generate:
        raise InputError("torchrun records text that is there: --generate runs in one process")
    if model_type(resolve(request.model.checkpoint)) is not None:
        raise InputError(
            f"{request.model.checkpoint}: torchrun spreads the native model's experts, no model of transformers"
        )


@contextmanager
def _said_by_others(store: Any) -> Iterator[None]:
    """Rank 0 speaks for all: what ended another rank is its own error."""

    def end(number: int, frame: Any) -> None:  # torchrun, where a rank has died
        raise PeerError("another process of this run has ended")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except PeerError as error:
        why = store.get(_WHY).decode() if store.check([_WHY]) else str(error)
        raise PeerError(f"{why}. What is committed is kept, and the same command goes on from there") from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(request: RunRequest, store: Any) -> None:
    """Ends this process quietly where rank 0 is gone, or with its reason left for rank 0 to say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 gets it and says when to stop
    try:
        torch.set_num_threads(request.threads or 1)
        follow(
            load_model(resolve(request.model.checkpoint), request.model.dtype, request.model.device, request.mesh),
            request.model.device,
        )
    except (VisitlensError, RuntimeError, MemoryError) as error:
        if not isinstance(error, PeerError):
            store.set(_WHY, f"rank {distributed.get_rank()}: {error}")
        raise SystemExit(1) from error

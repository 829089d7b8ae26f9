"""The native model's experts shared out over the processes of `torchrun`; everything else is whole in each of them.

More than 99 of 100 parameters of a large cell are experts. `W_in`, `W_out` are DTensors, `Shard(0)` over the expert axis:
each rank reads its own experts from the file and no others. Every rank runs the same forward; where the experts are due it
computes the rows [token, k, H] of its own ones, zeros for the rest, and the ranks' rows are added up (`Partial`, one
all-reduce a step). Of each row one rank alone has numbers, so the sum is exact and the k rows of a token are then added
in the usual order: values don't depend on the number of ranks. That costs k times the traffic of adding [token, H].

Rank 0 leads: its forwards are announced to the others, who do nothing else than run them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, distributed

from visitlens.errors import RecordingError
from visitlens.kernels.grouped_experts import expert_rows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from visitlens.hooks.models.looped_moe import Block, LoopedMoE

_EXPERTS = ("mlp.W_in", "mlp.W_out")


class PeerError(RecordingError):
    """Another process of this run has ended."""


def is_expert(name: str) -> bool:
    """Whether a parameter of that name is shared out."""
    return name.endswith(_EXPERTS)


def share(experts: int, ranks: int, rank: int) -> range:
    """The experts that a rank holds, as DTensor cuts a dimension: equal runs, the last ones shorter or empty."""
    each = -(-experts // ranks)
    return range(min(rank * each, experts), min((rank + 1) * each, experts))


def read_share(stored: Any, mesh: DeviceMesh, device: str, dtype: torch.dtype) -> Tensor:
    """A DTensor of a safetensors slice's whole shape, of which this rank has read its own experts."""
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size(stored.get_shape())
    mine = share(shape[0], mesh.size(), mesh.get_local_rank())
    local = stored[mine.start : mine.stop].to(device, dtype, copy=True)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def run_together(model: LoopedMoE) -> None:
    """From here on the model's experts, DTensors now, are run by all ranks."""
    for block in model.blocks:
        cast("Block", block).mlp.run_experts = _run_experts


def _run_experts(x: Tensor, experts: Tensor, gates: Tensor, w_in: Any, w_out: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial

    mesh = w_in.device_mesh
    first = share(w_in.shape[0], mesh.size(), mesh.get_local_rank()).start
    rows = expert_rows(x, experts, gates, w_in.to_local(), w_out.to_local(), first)
    with _peers():
        return DTensor.from_local(rows, mesh, [Partial()], run_check=False).full_tensor().sum(1)


@contextmanager
def leading(model: LoopedMoE) -> Iterator[None]:
    """In rank 0: each call of the model inside is one of all ranks; at the end they are let go."""

    def announce(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        _broadcast(([a.cpu() if isinstance(a, Tensor) else a for a in arguments], options))

    handle = model.register_forward_pre_hook(announce, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
        with suppress(PeerError):  # the others may be what ended it
            _broadcast(None)


@torch.inference_mode()
def follow(model: LoopedMoE, device: str) -> None:
    """In the other ranks: runs what rank 0 announces until it has finished.

    Raises:
        PeerError: rank 0 is gone.
    """
    while (call := _broadcast()) is not None:
        arguments, options = call
        model(*(a.to(device) if isinstance(a, Tensor) else a for a in arguments), **options)


def _broadcast(value: Any = None) -> Any:
    """Rank 0's value, in every rank."""
    values = [value]
    with _peers():
        distributed.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


@contextmanager
def _peers() -> Iterator[None]:
    """Around what needs every rank: whatever goes wrong there is that one of them is gone."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerError("another process of this run has ended") from error

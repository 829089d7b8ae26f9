"""One model in training: AdamW, warm-up, constant rate, cosine decay; its exact state on disk; one process or several.

Run under `torchrun`, every process takes its contexts of each batch, and gradients are those of one process on all of it: a
token weighs the same in whichever process it is, and experts' loads are those of the whole batch. With bfloat16 the model computes in it and the optimiser keeps float32 weights.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from visitlens.errors import CheckpointError, InputError, VisitlensError
from visitlens.hooks.models.checkpoint import DTYPES
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE

DECAYED_TO = 0.02
"""The rate at the end of a decay, over its peak."""


@dataclass(frozen=True)
class Recipe:
    """Everything but the model and the corpus that decides what is learnt.

    One stable run (warm-up, then a constant rate) from which decay branches fork: each ends at one of `horizons`, after
    `decay_tokens` of cosine decay. So one stable run gives trained models at several token counts, as in the paper.
    """

    horizons: tuple[int, ...]
    decay_tokens: int
    warmup_tokens: int = 150_000
    batch: int = 4
    learning_rate: float = 5e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    dyck_share: float = 0.25
    dtype: str = "float32"
    seed: int = 0
    decay_text: float = 0.0
    """Share of training documents kept for decay branches: the stable run never reads them. 0: branches go on in the same text."""

    def __post_init__(self) -> None:
        rising = list(self.horizons) == sorted(set(self.horizons)) and len(self.horizons) > 0
        if not rising or self.decay_tokens < 1 or min(self.horizons) <= self.decay_tokens:
            raise InputError(
                f"expected rising horizons, each longer than the decay of {self.decay_tokens} tokens, got {self.horizons}"
            )
        if not 0 <= self.decay_text < 1:
            raise InputError(
                f"expected a share of documents for decay branches from 0 to below 1, got {self.decay_text}"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise InputError(f"train in float32 or bfloat16, got {self.dtype!r}")

    @classmethod
    def of(cls, tokens: int, *, horizons: int = 1, decay_share: float = 0.2, **options: Any) -> Recipe:
        """Evenly spaced horizons up to `tokens`, each decaying over `decay_share` of the first."""
        ends = tuple(tokens * (i + 1) // horizons for i in range(horizons))
        warmup = min(cls.warmup_tokens, tokens // 10)
        return cls(ends, int(ends[0] * decay_share), **{"warmup_tokens": warmup, **options})

    @classmethod
    def forked(cls, updates: Sequence[int], decay_tokens: int, *, context: int, batch: int, **options: Any) -> Recipe:
        """Branches that fork after these updates of `batch` contexts each and decay over `decay_tokens`, as the paper says its own.

        Raises:
            InputError: updates that aren't positive and rising.
        """
        if not updates or min(updates) < 1 or list(updates) != sorted(set(updates)):
            raise InputError(f"expected rising numbers of updates at which branches fork, got {list(updates)}")
        ends = tuple(n * batch * context + decay_tokens for n in updates)
        warmup = min(cls.warmup_tokens, ends[-1] // 10)
        return cls(ends, decay_tokens, **{"warmup_tokens": warmup, "batch": batch, **options})

    def rate_at(self, seen: int, horizon: int | None) -> float:
        """The rate of the update after `seen` tokens, on the stable run (None) or on the branch to `horizon`."""
        if horizon is not None and seen >= horizon - self.decay_tokens:
            progress = min((seen - horizon + self.decay_tokens) / self.decay_tokens, 1.0)
            return self.learning_rate * (DECAYED_TO + (1 - DECAYED_TO) * 0.5 * (1 + math.cos(math.pi * progress)))
        return self.learning_rate * min(max(seen, 1) / max(self.warmup_tokens, 1), 1.0)


class Stream(Protocol):
    """Batches without end, and the place in them."""

    def next_batch(self) -> tuple[np.ndarray, ...]:
        """Token ids, segment ids and, where only some tokens are to be predicted, which; each [context, position]."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class _Wrapped(nn.Module):
    """What the trainer asks of a model, as the one forward that DistributedDataParallel and FSDP2 wrap."""

    def __init__(self, model: LoopedMoE) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, *args: Tensor, training: bool = False, **options: Any) -> Any:
        return self.model.training_loss(*args, added_up=_added_up) if training else self.model(*args, **options)


class Trainer:
    """One model, its optimiser and its place in the stream; `sharded` by FSDP2 over the processes of a group.

    All processes call every method together; rank 0 alone writes.
    """

    def __init__(
        self,
        config: LoopedMoEConfig,
        recipe: Recipe,
        stream: Stream,
        device: str = "cpu",
        *,
        sharded: bool = False,
    ) -> None:
        self.recipe, self.stream, self.device = recipe, stream, device
        self.rank, self.world = _rank_and_world()
        if recipe.batch % self.world:
            raise InputError(f"a batch of {recipe.batch} contexts can't be shared equally by {self.world} processes")
        if sharded and not distributed.is_initialized():
            raise InputError("sharding needs a process group: start with torchrun --nproc-per-node N")
        dtype = DTYPES[recipe.dtype]
        self.model = LoopedMoE(config)
        self.model.init_weights(recipe.seed)
        try:
            self.model.to(device=device, dtype=None if sharded else dtype)  # FSDP casts what it gathers
        except (RuntimeError, AssertionError) as error:  # no such device, or a torch built without it
            raise InputError(f"can't train on {device!r} ({error}); try cpu") from error
        self.evaluated = self._trained = _Wrapped(self.model)
        if sharded:
            policy = MixedPrecisionPolicy(param_dtype=dtype)
            for part in (*self.model.blocks, self.evaluated):
                fully_shard(part, mp_policy=policy, reshard_after_forward=True)
        elif self.world > 1:
            self._trained = nn.parallel.DistributedDataParallel(self.evaluated)
        self._weights = {
            n: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for n, p in self.model.named_parameters()
        }
        groups = [
            {"params": [p for p in self._weights.values() if p.ndim > 1], "weight_decay": recipe.weight_decay},
            {"params": [p for p in self._weights.values() if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)
        self.seen = 0
        self.seconds = 0.0  # of CPU time: other programs don't count

    def step(self, horizon: int | None = None) -> dict[str, float]:
        """One update, on the stable run or on the branch to `horizon`.

        Raises:
            VisitlensError: a loss, and so a gradient, that is not finite; nothing was updated.
        """
        began = time.process_time()
        rate = self.recipe.rate_at(self.seen, horizon)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = [
            torch.from_numpy(a) for a in self.stream.next_batch()
        ]  # tokens, segments and, of a task, what is scored
        mine = slice(self.rank, None, self.world)
        loss = self._trained(*(a[mine].to(self.device) for a in batch), training=True)
        (loss.total * self.world).backward()  # shares of one loss, whose gradients are averaged
        self._gradients_to_weights()
        parts = torch.stack([loss.total, loss.cross_entropy, loss.load_balance, loss.router_z]).detach()
        total, cross_entropy, load_balance, router_z = _added_up(parts).tolist()
        norm = _whole(torch.nn.utils.clip_grad_norm_(self._weights.values(), self.recipe.clip))
        if not torch.isfinite(norm):  # the same in every process
            raise VisitlensError(
                f"the loss is {total}, its gradient {float(norm)} after {self.seen:,} tokens: training has diverged. The last checkpoint is kept; try a lower learning rate"
            )
        self.optimizer.step()
        self._weights_to_model()
        self.optimizer.zero_grad()
        self.seen += batch[0].numel()
        self.seconds += time.process_time() - began
        return {
            "tokens": self.seen,
            "loss": cross_entropy,
            "load_balance": load_balance,
            "router_z": router_z,
            "gradient_norm": norm.item(),
            "learning_rate": rate,
        }

    def save(self, path: Path) -> None:
        """Weights, moments and the place in the stream in one safetensors file, replaced in one step."""
        tensors = {f"weight.{name}": p for name, p in self.weights().items()}
        for name, p in self._weights.items():
            tensors |= {f"{key}.{name}": _whole(value) for key, value in self.optimizer.state.get(p, {}).items()}
        if self.rank:
            return
        metadata = {"seen": str(self.seen), "seconds": str(self.seconds), "stream": json.dumps(self.stream.state())}
        partial = path.with_suffix(".tmp")
        save_file(tensors, partial, metadata=metadata)
        partial.replace(path)

    @torch.no_grad()
    def restore(self, path: Path) -> None:
        """Goes on exactly where `save` was called.

        Raises:
            CheckpointError: the file is damaged or another model's.
        """
        try:
            with safe_open(path, framework="pt", device=self.device) as file:
                names, metadata = set(file.keys()), file.metadata()
                for name, p in self._weights.items():
                    p.copy_(_divided(file.get_tensor(f"weight.{name}"), p))
                    keys = [k for k in ("step", "exp_avg", "exp_avg_sq") if f"{k}.{name}" in names]
                    state = {k: file.get_tensor(f"{k}.{name}") for k in keys}
                    self.optimizer.state[p] = {k: _divided(v, p) if v.shape == p.shape else v for k, v in state.items()}
        except Exception as error:  # SafetensorError, or shapes of another model
            raise CheckpointError(
                f"{path}: not this model's training state ({error}); delete the folder to start over"
            ) from error
        self._weights_to_model()
        self.seen, self.seconds = int(metadata["seen"]), float(metadata["seconds"])
        self.stream.restore(json.loads(metadata["stream"]))

    def weights(self) -> dict[str, Tensor]:
        """All of every weight, gathered from the processes that hold parts of it."""
        return {name: _whole(p.detach()) for name, p in self._weights.items()}

    def _gradients_to_weights(self) -> None:
        for name, p in self.model.named_parameters():
            if (weight := self._weights[name]) is not p:
                weight.grad, p.grad = None if p.grad is None else p.grad.float(), None

    @torch.no_grad()
    def _weights_to_model(self) -> None:
        for name, p in self.model.named_parameters():
            if (weight := self._weights[name]) is not p:
                p.copy_(weight)


def _whole(value: Tensor) -> Tensor:
    """With what other processes hold of it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _divided(value: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor, if `like` is divided."""
    return distribute_tensor(value, like.device_mesh, like.placements) if isinstance(like, DTensor) else value


def _added_up(value: Tensor) -> Tensor:
    """Over all processes."""
    if _rank_and_world()[1] > 1:
        distributed.all_reduce(value)
    return value


def _rank_and_world() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1

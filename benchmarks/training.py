"""Training throughput on one CPU core: against the floor of its matrix products alone, and against a naive expert loop.

    python benchmarks/training.py --out benchmarks/results/training.json

A step is forward, backward and AdamW on one batch of packed random tokens. The floor is the time that the same matrix
products take as plain `torch.mm` calls, one of each shape after another (experts as one product over all their rows;
forward once, backward twice that), without attention scores, norms, softmax, routing or the optimiser. The naive path
finds each expert's tokens by a mask and adds its output back, as first implementations do. CPU time, medians of
interleaved rounds.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn.functional import silu

from visitlens.hooks.models import looped_moe
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.kernels.memory import keep_freed_memory
from visitlens.probe.ladder.mini_grid import MINI

CASES = ("44K-S0", "44K-S85", "44K-S97", "263K-S85", "263K-S97")
FUSED = looped_moe.grouped_experts


def naive_experts(x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Expert by expert, by mask."""
    out = torch.zeros_like(x)
    for e in range(w_in.shape[0]):
        token, rank = (experts == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ w_in[e]).chunk(2, dim=-1)
        inner = silu(gate) * up * gates[token, rank].unsqueeze(-1)
        out = out.index_add(0, token, inner @ w_out[e])
    return out


def main(
    out: Annotated[Path, typer.Option(help="JSON file for the results")] = Path("training.json"),
    rounds: Annotated[int, typer.Option(help="interleaved rounds")] = 7,
    contexts: Annotated[int, typer.Option(help="contexts of 512 tokens per step")] = 4,
) -> None:
    """Times both models of some cells of the mini grid."""
    torch.set_num_threads(1)
    keep_freed_memory()
    results = {}
    for cell in MINI.cells:
        if cell.name in CASES:
            for side in ("baseline", "looped"):
                results[f"{cell.name} {side}"] = row = measure(getattr(cell, side), contexts, rounds)
                print(f"{cell.name} {side}", json.dumps(row), flush=True)
    report = {
        "machine": platform.processor() or platform.machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "rounds": rounds,
        "tokens_per_step": contexts * MINI.context,
        "results": results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")


def measure(config: LoopedMoEConfig, contexts: int, rounds: int) -> dict[str, float]:
    """Tokens per CPU-second, and medians of the ratios to the floor and to the naive path."""
    model = LoopedMoE(config)
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, config.vocab_size, (contexts, config.context_length), generator=generator)
    segments = torch.arange(config.context_length).expand(contexts, -1) // MINI.mean_document

    def step(experts: Callable[..., Tensor]) -> None:
        looped_moe.grouped_experts = experts
        model.training_loss(tokens, segments).total.backward()
        optimizer.step()
        optimizer.zero_grad()
        looped_moe.grouped_experts = FUSED

    products = matrix_products(config, tokens.numel())
    variants: dict[str, Callable[[], None]] = {
        "fused": lambda: step(FUSED),
        "naive": lambda: step(naive_experts),
        "floor": lambda: [torch.mm(a, b) for a, b in products for _ in range(3)] and None,
    }
    for run in variants.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            began = time.process_time()
            run()
            seconds[name].append(time.process_time() - began)
    ratio = {
        name: statistics.median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))
        for name, other in (("fused", "floor"), ("naive", "fused"))
    }
    return {
        "tokens_per_second": round(tokens.numel() / statistics.median(seconds["fused"])),
        "over_matmul_floor": round(ratio["fused"], 2),
        "naive_over_fused": round(ratio["naive"], 2),
        "experts": config.num_experts,
    }


def matrix_products(config: LoopedMoEConfig, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Operands of every product of a forward with weights, the output head included."""
    h, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows, f = tokens * config.experts_per_token, config.expert_dim
    step = [
        (tokens, h, q),
        (tokens, h, 2 * kv),
        (tokens, q, h),
        (tokens, h, config.num_experts),
        (rows, h, 2 * f),
        (rows, f, h),
    ]
    shapes = step * len(config.loop_spec.plan()) + [(tokens, h, config.vocab_size)]
    operands = {shape: (torch.randn(shape[0], shape[1]), torch.randn(shape[1], shape[2])) for shape in set(shapes)}
    return [operands[shape] for shape in shapes]


if __name__ == "__main__":
    typer.run(main)

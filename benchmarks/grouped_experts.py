"""How fast the Mixture-of-Experts feed-forward is, by implementation and number of experts.

    python benchmarks/grouped_experts.py --out experts.json [--repeats 5] [--tokens 4096]

CPU time of one thread (CUDA: elapsed), forward and forward + backward; each repeat times every case and
implementation one after the other, and ratios are medians of those within a repeat.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from machine import describe
from rich.console import Console
from rich.table import Table
from torch import Tensor

from visitlens.errors import InputError
from visitlens.kernels.grouped_experts import IMPLEMENTATIONS, grouped_experts

SHAPES = ((64, 64, 8), (64, 64, 96), (64, 64, 504), (256, 256, 96))
TOP = 8


def problem(
    tokens: int, hidden: int, width: int, num_experts: int, device: str = "cpu", dtype=torch.float32
) -> tuple[Tensor, ...]:
    """x, experts, gates, w_in, w_out of `grouped_experts`."""
    torch.manual_seed(0)
    experts = torch.rand(tokens, num_experts).argsort(1)[:, :TOP].to(device)
    leaves = [
        torch.randn(tokens, hidden),
        torch.rand(tokens, TOP).softmax(-1),
        torch.randn(num_experts, hidden, 2 * width) * hidden**-0.5,
        torch.randn(num_experts, width, hidden) * width**-0.5,
    ]
    x, gates, w_in, w_out = (t.to(device, dtype).requires_grad_() for t in leaves)
    return x, experts, gates, w_in, w_out


def naive(x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """One expert after the other, each looking for its tokens."""
    out = torch.zeros_like(x)
    for expert, (into, back) in enumerate(zip(w_in.unbind(0), w_out.unbind(0), strict=True)):
        token, rank = (experts == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ into).chunk(2, dim=-1)
        out = out.index_add(0, token, (torch.nn.functional.silu(gate) * up * gates[token, rank].unsqueeze(1)) @ back)
    return out


def seconds(case: tuple[Tensor, ...], implementation: str, backward: bool) -> float:
    cuda = case[0].is_cuda
    clock = time.perf_counter if cuda else time.process_time
    if cuda:
        torch.cuda.synchronize()
    before = clock()
    with torch.set_grad_enabled(backward):
        out = naive(*case) if implementation == "naive" else grouped_experts(*case, implementation)
        if backward:
            torch.autograd.grad(out.square().sum(), [case[0], *case[2:]])
    if cuda:
        torch.cuda.synchronize()
    return clock() - before


def applies(case: tuple[Tensor, ...], implementation: str) -> bool:
    """Dense work on many experts is hopeless, and grouped_mm doesn't take every shape."""
    if implementation == "dense" and case[3].shape[0] > 2 * TOP:
        return False
    if implementation == "naive":
        return True
    try:
        grouped_experts(*case, implementation)
    except InputError:
        return False
    return True


def measure(tokens: int, repeats: int, device: str = "cpu", dtype=torch.float32) -> dict:
    """Median milliseconds by shape, implementation and direction; and the two ratios that are promised."""
    cases = {shape: problem(tokens, *shape, device, dtype) for shape in SHAPES}
    runs = [
        (shape, name) for shape, case in cases.items() for name in ("naive", *IMPLEMENTATIONS) if applies(case, name)
    ]
    taken: dict = {(run, backward): [] for run in runs for backward in (False, True)}
    for _ in range(repeats):
        for (shape, name), backward in taken:
            taken[(shape, name), backward].append(seconds(cases[shape], name, backward))

    def ratio(over: tuple, under: tuple) -> float:
        return statistics.median(a / b for a, b in zip(taken[over, True], taken[under, True], strict=True))

    few = min((statistics.median(taken[run, True]), run) for run in runs if run[0] == SHAPES[0])[1]
    many = (SHAPES[2], "grouped")
    milliseconds: dict = {}
    for (shape, name), backward in taken:
        key = "H={} F={} E={}".format(*shape)
        both = milliseconds.setdefault(key, {}).setdefault(name, {})
        both["forward and backward" if backward else "forward"] = 1e3 * statistics.median(
            taken[(shape, name), backward]
        )
    return {
        "milliseconds": milliseconds,
        "E=504 over E=8 (its fastest), forward and backward": ratio(many, few),
        "naive over grouped at E=504, forward and backward": ratio((SHAPES[2], "naive"), many),
        "loop over grouped at E=504, forward and backward": ratio((SHAPES[2], "loop"), many),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(arguments.tokens, arguments.repeats)
    report = {"machine": describe(), "tokens": arguments.tokens, "repeats": arguments.repeats, **result}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    table = Table("shape", "implementation", "forward ms", "forward + backward ms")
    for shape, by_name in result["milliseconds"].items():
        for name, ms in by_name.items():
            table.add_row(shape, name, f"{ms['forward']:.0f}", f"{ms['forward and backward']:.0f}")
    Console().print(table)
    for name, value in result.items():
        if name != "milliseconds":
            Console().print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    main()

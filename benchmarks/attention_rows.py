"""How fast the attention-row statistics are, against a naive T x T version and against a floor.

    python benchmarks/attention_rows.py --out rows.json [--cases t1024 t2048 ...] [--repeats 5] [--memory]

Every repeat times floor, naive and each implementation one after the other on the CPU clock of one thread, so that
a busy machine slows all of them; the table holds medians of the ratios within a repeat. The floor is the score
products of both visits at the speed of one large product of this machine, plus two `exp` per visible key. Extra
memory is the peak of the process over what it held before the call, in a process of its own; `--memory` takes it at
lengths from 512 to 16384, one document each, beside that of the naive version where it fits.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from machine import describe
from rich.console import Console
from rich.table import Table
from torch import Tensor

from visitlens.errors import VisitlensError
from visitlens.kernels.attention.dispatch import ATTENTION_ROWS, choose_attention_rows
from visitlens.kernels.attention.rows import visit_overlaps
from visitlens.kernels.segments import Segments

Visits = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    tokens: int
    mean_document: int
    heads: int
    kv_heads: int
    width: int

    def segments(self) -> Segments:
        """A fixed draw of lengths between half and one and a half times the mean."""
        generator = torch.Generator().manual_seed(self.mean_document)
        bounds = [0]
        while self.mean_document < self.tokens and bounds[-1] < self.tokens:
            share = 0.5 + torch.rand((), generator=generator).item()
            bounds.append(bounds[-1] + round(share * self.mean_document))
        return Segments((*[b for b in bounds if b < self.tokens], self.tokens))

    def visits(self) -> Visits:
        torch.manual_seed(0)
        return [
            (torch.randn(self.tokens, self.heads, self.width), torch.randn(self.tokens, self.kv_heads, self.width))
            for _ in range(2)
        ]


CASES = {
    "t1024-small": Case(1024, 250, 6, 3, 12),
    "t1024": Case(1024, 300, 12, 4, 64),
    "t2048": Case(2048, 600, 12, 4, 64),
    "t2048-one": Case(2048, 2048, 12, 4, 64),
    "t4096": Case(4096, 700, 12, 4, 64),
    "t4096-one": Case(4096, 4096, 12, 4, 64),
}


def naive(visits: Visits, segments: Segments) -> None:
    """The same statistics with masked T x T maps, two heads of both visits at a time."""
    heads, groups = visits[0][0].shape[1], visits[0][0].shape[1] // visits[0][1].shape[1]
    starts, token = segments.starts(), torch.arange(segments.num_tokens)
    masked = (token > token[:, None]) | (starts != starts[:, None])
    for head in range(heads // 2):
        maps = []
        for q, k in visits:
            for h in (head, head + heads // 2):
                scores = (q[:, h] @ k[:, h // groups].T * q.shape[2] ** -0.5).masked_fill_(masked, -torch.inf)
                p = scores.softmax(-1)
                scores.logsumexp(-1)
                _ = p[token, starts], p[:, :4].sum(-1), -torch.special.xlogy(p, p).sum(-1)
                maps.append((p, scores.argmax(-1), scores.topk(8, dim=-1).indices))
        for a, b in ((0, 2), (1, 3), (0, 1), (2, 3)):
            (p, top1, top8), (p_other, top1_other, top8_other) = maps[a], maps[b]
            (top8[:, :, None] == top8_other[:, None]).sum((1, 2))
            _ = torch.minimum(p, p_other).sum(-1), top1 == top1_other


def floor_seconds(case: Case) -> float:
    """Two score products and two exps over visible keys, at this machine's speed now."""
    visible = sum((end - start) * (end - start + 1) / 2 for start, end in case.segments().spans)
    a = torch.randn(512, 512)
    values = torch.randn(2**16)
    product = min(_cpu_seconds(lambda: a @ a) for _ in range(5)) / (2 * 512**3)
    exp = min(_cpu_seconds(lambda: values.exp()) for _ in range(5)) / values.numel()
    return 2 * visible * case.heads * (2 * case.width * product + exp)


def _cpu_seconds(run: Callable[[], object]) -> float:
    before = time.process_time()
    run()
    return time.process_time() - before


def _extra_memory(case: Case, implementation: str, queue: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    small = Case(256, 100, case.heads, case.kv_heads, case.width)  # compiles and fills the allocator's caches
    run = naive if implementation == "naive" else partial(visit_overlaps, implementation=implementation)
    run(small.visits(), small.segments())
    visits, segments = case.visits(), case.segments()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    run(visits, segments)
    queue.put((_status("VmHWM") - before) / 1024)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))


def measure(case: Case, implementations: list[str], repeats: int) -> dict:
    """Median CPU milliseconds, ratios to naive and to the floor, and extra megabytes, by implementation."""
    visits, segments = case.visits(), case.segments()
    runs: dict[str, Callable[[], object]] = {"naive": lambda: naive(visits, segments)}
    for name in implementations:
        runs[name] = lambda name=name: visit_overlaps(visits, segments, implementation=name)
        runs[name]()
    seconds: dict[str, list[float]] = {name: [] for name in ("floor", *runs)}
    for _ in range(repeats):
        seconds["floor"].append(floor_seconds(case))
        for name, run in runs.items():
            seconds[name].append(_cpu_seconds(run))
    result: dict = {"case": asdict(case), "documents": len(segments.spans)}
    result["milliseconds"] = {name: 1e3 * statistics.median(s) for name, s in seconds.items()}
    for name in implementations:
        ours = seconds[name]
        result[name] = {
            "faster_than_naive": statistics.median(n / s for n, s in zip(seconds["naive"], ours, strict=True)),
            "times_the_floor": statistics.median(s / f for s, f in zip(ours, seconds["floor"], strict=True)),
            "extra_megabytes": extra_megabytes(case, name),
        }
    return result


def extra_megabytes(case: Case, implementation: str) -> float:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_extra_memory, args=(case, implementation, queue))
    process.start()
    megabytes = queue.get(timeout=900)
    process.join()
    return megabytes


def memory_by_length(implementations: list[str]) -> dict[str, dict[int, float]]:
    """Extra megabytes by implementation and T; 4 heads, 2 key/value, d = 64, one document."""
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    return {
        name: {
            t: round(extra_megabytes(Case(t, t, 4, 2, 64), name), 1) for t in lengths if name != "naive" or t <= 4096
        }
        for name in ("naive", *implementations)
    }


def _available(name: str) -> bool:
    try:
        choose_attention_rows("cpu", torch.float32, name)
    except VisitlensError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    implementations = [name for name in ATTENTION_ROWS if _available(name)]

    results = {name: measure(CASES[name], implementations, arguments.repeats) for name in arguments.cases}
    report = {"machine": describe(), "repeats": arguments.repeats, "cases": results}
    if arguments.memory:
        report["extra_megabytes_by_length"] = memory_by_length(implementations)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")

    table = Table("case", "floor ms", "naive ms", "implementation", "ms", "x naive", "x floor", "extra MB")
    for name, result in results.items():
        ms = result["milliseconds"]
        for implementation in implementations:
            ratios = result[implementation]
            table.add_row(
                name, f"{ms['floor']:.1f}", f"{ms['naive']:.0f}", implementation, f"{ms[implementation]:.1f}",
                f"{ratios['faster_than_naive']:.1f}", f"{ratios['times_the_floor']:.1f}",
                f"{ratios['extra_megabytes']:.0f}",
            )  # fmt: skip
    Console().print(table)
    for name, by_length in report.get("extra_megabytes_by_length", {}).items():
        Console().print(f"extra MB of {name} by T: {by_length}")


if __name__ == "__main__":
    main()

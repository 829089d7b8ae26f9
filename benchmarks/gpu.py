"""The one script for a GPU: are the kernels right there, and how fast? Within 8 minutes.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json [--minutes 7]

First every implementation of the attention statistics against float64 on the CPU, over head layouts, dtypes and rules;
then times (CUDA events, medians of interleaved rounds, after a warm-up that compiles) of one pair of visits at batch 8,
T = 4096, 44 heads; peak memory; then the experts. What doesn't fit the minutes is left out and named. A failure is
written down and the rest goes on; the exit code is 1 where anything was wrong.

Without a GPU, `TRITON_INTERPRET=1 python benchmarks/gpu.py --device cpu` runs the same script on tiny inputs: it tries
the script, its times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from grouped_experts import measure as measure_experts
from machine import describe

from visitlens.kernels.attention.rows import visit_overlaps
from visitlens.kernels.segments import Segments

TOLERANCE = 1e-4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def draw(tokens: int, heads: int, kv_heads: int, d: int, dtype: torch.dtype, visits: int = 2) -> list:
    generator = torch.Generator().manual_seed(tokens + heads + d)
    shapes = ((tokens, heads, d), (tokens, kv_heads, d))
    return [tuple(torch.randn(s, generator=generator).to(dtype) for s in shapes) for _ in range(visits)]


def rules(heads: int, tokens: int) -> dict[str, dict]:
    generator = torch.Generator().manual_seed(heads)
    sinks, bias = torch.randn(heads, generator=generator), torch.randn(heads, tokens, generator=generator)
    sets = torch.rand(2, tokens, generator=generator) < 0.3
    return {
        "plain": {},
        "window": {"window": 100},
        "soft cap, sinks, bias, sets": {"soft_cap": 3.0, "sinks": sinks, "bias": bias, "token_sets": sets},
    }


def worst_error(implementation: str, visits: list, segments: Segments, device: str, rule: dict) -> dict[str, float]:
    """Largest difference from float64 of every float result, and the share of top keys that differ."""
    on_device = [(q.to(device), k.to(device)) for q, k in visits]
    moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in rule.items()}
    ours = visit_overlaps(on_device, segments, implementation=implementation, top_keys=True, **moved)
    exact = visit_overlaps([(q.double(), k.double()) for q, k in visits], segments, top_keys=True, **rule)
    pairs = list(zip(ours.rows, exact.rows, strict=True))
    pairs += [(ours.across[p], exact.across[p]) for p in exact.across]
    pairs += list(zip(ours.control or [], exact.control or [], strict=True))
    errors: dict[str, float] = {}
    for a, b in pairs:
        for field in dataclasses.fields(b):
            one, two = getattr(a, field.name), getattr(b, field.name)
            if two is None:
                continue
            one = one.cpu()
            error = (one.double() - two).abs().max() if two.is_floating_point() else (one != two).double().mean()
            errors[field.name] = max(errors.get(field.name, 0.0), float(error))
    return errors


def check(device: str, small: bool, until: float) -> dict:
    """Errors by implementation, dtype, layout and rule; `wrong` names those beyond the tolerance."""
    tokens = 70 if small else 700
    layouts = [(2, 1, 16)] if small else [(8, 2, 64), (5, 1, 42), (4, 4, 128), (2, 1, 256), (44, 4, 44)]
    bounds = (0, 3, 4, 40, tokens) if small else (0, 3, 4, 68, 129, 193, 640, tokens)
    dtypes = {"float32": torch.float32} if small else DTYPES
    report: dict = {"tolerance": TOLERANCE, "cases": {}, "wrong": [], "left_out": 0}
    for implementation in ("torch", "triton"):
        for dtype_name, dtype in dtypes.items():
            for layout in layouts:
                visits = draw(tokens, *layout, dtype, visits=2 if small else 3)
                for rule_name, rule in rules(layout[0], tokens).items():
                    if time.monotonic() > until:
                        report["left_out"] += 1
                        continue
                    name = f"{implementation}, {dtype_name}, {layout}, {rule_name}"
                    try:
                        errors = worst_error(implementation, visits, Segments(bounds), device, rule)
                    except Exception as error:  # written down: the other cases still tell something
                        errors = {"failed": float("inf"), "message": f"{type(error).__name__}: {str(error)[:300]}"}
                    report["cases"][name] = errors
                    counted = ("top_keys", "top8_shared", "top1_match")
                    values = [(n, e) for n, e in errors.items() if n != "message"]
                    if any(e > (0.01 if n in counted else TOLERANCE) for n, e in values):
                        report["wrong"].append(name)
    return report


def milliseconds(run, device: str) -> float:
    if device == "cpu":
        before = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - before)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def time_rows(device: str, small: bool, until: float) -> dict:
    """Median milliseconds and peak extra megabytes by case and implementation."""
    batch, length, heads, kv_heads, d = (1, 64, 2, 1, 16) if small else (8, 4096, 44, 4, 64)
    tokens, report = batch * length, {}
    generator = torch.Generator().manual_seed(0)
    bounds = [0]
    while bounds[-1] < tokens:  # documents of 350 to 1050 tokens, ended by the context's end
        step = int(torch.randint(350, 1051, (), generator=generator))
        bounds.append(min(bounds[-1] + step, (bounds[-1] // length + 1) * length))
    documents = {"one document": Segments.whole_contexts(batch, length), "mean 700": Segments(tuple(bounds))}
    for dtype_name in ("float32",) if small else ("bfloat16", "float32"):
        visits = [tuple(t.to(device) for t in visit) for visit in draw(tokens, heads, kv_heads, d, DTYPES[dtype_name])]
        for case, segments in documents.items():
            runs = {n: partial(visit_overlaps, visits, segments, implementation=n) for n in ("triton", "torch")}
            key = f"batch {batch}, T = {length}, {heads} heads, {kv_heads} key heads, d = {d}, {dtype_name}, {case}"
            report[key] = {}
            taken: dict[str, list[float]] = {name: [] for name in runs}
            for round_ in range(2 if small else 6):
                for name, run in runs.items():
                    if time.monotonic() > until or "failed" in report[key].get(name, {}):
                        continue
                    try:
                        if round_ == 0 and device != "cpu":
                            torch.cuda.reset_peak_memory_stats()
                            held = torch.cuda.memory_allocated()
                        spent = milliseconds(run, device)
                    except Exception as error:  # out of memory, say
                        report[key][name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
                        continue
                    if round_:
                        taken[name].append(spent)
                    elif device != "cpu":
                        extra = (torch.cuda.max_memory_allocated() - held) / 2**20
                        report[key][name] = {"extra_megabytes": round(extra, 1)}
            for name, times in taken.items():
                if times:
                    report[key].setdefault(name, {})["milliseconds"] = round(statistics.median(times), 2)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    small, device = arguments.device == "cpu", arguments.device
    if not small and not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU here; --device cpu with TRITON_INTERPRET=1 tries the script without one")
    began = time.monotonic()
    report: dict = {"machine": describe()}

    def save() -> None:
        report["seconds"] = round(time.monotonic() - began, 1)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")

    def until(share: float) -> float:
        return began + 60 * arguments.minutes * share

    report["attention_rows_times"] = time_rows(device, small, until(0.4))  # first: it is what nothing else can tell
    save()
    report["attention_rows_errors"] = check(device, small, until(0.85))
    save()
    if time.monotonic() < until(0.9):
        tokens = 64 if small else 4096
        dtypes = ("float32",) if small else ("float32", "bfloat16")
        report["experts"] = {n: measure_experts(tokens, 2 if small else 10, device, DTYPES[n]) for n in dtypes}
    save()
    print(json.dumps(report, indent=1))
    failed = [t for case in report["attention_rows_times"].values() for t in case.values() if "failed" in t]
    sys.exit(bool(report["attention_rows_errors"]["wrong"] or failed))


if __name__ == "__main__":
    main()

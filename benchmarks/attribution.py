"""Gradient attribution against exact ablation: agreement and speed-up on the bundled looped model.

    python benchmarks/attribution.py --out benchmarks/results/attribution.json

Speed-up is CPU time of the exact ablation of every head over that of one attribution of all heads and all experts, on the same
contexts, interleaved, median of the rounds. The exact side already shares the forward up to the ablated step; its time is measured on one
head of every step and multiplied by the heads. Agreement is over units spread evenly over the gradient's ranking (by default every head).
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import visitlens as vl
from visitlens.hooks.interventions.intervene import site_means
from visitlens.probe.experiments.attribution import attribute, exact_chain, rank_correlation, spread
from visitlens.probe.samples.scores import score


def main(
    out: Annotated[Path | None, typer.Option(help="JSON file for the results")] = None,
    tokens: Annotated[int, typer.Option(help="tokens of the sample")] = 4096,
    rounds: Annotated[int, typer.Option(help="interleaved rounds")] = 3,
    checked: Annotated[int, typer.Option(help="heads, and experts, to check exactly")] = 72,
) -> None:
    """Times attribution and exact ablation in turn, then compares what they say."""
    torch.set_num_threads(1)
    model = vl.load()
    native, sample = model.native, model.sample(max_tokens=tokens)
    steps, heads = native.plan.steps, native.config.num_heads
    counts = sample.counts.sum()

    def seconds(work) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    one_each = [exact_chain("heads", s.layer, s.visit, 0) for s in steps]
    seconds(lambda: attribute(native, sample))  # warm
    ratios, fast = [], []
    for _ in range(rounds):
        fast.append(seconds(lambda: attribute(native, sample)))
        plain = seconds(lambda: score(native, sample))
        exact = seconds(lambda: score(native, sample, one_each)) - plain
        ratios.append((plain + exact * heads) / fast[-1])
    results: dict[str, Any] = {
        "tokens": int(counts),
        "speed_up_over_exact_heads": statistics.median(ratios),
        "attribution_seconds": statistics.median(fast),
    }
    for kind, means in (("zero", None), ("mean", site_means(native, sample.contexts, ["PV"]))):
        guess, experts = (effect.sum(0) / counts for effect in attribute(native, sample, means).values())
        results[f"heads_{kind}"] = agreement(native, sample, "heads", guess, spread(guess, checked), means)
        if means is None:
            results["experts"] = agreement(native, sample, "experts", experts, spread(experts, checked), None)
    text = json.dumps(results, indent=1)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")


def agreement(native, sample, name: str, guess: np.ndarray, cells: list[tuple[int, int]], means) -> dict[str, Any]:
    """Rank correlation and worst error, over all cells and over those of looped layers alone."""
    steps = native.plan.steps
    plain, *ablated = score(
        native, sample, [[], *(exact_chain(name, steps[i].layer, steps[i].visit, u, means) for i, u in cells)]
    )
    exact = np.array([(scored - plain).loss.sum() for scored in ablated]) / sample.counts.sum()
    estimate = np.array([guess[cell] for cell in cells])
    looped = np.array([steps[i].layer in native.plan.looped_layers for i, _ in cells])
    found: dict[str, Any] = {}
    for where, chosen in (("all", np.ones(len(cells), bool)), ("looped", looped)):
        error = np.abs(estimate - exact)[chosen]
        found[where] = {
            "units": int(chosen.sum()),
            "rank_correlation": rank_correlation(estimate[chosen], exact[chosen]),
            "worst_error": float(error.max()),
            "median_error": float(np.median(error)),
            "largest_exact": float(np.abs(exact[chosen]).max()),
        }
    return found


if __name__ == "__main__":
    typer.run(main)

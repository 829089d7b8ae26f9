"""Looped configurations that share a Baseline's three budgets: FLOPs per token, parameters, KV cache. No torch.

    match(baseline, loop_start=3, loop_stop=9, visits=2)[0].config

An exhaustive search over hardware-aligned sizes: KV heads and head dim from the KV budget, then hidden size, query heads
and expert dim; the expert count, unless given, from what the parameter budget leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from visitlens.errors import InputError
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.probe.ladder.budget import PAPER_DOCUMENT, PAPER_TOLERANCE, Budget, Ratios


@dataclass(frozen=True)
class Steps:
    """What sizes are multiples of; 8 rows of bfloat16 are the 16 bytes that grouped matrix products need."""

    hidden: int = 8
    head_dim: int = 2
    expert_dim: int = 8
    experts: int = 8


@dataclass(frozen=True)
class Candidate:
    """A looped configuration and its budgets over the Baseline's.

    `disproportion`: how far expert dim and query width over hidden size are from the Baseline's, relatively.
    """

    config: LoopedMoEConfig
    ratios: Ratios
    tolerance: Ratios
    disproportion: float = 0.0

    @property
    def residual(self) -> float:
        """The largest deviation from 1, in units of its tolerance: up to 1 is a match."""
        return max(abs(ratio - 1) / allowed for ratio, allowed in zip(self.ratios, self.tolerance, strict=True))


def match(
    baseline: LoopedMoEConfig,
    *,
    loop_start: int,
    loop_stop: int,
    visits: int = 2,
    layers: int | None = None,
    mean_document: float = PAPER_DOCUMENT,
    steps: Steps = Steps(),
    experts: Sequence[int] | None = None,
    kv_heads: Sequence[int] | None = None,
    full_width: bool = False,
    tolerance: Ratios = PAPER_TOLERANCE,
    limit: int | None = 10,
) -> list[Candidate]:
    """Candidates, nearest budgets first, in tenths of the tolerance; within half of it all count as equally near, and the
    shape nearest the Baseline's own proportions comes first.

    Args:
        layers: physical layers; None is the Baseline's. With others an unlooped shape can be matched too.
        experts: expert counts to try; None solves for the count.
        kv_heads: KV head counts to try; None is the Baseline's.
        full_width: only shapes whose query width is the hidden size, as in the paper's sparse rows; else the width may
            be 0.7 to 1.4 times the Baseline's in proportion.
        tolerance: allowed deviations of the three ratios from 1; all candidates lie within.
        limit: how many at most; None is all.

    Raises:
        InputError: the Baseline is looped, or no aligned shape comes within the tolerance (says the nearest).
    """
    if len(baseline.loop_spec.span):
        raise InputError("expected an unlooped Baseline to match, got a configuration with a loop span")
    looped = replace(
        baseline, num_layers=layers or baseline.num_layers, loop_start=loop_start, loop_stop=loop_stop, visits=visits
    )
    target = Budget.of(baseline, mean_document)
    executed = looped.num_layers + (looped.visits - 1) * len(looped.loop_spec.span)
    widest = int(baseline.hidden_size * max(1.0, baseline.num_layers / executed))  # fewer layers may be wider
    found = [
        Candidate(
            config, Ratios.of(Budget.of(config, mean_document), target), tolerance, _disproportion(config, baseline)
        )
        for shape in _shapes(
            looped, steps, kv_heads or [baseline.num_kv_heads], full_width, target, tolerance.kv, widest
        )
        for config in _with_experts(shape, steps, experts, target.total)
    ]
    if not found:
        raise InputError(f"no shape in steps of {steps} comes near the Baseline's KV cache; try smaller steps")
    found.sort(key=lambda c: (max(round(c.residual, 1), 0.5), c.disproportion))
    if found[0].residual > 1:
        raise InputError(
            f"no shape in steps of {steps} has all three budgets within {tuple(tolerance)} of the Baseline's; the nearest "
            f"has ratios {tuple(round(r, 3) for r in found[0].ratios)}. Try smaller steps or other expert counts."
        )
    return [c for c in found if c.residual <= 1][:limit]


def _shapes(
    looped: LoopedMoEConfig,
    steps: Steps,
    kv_heads: Sequence[int],
    full_width: bool,
    target: Budget,
    kv_tolerance: float,
    widest: int,
) -> Iterator[LoopedMoEConfig]:
    """Hidden size and heads whose KV cache fits."""
    proportion = looped.num_heads * looped.head_dim / looped.hidden_size  # still the Baseline's
    executed = looped.num_layers + (looped.visits - 1) * len(looped.loop_spec.span)
    for count in kv_heads:
        wanted = target.kv_values_per_token / (2 * executed * count)
        first = int(wanted * (1 - kv_tolerance)) // steps.head_dim * steps.head_dim
        dims = range(max(first, 2), int(wanted * (1 + kv_tolerance)) + 1, steps.head_dim)
        for dim in (d for d in dims if abs(d / wanted - 1) <= kv_tolerance):
            for hidden in range(looped.hidden_size // 2 // steps.hidden * steps.hidden, widest + 1, steps.hidden):
                for heads in range(count, 2 * hidden // dim + 1, count):
                    width = heads * dim / hidden
                    fits = width == 1 if full_width else 0.7 <= width / proportion <= 1.4
                    if fits and heads % 2 <= looped.num_heads % 2:  # head controls pair h with h + half the heads
                        yield replace(looped, hidden_size=hidden, num_heads=heads, num_kv_heads=count, head_dim=dim)


def _with_experts(
    shape: LoopedMoEConfig, steps: Steps, counts: Sequence[int] | None, total: int
) -> Iterator[LoopedMoEConfig]:
    """Expert dims and counts that bring the parameters nearest to the total: those to either side of it."""
    h, layers = shape.hidden_size, shape.num_layers
    bare = Budget.of(shape, 0)
    rest = (total - bare.attention - bare.norms) / layers - 3 * h * shape.shared_expert_dim  # router and routed experts
    if counts is None:
        for dim in range(steps.expert_dim, 2 * shape.expert_dim + steps.expert_dim, steps.expert_dim):
            for count in _around(rest / (h * (1 + 3 * dim)), steps.experts):
                if count >= shape.experts_per_token:
                    yield replace(shape, num_experts=count, expert_dim=dim)
        return
    for count in counts:
        for dim in _around((rest / count - h) / (3 * h), steps.expert_dim):
            yield replace(shape, num_experts=count, expert_dim=dim)


def _around(value: float, step: int) -> list[int]:
    below = int(value // step) * step
    return [n for n in (below, below + step) if n > 0]


def _disproportion(config: LoopedMoEConfig, baseline: LoopedMoEConfig) -> float:
    """How far expert dim and query width over hidden size are from the Baseline's, relatively."""

    def proportions(c: LoopedMoEConfig) -> tuple[float, float]:
        return c.expert_dim / c.hidden_size, c.num_heads * c.head_dim / c.hidden_size

    return sum(abs(a / b - 1) for a, b in zip(proportions(config), proportions(baseline), strict=True))

"""Sweeps over a loop's design, each point matched to one Baseline: how many layers loop, how often, how many layers there are. Torch-free.

What `match` alone offers first jumps between shapes, which confounds the swept quantity with width. Here all points keep the Baseline's
proportions (expert dim and query width over hidden size) as nearly as sizes in steps allow, and the hidden size never grows with the
number of executed layers (SMELT 3.3 to 3.5).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from visitlens.errors import InputError
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.probe.ladder.budget import PAPER_DOCUMENT, PAPER_TOLERANCE, Budget, Ratios
from visitlens.probe.ladder.match import Candidate, Steps, match

ALIGNED = Steps()
FORMAT, SWEEP_FILE = "visitlens-sweep", "sweep.json"
AXES = ("span", "count", "depth")
"""Layers that loop (twice); how often the middle half runs; physical layers, of looped models and Baselines."""


@dataclass(frozen=True)
class Point:
    """One configuration of a sweep; `value` on its axis."""

    axis: str
    value: int
    config: LoopedMoEConfig
    ratios: Ratios

    @property
    def looped(self) -> int:
        return len(self.config.loop_spec.span)

    @property
    def executed(self) -> int:
        return self.config.num_layers + (self.config.visits - 1) * self.looped

    @property
    def name(self) -> str:
        """`depth-12-looped`."""
        return f"{self.axis}-{self.value}" + ("-looped" if self.axis == "depth" and self.looped else "")


def sweep(
    baseline: LoopedMoEConfig,
    axis: str,
    values: Sequence[int] = (),
    *,
    mean_document: float = PAPER_DOCUMENT,
    steps: Steps = ALIGNED,
) -> list[Point]:
    """The points of a sweep, unlooped ones first, then by executed layers; the Baseline itself is among them.

    Args:
        axis: span, count or depth.
        values: those of the axis; by default every second span up to all layers, one to four visits, or 3/4 to 3/2 of the layers.

    Raises:
        InputError: an unknown axis or value; or no matched shape at a value (says which).
    """
    if axis not in AXES:
        raise InputError(f"expected an axis among {', '.join(AXES)}, got {axis!r}")
    if len(baseline.loop_spec.span):
        raise InputError("expected an unlooped Baseline to sweep from, got a configuration with a loop span")
    designs = _designs(baseline, axis, values)
    chains = [[d for d in designs if not d[1]], [d for d in designs if d[1]]]
    found: list[Point] = []
    for chain in chains:
        ordered = sorted(chain, key=lambda d: d[0].num_layers + (d[0].visits - 1) * len(d[0].loop_spec.span))
        options = [_options(baseline, shape, value, mean_document, steps) for shape, _, value in ordered]
        for (_, _, value), candidate in zip(ordered, _narrowing(options, [d[2] for d in ordered], axis), strict=True):
            found.append(Point(axis, value, candidate.config, candidate.ratios))
    return found


def centred_span(layers: int, looped: int) -> tuple[int, int]:
    """START, STOP of the middle `looped` layers: floor((L - m) / 2) layers lie before them, as in the paper."""
    start = (layers - looped) // 2
    return start, start + looped


def _designs(baseline: LoopedMoEConfig, axis: str, values: Sequence[int]) -> list[tuple[LoopedMoEConfig, bool, int]]:
    """(layers and loop, whether it loops, value) of each point."""
    layers = baseline.num_layers
    defaults = {
        "span": range(0, layers + 1, 2),
        "count": range(1, 5),
        "depth": sorted({round(layers * part) for part in (2 / 3, 0.75, 1, 1.25, 1.5)}),
    }
    found = []
    for value in values or defaults[axis]:
        lowest, highest = {"span": (0, layers), "count": (1, 64), "depth": (2, 1024)}[axis]
        if not lowest <= value <= highest:
            raise InputError(f"expected a value from {lowest} to {highest} on the axis {axis}, got {value}")
        if axis == "depth":
            found.append((_looped(baseline, value, 0, 1), False, value))
            found.append((_looped(baseline, value, value // 2, 2), True, value))
        elif axis == "span":
            found.append((_looped(baseline, layers, value, 2 if value else 1), value > 0, value))
        else:
            found.append((_looped(baseline, layers, layers // 2 if value > 1 else 0, value), value > 1, value))
    return found


def _looped(baseline: LoopedMoEConfig, layers: int, looped: int, visits: int) -> LoopedMoEConfig:
    start, stop = centred_span(layers, looped) if looped else (0, 0)
    return replace(baseline, num_layers=layers, loop_start=start, loop_stop=stop, visits=visits)


def _options(
    baseline: LoopedMoEConfig, shape: LoopedMoEConfig, value: int, mean_document: float, steps: Steps
) -> list[Candidate]:
    """Matched shapes; the Baseline itself where the point is the Baseline."""
    if shape == baseline:
        return [Candidate(baseline, Ratios(1.0, 1.0, 1.0), PAPER_TOLERANCE)]
    span = shape.loop_spec.span
    try:
        return match(
            baseline,
            layers=shape.num_layers,
            loop_start=span[0] if len(span) else 0,
            loop_stop=span[-1] + 1 if len(span) else 0,
            visits=shape.visits,
            mean_document=mean_document,
            steps=steps,
            tolerance=PAPER_TOLERANCE,
            limit=None,
        )
    except InputError as error:
        raise InputError(f"no matched point at {value}: {error}") from error


def _narrowing(options: Sequence[Sequence[Candidate]], values: Sequence[int], axis: str) -> list[Candidate]:
    """One candidate a point, hidden sizes never growing from point to point, with the least departure in all (dynamic programming)."""
    if not options:
        return []
    costs: list[dict[int, tuple[float, list[Candidate]]]] = []
    for candidates, value in zip(options, values, strict=True):
        best: dict[int, tuple[float, list[Candidate]]] = {}
        for candidate in candidates:
            width = candidate.config.hidden_size
            before = (
                min((c for h, c in costs[-1].items() if h >= width), key=lambda c: c[0], default=None)
                if costs
                else (0.0, [])
            )
            if before is None:
                continue
            cost = before[0] + _departure(candidate)
            if width not in best or cost < best[width][0]:
                best[width] = (cost, [*before[1], candidate])
        if not best:
            raise InputError(f"no shape at {axis} {value} is as narrow as the points before it need; try other values")
        costs.append(best)
    return min(costs[-1].values(), key=lambda c: c[0])[1]


def _departure(candidate: Candidate) -> float:
    """How far budgets (in tolerances) and proportions (in hundredths) are from the Baseline's."""
    return candidate.residual + 100 * candidate.disproportion


def write_sweep(points: Sequence[Point], out: Path, mean_document: float = PAPER_DOCUMENT) -> None:
    """`out/NAME/config.json` of each point, and `out/sweep.json`, which lists them."""
    for point in points:
        (out / point.name).mkdir(parents=True, exist_ok=True)
        text = json.dumps(point.config.to_dict(), indent=2) + "\n"
        (out / point.name / "config.json").write_text(text, encoding="utf-8")
    rows = [{"name": p.name, **row} for p, row in zip(points, sweep_rows(points, mean_document), strict=True)]
    found = {"format": FORMAT, "mean_document": mean_document, "points": rows}
    (out / SWEEP_FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def sweep_rows(points: Sequence[Point], mean_document: float = PAPER_DOCUMENT) -> list[dict[str, Any]]:
    """Each point as a row: shape, loop, budgets over the Baseline's."""
    return [
        {
            "axis": p.axis,
            "value": p.value,
            "layers": p.config.num_layers,
            "looped": p.looped,
            "visits": p.config.visits if p.looped else 1,
            "executed": p.executed,
            "hidden_size": p.config.hidden_size,
            "expert_dim": p.config.expert_dim,
            "experts": p.config.num_experts,
            "flops_per_token": Budget.of(p.config, mean_document).flops_per_token,
            **{f"{name}_ratio": value for name, value in p.ratios._asdict().items()},
        }
        for p in points
    ]

"""What SMELT's Section 6 found, as a list of claims, and whether each one's direction holds for a pair of models. No torch.

When a claim is decided stands in `finding`. The paper's numbers are for its own, far larger models: the direction is what is
compared, not the size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from visitlens.errors import InputError, RecordingError
from visitlens.probe.drawing.series import INTERVAL
from visitlens.probe.figures.dyck_map import dyck_study
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.pair_grid import PairGrid
from visitlens.probe.reading.recorded_run import RecordedRun
from visitlens.probe.report.finding import (
    FAMILY_RULE,
    RULE,
    UNMEASURED,
    Claim,
    Evidence,
    Finding,
    in_family,
    number_tested,
    verdict,
)

PAPER = "arXiv 2609.01343 v3, Section 6"


def findings(pair: Pair) -> list[Finding]:
    """Every claim, in the paper's order.

    Raises:
        InputError: there is no looped recording.
    """
    _looped(pair)
    return in_family([_find(claim, pair) for claim in CLAIMS])


def grid_findings(grid: PairGrid) -> dict[str, list[Finding]]:
    """Cell title -> every claim there; then, under the grid's own name, what is claimed of several cells together. All are one
    family: they stand on one page."""
    found = {cell.title: findings(cell.pair) for cell in grid.every_cell() if cell.pair is not None}
    found |= {grid.name: [_overlap_falls(grid)]}
    corrected = iter(in_family([each for several in found.values() for each in several]))
    return {where: [next(corrected) for _ in several] for where, several in found.items()}


def grid_findings_data(grid: PairGrid, found: dict[str, list[Finding]]) -> dict[str, Any]:
    """JSON-ready, as `findings_data`, by cell."""
    return {
        "paper": PAPER,
        "rule": RULE,
        "family_rule": FAMILY_RULE,
        "tested": number_tested(each for several in found.values() for each in several),
        "interval": INTERVAL,
        "grid": grid.name,
        "missing": {cell.title: cell.missing for cell in grid.every_cell() if cell.pair is None},
        "warnings": grid.warnings(),
        "models": {cell.title: cell.pair.describe() for cell in grid.every_cell() if cell.pair is not None},
        "findings": {where: [finding.to_dict() for finding in each] for where, each in found.items()},
    }


def findings_data(pair: Pair, found: list[Finding]) -> dict[str, Any]:
    """JSON-ready: the findings, what they are of, and how they were decided."""
    return {
        "paper": PAPER,
        "rule": RULE,
        "family_rule": FAMILY_RULE,
        "tested": number_tested(found),
        "interval": INTERVAL,
        "models": pair.describe(),
        "warnings": pair.warnings(),
        "findings": [finding.to_dict() for finding in found],
    }


def _find(claim: Claim, pair: Pair) -> Finding:
    try:
        evidence = claim.evidence(pair)
    except (RecordingError, InputError) as error:  # InputError: layers with unequal numbers of visits
        return Finding(claim, UNMEASURED, str(error))
    by_layer = evidence.difference
    difference = by_layer.mean("layer") if by_layer.axes else by_layer
    layers = None
    if by_layer.axes:
        layers = int((by_layer.values * claim.direction > 0).sum()), by_layer.values.size
    decided, reason = verdict(difference, claim.direction)
    p = float(difference.p_values())
    return Finding(claim, decided, reason, evidence.ours, evidence.against, difference, layers, p)


# Evidence


def _looped(pair: Pair) -> RecordedRun:
    return pair.need_looped("the table of findings")


def _minus(later: StatArray, earlier: StatArray | float) -> StatArray:
    measure = later.measure
    difference = Measure(
        f"{measure.name}_difference",
        f"{measure.title}: difference",
        measure.axes,
        measure.unit,
        measure.definition,
        measure.paper,
    )
    return later.combine(earlier, np.subtract, difference)


def _against_layers(ours: StatArray, against: StatArray) -> Evidence:
    return Evidence(ours.mean("layer"), against.mean("layer"), _minus(ours, against))


def _shared_over_uniform(pair: Pair) -> Evidence:
    run = _looped(pair)
    shared = run.between_visits("shared_expert_count")
    chance = run.expert_overlap_chance() * run.recording.config["experts_per_token"]
    return Evidence(shared.mean("layer"), chance, _minus(shared, chance))


def _shared_over_load(pair: Pair) -> Evidence:
    run = _looped(pair)
    chance = run.expert_overlap_chance_by_load()
    k = run.recording.config["experts_per_token"]
    return _against_layers(run.between_visits("shared_expert_count"), chance.combine(k, np.multiply, chance.measure))


def _norm_ratio(component: str) -> Callable[[Pair], Evidence]:
    def evidence(pair: Pair) -> Evidence:
        ratio = _looped(pair).norm_ratio(component)
        return Evidence(ratio.mean("layer"), 1.0, _minus(ratio, 1.0))

    return evidence


def _visits(name: str, axis: str | None = None) -> Callable[[Pair], Evidence]:
    """A step measure at the last visit against the first."""

    def evidence(pair: Pair) -> Evidence:
        run = _looped(pair)
        ends = run.plan.visit_pairs()[0]
        first, last = (run.at_visit(name, step.visit) for step in (ends.earlier, ends.later))
        return _against_layers(*(stat.mean(axis) if axis else stat for stat in (last, first)))

    return evidence


def _update_cosine(pair: Pair) -> Evidence:
    same, other = _looped(pair).update_cosine_same_layer(), _looped(pair).update_cosine_other_layers()
    if not other.values.size:
        raise RecordingError("one layer is looped, so there are no two different layers to compare")
    mean, other_mean = same.mean("layer"), other.mean("layer_pair")
    return Evidence(mean, other_mean, _minus(mean, other_mean))


def _stages(stage: str, reference: str) -> Callable[[Pair], Evidence]:
    def evidence(pair: Pair) -> Evidence:
        stages = _looped(pair).stage_cosine()
        return _against_layers(stages.sel(stage=stage), stages.sel(stage=reference))

    return evidence


def _attended(name: str) -> Callable[[Pair], Evidence]:
    def evidence(pair: Pair) -> Evidence:
        run = _looped(pair)
        return _against_layers(run.attended(name).mean("head"), run.attended_control(name).mean("head"))

    return evidence


def _baseline_sink(pair: Pair) -> Evidence:
    profile, missing = pair.from_baseline(lambda run: run.sink_mass().mean("head"))
    if profile is None:
        raise RecordingError(missing)
    steps = profile.labels["step"]
    half = len(steps) // 2
    if not half:
        raise RecordingError("the Baseline has one layer, so nothing can grow with depth")
    early = profile.sel(step=list(steps[:half])).mean("step")
    late = profile.sel(step=list(steps[-half:])).mean("step")
    return Evidence(late, early, _minus(late, early))


def _dyck(part: str) -> Callable[[Pair], Evidence]:
    """The Dyck head's mass at the last visit against the first, at four demonstrations or the most there are."""

    def evidence(pair: Pair) -> Evidence:
        study = dyck_study(_looped(pair))
        shots = study.mass.labels["shots"]
        mass = study.mass.sel(heads="dyck head", part=part, shots=4 if 4 in shots else shots[-1])
        first, last = (mass.sel(visit=mass.labels["visit"][at]) for at in (0, -1))
        return Evidence(last, first, _minus(last, first))

    return evidence


def _overlap_falls(grid: PairGrid) -> Finding:
    """Of the grid's column: shared experts in the layer's smallest pool against the largest."""

    def evidence(_: Pair) -> Evidence:
        runs = [cell.pair.looped for cell in grid.column() if cell.pair is not None and cell.pair.looped is not None]
        runs.sort(key=lambda run: run.recording.config["num_experts"])
        if len({run.recording.config["num_experts"] for run in runs}) < 2:
            raise RecordingError("no scale has recordings of two sizes of the expert pool")
        small, large = (run.between_visits("shared_expert_count").mean("layer") for run in (runs[0], runs[-1]))
        return Evidence(large, small, _minus(large, small))

    claim = Claim(
        "expert-overlap-falls",
        "6.1",
        f"Fewer experts are shared where the pool is larger (scale {grid.column_scale})",
        "from nearly 8 (S = 0%) to 2 to 3 (S ≈ 97%)",
        "experts",
        "largest pool",
        "smallest pool",
        -1,
        evidence,
    )
    return _find(claim, next(iter(grid.pairs.values())))


_QK = "0.89 to 0.93 (Q and K), 0.84 to 0.93 (X)"
_RANGES = {
    "X": (0.84, 0.93),
    "Q": (0.89, 0.93),
    "K": (0.89, 0.93),
    "V": (0.65, 0.74),
    "PV": (0.56, 0.69),
    "O": (0.49, 0.64),
}
_OVERLAPS = {"top8_overlap": ((0.56, 0.66), (0.28, 0.34))}
_NORMS = (
    ("update", "update"),
    ("attn_write", "attention write"),
    ("moe_write", "MoE write"),
    ("norm_output", "RMSNorm output"),
)
_STAGES = (
    ("Q", "X", "Queries are more alike than the normalised input they are made from", _QK, 1),
    ("K", "X", "Keys are more alike than the normalised input they are made from", _QK, 1),
    ("V", "X", "Values are less alike than the normalised input", "0.65 to 0.74 (V), 0.84 to 0.93 (X)", -1),
    ("PV", "V", "What is attended to is less alike than the values", "0.56 to 0.69 (PV), 0.65 to 0.74 (V)", -1),
    ("O", "PV", "Attention's output is less alike than what is attended to", "0.49 to 0.64 (O), 0.56 to 0.69 (PV)", -1),
)
_ATTENDED = (
    ("top1_match", "A head's most-attended token", "drawn, not printed"),
    ("top8_overlap", "A head's set of top-8 tokens", "56 to 66% against 28 to 34%, at S = 85%"),
    ("mass_overlap", "A head's attention mass", "drawn, not printed"),
)
# fmt: off
# By hand: one claim a block, its texts in the order of Claim's fields.
CLAIMS = (
    Claim("expert-overlap", "6.1", "Two visits share more experts than uniform chance gives",
          "S = 0%: nearly 8 of 8 (chance 4); S ≈ 97%: 2 to 3 of 8 (chance 0.13)",
          "experts", "shared", "uniform chance, k²/E", 1, _shared_over_uniform),
    Claim("expert-overlap-load", "6.1, null ours", "Two visits share more experts than their expert loads alone give",
          "not reported",
          "experts", "shared", "load-aware chance", 1, _shared_over_load),
    *(Claim(f"norm-ratio-{component.replace('_', '-')}", "6.2", f"The {words} is larger at the later visit",
            "1.2 to 3.5, above 1 in 16 of 16 models",
            "ratio", "later/earlier", "no change", 1, _norm_ratio(component), (1.2, 3.5)) for component, words in _NORMS),
    Claim("relative-update", "6.2", "The update relative to the residual stream is larger at the later visit",
          "larger, except in a few early layers at 100M",
          "ratio", "last visit", "first visit", 1, _visits("relative_update")),
    Claim("update-cosine", "6.2", "A layer's updates at two visits are more alike than those of two different layers",
          "0.56 (0.42 to 0.65) against 0.16, at 1.6B",
          "cosine", "same layer", "different layers", 1, _update_cosine, (0.42, 0.65), (0.16, 0.16)),
    *(Claim(f"stage-{stage.lower()}", "6.3", words, paper, "cosine", stage, against, sign, _stages(stage, against),
            _RANGES[stage], _RANGES[against])
      for stage, against, words, paper, sign in _STAGES),
    *(Claim(name.replace("_", "-"), "6.3", f"{words} is more alike at two visits than for two heads", paper,
            "share", "same head", "other head", 1, _attended(name), *_OVERLAPS.get(name, (None, None)))
      for name, words, paper in _ATTENDED),
    Claim("dyck-bos", "6.4", "The Dyck head's attention on the segment start falls at the later visit",
          "0.60 at visit 1, 0.02 at visit 2 (1.6B, S = 85%, 4 demonstrations)",
          "share of mass", "last visit", "first visit", -1, _dyck("bos"), (0.02, 0.02), (0.60, 0.60)),
    Claim("dyck-answers", "6.4", "The Dyck head's attention on the demonstrations' answers rises at the later visit",
          "0.24 at visit 1, 0.85 at visit 2 (1.6B, S = 85%, 4 demonstrations)",
          "share of mass", "last visit", "first visit", 1, _dyck("answers"), (0.85, 0.85), (0.24, 0.24)),
    Claim("sink-visits", "6.4, D", "Attention on the segment start is lower at the later visit",
          "lower throughout the repeated block, at all four scales",
          "share of mass", "last visit", "first visit", -1, _visits("sink_mass", "head")),
    Claim("sink-baseline", "6.4, D", "The Baseline's attention on the segment start grows with depth",
          "rises toward later layers",
          "share of mass", "later half of its layers", "earlier half", 1, _baseline_sink),
)
# fmt: on

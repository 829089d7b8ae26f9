"""Do two visits attend to the same tokens? With the control of another head (SMELT 6.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.statistic import Geometry, Statistic, TokenValues

if TYPE_CHECKING:
    from visitlens.hooks.capture.step_values import StepValues
    from visitlens.kernels.attention.results import OverlapStatistics

_MEANINGS = {
    "top1_match": (
        "Same most-attended token",
        "share of queries",
        "1 where argmax P agrees. Queries that see one key are left out.",
    ),
    "top8_overlap": (
        "Shared top-8 attended tokens",
        "share of 8",
        "|top8 ∩ top8| / 8. Queries that see at most 8 keys are left out.",
    ),
    "mass_overlap": (
        "Shared attention mass",
        "share of mass",
        "sum over keys of min(P, P'). Queries that see one key are left out.",
    ),
}
_CONTROL = " Control: head h against head (h + n_h // 2) mod n_h of the same layer and visit."


def _measures() -> tuple[Measure, ...]:
    across = [
        Measure(
            name,
            title + " across two visits",
            ("pair", "head"),
            unit,
            "Per query and head, between two visits of one layer: " + text,
            "6.3, html Figure 26",
        )
        for name, (title, unit, text) in _MEANINGS.items()
    ]
    control = [
        Measure(
            f"{name}_control",
            title + " of another head",
            ("step", "head"),
            unit,
            text + _CONTROL,
            "6.3, html Figure 26, grey",
        )
        for name, (title, unit, text) in _MEANINGS.items()
    ]
    return (*across, *control)


class AttendedTokens(Statistic):
    measures = _measures()
    sites = frozenset({"Q", "K"})
    looped_only = True
    stored = frozenset(_MEANINGS)

    def per_token(self, values: StepValues, geometry: Geometry) -> dict[str, TokenValues]:
        plan, seen = geometry.plan, values.keys_seen
        earlier, later = ([getattr(pair, which).index for pair in plan.pairs] for which in ("earlier", "later"))
        seen_at_both = torch.minimum(seen[:, earlier], seen[:, later])
        across, control = [], {}
        for layer, overlaps in values.attention_overlaps.items():
            visits = [s.index for s in plan.steps if s.layer == layer]
            across += [overlaps.across[pair] for pair in sorted(overlaps.across)]
            if overlaps.control is not None:
                control.update(zip(visits, overlaps.control, strict=True))
        # An unlooped layer has no control; a model with one head has none at all.
        looped = torch.tensor([s in control for s in range(len(plan))]).view(1, -1, 1)
        result = {}
        for name, few in (("top1_match", 1), ("top8_overlap", 8), ("mass_overlap", 1)):
            pairs = torch.stack([_value(overlap, name) for overlap in across], dim=1)
            result[name] = TokenValues(pairs, (seen_at_both > few).unsqueeze(2))
            empty = torch.zeros_like(pairs[:, 0])
            steps = [_value(control[s], name) if s in control else empty for s in range(len(plan))]
            result[f"{name}_control"] = TokenValues(torch.stack(steps, dim=1), (seen > few).unsqueeze(2) & looped)
        return result


def _value(overlap: OverlapStatistics, name: str) -> Tensor:
    """[token, head] as a number between 0 and 1; NaN where a score was NaN."""
    if name == "mass_overlap":
        return overlap.mass_overlap
    value = overlap.top1_match.double() if name == "top1_match" else overlap.top8_shared.double() / 8
    return value.masked_fill(overlap.mass_overlap.isnan(), float("nan"))

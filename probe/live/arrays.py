"""The arrays of a LiveRun, from what was captured of its forward; and what the model lacks, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visitlens.hooks.capture.attention_rule import AttentionRule
from visitlens.hooks.capture.capture import Captured, capture
from visitlens.hooks.capture.step_values import StepValues
from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.core.sites import token_shape
from visitlens.probe.live.row_rule import RowRule


def arrays_of(model: InstrumentedModel, captured: Captured, batch: Tensor) -> dict[str, Any]:
    """The arrays of a LiveRun that are made of captured sites."""
    values = StepValues(captured, torch.zeros_like(batch))
    each, tokens = range(len(model.plan)), batch.shape[1]

    def there(site: str, step: int) -> Tensor:
        """NaN at tokens that halting or routing leaves out of the step; their queries and keys may still be at work."""
        value, mask = values.site(site, step), values.visited(step)
        if mask is None or site in ("Q", "K", "experts", "gates"):
            return value
        return value.masked_fill(~mask.to(value.device).view(-1, *[1] * (value.ndim - 1)), torch.nan)

    def stacked(site: str) -> Tensor:
        if site in captured.sites:
            return torch.stack([there(site, step) for step in each])
        shape = (len(each), tokens, *token_shape(site, model.config))  # of no experts: none
        return torch.full(shape, torch.nan if site not in ("experts", "gates") else 0.0, device=batch.device)

    def rms(x: Tensor) -> np.ndarray:
        return np.sqrt(np.square(as_array(x), dtype=np.float64).mean(-1)).astype(np.float32)

    attn, moe = stacked("attn_write"), stacked("moe_write")
    adds_up = "sum of writes" not in model.config.missing
    update = attn + moe if adds_up else stacked("resid_out") - stacked("resid")
    rows = values.attention_rows
    pairs = [
        values.attention_overlaps[p.layer].across[p.earlier.visit - 1, p.later.visit - 1].mass_overlap
        for p in model.plan.pairs
    ]
    return {
        "queries": as_array(stacked("Q")),
        "keys": as_array(stacked("K")),
        "rules": tuple(_rule(captured.rules.get(step)) for step in each),
        "maps": _maps(model, captured, batch),
        "experts": stacked("experts").long().cpu().numpy(),
        "gates": as_array(stacked("gates")),
        "resid_rms": rms(stacked("resid")),
        "update_rms": rms(update),
        "attn_write_rms": rms(attn),
        "moe_write_rms": rms(moe),
        "sink_mass": as_array(torch.stack([row.sink_mass for row in rows])),
        "attention_entropy": as_array(torch.stack([row.entropy for row in rows])),
        "mass_overlap": as_array(torch.stack(pairs))
        if pairs
        else np.empty((0, *rows[0].sink_mass.shape), dtype=np.float32),
        "mean_context": as_array(stacked("PV").nanmean(1)),
    }


def _maps(model: InstrumentedModel, captured: Captured, batch: Tensor) -> dict[int, np.ndarray]:
    """Step -> P [head, query, key], of those steps whose rows Q and K alone don't give."""
    steps = [step for step, rule in captured.rules.items() if rule.from_map or rule.among_visited]
    if not steps:
        return {}
    with capture(model, ("P",)) as patterns:
        model(batch, return_type="none")
    held = {step: patterns.held("P", step) for step in steps}
    return {step: as_array(p[0]) for step, p in held.items() if p is not None}


def lacking(model: InstrumentedModel, captured: Captured, no_lens: str) -> dict[str, dict[int, str]]:
    """Site -> layers without it, or assumption -> {-1: ...} for the whole model, each with its reason."""
    missing: Mapping[str, str] = model.config.missing
    sites = {
        site: {model.plan.steps[step].layer: why for step, why in steps.items()}
        for site, steps in captured.absent.items()
    }
    every = {name: {-1: why} for name, why in missing.items()}
    return sites | every | ({"lens": {-1: no_lens}} if no_lens else {})


def _rule(rule: AttentionRule | None) -> RowRule | None:
    """In NumPy; None for the native model's."""
    if rule is None:
        return None
    sinks = None if rule.sinks is None else as_array(rule.sinks)
    return RowRule(rule.scale, rule.window, rule.causal, sinks, rule.soft_cap)


def as_array(x: Tensor) -> np.ndarray:
    """float32 (float64 stays)."""
    return (x if x.dtype == torch.float64 else x.float()).cpu().numpy()

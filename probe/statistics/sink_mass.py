"""The attention sink and the spread of attention, by step and head (SMELT 6.4, D)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.statistic import Geometry, Statistic, TokenValues, stack

if TYPE_CHECKING:
    from visitlens.hooks.capture.step_values import StepValues


class SinkMass(Statistic):
    measures = (
        Measure(
            name="sink_mass",
            title="Attention on the segment start",
            axes=("step", "head"),
            unit="share of mass",
            definition="P[i, segment start], over queries that aren't themselves the segment start.",
            paper="6.4 and D, html Figures 28, 29",
        ),
        Measure(
            name="first4_mass",
            title="Attention on the segment's first four tokens",
            axes=("step", "head"),
            unit="share of mass",
            definition="Sum of P over the first 4 tokens of the segment, over queries beyond them.",
            paper="ours",
        ),
        Measure(
            name="attention_entropy",
            title="Attention entropy",
            axes=("step", "head"),
            unit="nats",
            definition="- sum over keys of P ln P, over queries that aren't the segment start.",
            paper="ours",
        ),
    )
    sites = frozenset({"Q", "K"})
    stored = frozenset({"sink_mass", "attention_entropy"})

    def per_token(self, values: StepValues, geometry: Geometry) -> dict[str, TokenValues]:
        rows = values.attention_rows
        positions = values.segments.positions()
        beyond_start = (positions > 0).view(-1, 1, 1)
        beyond_four = (positions > 3).view(-1, 1, 1)
        return {
            "sink_mass": TokenValues(stack([r.sink_mass for r in rows]), beyond_start),
            "first4_mass": TokenValues(stack([r.first4_mass for r in rows]), beyond_four),
            "attention_entropy": TokenValues(stack([r.entropy for r in rows]), beyond_start),
        }

"""What a model's learned attention sink takes, by step and head (gpt-oss and the like; ours)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from visitlens.probe.measures.measure import Measure
from visitlens.probe.measures.statistic import Geometry, Statistic, TokenValues, stack

if TYPE_CHECKING:
    from visitlens.hooks.capture.step_values import StepValues
    from visitlens.kernels.attention.results import RowStatistics


class LearnedSinkMass(Statistic):
    measures = (
        Measure(
            name="learned_sink_mass",
            title="Attention on the learned sink",
            axes=("step", "head"),
            unit="share of mass",
            definition="1 - sum over keys of P: what the model's learned sink slot takes of a row, over all queries.",
            paper="D: a learned-sink slot where a model has one; ours",
        ),
    )
    sites = frozenset({"Q", "K"})
    needs: ClassVar = {"learned_sink_mass": frozenset({"Q", "K", "learned sink"})}
    stored = frozenset({"learned_sink_mass"})

    def per_token(self, values: StepValues, geometry: Geometry) -> dict[str, TokenValues]:
        return {"learned_sink_mass": TokenValues(stack([_learned(rows) for rows in values.attention_rows]))}


def _learned(rows: RowStatistics) -> Tensor:
    """[token, head]; 0 at a step whose rows have no such slot."""
    return torch.zeros_like(rows.entropy) if rows.learned_sink_mass is None else rows.learned_sink_mass

"""The trainable miniatures of the paper's grid: scales x sparsity levels, every pair matched by `match`. No torch.

`mini` has the paper's shape (4 x 4, about the middle half of the layers twice, 8 experts a token, the Baseline's expert
counts); `nano` is its smoke test. Scales are named by the Baseline's active parameters at S = 0, levels by the paper's
labels: what S really is at these sizes, where routers weigh more, is in each cell's budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from visitlens.errors import InputError
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.probe.ladder.match import Steps, match

EXPERTS = {"0": 8, "85": 64, "95": 192, "97": 336}
"""Level -> experts of the Baseline."""
VOCABULARY = 4096


@dataclass(frozen=True)
class Scale:
    """A Baseline's sizes, the layers its looped partner runs twice, and how long a cell trains."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    expert_dim: int
    layers: int
    span: tuple[int, int]
    tokens: int


@dataclass(frozen=True)
class CellPlan:
    """One pair to train."""

    scale: Scale
    level: str
    baseline: LoopedMoEConfig
    looped: LoopedMoEConfig

    @property
    def name(self) -> str:
        return f"{self.scale.name}-S{self.level}"


@dataclass(frozen=True)
class GridPlan:
    """Scales and levels, the context length, the mean document of the FLOPs (weighted by tokens, in that context),
    contexts per update, peak rate, decay branches, and Dyck prompts per number of shots in the evaluation."""

    name: str
    scales: tuple[Scale, ...]
    levels: tuple[str, ...]
    context: int
    mean_document: int
    batch: int
    learning_rate: float
    horizons: int
    dyck_prompts: int

    @property
    def cells(self) -> tuple[CellPlan, ...]:
        """The column at S = 85 % first, then the row of the smallest scale, then the rest, small scales first."""
        first = "85" if "85" in self.levels else self.levels[0]
        order = [(s, first) for s in self.scales] + [(s, v) for s in self.scales for v in self.levels if v != first]
        return tuple(self.cell(scale, level) for scale, level in order)

    def cell(self, scale: Scale, level: str) -> CellPlan:
        baseline, looped = _pair(scale, level, self.context, self.mean_document)
        return CellPlan(scale, level, baseline, looped)


@cache
def _pair(scale: Scale, level: str, context: int, mean_document: int) -> tuple[LoopedMoEConfig, LoopedMoEConfig]:
    count = EXPERTS[level]
    baseline = LoopedMoEConfig(
        vocab_size=VOCABULARY,
        hidden_size=scale.hidden,
        num_layers=scale.layers,
        num_heads=scale.heads,
        num_kv_heads=scale.kv_heads,
        head_dim=scale.head_dim,
        num_experts=count,
        expert_dim=scale.expert_dim,
        context_length=context,
    )
    start, stop = scale.span
    # Float32 rows of 16 bytes are multiples of 4; the paper's looped models hold 1.5 times the Baseline's experts.
    candidates = match(
        baseline,
        loop_start=start,
        loop_stop=stop,
        mean_document=mean_document,
        steps=Steps(hidden=4, head_dim=2, expert_dim=4),
        experts=range(count, 2 * count + 1, 1 if count == 8 else 2),
    )
    return baseline, candidates[0].config


MINI = GridPlan(
    "mini",
    (
        Scale("44K", 32, 4, 2, 12, 8, 4, (1, 3), tokens=1_200_000),
        Scale("136K", 44, 6, 3, 12, 12, 6, (1, 4), tokens=600_000),
        Scale("263K", 64, 6, 3, 12, 12, 8, (2, 6), tokens=450_000),
        Scale("1.1M", 104, 6, 3, 18, 40, 8, (2, 6), tokens=300_000),
    ),
    ("0", "85", "95", "97"),
    context=512,
    mean_document=280,
    batch=1,
    learning_rate=8e-3,
    horizons=3,
    dyck_prompts=100,
)
NANO = GridPlan(
    "nano",
    (
        Scale("24K", 16, 4, 2, 6, 12, 4, (1, 3), tokens=40_000),
        Scale("49K", 28, 4, 2, 12, 12, 4, (1, 3), tokens=40_000),
    ),
    ("0", "85"),
    context=384,
    mean_document=210,
    batch=1,
    learning_rate=1e-2,
    horizons=1,
    dyck_prompts=20,
)
PLANS = {plan.name: plan for plan in (MINI, NANO)}


def plan_named(name: str) -> GridPlan:
    """Raises InputError with the names there are."""
    if name not in PLANS:
        raise InputError(f"expected a grid among {', '.join(PLANS)}, got {name!r}")
    return PLANS[name]

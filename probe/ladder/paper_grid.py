"""The paper's 32 configurations: four scales x four sparsity levels x Baseline and looped. No torch.

`paper_grid.json` has the published numbers as printed and the geometry inferred from them; its notes say which is which.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.probe.ladder.budget import PAPER_DOCUMENT, Budget, Ratios, sparsity

FILE = Path(__file__).with_name("paper_grid.json")
SCALES = ("100M", "200M", "600M", "1.6B")
LEVELS = ("0%", "85%", "95%", "97%")
VOCABULARY = 50_304
"""Not published and in no budget: a model needs one to be built."""
PRINTED = ("active_params", "S_percent", "total_params", "flops_ratio", "kv_ratio")


@dataclass(frozen=True)
class PaperCell:
    """One published configuration; `arch` is `baseline` or `smelt`, `printed` the paper's strings by name (or None)."""

    arch: str
    scale: str
    level: str
    config: LoopedMoEConfig
    printed: dict[str, str | None]

    @property
    def budget(self) -> Budget:
        return Budget.of(self.config, PAPER_DOCUMENT)


@cache
def paper_grid() -> tuple[PaperCell, ...]:
    """Baselines first, then looped; within each by scale, then level."""
    cells = []
    for row in json.loads(FILE.read_text(encoding="utf-8"))["rows"]:
        arch, scale, level, printed = (row.pop(name) for name in ("arch", "scale", "level", "printed"))
        config = LoopedMoEConfig(vocab_size=VOCABULARY, context_length=4096, **row)
        cells.append(PaperCell(arch, scale, level, config, dict(zip(PRINTED, printed, strict=True))))
    return tuple(cells)


def paper_cell(arch: str, scale: str, level: str) -> PaperCell:
    """The cell of that name; KeyError where there's none."""
    return next(c for c in paper_grid() if (c.arch, c.scale, c.level) == (arch, scale, level))


def budget_row(cell: PaperCell) -> dict[str, Any]:
    """The cell's budgets as the paper's table has them, by the names of `PRINTED`, and a few more.

    `S_percent` takes the S = 0 row of the cell's own architecture as control, as the printed values do;
    `S_percent_baseline_control` takes the Baseline's, as the text of Eq. 1 says. Ratios are over the Baseline of the same
    scale and level (None for Baselines).
    """
    budget = cell.budget
    own, baseline = (paper_cell(arch, cell.scale, LEVELS[0]).budget for arch in (cell.arch, "baseline"))
    looped = cell.arch != "baseline"
    ratios = Ratios.of(budget, paper_cell("baseline", cell.scale, cell.level).budget) if looped else None
    return {
        "arch": cell.arch,
        "scale": cell.scale,
        "level": cell.level,
        "active_params": budget.active,
        "total_params": budget.total,
        "executed_params": budget.executed,
        "S_percent": 100 * sparsity(budget, own),
        "S_percent_baseline_control": 100 * sparsity(budget, baseline),
        "flops_per_token": budget.flops_per_token,
        "kv_bytes_per_token": budget.kv_bytes_per_token(),
        "flops_ratio": None if ratios is None else ratios.flops,
        "total_ratio": None if ratios is None else ratios.total,
        "kv_ratio": None if ratios is None else ratios.kv,
        "printed": cell.printed,
    }


def prints_as(value: float, printed: str) -> bool:
    """Whether a value rounds to what the paper prints: `0.71B`, `86.0%`, `1.024`; a cut-off `4.` fixes the integer part.

    A value half a printed unit away counts, whichever way it would be rounded.
    """
    number = printed.rstrip("B%")
    scaled = value / 1e9 if printed.endswith("B") or number.endswith(".") else value
    if number.endswith("."):
        return int(scaled) == int(number[:-1])
    unit = 10.0 ** -len(number.partition(".")[2])
    return abs(scaled - float(number)) <= unit / 2 + 1e-9

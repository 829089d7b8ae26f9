"""What SMELT prints of its scaling law (arXiv 2609.01343 v3, Sections 3 to 5), its runs' design, and runs made up from both. Torch-free.

The paper prints coefficients, not the losses that they were fitted to: `synthetic_runs` puts the printed surfaces, with noise if wanted,
at the grid's own FLOPs per token, sparsity and horizons.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np

from visitlens.errors import InputError
from visitlens.probe.ladder.paper_grid import LEVELS, budget_row, paper_grid
from visitlens.probe.model.bundled import ASSETS
from visitlens.probe.scaling.frontier import Level
from visitlens.probe.scaling.law import Window
from visitlens.probe.scaling.surface import COEFFICIENTS, Surface
from visitlens.probe.scaling.table import RunTable, table_of

FILE = ASSETS / "paper" / "printed.json"
TARGET, REFERENCE = "SMELT", "Baseline"
SPARSE = LEVELS[1:]
"""The levels that the paper fits."""


@cache
def printed() -> dict[str, Any]:
    """The printed numbers, each group with the section it stands in.

    Raises:
        InputError: the file is missing (a partial checkout).
    """
    try:
        return json.loads(FILE.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{FILE} is missing: this copy of visitlens is incomplete; clone the repository again"
        ) from error


def paper_surfaces() -> dict[str, Surface]:
    """The two printed surfaces by architecture, the reference first."""
    return {row["arch"]: Surface(*(row[name] for name in COEFFICIENTS)) for row in printed()["coefficients"]["rows"]}


def paper_levels() -> tuple[Level, ...]:
    return tuple(Level(row["name"], row["sparsity"]) for row in printed()["levels"])


def paper_windows() -> dict[str, Window]:
    """What the paper's sparse runs span, from the grid's FLOPs per token and the horizons."""
    ends = synthetic_runs()
    return {arch: Window.of(ends.where(ends["arch"] == arch)) for arch in ends.archs}


def synthetic_runs(
    noise: float | dict[str, float] = 0.0,
    seed: int = 0,
    decimals: int | None = None,
    surfaces: dict[str, Surface] | None = None,
) -> RunTable:
    """72 endpoints an architecture: the 12 sparse cells at six horizons, with losses of the printed surfaces.

    Args:
        noise: standard deviation of independent errors in nats, one for all or by architecture.
        decimals: losses are rounded to so many.
        surfaces: others than the printed ones.
    """
    rng, rows = np.random.default_rng(seed), []
    laws = surfaces or paper_surfaces()
    for cell in paper_grid():
        if cell.level not in SPARSE:
            continue
        arch = REFERENCE if cell.arch == "baseline" else TARGET
        budget = budget_row(cell)
        place = {"F": budget["flops_per_token"], "S": budget["S_percent"] / 100}
        for tokens in printed()["horizons"]["tokens"]:
            spread = noise[arch] if isinstance(noise, dict) else noise
            loss = float(laws[arch].loss(place["F"], place["S"], tokens)) + spread * rng.standard_normal()
            loss = loss if decimals is None else round(loss, decimals)
            rows.append({"arch": arch, "scale": cell.scale, "level": cell.level, **place, "D": tokens, "loss": loss})
    return table_of(rows, "runs made up from the printed surfaces")

"""A grid of matched pairs, scale x sparsity level, as a folder with `grid.json`: of checkpoints or of recordings. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visitlens.errors import InputError

FORMAT = "visitlens-grid"
SIDES = ("looped", "baseline")


@dataclass(frozen=True)
class GridCell:
    """One pair: where its looped model and its Baseline lie (checkpoints or recordings); None = not there."""

    scale: str
    level: str
    looped: Path | None = None
    baseline: Path | None = None

    @property
    def name(self) -> str:
        """Short and fit for a folder: `100M-S85`."""
        return f"{self.scale}-S{self.level}"


@dataclass(frozen=True)
class Grid:
    """Scales (small to large) and sparsity levels (in percent, low to high) with the cells that exist."""

    name: str
    scales: tuple[str, ...]
    levels: tuple[str, ...]
    cells: tuple[GridCell, ...]

    def __post_init__(self) -> None:
        for cell in self.cells:
            if cell.scale not in self.scales or cell.level not in self.levels:
                raise InputError(f"grid {self.name}: cell {cell.name} lies outside {self.scales} x {self.levels}")
        names = [cell.name for cell in self.cells]
        if len(set(names)) < len(names):
            raise InputError(f"grid {self.name}: a cell is listed twice among {', '.join(names)}")

    def cell(self, scale: str, level: str) -> GridCell:
        """The cell, empty where the grid has none."""
        found = [cell for cell in self.cells if (cell.scale, cell.level) == (scale, level)]
        return found[0] if found else GridCell(scale, level)

    def missing(self) -> tuple[GridCell, ...]:
        """Cells without a looped model, in reading order."""
        cells = (self.cell(scale, level) for level in self.levels for scale in self.scales)
        return tuple(cell for cell in cells if cell.looped is None)

    def write(self, folder: Path) -> Path:
        """Writes `grid.json`, with paths relative to the folder, in one step."""

        def relative(path: Path | None) -> str | None:
            return None if path is None else Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()

        data = {
            "format": FORMAT,
            "name": self.name,
            "scales": self.scales,
            "levels": self.levels,
            "cells": [
                {"scale": c.scale, "level": c.level, **{side: relative(getattr(c, side)) for side in SIDES}}
                for c in self.cells
            ],
        }
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / "grid.json.tmp"
        partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        return partial.replace(folder / "grid.json")

    @classmethod
    def read(cls, folder: Path) -> Grid:
        """Raises InputError where there is no readable `grid.json`; a path that doesn't exist becomes None."""
        file = folder / "grid.json" if folder.is_dir() else folder
        try:
            data: Any = json.loads(file.read_text(encoding="utf-8"))
            if data.get("format") != FORMAT:
                raise ValueError(f"format is {data.get('format')!r}")
            cells = [
                GridCell(c["scale"], c["level"], *(_existing(file.parent, c.get(side)) for side in SIDES))
                for c in data["cells"]
            ]
            return cls(data["name"], tuple(data["scales"]), tuple(data["levels"]), tuple(cells))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"expected {file} to be a grid (format {FORMAT!r}); {error}") from error


def of_pair(looped: Path | None, baseline: Path | None, *, scale: str = "pair", level: str = "0") -> Grid:
    """A grid of one cell."""
    return Grid("pair", (scale,), (level,), (GridCell(scale, level, looped, baseline),))


def selected(grid: Grid, scales: Iterable[str] = (), levels: Iterable[str] = ()) -> Grid:
    """The row, column or cells named; all where none is named. A level may be written as in a cell's name, S85.

    Raises:
        InputError: a scale or level that the grid doesn't have.
    """
    wanted_scales, wanted_levels = tuple(scales) or grid.scales, tuple(levels) or grid.levels
    wanted_levels = tuple(
        v[1:] if v not in grid.levels and v[:1] == "S" and v[1:] in grid.levels else v for v in wanted_levels
    )
    for wanted, have in ((wanted_scales, grid.scales), (wanted_levels, grid.levels)):
        unknown = [name for name in wanted if name not in have]
        if unknown:
            raise InputError(f"grid {grid.name} has no {', '.join(unknown)}; expected some of {', '.join(have)}")
    cells = tuple(c for c in grid.cells if c.scale in wanted_scales and c.level in wanted_levels)
    return Grid(
        grid.name,
        tuple(s for s in grid.scales if s in wanted_scales),
        tuple(v for v in grid.levels if v in wanted_levels),
        cells,
    )


def _existing(folder: Path, path: str | None) -> Path | None:
    if path is None:
        return None
    return folder / path if (folder / path).exists() else None

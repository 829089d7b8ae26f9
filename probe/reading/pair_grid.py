"""PairGrid: pairs of recordings by scale and sparsity level, for the figures that draw a row, a column or all of them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from visitlens.errors import InputError, VisitlensError
from visitlens.hooks.recording.store.object_store import is_url
from visitlens.probe.reading.grid import Grid, GridCell, selected
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.recorded_run import RecordedRun, open_recording

ROW_LEVEL = "85"
"""The paper's level wherever it draws one level only."""


@dataclass(frozen=True)
class Cell:
    """One place of the grid; without a pair, `missing` says why. `name` is short and fit for a file, `title` for a reader."""

    scale: str
    level: str
    pair: Pair | None
    missing: str = ""

    @property
    def name(self) -> str:
        return GridCell(self.scale, self.level).name

    @property
    def title(self) -> str:
        return f"{self.scale}, S = {self.level}%"


@dataclass(frozen=True)
class PairGrid:
    """Scales from small to large, levels (percent) from dense to sparse, and the pairs that exist.

    Raises:
        InputError: no cell has a looped recording.
    """

    name: str
    scales: tuple[str, ...]
    levels: tuple[str, ...]
    pairs: Mapping[tuple[str, str], Pair]
    reasons: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not any(pair.looped is not None for pair in self.pairs.values()):
            told = "; ".join(f"{GridCell(*at).name}: {why}" for at, why in self.reasons.items())
            raise InputError(
                f"grid {self.name}: no cell has a looped model's recording" + (f" ({told})" if told else "")
            )

    @classmethod
    def open(cls, grid: Grid, failures: Mapping[GridCell, str] | None = None) -> PairGrid:
        """The recordings of a grid's cells; one that can't be read, or failed before, is missing, with the reason."""
        pairs, reasons = {}, {(cell.scale, cell.level): why for cell, why in (failures or {}).items()}
        for cell in grid.cells:
            if cell.looped is None:
                continue
            try:
                baseline = open_recording(cell.baseline) if cell.baseline else None
                pairs[cell.scale, cell.level] = Pair(open_recording(cell.looped), baseline)
            except VisitlensError as error:
                reasons[cell.scale, cell.level] = str(error)
        return cls(grid.name, grid.scales, grid.levels, pairs, reasons)

    def cell(self, scale: str, level: str) -> Cell:
        at = (scale, level)
        pair = self.pairs.get(at)
        if pair is None or pair.looped is None:
            return Cell(scale, level, None, self.reasons.get(at, "no recording"))
        return Cell(scale, level, pair)

    def every_cell(self) -> list[Cell]:
        """By level, then scale."""
        return [self.cell(scale, level) for level in self.levels for scale in self.scales]

    @property
    def row_level(self) -> str:
        """The level of figures over scales: 85% where there is one, else the one with most pairs, the denser first."""
        found = {level: sum(self.cell(s, level).pair is not None for s in self.scales) for level in self.levels}
        return ROW_LEVEL if found.get(ROW_LEVEL) else max(self.levels, key=lambda level: found[level])

    @property
    def column_scale(self) -> str:
        """The scale of figures over levels: the one with most pairs, the larger first."""
        found = {scale: sum(self.cell(scale, v).pair is not None for v in self.levels) for scale in self.scales}
        return max(reversed(self.scales), key=lambda scale: found[scale])

    def row(self) -> list[Cell]:
        return [self.cell(scale, self.row_level) for scale in self.scales]

    def column(self) -> list[Cell]:
        return [self.cell(self.column_scale, level) for level in self.levels]

    def focus(self) -> Cell:
        """The cell of figures of one pair: the largest scale that there is at the row's level."""
        return next(cell for cell in reversed(self.row()) if cell.pair is not None)

    def warnings(self) -> list[str]:
        """What a reader must know, by cell."""
        gone = [f"{cell.title} is missing: {cell.missing}." for cell in self.every_cell() if cell.pair is None]
        told = [f"{c.title}: {w}" for c in self.every_cell() if c.pair is not None for w in c.pair.warnings()]
        return [*gone, *told]


def pair_grid(
    recordings: Iterable[Path | str],
    *,
    scales: Iterable[str] = (),
    levels: Iterable[str] = (),
    name: str = "recordings",
) -> Pair | PairGrid:
    """What some paths are: a folder with `grid.json`, a looped recording and its Baseline in any order, or several looped
    recordings, each with the Baseline (as many as there are, in order), as scales of one row. `scales` and `levels` choose
    among those of a grid.

    Raises:
        InputError: nothing, Baselines that can't be told apart, or a scale or level that isn't there.
    """
    places = list(recordings)
    paths = [Path(place) for place in places if not is_url(place)]
    if not places:
        raise InputError("name recordings, or a folder with grid.json")
    grids = [path for path in paths if (path / "grid.json").is_file() or path.name == "grid.json"]
    if grids:
        if len(places) > 1:
            raise InputError(f"expected one grid alone, got {', '.join(map(str, places))}")
        return PairGrid.open(selected(Grid.read(grids[0]), scales, levels))
    if tuple(scales) or tuple(levels):
        raise InputError("scales and levels choose among those of a grid: name a folder with grid.json")
    runs = [open_recording(place) for place in places]
    looped, baselines = [r for r in runs if r.looped], [r for r in runs if not r.looped]
    if len(looped) <= 1 and len(baselines) <= 1:
        return Pair(looped[0] if looped else None, baselines[0] if baselines else None)
    if baselines and len(baselines) != len(looped):
        raise InputError(
            f"expected a Baseline for each of {len(looped)} looped recordings, or none, got {len(baselines)}; or name a folder with grid.json"
        )
    scales = _names(looped)
    matched = dict(zip(scales, zip(looped, baselines or [None] * len(looped), strict=True), strict=True))
    return PairGrid(name, tuple(scales), ("0",), {(scale, "0"): Pair(*runs) for scale, runs in matched.items()})


def _names(runs: list[RecordedRun]) -> list[str]:
    """Each run's name, numbered where two are alike."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else f"{name}-{i}" for i, name in enumerate(names, 1)]

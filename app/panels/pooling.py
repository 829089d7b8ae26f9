"""Maps that are larger than a browser draws at ease, pooled by blocks, some rows at a time. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_TILE = 512  # rows of a map that are held at once
MOST_CELLS = 512
"""Rows or columns that a browser draws at ease; larger maps are pooled."""


@dataclass(frozen=True)
class Pooled:
    """`values` [row, column] of blocks of `factor` cells; `starts` are the first row and column of each block."""

    values: np.ndarray
    factor: int
    row_starts: np.ndarray
    column_starts: np.ndarray


def pool(
    values: np.ndarray,
    how: str = "max",
    most: int = MOST_CELLS,
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
) -> Pooled:
    """A map, or the part of it that is zoomed to, in at most `most` x `most` blocks; the last row and column are kept.

    Args:
        how: "max" keeps single bright cells, "mean" keeps the mass.
        rows, columns: from and up to, in cells of the whole map; out of range is cut.
    """
    region = Region.of(values.shape, most, rows, columns)
    part = values[slice(*region.rows), slice(*region.columns)]
    return region.pooled(_blocks(part, region.factor, how))


def pooled_difference(
    earlier: np.ndarray,
    later: np.ndarray,
    most: int = MOST_CELLS,
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
    how: str = "max",
) -> tuple[Pooled, Pooled, Pooled]:
    """Both maps pooled, and their difference: of each block its value that is largest in size, with its sign; or the mean."""
    region = Region.of(earlier.shape, most, rows, columns)
    return pooled_by_tiles(lambda low, high: (earlier[low:high], later[low:high]), region, how)


def pooled_by_tiles(
    maps: Callable[[int, int], tuple[np.ndarray, np.ndarray]], region: Region, how: str = "max"
) -> tuple[Pooled, Pooled, Pooled]:
    """As `pooled_difference`, from some rows of both maps at a time: no whole map is held.

    Args:
        maps: rows from and up to, whole, at either visit.
    """
    step = max(_TILE // region.factor, 1) * region.factor
    parts: list[tuple[np.ndarray, ...]] = []
    for low in range(*region.rows, step):
        tile = maps(low, min(low + step, region.rows[1]))
        earlier, later = (rows[:, slice(*region.columns)].astype(np.float32, copy=False) for rows in tile)
        difference = later - earlier
        kept = _blocks(difference, region.factor, how)
        if how == "max" and region.factor > 1:
            lowest = -_blocks(-difference, region.factor, how)
            kept = np.where(kept >= -lowest, kept, lowest)
        parts.append((_blocks(earlier, region.factor, how), _blocks(later, region.factor, how), kept))
    first, second, change = (region.pooled(np.concatenate(blocks)) for blocks in zip(*parts, strict=True))
    return first, second, change


@dataclass(frozen=True)
class Region:
    """The part of a map that is shown, `rows` and `columns` from and up to, and the edge of the blocks it is pooled by."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    factor: int

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        most: int = MOST_CELLS,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Region:
        down, across = _within(rows, shape[0]), _within(columns, shape[1])
        return cls(down, across, max(1, -(-max(down[1] - down[0], across[1] - across[0]) // most)))

    def pooled(self, values: np.ndarray) -> Pooled:
        return Pooled(values, self.factor, np.arange(*self.rows, self.factor), np.arange(*self.columns, self.factor))


def _blocks(values: np.ndarray, factor: int, how: str) -> np.ndarray:
    """[row, column] of square blocks; those at the far edges may be smaller."""
    if factor == 1:
        return values
    known = values if how == "max" else np.nan_to_num(values.astype(np.float32, copy=False))
    reduced = _along(_along(known, factor, how), factor, how)
    if how == "max":
        return reduced
    sizes = [np.minimum(factor, n - np.arange(0, n, factor)) for n in values.shape]
    return reduced / np.outer(*sizes)


def _along(values: np.ndarray, factor: int, how: str) -> np.ndarray:
    """The first axis reduced by blocks, and the axes swapped: twice reduces both."""
    reduce = np.fmax.reduce if how == "max" else np.add.reduce
    whole = len(values) // factor * factor
    found = reduce(values[:whole].reshape(-1, factor, values.shape[1]), axis=1)
    if whole < len(values):
        found = np.concatenate([found, reduce(values[whole:], axis=0, keepdims=True)])
    return np.ascontiguousarray(found.T)


def _within(part: tuple[int, int] | None, size: int) -> tuple[int, int]:
    low, high = part or (0, size)
    low = min(max(low, 0), size - 1)
    return low, min(max(high, low + 1), size)

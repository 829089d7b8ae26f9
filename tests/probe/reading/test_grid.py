"""A grid of pairs: its file, its missing cells, rows and columns, and what a bad file is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from visitlens.errors import InputError
from visitlens.probe.reading.grid import Grid, GridCell, of_pair, selected


@pytest.fixture
def grid(tmp_path: Path) -> Grid:
    """Two scales by two levels; `L` at 85 % is missing, `S` at 85 % has no Baseline."""
    for name in ("S-S0/looped", "S-S0/baseline", "L-S0/looped", "L-S0/baseline", "S-S85/looped"):
        (tmp_path / name).mkdir(parents=True)
    cells = (
        GridCell("S", "0", tmp_path / "S-S0/looped", tmp_path / "S-S0/baseline"),
        GridCell("L", "0", tmp_path / "L-S0/looped", tmp_path / "L-S0/baseline"),
        GridCell("S", "85", tmp_path / "S-S85/looped"),
    )
    return Grid("small", ("S", "L"), ("0", "85"), cells)


def test_a_written_grid_reads_back_and_moves_with_its_folder(grid: Grid, tmp_path: Path) -> None:
    file = grid.write(tmp_path)
    assert file == tmp_path / "grid.json" and not list(tmp_path.glob("*.tmp"))
    assert Grid.read(tmp_path) == Grid.read(file) == grid
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert Grid.read(moved).cell("S", "0").baseline == moved / "S-S0/baseline"


def test_a_grid_may_lie_apart_from_its_models(grid: Grid, tmp_path: Path) -> None:
    grid.write(tmp_path / "elsewhere" / "deep")
    looped = Grid.read(tmp_path / "elsewhere" / "deep").cell("L", "0").looped
    assert looped is not None and looped.resolve() == tmp_path / "L-S0/looped"


def test_missing_cells_are_named_and_a_vanished_model_is_missing(grid: Grid, tmp_path: Path) -> None:
    assert [cell.name for cell in grid.missing()] == ["L-S85"]
    grid.write(tmp_path)
    (tmp_path / "L-S0/looped").rmdir()
    assert [cell.name for cell in Grid.read(tmp_path).missing()] == ["L-S0", "L-S85"]


def test_rows_and_columns(grid: Grid) -> None:
    assert [c.name for c in selected(grid, levels=["85"]).cells] == ["S-S85"]
    assert [c.name for c in selected(grid, scales=["S"]).cells] == ["S-S0", "S-S85"]
    assert selected(grid, levels=["S85"]) == selected(grid, levels=["85"])
    assert selected(grid) == grid
    with pytest.raises(InputError, match="no XL; expected some of S, L"):
        selected(grid, scales=["XL"])


def test_a_pair_is_a_grid_of_one_cell(tmp_path: Path) -> None:
    grid = of_pair(tmp_path, None)
    assert grid.cell("pair", "0").looped == tmp_path and not grid.missing()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "grid.json"),
        ("[]", "grid.json"),
        ('{"format": "other"}', "format is 'other'"),
        ('{"format": "visitlens-grid", "name": "x", "scales": ["S"], "levels": ["0"]}', "cells"),
        (
            json.dumps(
                {
                    "format": "visitlens-grid",
                    "name": "x",
                    "scales": ["S"],
                    "levels": ["0"],
                    "cells": [{"scale": "L", "level": "0"}],
                }
            ),
            "lies outside",
        ),
        (
            json.dumps(
                {
                    "format": "visitlens-grid",
                    "name": "x",
                    "scales": ["S"],
                    "levels": ["0"],
                    "cells": [{"scale": "S", "level": "0"}] * 2,
                }
            ),
            "listed twice",
        ),
    ],
)
def test_a_file_that_is_no_grid_gets_one_clear_error(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "grid.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said):
        Grid.read(tmp_path)


def test_a_folder_without_a_grid_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected .*grid\.json to be a grid"):
        Grid.read(tmp_path)

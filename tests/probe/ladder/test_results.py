"""Tables of trained grids: from written reports to the page in docs/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from visitlens.errors import InputError
from visitlens.hooks.models.checkpoint import load_config, load_model
from visitlens.probe.ladder.budget import PAPER_TOLERANCE, Budget, Ratios
from visitlens.probe.ladder.mini_grid import MINI, NANO
from visitlens.probe.ladder.results import results_tables, trained_cells
from visitlens.probe.ladder.tables import short, table
from visitlens.probe.model.bundled import LADDER
from visitlens.probe.reading.grid import Grid, GridCell

DOCS = Path(__file__).resolve().parents[3] / "docs" / "ladder.md"


def trained(out: Path, seed: int, losses: dict[str, dict[str, float]]) -> Path:
    """A nano grid of one cell, with reports but no weights."""
    cell = NANO.cells[0]
    for side, by_category in losses.items():
        folder = out / cell.name / side / "tokens-1000"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(getattr(cell, side).to_dict()))
        score = {"exact_match": 0.25, "closer_accuracy": 0.5}
        report = {
            "recipe": {"seed": seed},
            "tokens": 1024,
            "validation_loss": by_category,
            "loss_by_length": {"<64": {"loss": 1.5}},
            "dyck": {"0": score},
        }
        (folder / "training.json").write_text(json.dumps(report))
    paths = {side: out / cell.name / side / "tokens-1000" for side in losses}
    Grid(
        "nano", tuple(s.name for s in NANO.scales), NANO.levels, (GridCell(cell.scale.name, cell.level, **paths),)
    ).write(out)
    return out


def first_row(tables: str) -> dict[str, str]:
    header, _, row = (line.split("|")[1:-1] for line in tables.splitlines()[:3])
    return {h.strip(): r.strip() for h, r in zip(header, row, strict=True)}


def test_a_table_reads_well_as_markdown() -> None:
    assert table(("a", "bb"), [("long", 1), ("x", None)]).splitlines() == [
        "| a    | bb |",
        "|------|---:|",
        "| long |  1 |",
        "| x    |  - |",
    ]
    assert [short(x) for x in (3.891e9, 1_330_000, 999, 44_320, 1e13)] == ["3.891B", "1.33M", "999", "44.32K", "10T"]


def test_losses_are_means_over_categories_and_the_difference_is_looped_minus_baseline(tmp_path: Path) -> None:
    grid = trained(tmp_path, 0, {"baseline": {"code": 4.0, "web": 5.0}, "looped": {"code": 3.9, "web": 5.0}})
    out = results_tables([grid])
    row = first_row(out)
    assert (row["Baseline"], row["looped"], row["difference"], row["tokens"]) == ("4.500", "4.450", "-0.050", "1,024")
    cell = NANO.cells[0]
    ratios = Ratios.of(*(Budget.of(c, NANO.mean_document) for c in (cell.looped, cell.baseline)))
    assert [row["FLOPs x"], row["total x"], row["KV x"]] == [f"{r:.3f}" for r in ratios]
    assert "25 / 50" in out and "1.500" in out


def test_several_seeds_give_a_mean_and_its_range(tmp_path: Path) -> None:
    grids = [
        trained(tmp_path / str(seed), seed, {"baseline": {"web": 5.0}, "looped": {"web": 5.0 + d}})
        for seed, d in enumerate((0.1, -0.3, 0.05))
    ]
    assert first_row(results_tables(grids))["difference"] == "-0.050 (-0.300 to +0.100, 3 seeds)"
    with pytest.raises(InputError, match=r"seed 0 of cell .* is in two of the folders"):
        results_tables([grids[0], grids[0]])


def test_a_grid_of_which_nothing_is_finished_says_so(tmp_path: Path) -> None:
    Grid("nano", ("a",), ("0",), ()).write(tmp_path)
    with pytest.raises(InputError, match="no cell has both its models finished yet"):
        results_tables([tmp_path])


# What ships


def test_the_bundled_ladder_is_a_row_and_a_column_of_matched_pairs() -> None:
    name, cells = trained_cells([LADDER])
    row = {f"{MINI.scales[0].name}-S{level}" for level in MINI.levels}
    column = {f"{scale.name}-S85" for scale in MINI.scales}
    assert name == "mini" and {c.name for c in cells} == row | column
    for cell in Grid.read(LADDER).cells:
        looped, baseline = (load_config(folder) for folder in (cell.looped, cell.baseline) if folder is not None)
        ratios = Ratios.of(*(Budget.of(c, MINI.mean_document) for c in (looped, baseline)))
        assert all(abs(r - 1) <= allowed for r, allowed in zip(ratios, PAPER_TOLERANCE, strict=True)), cell.name
    assert sum(f.stat().st_size for f in LADDER.rglob("model.safetensors")) <= 20e6
    assert load_model(LADDER / "44K-S85" / "looped").config.visits == 2


def test_the_page_has_the_bundled_ladders_tables() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for part in results_tables([LADDER]).split("\n\n"):
        assert part in text, "paste the output of: visitlens ladder table assets/ladder"

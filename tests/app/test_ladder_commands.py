"""`visitlens budget` and `visitlens ladder` as a person uses them: from a text file to a table of trained pairs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from visitlens.app.cli import main
from visitlens.hooks.models.checkpoint import load_model, load_tokenizer
from visitlens.probe.ladder.paper_grid import prints_as
from visitlens.probe.model.bundled import PAIR
from visitlens.probe.reading.grid import Grid

# budget


def test_the_papers_grid_as_json(run: Callable) -> None:
    code, out, _ = run("budget", "--grid", "paper", "--json")
    rows = json.loads(out)
    assert code == 0 and len(rows) == 32
    names = {"arch", "scale", "level", "active_params", "total_params", "S_percent", "flops_ratio", "kv_ratio"}
    assert all(names <= set(row) for row in rows)
    assert {(r["arch"], r["scale"], r["level"]) for r in rows} >= {("smelt", "1.6B", "97%"), ("baseline", "100M", "0%")}
    checked = [
        prints_as(row[name], printed)
        for row in rows
        for name, printed in row["printed"].items()
        if printed not in (None, "4.")
    ]
    assert (sum(checked), len(checked)) == (125, 127)


@pytest.mark.parametrize("grid", ["paper", "mini", "nano"])
def test_a_grid_as_a_table(grid: str, run: Callable) -> None:
    code, out, _ = run("budget", "--grid", grid)
    lines = out.splitlines()
    assert code == 0 and len(lines) == {"paper": 34, "mini": 34, "nano": 10}[grid]
    assert len({line.count("|") for line in lines}) == 1 and len({len(line) for line in lines}) == 1


def test_a_checkpoint_against_its_baseline(run: Callable) -> None:
    code, out, _ = run("budget", PAIR["looped"], "--baseline", PAIR["baseline"], "--mean-document", 330, "--json")
    row = json.loads(out)
    assert code == 0
    assert row["total_params"] == row["attention"] + row["router"] + row["experts"] + row["norms"] == 6_709_208
    assert row["kv_ratio"] == 1 and row["flops_ratio"] == pytest.approx(1.014, abs=5e-4)
    code, out, _ = run("budget", PAIR["looped"] / "config.json")
    assert code == 0 and "6,709,208" in out and "FLOPs over" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a checkpoint"),
        (["somewhere", "--grid", "paper"], "give either a checkpoint"),
        (["nowhere"], "expected nowhere to be a checkpoint folder or a config.json"),
    ],
)
def test_what_budget_cannot_read_is_said(arguments: list, message: str, run: Callable) -> None:
    code, _, err = run("budget", *arguments)
    assert code == 1 and message in err


# match


def test_the_bundled_pair_is_found_again(run: Callable, tmp_path: Path) -> None:
    code, out, _ = run(
        *("ladder", "match", PAIR["baseline"], "--span", "2:6", "--experts", "96", "--steps", "4,2,4,2"),
        *("--mean-document", 350, "--write", tmp_path / "config.json"),
    )
    assert code == 0 and out.splitlines()[2].split("|")[1].strip() == "88"
    code, out, _ = run("budget", tmp_path / "config.json", "--json")
    assert code == 0 and json.loads(out)["total_params"] == 6_709_208


@pytest.mark.parametrize("options", [["--span", "2"], ["--span", "a:b"], ["--span", "2:6", "--steps", "8,8"]])
def test_numbers_that_are_none_are_refused(options: list, run: Callable) -> None:
    code, _, err = run("ladder", "match", PAIR["baseline"], *options)
    assert code == 1 and "whole numbers" in err


# From text to a table


@pytest.fixture(scope="session")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cell of the nano grid on the bundled sample, its two models at a time, by the command line, in two goes."""
    out = tmp_path_factory.mktemp("ladder") / "nano"
    arguments = ["ladder", "train", "--grid", "nano", "--out", str(out), "--cells", "24K-S85", "--tokens", "4000"]
    with pytest.MonkeyPatch.context() as patch:
        for workers in ("2", "1"):  # the second finds everything finished
            patch.setattr(sys, "argv", ["visitlens", *arguments, "--workers", workers])
            with pytest.raises(SystemExit) as exit_:
                main()
            assert not exit_.value.code
    return out


def test_a_trained_grid_is_a_grid_of_checkpoints(grid: Path) -> None:
    cells = Grid.read(grid).cells
    assert [c.name for c in cells] == ["24K-S85"]
    for side in ("looped", "baseline"):
        folder = getattr(cells[0], side)
        assert load_model(folder).config.num_layers == 4
        assert load_tokenizer(folder).get_vocab_size() == 4096
        assert json.loads((folder / "training.json").read_text())["tokens"] >= 4000


def test_its_table_has_budgets_losses_and_differences(grid: Path, run: Callable) -> None:
    code, out, _ = run("ladder", "table", grid)
    assert code == 0
    header, _, row = (line.split("|")[1:-1] for line in out.splitlines()[:3])
    values = dict(zip((h.strip() for h in header), (r.strip() for r in row), strict=True))
    assert values["cell"] == "24K-S85"
    assert float(values["difference"]) == pytest.approx(float(values["looped"]) - float(values["Baseline"]), abs=2e-3)
    for title in ("by category", "By length", "Dyck completion by shots"):
        assert title in out
    code, _, err = run("ladder", "table", grid, grid)
    assert code == 1 and "seed 0 of cell 24K-S85 is in two of the folders" in err


def test_the_whole_nano_grid_is_trained_and_reproduced(run: Callable, tmp_path: Path) -> None:
    """The 2 x 2 grid at a fraction of its tokens, on the text that ships: 8 models, recorded, ablated, drawn, reported."""
    nano, out = tmp_path / "nano", tmp_path / "out"
    code, _, err = run("ladder", "train", "--grid", "nano", "--tokens", 4000, "--out", nano, "--workers", 2)
    assert code == 0, err
    grid = Grid.read(nano)
    assert len(grid.cells) == 4 and not grid.missing()
    options = ("--max-tokens", 600, "--prompts", 5, "--formats", "json")
    code, _, err = run("reproduce", "--grid", nano, "--out", out, *options)
    assert code == 0, err
    findings = json.loads((out / "report" / "findings.json").read_text(encoding="utf-8"))["findings"]
    assert len(findings) == 5  # the grid's own, and each cell's
    drawn = {file.stem for file in (out / "report").glob("*.json")} - {"findings"}
    assert len(drawn) == 10 and all(c.looped and c.baseline for c in Grid.read(out).cells)


def test_an_exported_grid_holds_checkpoints_alone(grid: Path, run: Callable, tmp_path: Path) -> None:
    code, out, _ = run("ladder", "export", grid, "--out", tmp_path / "release")
    assert code == 0 and "1 pairs" in out
    files = {str(f.relative_to(tmp_path / "release")) for f in (tmp_path / "release").rglob("*") if f.is_file()}
    parts = ("config.json", "model.safetensors", "tokenizer.json", "training.json")
    assert files == {"grid.json"} | {f"24K-S85/{side}/{name}" for side in ("looped", "baseline") for name in parts}
    assert Grid.read(tmp_path / "release").cells[0].looped == tmp_path / "release" / "24K-S85" / "looped"
    code, _, err = run("ladder", "export", grid, "--out", tmp_path / "release")
    assert code == 1 and "is not empty" in err


def test_a_cell_that_is_not_there_is_refused(grid: Path, run: Callable) -> None:
    code, _, err = run("ladder", "train", "--grid", "nano", "--out", grid, "--cells", "24K-S85,99K")
    assert code == 1 and "grid nano has no 99K; its cells are" in err


def test_text_is_prepared_with_counts_of_what_was_skipped(run: Callable, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join([*(json.dumps({"body": f"text {i}"}) for i in range(60)), "{", ""]))
    arguments = (tmp_path / "a.jsonl", "--out", tmp_path / "corpus", "--field", "body", "--validation-share", 0.3)
    code, out, _ = run("ladder", "corpus", *arguments)
    assert code == 0 and json.loads(out)["skipped"] == {"no object with text": 1}
    code, _, err = run("ladder", "corpus", tmp_path / "a.jsonl", "--out", tmp_path / "other")
    assert code == 1 and "no document for train or validation" in err

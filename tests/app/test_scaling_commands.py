"""`visitlens scaling` as a person uses it: from a CSV of one's own to coefficients, gains and figures."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.run_tables import full_table, shots_rows

from visitlens.probe.model.bundled import LADDER
from visitlens.probe.scaling.paper import paper_surfaces, synthetic_runs
from visitlens.probe.scaling.table import table_of, to_csv


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    (folder / "runs.csv").write_text(to_csv(synthetic_runs(noise=0.004)))
    (folder / "full.csv").write_text(to_csv(full_table()))
    (folder / "shots.csv").write_text(to_csv(table_of(shots_rows({0: 0.01, 1: 0.02}), "shots", ("arch",))))
    return folder


def test_a_newcomers_20_runs_become_a_frontier_figure_in_one_command(run: Callable, tmp_path: Path) -> None:
    """Two architectures, ten runs each, at a student's scale: 1e15 to 1e17 FLOPs."""
    surface = paper_surfaces()["Baseline"]
    with (tmp_path / "mine.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arch", "scale", "level", "F", "S", "D", "loss"])
        for arch, better in (("baseline", 0.0), ("mine", 0.02)):
            for scale, flops, cells in (("S", 1e7, 4), ("M", 4e7, 3), ("L", 1.6e8, 3)):
                for i in range(cells):
                    level, S = (("half", 0.5), ("most", 0.9))[i % 2]
                    tokens = 1e8 * 3**i
                    loss = float(surface.loss(100 * flops, S, 100 * tokens)) * (1 - better)
                    writer.writerow([arch, scale, level, flops, S, tokens, loss])
    code, out, err = run("scaling", "frontier", tmp_path / "mine.csv", "--out", tmp_path / "out", "--draws", "20")
    assert code == 0, err
    assert "Compute that mine saves over baseline at the same loss" in out and "S most" in out
    drawn = json.loads((tmp_path / "out" / "frontier.json").read_text())
    gains = [entry for name, entry in drawn["series"].items() if name.startswith("gain")]
    assert gains and all(v > 0 for entry in gains for v in entry["values"])
    assert (tmp_path / "out" / "frontier.html").is_file()


def test_the_law_is_printed_and_given_as_json(run: Callable, tables: Path) -> None:
    code, out, _ = run("scaling", "law", tables / "runs.csv", "--residuals")
    assert code == 0 and "| Baseline " in out and "SMELT 1.6B 97% at 2.156e+11 tokens" in out
    found = json.loads(run("scaling", "law", tables / "runs.csv", "--json")[1])
    assert found["fits"]["SMELT"]["rmse"] == pytest.approx(0.004, rel=0.3)
    assert found["coefficients"]["labels"]["coefficient"] == ["E", "A", "K", "a", "b", "c"]


def test_gain_and_tpp_have_intervals_and_marks(run: Callable, tables: Path) -> None:
    code, out, _ = run("scaling", "gain", tables / "runs.csv", "--draws", "20", "--budgets", "1e21,1e22")
    assert code == 0 and "]*" in out and "20 draws of 12 cells" in out
    found = json.loads(run("scaling", "tpp", tables / "runs.csv", "--draws", "0", "--json", "--levels", "85%,97%")[1])
    assert found["tpp"]["SMELT"]["labels"]["level"] == ["85%", "97%"] and found["tpp"]["SMELT"]["low"][0] == [
        None,
        None,
    ]


def test_parts_of_the_text(run: Callable, tables: Path) -> None:
    code, out, _ = run("scaling", "subset", tables / "full.csv", "--by", "source")
    assert code == 0 and "s00" in out and "Q4" in out
    found = json.loads(run("scaling", "subset", tables / "full.csv", "--json", "--budget", "1e20")[1])
    assert found[0]["labels"]["part"] == ["Code", "Web", "Math"] and "1e+20 FLOPs" in found[0]["aggregation"]


def test_downstream_residuals_and_wins(run: Callable, tables: Path) -> None:
    code, out, _ = run(
        "scaling",
        "downstream",
        tables / "full.csv",
        "--tasks",
        "copa",
        "--draws",
        "10",
        "--above-chance",
        "0.1",
        "--centre",
    )
    assert code == 0 and "Mean residual of SMELT" in out and "outside Baseline's" in out
    found = json.loads(run("scaling", "downstream", tables / "full.csv", "--draws", "5", "--by", "level", "--json")[1])
    assert [row["task"] for row in found] == ["arc_easy", "copa", "answers"] and found[0]["wins"]["wins"] == 72


def test_shots_lengths_and_axes(run: Callable, tables: Path) -> None:
    assert "Gap:" in run("scaling", "shots", tables / "shots.csv")[1]
    code, out, _ = run("scaling", "shots", tables / "shots.csv", "--test", "arc_easy:1")
    assert code == 0 and "exact two-sided p = 0.00195" in out
    assert "more experts: 48 pairs" in run("scaling", "lengths", tables / "full.csv")[1]
    assert "Knowledge" in run("scaling", "radar", tables / "full.csv", "--scale", "1.6B", "--level", "97%")[1]


def test_figures_are_listed_and_written(run: Callable, tables: Path, tmp_path: Path) -> None:
    listed = run("scaling", "figures", "--list")[1]
    assert "frontier" in listed and "SMELT 5.3, Figure 20b" in listed
    code, out, _ = run(
        "scaling",
        "figures",
        tables / "full.csv",
        "--only",
        "radar,length-contrast",
        "--out",
        tmp_path,
        "--formats",
        "json,csv",
    )
    assert code == 0 and {Path(line).name for line in out.split()} == {
        "radar.json",
        "radar.csv",
        "length-contrast.json",
        "length-contrast.csv",
    }


def test_the_papers_numbers_and_a_table_to_start_from(run: Callable, tmp_path: Path) -> None:
    assert "TPP of SMELT, S 97%" in run("scaling", "paper")[1]
    assert json.loads(run("scaling", "paper", "--json")[1])["gamma"]["SMELT"] == 0.25
    assert run("scaling", "example", tmp_path / "runs.csv")[0] == 0
    assert run("scaling", "law", tmp_path / "runs.csv")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["law", LADDER], "D is fixed by scale"),
        (["law", "none.csv"], "can't be read as a table"),
        (["gain", "{runs}", "--budgets", "big"], "expected budgets in FLOPs"),
        (["gain", "{runs}", "--target", "smelt"], "no architecture 'smelt'; it has Baseline, SMELT"),
        (["law", "{runs}", "--levels", "12%"], "no level 12%"),
        (["subset", "{runs}"], "no column 'category'"),
        (["subset", "{runs}", "--by", "colour"], "--by category or --by source"),
        (["shots", "{runs}"], "no column task, k, score"),
        (["shots", "{shots}", "--test", "arc_easy"], "whole number of demonstrations"),
        (["downstream", "{full}", "--lower", "none"], "no task none"),
        (["figures"], "name a table"),
    ],
)
def test_a_mistake_is_one_clear_error(run: Callable, tables: Path, arguments: list, message: str) -> None:
    places = {name: str(tables / f"{name}.csv") for name in ("runs", "full", "shots")}
    code, _, err = run("scaling", *(str(a).format(**places) for a in arguments))
    assert code == 1 and message in err, err

"""Figures of a table of runs: what they draw, that a saved JSON draws the same, and what they say where they can't be drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.run_tables import full_rows, full_table, shots_rows

from visitlens.errors import InputError
from visitlens.probe.drawing.series import csv_rows
from visitlens.probe.drawing.theme import THEMES, find_theme
from visitlens.probe.scaling.figure import TableFigure, find, registered, write_table_figures
from visitlens.probe.scaling.figures.frontier import Frontier
from visitlens.probe.scaling.paper import synthetic_runs
from visitlens.probe.scaling.study import Study, paper_laws
from visitlens.probe.scaling.table import table_of

FIGURES = registered()
every_figure = pytest.mark.parametrize("figure", FIGURES, ids=[figure.slug for figure in FIGURES])


@pytest.fixture(scope="module")
def study() -> Study:
    shots = [
        {**row, "scale": "100M", "level": "85%", "F": 6e8, "S": 0.85, "D": 2e10}
        for row in shots_rows({0: 0.01, 1: 0.02}, seeds=2)
    ]
    both = table_of(full_rows(1) + [r | {"task": f"{r['task']} by k"} for r in shots], "everything.csv")
    return Study.of(both, draws=8)


@every_figure
def test_a_saved_json_draws_the_same_picture_in_every_theme(figure: TableFigure, study: Study) -> None:
    if figure.slug == "sweeps":
        pytest.skip("drawn from a sweep's table: see tests/probe/ladder/test_sweep.py")
    data = figure.data(study)
    saved = json.loads(json.dumps(data, allow_nan=False))
    for theme in THEMES.values():
        assert figure.draw(saved, theme).to_json() == figure.draw(data, theme).to_json()
    assert csv_rows(data)[0]["recording"] == "everything.csv"
    assert figure.question.endswith("?") and data["notes"]


def test_files_of_every_format_are_written(tmp_path: Path) -> None:
    study = Study.of(synthetic_runs(noise=0.004), draws=4)
    with pytest.warns(UserWarning, match="figure subset-gain is left out: .* needs the column category or source"):
        written = write_table_figures(study, tmp_path, None, ("html", "json", "csv"))
    assert {f.name for f in written} >= {"frontier.html", "law-fit.json", "loss-compute.csv"}
    page = (tmp_path / "frontier.html").read_text()
    assert "4.3, Figure 1b and the table of CE Gain" in page
    assert "144 rows" in page and "<dt>In the paper</dt>" in page


def test_the_frontier_of_the_printed_surfaces_has_the_printed_brackets() -> None:
    figure = Frontier()
    laws = paper_laws()
    data = figure.headed(figure.of_laws(laws), "printed", laws.archs, "two surfaces")
    assert data["series"]["gain.85%"]["low"] == [0.01, 0.08, 0.08] and data["interval"] == "95% intervals as printed"
    picture = figure.draw(data, find_theme("light")).to_json()
    assert "diamond-open" in picture


def test_one_architecture_has_a_frontier_and_no_gain() -> None:
    table = synthetic_runs()
    study = Study.of(table.where(table["arch"] == "Baseline"), draws=0)
    data = find("frontier").data(study)
    assert not [name for name in data["series"] if name.startswith("gain")]
    assert "xaxis2" not in find("frontier").draw(data, find_theme("dark")).to_plotly_json()["layout"]
    with pytest.raises(InputError, match="Baseline alone"):
        find("radar").data(Study.of(full_table().where(full_table()["arch"] == "Baseline"), draws=0))


def test_an_unknown_slug_is_refused_with_a_near_one() -> None:
    with pytest.raises(InputError, match="did you mean 'frontier'"):
        find("fronteir")


def test_a_figure_that_was_asked_for_and_cannot_be_drawn_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="shots-gap needs the column task, k, score"):
        write_table_figures(Study.of(synthetic_runs(), draws=0), tmp_path, ["shots-gap"], ("json",))


def test_slugs_are_those_of_no_figure_of_recordings() -> None:
    from visitlens.probe.gallery.figure import registered as of_recordings

    slugs = [figure.slug for figure in FIGURES]
    assert len(set(slugs)) == len(slugs) and not set(slugs) & {figure.slug for figure in of_recordings()}

"""The Ablation page: stored analyses ranked by visit, opened, missing, damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect


@pytest.fixture(scope="session")
def ablated(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The looped recording with a stored ablation of known numbers: layers 1, 2 x 4 heads."""
    import shutil

    import numpy as np

    from visitlens.probe.analyses.results.head_ablation import HeadAblation
    from visitlens.probe.analyses.results.store import store
    from visitlens.probe.measures.grouped import Grouped
    from visitlens.probe.measures.measure import Measure

    path = tmp_path_factory.mktemp("ablated") / "looped.vlens"
    shutil.copytree(folder / "looped.vlens", path)
    measure = Measure("change", "Change", ("visits", "layer", "head"), "nats", "With minus without.", "6.4")
    labels = {"visits": ["1", "2", "1+2"], "layer": [1, 2], "head": [0, 1, 2, 3]}
    effect = np.arange(24.0).reshape(3, 2, 4) / 10
    effect[1, 0, 2] = 9.0  # at visit 2: layer 1, head 2
    noise = np.random.default_rng(0).normal(0, 0.01, (40, 3, 2, 4))
    grouped = Grouped(measure, labels, effect + noise, np.ones((40, 3, 2, 4)))
    intact = Grouped(Measure("loss", "Loss", (), "nats", "Loss.", "6.4"), {}, np.ones(40), np.ones(40))
    about: dict[str, Any] = {"documents": 40, "targets": "many"}
    for name, metric, settings in (
        ("dyck-zero", "Dyck target loss", {"dyck": {"prompts": 40}}),
        ("text-mean", "<b>text</b> loss", "odd"),
    ):
        ablation = HeadAblation(name, metric, name.split("-")[1], intact, grouped, about | {"settings": settings})
        store(path, ablation)
    return path


def test_stored_ablations_ranked_by_visit_and_opened(serve: Any, meet: Any, ablated: Path, checkpoint: Path) -> None:
    visitor = meet(serve(ablated, checkpoint=checkpoint))
    visitor.open("ablation")
    expect(visitor.page.locator("[aria-labelledby=title-finding] .figure-line")).to_contain_text(
        "Ablating layer 2, head 3 at every visit"
    )
    assert (
        "8 of 8 heads differ from no effect: p is at most 5% after correction for all 8, by sign flips over prompts"
        in visitor.page.inner_text("[aria-labelledby=title-finding]")
    )
    first = visitor.page.locator("[aria-labelledby=title-ranked-table] tbody tr").first
    assert (
        first.inner_text().startswith("layer 2, head 3")
        and "2.30" in first.inner_text()
        and "< 0.001" in first.inner_text()
    )
    said = "n = 40 prompts. Intervals, 95% interval over prompts, for this model (jackknife, studentised, corrected for skewness)"
    assert said in visitor.page.inner_text("#panel-map .caption")
    visitor.choose("when", "2")
    expect(visitor.page.locator("#title-ranked")).to_contain_text("at visit 2")
    assert first.inner_text().startswith("layer 1, head 2")
    visitor.choose("analysis", "text-mean")
    expect(visitor.page.locator("#title-map")).to_contain_text("<b>text</b> loss")
    assert "n = 40 documents." in visitor.page.inner_text("#panel-map .caption")
    assert visitor.page.locator("main h2 b").count() == 0 and visitor.query == {"when": "2", "analysis": "text-mean"}
    visitor.click_cell("map", 1, 0, 2)
    assert visitor.path == "attention" and (visitor.query["layer"], visitor.query["head"]) == ("1", "2")
    visitor.page.go_back()
    visitor.settled()
    visitor.page.get_by_role("link", name="Probe layer 1, head 2 live").click()
    visitor.settled()
    assert visitor.path == "live" and (visitor.query["layer"], visitor.query["head"]) == ("1", "2")
    assert not visitor.errors and not visitor.outside


def test_no_stored_ablation_says_how_to_make_one(visit: Any) -> None:
    for run in ("baseline", "summary"):
        visit.open(f"ablation?run={run}")
        assert f"visitlens ablate {run}.vlens --model CHECKPOINT" in visit.page.inner_text("main")


def test_a_damaged_analysis_is_named(serve: Any, meet: Any, ablated: Path, tmp_path: Path) -> None:
    import shutil

    path = tmp_path / "looped.vlens"
    shutil.copytree(ablated, path)
    (path / "analyses" / "ablation-dyck-zero.json").write_text("{")
    visitor = meet(serve(path))
    visitor.open("ablation")
    assert "not a readable ablation analysis" in visitor.page.inner_text("main")

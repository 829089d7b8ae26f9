"""Analyses in a recording: what is stored is read back, and a file that doesn't fit is one clear error."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.planted import HEAD, LAYER, plant

from visitlens.errors import InputError, RecordingError
from visitlens.hooks.recording.format import untrusted
from visitlens.hooks.recording.write.record import RecordingOptions
from visitlens.probe.analyses.ablation.ablate_recording import ablate
from visitlens.probe.analyses.ablation.dyck_study import DyckSettings, dyck_task, study_head
from visitlens.probe.analyses.results.head_ablation import HeadAblation
from visitlens.probe.analyses.results.store import DyckStudy, store
from visitlens.probe.measures.intervals import interval
from visitlens.probe.measures.sign_flips import flip_test
from visitlens.probe.reading.recorded_run import RecordedRun, open_recording

ABOUT = {"documents": 9, "tokens": 700, "provenance": {"recording": "r"}, "settings": {"seed": 0}}


@pytest.fixture(scope="module")
def results() -> tuple[HeadAblation, DyckStudy]:
    planted, settings = plant(), DyckSettings(prompts=9)
    found = ablate(planted.model, dyck_task(settings.draw(planted.tokenizer), 0, 2), metric_name="Dyck target loss")
    study = study_head(planted.model, planted.tokenizer, LAYER, HEAD, settings, name="zero", about=ABOUT)
    return HeadAblation(
        "dyck-zero", *[getattr(found, n) for n in ("metric", "mode", "grouped_intact", "grouped_effect")], ABOUT
    ), study


@pytest.fixture
def run(looped_recording: RecordedRun, results: tuple[HeadAblation, DyckStudy], tmp_path: Path) -> RecordedRun:
    shutil.copytree(looped_recording.recording.path, tmp_path / "run.vlens")
    for result in results:
        store(tmp_path / "run.vlens", result)
    return open_recording(tmp_path / "run.vlens")


def test_a_recording_without_analyses_has_none(baseline_recording: RecordedRun) -> None:
    assert baseline_recording.ablations() == {} == baseline_recording.dyck()


def test_what_is_stored_is_read_back(run: RecordedRun, results: tuple[HeadAblation, DyckStudy]) -> None:
    ablation, study = run.ablations()["dyck-zero"], run.dyck()["zero"]
    np.testing.assert_allclose(ablation.effect.values, results[0].effect.values, atol=1e-8)
    np.testing.assert_allclose(ablation.effect.interval(), results[0].effect.interval(), atol=1e-8)
    assert ablation.effect.measure == results[0].effect.measure and ablation.effect.labels == results[0].effect.labels
    assert (ablation.effect.documents, ablation.effect.tokens) == (9, 700)
    assert ablation.note() == results[0].note() and ablation.every_visit == "1+2"
    np.testing.assert_allclose(study.mass.values, results[1].mass.values, atol=1e-8)
    assert (study.layer, study.head) == (LAYER, HEAD)
    assert study.examples[0].pieces == results[1].examples[0].pieces
    np.testing.assert_allclose(study.examples[1].maps, results[1].examples[1].maps, atol=1e-8)
    perplexity = study.scores["perplexity"]
    np.testing.assert_allclose(perplexity.values, np.exp(study.scores["nll"].values))
    nll = study.scores["nll"]
    assert nll.replicates is not None and nll.support is not None
    expected = interval(np.exp(nll.values), np.exp(nll.replicates), nll.support)
    np.testing.assert_allclose(perplexity.interval(), expected)


def test_the_file_also_holds_the_intervals(run: RecordedRun) -> None:
    data = json.loads((run.recording.path / "analyses" / "ablation-dyck-zero.json").read_text(encoding="utf-8"))
    assert data["format"] == "visitlens-ablation" and data["version"] == 1 and data["about"]["settings"] == {"seed": 0}
    effect = run.ablations()["dyck-zero"].effect
    np.testing.assert_allclose(data["effect"]["values"], effect.values, atol=1e-8)
    np.testing.assert_allclose(data["effect"]["high"], effect.interval()[1], atol=1e-8)
    assert np.shape(data["p_family"]) == effect.values.shape


def test_storing_again_replaces_and_leaves_nothing_else(
    run: RecordedRun, results: tuple[HeadAblation, DyckStudy]
) -> None:
    store(run.recording.path, results[0])
    folder = run.recording.path / "analyses"
    assert sorted(p.name for p in folder.iterdir()) == ["ablation-dyck-zero.json", "dyck-zero.json"]


def test_recording_goes_on_in_a_folder_with_analyses(
    make_model: Callable[..., Any], make_text: Callable[..., Any], make_recording: Callable[..., RecordedRun],
    results: tuple[HeadAblation, DyckStudy], tmp_path: Path,
) -> None:  # fmt: skip
    model, text = make_model(2), make_text()
    rec = make_recording(model, text, tmp_path / "r.vlens", level="summary")
    store(rec.recording.path, results[0])
    again = make_recording(model, text, tmp_path / "r.vlens", level="summary")
    assert list(again.ablations()) == ["dyck-zero"]
    assert RecordingOptions().level == "summary"


def test_p_values_are_those_of_sign_flips_over_prompts(results: tuple[HeadAblation, DyckStudy]) -> None:
    ablation = results[0]
    grouped = ablation.grouped_effect
    test = flip_test(grouped.total[:, -1], grouped.count[:, -1])
    np.testing.assert_array_equal(ablation.p_values(), test.p)
    np.testing.assert_array_equal(ablation.p_family(), test.p_family)
    assert ablation.top("2").head == HEAD


def test_what_is_called_found_has_a_small_p_and_an_interval_without_0(results: tuple[HeadAblation, DyckStudy]) -> None:
    ablation = results[0]
    low, high = ablation.effect.sel(visits="1+2").interval()
    expected = (ablation.p_family() <= 0.05) & ((low > 0) | (high < 0))
    np.testing.assert_array_equal(ablation.found(), expected)
    top = ablation.top()
    assert top.found == bool(ablation.found().ravel()[ablation.effect.sel(visits="1+2").values.argmax()])
    assert ("not told apart from no effect" in ablation.note()) == (not top.found and not math.isnan(top.p_family))


# Files that don't fit


def broken(run: RecordedRun, kind: str, change: Callable[[dict], Any]) -> Path:
    (file,) = (run.recording.path / "analyses").glob(f"{kind}-*.json")
    data = json.loads(file.read_text(encoding="utf-8"))
    change(data)
    file.write_text(json.dumps(data), encoding="utf-8")
    return file


BAD: dict[str, tuple[str, Callable[[dict], Any]]] = {
    "another version": ("ablation", lambda d: d.update(version=2)),
    "another format": ("ablation", lambda d: d.update(format="visitlens-dyck")),
    "another name": ("ablation", lambda d: d.update(name="x")),
    "a missing part": ("ablation", lambda d: d.pop("effect")),
    "a ragged array": ("ablation", lambda d: d["effect"]["total"][0][0].append([1])),
    "too few labels": ("ablation", lambda d: d["effect"]["labels"]["head"].pop()),
    "NaN": ("ablation", lambda d: d["effect"]["total"][0][0][0].__setitem__(0, float("nan"))),
    "a negative count": ("ablation", lambda d: d["effect"]["count"][0][0][0].__setitem__(0, -1)),
    "a text for a number": ("ablation", lambda d: d["intact"]["total"].__setitem__(0, "many")),
    "a layer that is no number": ("ablation", lambda d: d["effect"]["labels"].update(layer=["<script>"])),
    "a huge text": ("ablation", lambda d: d.update(metric="x" * 5000)),
    "no object": ("ablation", lambda d: d.update(about=[1])),
    "a map of another shape": ("dyck", lambda d: d["examples"][0]["maps"].pop()),
    "a target outside": ("dyck", lambda d: d["examples"][0].update(targets=[1, 2, 99999])),
    "a head that is no number": ("dyck", lambda d: d.update(head="3")),
    "no masses": ("dyck", lambda d: d.update(mass=None)),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_file_that_does_not_fit_is_one_clear_error(what: str, run: RecordedRun) -> None:
    kind, change = BAD[what]
    file = broken(run, kind, change)
    with pytest.raises(RecordingError, match=f"not a readable {kind} analysis") as caught:
        run.ablations() if kind == "ablation" else run.dyck()
    assert str(file) in str(caught.value) and "visitlens ablate" in str(caught.value)


def test_links_pipes_and_huge_files_are_refused(run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    file = run.recording.path / "analyses" / "ablation-dyck-zero.json"
    moved = file.rename(run.recording.path.parent / "elsewhere.json")
    file.symlink_to(moved)
    with pytest.raises(RecordingError):
        run.ablations()
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(RecordingError):
        run.ablations()
    file.unlink()
    shutil.copy(moved, file)
    monkeypatch.setattr(untrusted, "MAX_JSON_BYTES", 100)
    with pytest.raises(RecordingError, match="at most 100"):
        run.ablations()


def test_other_files_and_names_are_passed_over(run: RecordedRun, results: tuple[HeadAblation, DyckStudy]) -> None:
    folder = run.recording.path / "analyses"
    (folder / "ablation-.hidden.json").write_text("{")
    (folder / "notes.txt").write_text("x")
    assert list(run.ablations()) == ["dyck-zero"]
    with pytest.raises(InputError, match="expected a name"):
        store(
            run.recording.path,
            HeadAblation(
                "../x",
                *[getattr(results[0], n) for n in ("metric", "mode", "grouped_intact", "grouped_effect", "about")],
            ),
        )
    shutil.rmtree(folder)
    (run.recording.path.parent / "away").mkdir()
    folder.symlink_to(run.recording.path.parent / "away")
    with pytest.raises(RecordingError, match="symbolic link"):
        store(run.recording.path, results[0])
    with pytest.raises(RecordingError, match="symbolic link"):
        run.ablations()

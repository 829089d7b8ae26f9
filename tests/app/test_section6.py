"""`visitlens ablate`, `figures`, `reproduce` and `compare` as a person uses them, on tiny models with a character tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.planted import HEAD, LAYER, character_tokenizer, plant

import visitlens as vl
from visitlens.hooks.models.checkpoint import save_model
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.probe.reading.grid import Grid, GridCell
from visitlens.probe.samples.dyck_prompts import dyck_prompt

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The planted model, and a random Baseline of its sizes."""
    root = tmp_path_factory.mktemp("checkpoints")
    planted = plant()
    sizes = planted.model.config.to_dict() | {"loop_start": 0, "loop_stop": 0, "visits": 1}
    sizes.pop("architecture")
    baseline = LoopedMoE(LoopedMoEConfig(**sizes))
    baseline.init_weights(0)
    for name, model in {"looped": planted.model, "baseline": baseline}.items():
        save_model(model, root / name)
        character_tokenizer().save(str(root / name / "tokenizer.json"))
    return {name: root / name for name in ("looped", "baseline")}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    prompts = [dyck_prompt((i,), character_tokenizer(), shots=1 + i % 2).text for i in range(12)]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in prompts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def recordings(checkpoints: dict[str, Path], text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("recordings")
    for name, checkpoint in checkpoints.items():
        vl.record(checkpoint, text, root / f"{name}.vlens")
    return {name: root / f"{name}.vlens" for name in checkpoints}


def refused(result: tuple[int, str, str], *parts: str) -> None:
    code, _, err = result
    assert code == 1 and err.count("error:") == 1 and "Traceback" not in err
    for part in parts:
        assert part in err, err


# ablate


def test_ablate_keeps_the_result_and_names_the_head(run: Run, checkpoints, recordings, tmp_path: Path) -> None:
    rec = tmp_path / "looped.vlens"
    shutil.copytree(recordings["looped"], rec)
    code, out, err = run("ablate", rec, "--model", checkpoints["looped"], "--prompts", 9)
    assert code == 0, err
    printed = out.replace("\n", "")
    assert (
        "ablation-dyck-zero.json" in printed
        and f"layer {LAYER}, head {HEAD}" in printed
        and "sign flips over prompts" in printed
    )
    opened = vl.open(rec)
    assert opened.ablations()["dyck-zero"].top().head == HEAD == opened.dyck()["zero"].head
    before = {f: f.stat().st_mtime_ns for f in (rec / "analyses").iterdir()}
    assert run("ablate", rec, "-m", checkpoints["looped"], "--prompts", 9)[0] == 0
    assert {f: f.stat().st_mtime_ns for f in (rec / "analyses").iterdir()} == before  # the same settings: nothing to do
    assert run("ablate", rec, "-m", checkpoints["looped"], "--prompts", 5, "--style", "drawn")[0] == 0
    assert vl.open(rec).dyck()["zero"].mass.documents == 5
    (rec / "analyses" / "dyck-zero.json").write_text("{")  # damaged: made anew
    assert run("ablate", rec, "-m", checkpoints["looped"], "--prompts", 5, "--style", "drawn")[0] == 0
    assert vl.open(rec).dyck()["zero"].mass.documents == 5
    text = ("--metric", "text", "--mode", "mean", "--max-tokens", 300)
    assert run("ablate", rec, "-m", checkpoints["looped"], *text)[0] == 0
    assert set(vl.open(rec).ablations()) == {"dyck-zero", "text-mean"}
    code, out, err = run("figures", rec, "--out", tmp_path / "f", "--only", "pdf:18", "--formats", "json,csv")
    assert code == 0 and (tmp_path / "f" / "dyck-map.json").is_file(), err


def test_ablate_refuses_another_models_checkpoint_and_other_mistakes(
    run: Run, checkpoints, recordings, tmp_path
) -> None:
    refused(run("ablate", recordings["looped"], "-m", checkpoints["baseline"]), "aren't those of", "that was recorded")
    refused(run("ablate", tmp_path / "none", "-m", checkpoints["looped"]), "no recording there")
    refused(run("ablate", recordings["looped"], "-m", tmp_path / "none"), "no such checkpoint folder")
    assert run("ablate", recordings["looped"], "-m", checkpoints["looped"], "--mode", "half")[0] == 2


# figures over a grid


def test_figures_of_a_grid_a_row_and_a_single_cell(run: Run, recordings: dict[str, Path], tmp_path: Path) -> None:
    cells = (
        GridCell("a", "0", recordings["looped"], recordings["baseline"]),
        GridCell("b", "85", recordings["looped"]),
    )
    Grid("tiny", ("a", "b"), ("0", "85"), cells).write(tmp_path)
    only = ("--only", "html:23,sink-profile-all", "--formats", "json")
    code, _, err = run("figures", tmp_path, "--out", tmp_path / "f", *only)
    assert code == 0, err
    data = json.loads((tmp_path / "f" / "grid-diagnostics.json").read_text(encoding="utf-8"))
    assert [panel["absent"] for panel in data["panels"]] == ["", "no recording", "no recording", ""]
    assert run("figures", tmp_path, "--out", tmp_path / "g", "--scales", "a", *only)[0] == 0
    data = json.loads((tmp_path / "g" / "grid-diagnostics.json").read_text(encoding="utf-8"))
    assert {panel["scale"] for panel in data["panels"]} == {"a"}
    refused(run("figures", tmp_path, "--levels", "97"), "no 97")
    refused(run("figures", recordings["looped"], "--scales", "a"), "grid.json")
    refused(run("figures"), "name a recording")


# reproduce


def test_reproduce_a_grid_loses_only_what_fails_and_does_nothing_twice(
    run: Run, checkpoints, text, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoints["looped"], broken)
    (broken / "config.json").write_text("{")
    cells = (
        GridCell("a", "0", checkpoints["looped"], checkpoints["baseline"]),
        GridCell("b", "0", broken, checkpoints["baseline"]),
    )
    Grid("tiny", ("a", "b"), ("0",), cells).write(tmp_path / "grid")
    out = tmp_path / "out"
    options = ("--grid", tmp_path / "grid", "--text", text, "--prompts", 9, "--formats", "json,csv", "--out", out)
    code, printed, err = run("reproduce", *options)
    assert code == 1 and "b-S0 looped failed: " in err and "not valid JSON" in err and "CPU-seconds" in err
    assert str(out / "report" / "report.html") in printed.replace("\n", "")
    page = (out / "report" / "report.html").read_text(encoding="utf-8")
    assert "b, S = 0% is missing" in page and "not valid JSON" in page and "section-dyck-map" in page
    findings = json.loads((out / "report" / "findings.json").read_text(encoding="utf-8"))
    by_key = {finding["key"]: finding for finding in findings["findings"]["a, S = 0%"]}
    assert by_key["dyck-answers"]["verdict"] == "holds" == by_key["dyck-bos"]["verdict"]  # it is planted
    assert by_key["norm-ratio-update"]["ours"]["value"] == pytest.approx(1.5, abs=0.01)
    assert (
        by_key["norm-ratio-update"]["published"] == [1.2, 3.5]
        and by_key["norm-ratio-update"]["ours_in_published_range"]
    )
    assert findings["findings"]["tiny"][0]["verdict"] == "not measured"
    assert vl.open(out / "a-S0" / "looped.vlens").recording.complete
    assert Grid.read(out).cell("a", "0").looped is not None and Grid.read(out).cell("b", "0").looped is None

    shutil.copy(checkpoints["looped"] / "config.json", broken)  # mended: only that is done
    before = {f: f.stat().st_mtime_ns for f in out.rglob("*") if f.is_file() and "a-S0" in str(f)}
    code, _, err = run("reproduce", *options)
    assert code == 0 and "b-S0 looped" in err and "a-S0 looped" not in err, err
    assert {f: f.stat().st_mtime_ns for f in before} == before
    everything = {f: f.stat().st_mtime_ns for f in out.rglob("*") if f.is_file()}
    code, _, err = run("reproduce", *options)
    assert code == 0 and "Nothing to do" in err
    assert {f: f.stat().st_mtime_ns for f in out.rglob("*") if f.is_file()} == everything


def test_pictures_that_were_left_out_for_want_of_a_chromium_are_made_by_the_next_run(
    run: Run, checkpoints, text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = ("--looped", checkpoints["looped"], "--baseline", checkpoints["baseline"], "--text", text)
    options = (*pair, "--prompts", 0, "--formats", "svg", "--out", tmp_path)
    picture, page = tmp_path / "report" / "sink-heads.svg", tmp_path / "report" / "report.html"
    with monkeypatch.context() as without:
        without.setenv("BROWSER_PATH", str(tmp_path / "no-such-browser"))
        code, _, err = run("reproduce", *options)
        assert code == 0 and "and run this again" in err and not picture.exists()
        assert "and run this again" in page.read_text(encoding="utf-8")
        assert "Nothing to do" in run("reproduce", *options)[2]
    code, _, err = run("reproduce", *options)
    assert code == 0 and picture.is_file() and "CPU-seconds" not in err, err
    assert "Nothing to do" in run("reproduce", *options)[2]


def test_reproduce_where_nothing_can_be_recorded_tells_why(run: Run, checkpoints, text, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoints["looped"], broken)
    (broken / "model.safetensors").write_bytes(b"nothing")
    options = ("--looped", broken, "--baseline", checkpoints["baseline"], "--text", text, "--out", tmp_path / "out")
    refused(run("reproduce", *options), "no looped model was recorded", "not a readable safetensors file")


def test_reproduce_refuses_what_makes_no_sense(run: Run, checkpoints, tmp_path: Path) -> None:
    refused(run("reproduce", "--grid", tmp_path, "--looped", checkpoints["looped"]), "not both")
    refused(run("reproduce", "--grid", tmp_path / "none"), "to be a grid")
    refused(run("reproduce", "--grid", tmp_path, "--out", tmp_path), "choose another --out")
    pair = ("--looped", checkpoints["looped"], "--baseline", checkpoints["baseline"])
    refused(run("reproduce", *pair, "--text", tmp_path / "none.txt", "--out", tmp_path), "no such file")
    Grid("g", ("a",), ("0",), (GridCell("a", "0"),)).write(tmp_path)
    refused(run("reproduce", "--grid", tmp_path, "--out", tmp_path / "o"), "no looped model")


# compare


def test_compare_prints_a_table_json_and_draws(run: Run, recordings: dict[str, Path], tmp_path: Path) -> None:
    code, out, err = run("compare", recordings["looped"], recordings["baseline"])
    assert (
        code == 0 and "sink_mass" in out and "difference" in out and "paired: both are of the same documents" in out
    ), err
    options = ("--by", "step", "--measures", "update_rms,sink_mass", "--json", "--figure", tmp_path / "c.html")
    code, out, err = run("compare", recordings["looped"], recordings["baseline"], *options)
    data = json.loads(out)
    assert code == 0 and [row["place"] for row in data["rows"]] == ["0·1", "1·1", "2·1"] * 2
    assert (tmp_path / "c.html").is_file()
    refused(
        run("compare", recordings["looped"], recordings["baseline"], "--measures", "stage_cosine"),
        "both recordings hold",
    )
    refused(run("compare", recordings["looped"], tmp_path / "none"), "no recording there")

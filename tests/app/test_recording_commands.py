"""The commands around recordings as a person uses them: exit codes, one clear error, nothing half done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from visitlens.probe.reading.recorded_run import RecordedRun

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def recording(looped_recording: RecordedRun, tmp_path: Path) -> Path:
    return Path(shutil.copytree(looped_recording.recording.path, tmp_path / "run.vlens"))


def first_shard(path: Path) -> Path:
    return path / "shards" / "w00-000000.h5"


def test_validate_says_whole_damaged_or_unfinished_by_its_exit_code(run: Run, recording: Path) -> None:
    code, out, _ = run("validate", recording)
    assert code == 0 and "whole (1 sound shard," in out
    assert run("validate", first_shard(recording), "--quick")[0] == 0
    manifest = json.loads((recording / "manifest.json").read_text())
    (recording / "manifest.json").write_text(json.dumps({**manifest, "shards": []}))
    code, out, err = run("validate", recording)
    assert code == 3 and "unfinished" in out and "not yet in the manifest" in err
    assert run("repair", recording)[:1] == (0,) and run("validate", recording)[0] == 0
    data = first_shard(recording).read_bytes()
    first_shard(recording).write_bytes(data[:-100])
    code, out, err = run("validate", recording)
    assert code == 1 and "damaged or refused" in out and "damage:" in err and "w00-000000.h5" in err
    code, _, err = run("repair", recording)
    assert code == 1 and "--set-aside" in err and err.count("error:") == 1
    code, _, err = run("validate", recording / "nowhere")
    assert code == 1 and "nothing there" in err


def test_info_of_a_cut_or_missing_shard_says_damaged(run: Run, recording: Path) -> None:
    assert "(complete)" in run("info", recording)[1]
    data = first_shard(recording).read_bytes()
    first_shard(recording).write_bytes(data[:-100])
    code, out, err = run("info", recording)
    assert code == 1 and "(damaged)" in out and "warning    damaged: w00-000000.h5: " in out and not err
    first_shard(recording).unlink()
    assert "w00-000000.h5: missing" in run("info", recording)[1]


def test_pack_and_unpack(run: Run, recording: Path, tmp_path: Path) -> None:
    packed = tmp_path / "shared.vlens.tar.gz"
    assert run("pack", recording, "-o", packed)[0] == 0 and packed.is_file()
    shutil.rmtree(recording)
    code, out, _ = run("unpack", packed)
    assert code == 0 and out.strip() == str(tmp_path / "shared.vlens")
    assert run("validate", tmp_path / "shared.vlens")[0] == 0
    code, _, err = run("info", packed)
    assert code == 1 and "visitlens unpack" in err


def test_merge_of_one_and_the_same_is_the_same(run: Run, recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged.vlens"
    assert run("merge", recording, recording, "-o", out)[0] == 0
    assert run("validate", out)[0] == 0
    code, _, err = run("merge", recording, "-o", tmp_path / "m.vlens")
    assert code == 1 and "two recordings or more" in err


def test_export_by_the_ending_of_the_file(
    run: Run, recording: Path, looped_recording: RecordedRun, tmp_path: Path
) -> None:
    out = tmp_path / "sink.npz"
    assert run("export", recording, "sink_mass", "-o", out)[0] == 0
    with np.load(out) as arrays:
        np.testing.assert_array_equal(arrays["value"], looped_recording.sink_mass().values)
    out = tmp_path / "experts.csv"
    assert run("export", recording, "experts", "--layer", 1, "--visit", 2, "--tokens", "3:6", "-o", out)[0] == 0
    assert [line.split(",")[0] for line in out.read_text().splitlines()] == ["token", "3", "4", "5"]
    for arguments, says in (
        (["sink", "-o", "a.csv"], "nothing of the name 'sink'"),
        (["experts", "-o", "a.csv"], "name a layer and a visit"),
        (["Q", "--layer", "1", "--visit", "1", "-o", "a.csv"], "wasn't recorded"),
        (["sink_mass", "-o", "a.xlsx"], ".parquet, .csv, .npz, .safetensors"),
        (["tokens", "--tokens", "9", "-o", "a.csv"], "START:STOP"),
    ):
        code, _, err = run("export", recording, *arguments)
        assert code == 1 and says in err and err.count("error:") == 1


def test_info_says_what_is_inside_with_sizes_and_warnings(run: Run, recording: Path) -> None:
    manifest = json.loads((recording / "manifest.json").read_text())
    manifest["run"]["provenance"] |= {
        "warnings": ["synthetic: random weights"],
        "command": "x\x1b[2J",
        "text": "[red]t[/]",
    }
    (recording / "manifest.json").write_text(json.dumps(manifest))
    (recording / "analyses").mkdir(exist_ok=True)
    (recording / "analyses" / "neurons.json").write_text("{}")
    code, out, _ = run("info", recording)
    assert code == 0 and "routing/ids" in out and "bytes a token" in out and "analysis   neurons.json" in out
    assert "warning    synthetic: random weights" in out and "[red]t[/]" in out
    assert "\x1b" not in out and r"x\x1b[2J" in out


def test_a_hostile_recording_is_one_line_of_error_for_every_command(run: Run, recording: Path, tmp_path: Path) -> None:
    (recording / "summary.h5").unlink()
    (recording / "summary.h5").symlink_to("/etc/passwd")
    for command in (["info", recording], ["export", recording, "sink_mass", "-o", tmp_path / "a.csv"]):
        code, _, err = run(*command)
        assert code == 1 and "symbolic link" in err and err.count("error:") == 1
    assert run("validate", recording)[0] == 1
    assert run("repair", recording)[0] == 0 and not (recording / "summary.h5").is_symlink()
    assert run("validate", recording)[0] == 0


def test_a_damaged_recording_is_not_packed(run: Run, recording: Path, tmp_path: Path) -> None:
    """It couldn't be unpacked, and the original might be deleted by then."""
    data, summary = first_shard(recording).read_bytes(), (recording / "summary.h5").read_bytes()
    for file, wrong in (
        (first_shard(recording), data[:-1] + b"?"),
        (first_shard(recording), b""),
        (recording / "summary.h5", summary[:-9]),
    ):
        before = file.read_bytes()
        file.write_bytes(wrong)
        code, _, err = run("pack", recording, "-o", tmp_path / "p.tar.gz")
        assert code == 1 and err.count("error:") == 1 and file.name in err and not (tmp_path / "p.tar.gz").exists()
        file.write_bytes(before)
    assert run("pack", recording, "-o", tmp_path / "p.tar.gz")[0] == 0


def test_what_repair_can_mend_says_so_and_what_it_cannot_is_told(run: Run, recording: Path) -> None:
    (recording / "summary.h5").unlink()
    code, _, err = run("info", recording)
    assert code == 1 and "`visitlens repair` rebuilds it from the shards" in err
    manifest = json.loads((recording / "manifest.json").read_text())
    lost = {**manifest["shards"][0], "name": "w00-000009.h5", "seq": 9}
    for unit in ("token", "context"):
        lost[f"{unit}_start"] += lost[f"{unit}_count"]
    (recording / "manifest.json").write_text(json.dumps({**manifest, "shards": [*manifest["shards"], lost]}))
    assert "`visitlens repair`" not in run("info", recording)[2]  # a lost shard isn't mended by that
    code, _, err = run("repair", recording)
    assert code == 0 and "w00-000009.h5 is gone: recording again fills the gap" in err
    assert run("validate", recording)[0] == 0


@pytest.mark.parametrize(
    ("chosen", "unused"),
    [
        (["sink_mass", "--tokens", "0:9"], "--tokens; --per-token has"),
        (["sink_mass", "--layer", 1, "--visit", 2], "--layer, --visit"),
        (["sink_mass", "--per-token", "--head", 0], "--head"),
        (["tokens", "--layer", 1], "--layer"),
        (["experts", "--layer", 1, "--visit", 1, "--head", 0], "--head"),
    ],
)
def test_a_choice_that_would_be_ignored_is_refused(
    run: Run, recording: Path, tmp_path: Path, chosen: list[object], unused: str
) -> None:
    out = tmp_path / "x.csv"
    code, _, err = run("export", recording, *chosen, "-o", out)
    assert code == 1 and f"{chosen[0]} isn't chosen from by {unused}" in err and not out.exists()


def test_places_that_cannot_be_are_one_error(run: Run, recording: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    inside, long = tmp_path / "file" / "x", tmp_path / ("x" * 300)
    assert run("pack", recording, "-o", tmp_path / "p.tar.gz")[0] == 0
    for out in (inside, long):
        for command in (
            ("export", recording, "sink_mass", "-o", f"{out}.csv"),
            ("pack", recording, "-o", f"{out}.tar.gz"),
            ("unpack", tmp_path / "p.tar.gz", "-o", out),
            ("merge", recording, recording, "-o", out),
            ("info", out),
            ("validate", out),
            ("repair", out),
        ):
            code, _, err = run(*command)
            assert code == 1 and err.count("error:") == 1, (command[0], err)

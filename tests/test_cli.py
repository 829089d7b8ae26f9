"""The command line as a person uses it: each command, and one clear error with a non-zero exit for each bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import visitlens as vl
from visitlens.hooks.loading.load_model import load_model
from visitlens.hooks.models.checkpoint import save_model
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE

TEXT = [
    "A looped block runs the same layers twice; each run is a visit.",
    "The router picks eight experts for each token, and the second visit keeps some of them.",
    "Input: ( [ { }\nOutput: ] )\n" * 12,
    "x",
]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny looped model and its Baseline, with a byte-level tokenizer."""
    root = tmp_path_factory.mktemp("checkpoints")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<bos>", "<eos>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    sizes = {
        "hidden_size": 16,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "expert_dim": 8,
        "context_length": 64,
    }
    for name, loop in {
        "looped": {"num_experts": 12, "loop_start": 1, "loop_stop": 3, "visits": 2},
        "baseline": {"num_experts": 10},
    }.items():
        model = LoopedMoE(LoopedMoEConfig(vocab_size=tokenizer.get_vocab_size(), **sizes, **loop))
        model.init_weights(0)
        save_model(model, root / name)
        tokenizer.save(str(root / name / "tokenizer.json"))
    return {name: root / name for name in ("looped", "baseline")}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXT))
    return path


def test_help_lists_the_commands(run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for command in ("record", "info", "figures", "reproduce"):
        assert command in out


def test_version_and_module_entry_point() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "visitlens", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == vl.__version__


def test_record_then_info_then_figures(run, checkpoints, text, tmp_path) -> None:
    looped, baseline = tmp_path / "looped.vlens", tmp_path / "baseline.vlens"
    code, out, err = run("record", checkpoints["looped"], text, "--out", looped, "--level", "tokens")
    assert code == 0 and str(looped) in out.replace("\n", "")
    assert "writes about" in err  # the size, before it starts
    assert run("record", checkpoints["baseline"], text, "-o", baseline)[0] == 0

    code, out, _ = run("info", looped, "--measures")
    assert code == 0
    assert "layers 1-2 run 2 times, 6 steps" in out
    assert "complete" in out and "sink_mass" in out and "P[i, segment start]" in out

    code, out, _ = run(
        "figures",
        looped,
        baseline,
        "--out",
        tmp_path / "figures",
        "--formats",
        "html,json",
        "--only",
        "sink-heads,html:24",
    )
    assert code == 0
    assert (tmp_path / "figures" / "sink-heads.html").is_file()
    assert (tmp_path / "figures" / "update-cosine.json").is_file()

    code, out, _ = run("figures", "--list")
    assert code == 0 and "expert-overlap" in out and "html:21" in out


def test_recording_again_changes_nothing_and_says_so_with_success(run, checkpoints, text, tmp_path) -> None:
    out = tmp_path / "run.vlens"
    assert run("record", checkpoints["looped"], text, "--out", out)[0] == 0
    before = {f: f.read_bytes() for f in out.rglob("*.h5")}
    assert run("record", checkpoints["looped"], text, "--out", out)[0] == 0
    assert {f: f.read_bytes() for f in out.rglob("*.h5")} == before


def test_reproduce_on_a_users_pair_writes_recordings_figures_and_report(run, checkpoints, text, tmp_path) -> None:
    out = tmp_path / "out"
    arguments = ("--looped", checkpoints["looped"], "--baseline", checkpoints["baseline"], "--text", text, "--out", out)
    code, printed, err = run("reproduce", *arguments)
    assert code == 0, err
    report = out / "report" / "report.html"
    assert str(report) in printed.replace("\n", "")
    assert report.is_file()
    for slug in ("expert-overlap", "residual-flow", "update-cosine", "sink-heads", "sink-profile", "stage-cosine"):
        for ending in ("html", "png", "svg", "json"):
            assert (out / "report" / f"{slug}.{ending}").stat().st_size > 0
    assert vl.open(out / "looped.vlens").recording.complete
    assert vl.open(out / "baseline.vlens").recording.complete


def test_max_tokens_stops_after_the_context_in_which_it_falls(run, checkpoints, text, tmp_path) -> None:
    out = tmp_path / "run.vlens"
    assert run("record", checkpoints["looped"], text, "--out", out, "--max-tokens", "70")[0] == 0
    assert vl.open(out).recording.tokens == 128


def test_a_notebook_records_captures_and_reads_with_the_exported_names(checkpoints, text, tmp_path) -> None:
    rec = vl.record(checkpoints["looped"], text, tmp_path / "run.vlens", level="tokens", max_tokens=64)
    assert rec.recording.tokens == 64 and rec.expert_overlap().axes == ("layer",)
    model = load_model(checkpoints["looped"])
    with vl.capture(model, ["PV"]) as captured:
        model(torch.tensor([[0, 5, 6, 7]]))
    assert captured.get("PV", layer=2, visit=2).shape == (1, 4, 4, 4)
    assert {"open", "record", "capture", "load"} <= set(dir(vl))
    with pytest.raises(AttributeError, match=r"it has .*open"):
        _ = vl.nothing


# Bad input: one clear error, a non-zero exit, nothing lost


def _refused(result: tuple[int, str, str], *parts: str) -> None:
    code, _, err = result
    assert code == 1
    assert err.count("error:") == 1 and "Traceback" not in err
    for part in parts:
        assert part in err


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_model_files_are_named(run, checkpoints, text, tmp_path, missing) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(checkpoints["looped"], folder)
    (folder / missing).unlink()
    _refused(run("record", folder, text, "--out", tmp_path / "r"), f"no {missing}")
    assert not (tmp_path / "r").exists()


def test_a_checkpoint_whose_shapes_disagree_with_its_config_is_refused(run, checkpoints, text, tmp_path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(checkpoints["looped"], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["ln_final.w"] = tensors["ln_final.w"][:-1].clone()
    save_file(tensors, folder / "model.safetensors")
    _refused(run("record", folder, text, "--out", tmp_path / "r"), "ln_final.w has shape (15,)", "(16,)")


def test_tokens_outside_the_vocabulary_are_refused(run, checkpoints, text, tmp_path) -> None:
    folder = tmp_path / "other-tokenizer"
    shutil.copytree(checkpoints["looped"], folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["looped"])
    tokenizer.save(str(folder / "tokenizer.json"))
    _refused(run("record", folder, text, "--out", tmp_path / "r"), "token ids must lie in", "tokenizer")


def test_empty_text_is_refused(run, checkpoints, tmp_path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    _refused(run("record", checkpoints["looped"], empty, "--out", tmp_path / "r"), "empty")


def test_missing_text_is_refused(run, checkpoints, tmp_path) -> None:
    _refused(run("record", checkpoints["looped"], tmp_path / "nowhere.txt", "--out", tmp_path / "r"), "no such file")


def test_an_existing_recording_with_another_config_is_refused_and_untouched(run, checkpoints, text, tmp_path) -> None:
    out = tmp_path / "run.vlens"
    assert run("record", checkpoints["looped"], text, "--out", out)[0] == 0
    before = {f: f.read_bytes() for f in out.rglob("*.h5")}
    _refused(
        run("record", checkpoints["looped"], text, "--out", out, "--level", "tokens"),
        "another configuration",
        "options differs",
    )
    assert {f: f.read_bytes() for f in out.rglob("*.h5")} == before


def test_a_full_disk_is_one_clear_error_and_the_run_can_go_on(run, checkpoints, text, tmp_path, monkeypatch) -> None:
    out = tmp_path / "run.vlens"
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        _refused(
            run("record", checkpoints["looped"], text, "--out", out), "free", "a recording goes on where it stopped"
        )
    assert run("record", checkpoints["looped"], text, "--out", out)[0] == 0


def test_no_chromium_is_a_warning_and_html_and_json_are_still_written(
    run, checkpoints, text, tmp_path, monkeypatch
) -> None:
    out = tmp_path / "run.vlens"
    assert run("record", checkpoints["looped"], text, "--out", out)[0] == 0
    monkeypatch.setenv("BROWSER_PATH", "/nonexistent/chromium")
    code, _, err = run("figures", out, "--out", tmp_path / "figures", "--only", "sink-heads")
    assert code == 0, err
    assert err.count("warning:") == 1 and "hromium" in err
    assert (tmp_path / "figures" / "sink-heads.html").is_file()
    assert (tmp_path / "figures" / "sink-heads.json").is_file()
    assert not (tmp_path / "figures" / "sink-heads.png").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sites", "Q"], "level 'activations'"),
        (["--level", "activations"], "needs sites"),
        (["--level", "activations", "--sites", "Z"], "no site 'Z'"),
        (["--level", "activations", "--sites", "Q", "--token-range", "5"], "START:STOP"),
        (["--level", "maps", "--context", "512"], "at most 256"),
        (["--dtype", "int8"], "expected a dtype"),
        (["--context", "4096"], "context"),
        (["--max-tokens", "0"], "at least 1 token"),
    ],
)
def test_options_that_make_no_sense_are_refused(run, checkpoints, text, tmp_path, arguments, said) -> None:
    _refused(run("record", checkpoints["looped"], text, "--out", tmp_path / "r", *arguments), said)


def test_what_is_no_recording_is_refused(run, tmp_path) -> None:
    _refused(run("info", tmp_path / "nowhere.vlens"), "no recording there", "visitlens record")
    (tmp_path / "manifest.json").write_text("{")
    _refused(run("info", tmp_path), "not readable JSON")


def test_a_figure_by_bare_number_or_unknown_name_is_refused(run, checkpoints, text, tmp_path) -> None:
    out = tmp_path / "run.vlens"
    assert run("record", checkpoints["looped"], text, "--out", out)[0] == 0
    _refused(run("figures", out, "--out", tmp_path / "f", "--only", "24"), "html:24")
    _refused(run("figures", out, "--out", tmp_path / "f", "--only", "nothing"), "sink-heads")
    _refused(run("figures", out, "--out", tmp_path / "f", "--formats", "bmp"), "bmp")


def test_reproduce_with_half_a_pair_is_refused(run, checkpoints, tmp_path) -> None:
    _refused(run("reproduce", "--looped", checkpoints["looped"], "--out", tmp_path), "both")

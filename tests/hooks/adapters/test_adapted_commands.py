"""Ablation and experiments on checkpoints of transformers, as a person runs them; a notebook's model of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import visitlens as vl
from visitlens.errors import InputError
from visitlens.hooks.interventions.intervene import intervene, mean, site_means, zero
from visitlens.probe.analyses.ablation.heads import ablate_heads, text_task
from visitlens.probe.reading.recorded_run import RecordedRun

Recorded = Callable[[str], RecordedRun]
Run = Callable[..., tuple[int, str, str]]


def checkpoint(run: RecordedRun) -> Path:
    return run.recording.path.parent / "model"


@pytest.mark.parametrize("mode", ["zero", "mean", "resample"])
def test_each_head_of_an_adapted_model_at_each_choice_of_visits(
    mode: str, adapted: Callable[..., Any], make_text: Callable[..., Any]
) -> None:
    model, packed = adapted("dory"), make_text(lengths=(9, 20, 9, 12))
    task = text_task(packed)
    found = ablate_heads(model, task, mode=mode, heads=(1, 2))
    assert found.visits == ((1,), (2,), (3,), (1, 2, 3)) and found.layers == (1, 2)
    tokens, segments = torch.from_numpy(task.tokens).long(), torch.from_numpy(task.segments)

    def loss(*chain: Any) -> float:
        with intervene(model, *chain):
            return float(model(tokens, segments, return_type="loss").double().nansum())

    assert found.intact.sum() == pytest.approx(loss(), rel=1e-5)
    over = site_means(model, packed, ["PV"])
    by_hand = {"zero": lambda **at: zero("PV", **at), "mean": lambda **at: mean("PV", over, **at)}
    if mode in by_hand:
        for i, visits in enumerate(found.visits):
            expected = loss(by_hand[mode](layer=2, visit=visits, head=1)) - loss()
            assert found.change[:, i, 1, 0].sum() == pytest.approx(expected, rel=1e-3, abs=2e-4)
    assert np.isfinite(found.change).all() and (np.abs(found.change).sum(0) > 0).all()


def test_ablate_keeps_its_result_in_the_recording(recorded: Recorded, run: Run, words: Path) -> None:
    rec = recorded("dory")
    path, model = rec.recording.path, checkpoint(rec)
    code, out, err = run("ablate", path, "--model", model, "--metric", "text", "--text", words, "--max-tokens", 60)
    assert code == 0, err
    ablation = vl.open(path).ablations()["text-zero"]
    assert "text-zero" in out and ablation.effect.labels["layer"] == [1, 2]
    for wrong, said in (
        (("--layers", "0,9", "--again"), "expected layers among 0..3"),
        (("--layers", "a"), "numbers such as 2,3"),
        (("--metric", "dyck"), "error:"),
    ):
        code, _, err = run("ablate", path, "--model", model, "--metric", "text", "--text", words, *wrong)
        assert code == 1 and said in err and "Traceback" not in err
    code, _, err = run("ablate", path, "--model", "nowhere")
    assert code == 1 and "no such checkpoint folder" in err


def test_what_is_left_out_is_told_with_the_reason(recorded: Recorded, run: Run, words: Path, tmp_path: Path) -> None:
    path = recorded("dory").recording.path
    code, out, _ = run("info", path)
    assert (
        code == 0
        and "4 heads, dense" in out
        and "note       attn_write and moe_write are the normalised outputs" in out
    )
    code, out, _ = run("info", path, "--measures")
    told = {names: why.strip() for names, why in zip(out.splitlines(), out.splitlines()[1:], strict=False)}
    why = next(why for names, why in told.items() if names.startswith("left out: ") and "update_cosine" in names)
    assert code == 0 and why.startswith("nGPT interpolation")
    code, _, err = run("export", path, "update_cosine", "-o", tmp_path / "x.csv")
    assert code == 1 and "update_cosine was left out of this model: nGPT" in err.replace("\n", " ")
    hrm = recorded("hrm_text")
    code, _, err = run("ablate", hrm.recording.path, "--model", checkpoint(hrm), "--metric", "text", "--text", words)
    said = err.replace("\n", " ")
    assert code == 1 and "layers 0, 1 run 6 times; layers 2, 3 run 2 times" in said and "--layers 0,1" in said


def test_a_recording_of_another_loop_count_is_not_ablated(
    recorded: Recorded, run: Run, words: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.symlink_to(checkpoint(recorded("dory")))
    config = json.loads((model / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (other / name).write_bytes((model / name).read_bytes())
    (other / "config.json").write_text(json.dumps({**config, "n_recurrent_loops": 2}))
    code, _, err = run(
        "ablate", recorded("dory").recording.path, "--model", other, "--metric", "text", "--text", words, "--again"
    )
    assert code == 1 and "has 8 steps, the model as loaded 6" in err


def test_experiments_on_a_checkpoint_of_transformers(recorded: Recorded, run: Run, words: Path) -> None:
    model = checkpoint(recorded("dory"))
    code, out, err = run("experiment", "skip_visit", "--model", model, "--text", words, "--max-tokens", 60, "--json")
    assert code == 0, err
    assert json.loads(out)["results"]["skip_block"]["labels"]["visit"] == ["1", "2", "3"]
    for name, said in (
        ("routing_dynamics", "no site 'experts': its feed-forward layers are dense"),
        ("patching", "needs prompts"),
    ):
        code, _, err = run("experiment", name, "--model", model, "--text", words, "--max-tokens", 60)
        assert code == 1 and said in err and "Traceback" not in err


def test_a_notebooks_model_of_transformers(recorded: Recorded, words: Path) -> None:
    model = vl.load(checkpoint(recorded("dory")))
    assert "no experts" in repr(model) and "3 visits" in model._repr_html_()
    run = model.run("w5 w9 w7 w30 w12")
    assert run.tokens[0] == "<bos>" and run.site("Q", layer=1, visit=2).shape == (6, 4, 8)
    frozen = run.with_(vl.do.take("V", layer=1, visit=2))
    assert torch.equal(frozen.site("V", 1, 2), run.site("V", 1, 1)) and frozen.loss.shape == (5,)
    assert float(run.diff(run.with_()).divergence.abs().max()) == 0 < float(run.diff(frozen).divergence.abs().max())
    maps = run.attention(layer=2, head=1)
    np.testing.assert_allclose(np.nansum(maps.panels["visit 3"], 1), 1, rtol=1e-5)
    assert not torch.equal(model.with_loops(5).run("w5 w9").logits, model.run("w5 w9").logits)
    with pytest.raises(InputError, match="no site 'experts'"):
        run.experts(layer=1)
    sample = model.sample(words, max_tokens=50)
    assert model.experiment("skip_visit", sample).skip_block.documents == sample.documents
    moe = vl.load(checkpoint(recorded("olmoe")))
    table = moe.run("w5 w9 w7").experts(layer=1).panels["visit 1"]
    assert table.shape == (4, 7) and (table > 0).sum(1).tolist() == [3] * 4

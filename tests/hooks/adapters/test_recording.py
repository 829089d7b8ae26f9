"""From a checkpoint folder of transformers to statistics and figures, for every family, by the public calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import visitlens as vl
from visitlens.errors import RecordingError
from visitlens.hooks.adapters.adapted_model import AdaptedModel
from visitlens.probe.gallery.write_figures import prepare
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.recorded_run import RecordedRun

REFUSED = {
    "dory": {"update_cosine": "nGPT interpolation", "attn_write_rms": "nGPT", "shared_experts": "dense"},
    "inkling2_loop_text": {"resid_rms": "partial sum", "router_entropy": "sigmoids"},
    "hrm_text": {"gate_overlap": "dense"},
    "albert": {"update_cosine": "LayerNorm"},
    "zamba": {"update_rms": "Mamba"},
    "zamba2": {"moe_write_rms": "Mamba"},
    "deepseek_v3": {"router_entropy": "sigmoids"},
    "llama": {"expert_load": "dense"},
}


def test_record_then_statistics_then_figures(
    family: str, recorded: Callable[[str], RecordedRun], looped_recording: RecordedRun, adapted: Callable[..., Any]
) -> None:
    run = recorded(family)
    model: AdaptedModel = adapted(family)
    assert run.plan == model.plan and run.recording.complete
    for name in run.measures:
        stat = run.stat(name)
        assert stat.values.shape == tuple(len(stat.labels[axis]) for axis in stat.axes)
        totals = run.recording.totals[name]
        assert not totals.non_finite.any(), f"{name}: what a layer doesn't have is left out, not lost"
        assert totals.count.any(), name
    for name, reason in REFUSED.get(family, {}).items():
        if run.looped or name in ("router_entropy", "expert_load"):
            with pytest.raises(RecordingError, match=f"{name} was left out of this model: .*{reason}"):
                run.stat(name)
    if "experts" not in model.config.missing:
        layer = model.plan.steps[-1].layer
        ids, gates = run.recording.experts(layer, 1)
        assert ids.shape == gates.shape == (run.recording.tokens, 3)
    said: list[str] = []
    pair = Pair(run, None) if run.looped else Pair(looped_recording, run)
    drawings = prepare(pair, None, said.append)
    assert drawings and all(drawing.figure.data(pair)["series"] for drawing in drawings)
    if family in ("gpt_oss", "inkling2_loop_text"):
        learned = run.recording.token_stat("learned_sink_mass")
        assert bool(((learned > 0) & (learned < 1)).all()) and run.stat("learned_sink_mass").values.shape == (
            len(model.plan),
            4,
        )
    else:
        assert "learned_sink_mass" not in run.measures
    guards = {guard["name"]: guard["ok"] for guard in run.recording.provenance["guards"]}
    assert (
        guards["observation"]
        and guards["plan"]
        and guards["documents"]
        and guards["padding"]
        and guards["attention rows"]
    )
    if family == "inkling2_loop_text":  # everything that needs no residual stream and no softmax router
        assert {"token_overlap", "stage_cosine", "expert_overlap"} <= {
            d.figure.slug.replace("-", "_") for d in drawings
        }


def test_more_than_two_and_ragged_visits_make_square_tables(recorded: Callable[[str], RecordedRun]) -> None:
    """HRM's L layers have six visits, its H layers two: every pair is measured, and a pair can be asked for."""
    run = recorded("hrm_text")
    assert run.plan.visits == {0: 6, 1: 6, 2: 2, 3: 2}
    stat = run.stat("stage_cosine")
    assert len(stat.labels["pair"]) == 2 * 15 + 2
    table = run.visit_matrix("stage_cosine", layer=0)
    assert table.axes == ("visit", "later_visit", "stage") and table.values.shape == (6, 6, 6)
    one = stat.sel(pair=lambda pair: pair.layer == 0 and (pair.earlier.visit, pair.later.visit) == (2, 5))
    np.testing.assert_array_equal(table.sel(visit=2, later_visit=5).values, one.values[0])
    np.testing.assert_array_equal(table.sel(visit=5, later_visit=2).values, one.values[0])
    assert np.isnan(table.sel(visit=3, later_visit=3).values).all()
    low, high = table.interval()
    assert bool((low[0, 1] <= high[0, 1]).all())


def test_the_command_records_a_transformers_checkpoint(
    run: Callable,
    make_hf: Callable[..., Any],
    words: Path,
    save_tokenizer: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "visitlens.kernels.attention.dispatch._numba_is_installed", lambda: False
    )  # compiling takes longer
    make_hf("mixtral").save_pretrained(tmp_path / "mixtral")
    save_tokenizer(tmp_path / "mixtral")

    out = tmp_path / "m.vlens"
    arguments = (tmp_path / "mixtral", words, "--out", out, "--context", 40)
    assert run("record", *arguments, "--level", "activations", "--sites", "Q,PV,moe_write")[0] == 0
    rec = vl.open(out)
    assert rec.recording.activation("Q", 1, 1).shape == (rec.recording.tokens, 4, 4)
    code, text, _ = run("info", out)
    assert code == 0 and "3 layers" in text and "unlooped" in text
    code, _, err = run("record", *arguments[:3], tmp_path / "n.vlens", "--steps", 4)
    assert (
        code == 1
        and "mixtral takes no option 'steps': it runs its layers as often as its configuration says; it takes none"
        in err
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "gpt2"}')
    code, _, err = run("record", tmp_path / "empty", words, "--out", tmp_path / "n.vlens")
    assert code == 1 and "transformers can't load it" in err


def test_a_model_without_an_adapter_is_refused_with_those_there_are() -> None:
    import transformers

    from visitlens.hooks.adapters.adapt import adapt

    sizes = {"hidden_size": 4, "word_embed_proj_dim": 4, "ffn_dim": 8, "num_attention_heads": 1, "vocab_size": 9}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(num_hidden_layers=1, **sizes))
    with pytest.raises(vl.VisitlensError, match="no adapter for model type 'opt'; there are albert, deepseek_v3, dory"):
        adapt(model)
    assert torch.is_grad_enabled()

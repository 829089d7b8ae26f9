"""What a recording holds is what the model did: tokens, routing, per-token scalars, activations, maps, summary."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from visitlens.errors import InputError, RecordingError
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.core.sites import ACTIVATION_SITES
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.recording.format.totals import GroupTotals
from visitlens.hooks.recording.read.recording import Recording
from visitlens.hooks.recording.write.record import RecordingOptions, bytes_per_token, record
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.reading.recorded_run import RecordedRun

MakeRecording = Callable[..., RecordedRun]


def assert_same_totals(one: dict[str, GroupTotals], two: dict[str, GroupTotals], tolerance: float) -> None:
    assert one.keys() == two.keys()
    for name in one:
        for key in ("count", "left_out", "non_finite"):
            np.testing.assert_array_equal(getattr(one[name], key), getattr(two[name], key), err_msg=f"{name}.{key}")
        np.testing.assert_allclose(one[name].total, two[name].total, rtol=tolerance, atol=tolerance, err_msg=name)
        assert one[name].attributes == two[name].attributes


def raw(model: LoopedMoE, text: PackedTokens, sites: tuple[str, ...], batch: int = 1) -> dict[tuple[str, int], Any]:
    """(site, step) -> [token, ...] over real tokens, straight from the model."""
    parts: dict[tuple[str, int], list[torch.Tensor]] = {}
    for first in range(0, len(text.tokens), batch):
        rows = slice(first, first + batch)
        segments = torch.from_numpy(text.segments[rows])
        with capture(model, sites) as captured, torch.inference_mode():
            model(torch.from_numpy(text.tokens[rows]), segments, return_type="none")
        for site in sites:
            for step in range(len(model.plan)):
                parts.setdefault((site, step), []).append(captured.at(site, step)[segments >= 0])
    return {key: torch.cat(values) for key, values in parts.items()}


# Round trips


@pytest.mark.parametrize("shard_tokens", [1, 70, 10**6])
def test_tokens_experts_and_gates_come_back(
    shard_tokens: int, model: LoopedMoE, text: PackedTokens, make_recording: MakeRecording, tmp_path: Path
) -> None:
    rec = make_recording(model, text, tmp_path / "r.vlens", shard_tokens=shard_tokens).recording
    assert len(rec.shards) == {1: len(text.tokens), 70: -(-len(text.tokens) // 3), 10**6: 1}[shard_tokens]
    real = text.segments >= 0
    table = rec.token_table()
    np.testing.assert_array_equal(table["id"], text.tokens[real])
    np.testing.assert_array_equal(table["segment"], text.segments[real])
    starts = {s: i for i, s in reversed(list(enumerate(text.segments[real])))}
    np.testing.assert_array_equal(table["pos"], [i - starts[s] for i, s in enumerate(text.segments[real])])
    expected = raw(model, text, ("experts", "gates"))
    for step in model.plan.steps:
        experts, gates = rec.experts(step.layer, step.visit)
        np.testing.assert_array_equal(experts, expected["experts", step.index])
        np.testing.assert_array_equal(gates, expected["gates", step.index].half())
    assert (rec.tokens, rec.documents, rec.complete) == (text.num_tokens, len(text.document_hash), True)


def test_per_token_scalars_average_to_the_summary(
    model: LoopedMoE, text: PackedTokens, make_recording: MakeRecording, tmp_path: Path
) -> None:
    run = make_recording(model, text, tmp_path / "r.vlens", shard_tokens=100)
    stored = {"shared_expert_count", "sink_mass", "attention_entropy", "top1_match", "top8_overlap", "mass_overlap"}
    stored |= {"resid_rms", "update_rms", "relative_update", "attn_write_rms", "moe_write_rms"}
    for name in stored:
        values = run.recording.token_stat(name).astype(float)
        totals = run.recording.totals[name]
        assert values.shape == (totals.total.shape[1], text.num_tokens, *totals.total.shape[2:])
        np.testing.assert_array_equal(np.isnan(values).sum(1), totals.left_out)
        np.testing.assert_allclose(np.nanmean(values, axis=1), run.stat(name).values, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_activations_come_back_without_loss(
    dtype: torch.dtype, make_model, text: PackedTokens, make_recording: MakeRecording, tmp_path: Path
) -> None:
    """bfloat16 is kept as its bits and read as float32."""
    model = make_model(2, dtype=dtype)
    run = make_recording(
        model, text, tmp_path / "r.vlens", level="activations", sites=ACTIVATION_SITES, shard_tokens=80
    )
    expected = raw(model, text, ACTIVATION_SITES)
    for site in ACTIVATION_SITES:
        for step in model.plan.steps:
            got = run.recording.activation(site, step.layer, step.visit)
            assert got.dtype == (np.float64 if dtype == torch.float64 else np.float32)
            np.testing.assert_array_equal(got, expected[site, step.index].to(torch.float64), err_msg=site)


@pytest.mark.parametrize("span", [(0, 5), (30, 95), (100, 10**9)])
def test_activations_of_a_token_range_come_back(
    span: tuple[int, int], model: LoopedMoE, text: PackedTokens, make_recording: MakeRecording, tmp_path: Path
) -> None:
    """Across contexts of 32 and shards of two."""
    options = {"sites": ("Q", "resid"), "activation_tokens": span, "shard_tokens": 60}
    run = make_recording(model, text, tmp_path / "r.vlens", level="activations", **options)
    expected = raw(model, text, ("Q", "resid"))
    for site in ("Q", "resid"):
        np.testing.assert_array_equal(run.recording.activation(site, 2, 2), expected[site, 4][slice(*span)])
    assert len(run.recording.token_table()["id"]) == text.num_tokens


def test_maps_are_the_attention_patterns_of_whole_contexts(
    model: LoopedMoE, text: PackedTokens, make_recording: MakeRecording, tmp_path: Path
) -> None:
    run = make_recording(model, text, tmp_path / "r.vlens", level="maps", shard_tokens=64)
    cache = model.run_with_cache(torch.from_numpy(text.tokens), torch.from_numpy(text.segments))[1]
    for step in model.plan.steps:
        maps = run.recording.attention_maps(step.layer, step.visit)
        expected = cache[f"blocks.{step.layer}.visit.{step.visit}.attn.hook_pattern"]
        assert maps.dtype == np.float16 and maps.shape == (len(text.tokens), 4, 32, 32)
        np.testing.assert_allclose(maps, expected, atol=5e-4)


def test_a_recording_describes_its_run(
    model: LoopedMoE, text: PackedTokens, make_recording: MakeRecording, tmp_path: Path
) -> None:
    rec = make_recording(model, text, tmp_path / "r.vlens", level="summary", groups=4).recording
    assert rec.config == model.config.to_dict()
    assert rec.plan == model.plan
    assert rec.level == "summary" and rec.run["config"]["dtype"] == "float32"
    assert rec.run["config"]["data_sha256"] == text.sha256
    assert rec.provenance["note"] == "random weights"
    for shard in rec.shards:
        data = (rec.path / "shards" / shard["name"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (shard["bytes"], shard["sha256"])
    assert {t.total.shape[0] for n, t in rec.totals.items() if n != "expert_transitions"} <= {1, 2, 3, 4}


# The summary


def test_the_summary_does_not_depend_on_the_size_of_shards(
    model: LoopedMoE, text: PackedTokens, make_recording: MakeRecording, tmp_path: Path
) -> None:
    one, many = (
        make_recording(model, text, tmp_path / f"{n}.vlens", shard_tokens=n, level="summary") for n in (10**6, 1)
    )
    assert len(many.recording.shards) == len(text.tokens) > len(one.recording.shards)
    assert_same_totals(one.recording.totals, many.recording.totals, 1e-9)


def test_the_summary_does_not_depend_on_the_batch_in_float64(
    make_model, text: PackedTokens, make_recording: MakeRecording, tmp_path: Path
) -> None:
    model = make_model(2, dtype=torch.float64)
    one, three = (make_recording(model, text, tmp_path / f"{n}.vlens", batch=n, level="summary") for n in (1, 3))
    assert_same_totals(one.recording.totals, three.recording.totals, 1e-9)


@pytest.mark.parametrize("groups", [128, 4])
def test_every_token_is_summed_in_the_group_of_its_document(
    groups: int, model: LoopedMoE, text: PackedTokens, make_recording: MakeRecording, tmp_path: Path
) -> None:
    rec = make_recording(model, text, tmp_path / "r.vlens", level="summary", groups=groups, shard_tokens=70).recording
    of_token = text.document_groups(groups)[text.segment_document[text.segments[text.segments >= 0]]]
    resid = raw(model, text, ("resid",))["resid", 3].double()
    size = (resid.square().mean(1)).sqrt().numpy()
    totals = rec.totals["resid_rms"]
    np.testing.assert_array_equal(totals.count[:, 3], np.bincount(of_token))
    np.testing.assert_allclose(totals.total[:, 3], np.bincount(of_token, size), rtol=1e-6)


def test_every_level_has_the_same_summary(
    model: LoopedMoE, text: PackedTokens, make_recording: MakeRecording, tmp_path: Path
) -> None:
    levels: dict[str, dict] = {"summary": {}, "tokens": {}, "activations": {"sites": ("V",)}, "maps": {}}
    totals = [
        make_recording(model, text, tmp_path / f"{level}.vlens", level=level, **options).recording.totals
        for level, options in levels.items()
    ]
    for other in totals[1:]:
        assert_same_totals(totals[0], other, 0)


def test_progress_counts_tokens_up_to_all_of_them(
    model: LoopedMoE, text: PackedTokens, make_recording: MakeRecording, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    make_recording(model, text, tmp_path / "r.vlens", shard_tokens=64, on_progress=lambda *p: seen.append(p))
    done = [d for d, _ in seen]
    assert done == np.cumsum((text.segments >= 0).sum(1)).tolist()
    assert {total for _, total in seen} == {text.num_tokens}


def test_a_reader_sees_whole_shards_while_more_are_written(
    model: LoopedMoE, text: PackedTokens, make_recording: MakeRecording, tmp_path: Path
) -> None:
    """Shards of one context: when one is handed over, the one before is acknowledged. Totals may be of a shard more: the summary
    is written before the manifest."""
    path, seen = tmp_path / "r.vlens", []
    whole = np.cumsum((text.segments >= 0).sum(1)).tolist()

    def look(done: int, total: int) -> None:
        if (path / "manifest.json").is_file():
            rec = Recording(path)
            counted = int(rec.totals["resid_rms"].count[:, 0].sum())
            assert rec.tokens == len(rec.token_table()["id"]) < total and not rec.complete
            assert {rec.tokens, counted} <= set(whole) and rec.tokens <= counted < total
            seen.append(rec.tokens)

    make_recording(model, text, path, shard_tokens=1, on_progress=look)
    assert len(set(seen)) >= 2 and seen == sorted(seen)


# What a level doesn't hold, and impossible options


def test_a_summary_refuses_token_access_and_says_how_to_get_it(
    model: LoopedMoE, text: PackedTokens, make_recording: MakeRecording, tmp_path: Path
) -> None:
    rec = make_recording(model, text, tmp_path / "r.vlens", level="summary").recording
    for read in (rec.token_table, lambda: rec.experts(1, 1), lambda: rec.token_stat("sink_mass")):
        with pytest.raises(RecordingError, match="aren't kept at level 'summary'; record again with --level tokens"):
            read()
    with pytest.raises(RecordingError, match=r"'Q' wasn't recorded .*--level activations --sites Q"):
        rec.activation("Q", 1, 1)
    with pytest.raises(RecordingError, match=r"no attention maps .*--level maps"):
        rec.attention_maps(1, 1)


def test_what_was_never_there_is_refused_by_name(looped_recording: RecordedRun) -> None:
    rec = looped_recording.recording
    with pytest.raises(InputError, match="no site 'R'"):
        rec.activation("R", 1, 1)
    with pytest.raises(InputError, match="no visit 3 of layer 1"):
        rec.experts(1, 3)
    with pytest.raises(InputError, match="no dataset stats/sink"):
        rec.token_stat("sink")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "all"}, "level among summary, tokens, activations, maps, got 'all'"),
        ({"level": "activations"}, "needs sites: some of resid, X"),
        ({"level": "tokens", "sites": ("Q",)}, "kept at level 'activations'; the level is 'tokens'"),
        ({"level": "activations", "sites": ("P",)}, "no site 'P'"),
        ({"groups": 0}, "at least 1"),
        ({"batch": 0}, "at least 1"),
        ({"shard_tokens": 0}, "at least 1"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        RecordingOptions(**options)


def test_maps_of_long_contexts_are_refused(make_model, make_text, make_collector, tmp_path: Path) -> None:
    model, text = make_model(2, context_length=300), make_text(lengths=(290,), context=300)
    with pytest.raises(InputError, match="at most 256 tokens, got 300"):
        record(model, text, tmp_path / "r", make_collector(model, text), RecordingOptions(level="maps"), provenance={})
    assert not (tmp_path / "r").exists()


def test_the_size_that_is_foretold_is_an_upper_bound_that_holds(
    model: LoopedMoE, make_text, make_collector, make_recording: MakeRecording, tmp_path: Path
) -> None:
    """Of a recording that is mostly vectors, which aren't compressed; small files have their HDF5 overhead."""
    text = make_text(seed=1, lengths=(30,) * 64)
    options = {"level": "activations", "sites": ACTIVATION_SITES}
    foretold = text.num_tokens * bytes_per_token(model, make_collector(model, text), RecordingOptions(**options))
    rec = make_recording(model, text, tmp_path / "r.vlens", **options).recording
    vectors = 6 * 4 * (4 * 16 + 2 * 4 * 4 + 2 * 2 * 4 + 16) * text.num_tokens  # 5 of H = 16, 2 heads, 2 kv heads
    written = sum(s["bytes"] for s in rec.shards)
    assert vectors < written < foretold * 1.2

"""Visits that leave tokens out: halting (a mask) and routing (the layer gets some of the tokens), on small re-implementations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.hooks.adapters.remote_code.tiny_ragged import Recursion
from torch import Tensor

import visitlens as vl
from visitlens.errors import InputError, PlanError
from visitlens.hooks.audit.guards import check
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.capture.generation import capture_generation
from visitlens.hooks.capture.step_values import StepValues
from visitlens.hooks.recording.format.totals import GroupTotals
from visitlens.hooks.recording.write.record import RecordingOptions, record
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.measures.collector import StatisticsCollector
from visitlens.probe.measures.statistic import Geometry
from visitlens.probe.reading.recorded_run import RecordedRun

TOKENS = torch.randint(3, 40, (2, 24), generator=torch.Generator().manual_seed(5))
SEGMENTS = torch.tensor([[0] * 10 + [1] * 14, [2] * 10 + [3] * 11 + [-1] * 3])


def totals_of(
    model: Any, tokens: Tensor, segments: Tensor
) -> tuple[StatisticsCollector, dict[str, GroupTotals], StepValues]:
    collector = StatisticsCollector(Geometry.of(model.plan, model.config.to_dict()), 1)
    with capture(model, sorted(collector.sites)) as captured:
        model(tokens, segments, return_type="none")
    values = StepValues(captured, segments, "torch")
    collector.update(values, torch.zeros(int((segments >= 0).sum()), dtype=torch.long))
    return collector, collector.take(), values


def test_a_halted_token_is_at_no_later_visit_and_every_pair_counts_those_at_both(halting: Any) -> None:
    """Of ids 4, 5, 6, 7, 8, 9 (halting after visits 1, 2, 3, 4, 1, 2), 6, 4, 2, 1 tokens are at visits 1 to 4; a pair has the
    tokens of its later visit."""
    tokens = torch.tensor([[4, 5, 6, 7, 8, 9]])
    _, totals, values = totals_of(halting, tokens, torch.zeros_like(tokens))
    assert [(s.layer, s.visit) for s in halting.plan.steps] == [(0, 1), (1, 1), (1, 2), (1, 3), (1, 4), (2, 1)]
    visited = [values.visited(step) for step in range(6)]
    assert visited[0] is None and visited[5] is None
    assert [v.tolist() for v in visited[1:5] if v is not None] == [
        [True] * 6,
        [False, True, True, True, False, True],
        [False, False, True, True, False, False],
        [False, False, False, True, False, False],
    ]
    np.testing.assert_allclose(totals["visit_share"].total[0], [6, 6, 4, 2, 1, 6])
    assert totals["visit_share"].count[0].tolist() == [6] * 6
    later = [4, 2, 1, 2, 1, 1]  # pairs (1,2) (1,3) (1,4) (2,3) (2,4) (3,4)
    np.testing.assert_allclose(totals["both_visits_share"].total[0], later)
    stages = totals["stage_cosine"]
    assert stages.count[0, :, 1].tolist() == later and stages.left_out[:, 1].tolist() == [6 - n for n in later]
    assert not stages.non_finite.any()
    assert totals["token_norm_ratio"].count[0, :, 0].tolist() == later
    assert totals["resid_rms"].count[0].tolist() == [6, 6, 4, 2, 1, 6]
    cosines = totals["update_cosine"].count[0]
    assert cosines[2].tolist() == [4, 4, 4, 2, 1, 4] and cosines[0].tolist() == [6, 6, 4, 2, 1, 6]
    # The first token sees one key and is left out; it is halted from visit 2 on anyway.
    assert totals["top1_match"].count[0, :, 0].tolist() == later
    assert totals["mass_overlap_control"].count[0, :, 0].tolist() == [0, 5, 4, 2, 1, 0]


def test_the_values_are_those_of_the_tokens_that_were_there(halting: Any) -> None:
    """By hand from the captured queries: the mean cosine of Q between visits 1 and 3 over the two tokens at both."""
    tokens = torch.tensor([[4, 5, 6, 7, 8, 9]])
    _, totals, values = totals_of(halting, tokens, torch.zeros_like(tokens))
    q = [values.site("Q", step).flatten(1).double() for step in (1, 3)]
    expected = torch.cosine_similarity(*q, dim=1)[[2, 3]].sum()
    np.testing.assert_allclose(totals["stage_cosine"].total[0, 1, 1], expected, rtol=1e-5)


def test_a_loop_that_ends_early_leaves_its_last_visits_empty(halting: Any) -> None:
    """Ids of 0 and 1 modulo 4 alone: two visits run. Of two documents of unequal length, one ends early."""
    tokens = torch.tensor([[4, 5, 8, 9]])
    with capture(halting, ["resid", "Q"]) as captured:
        halting(tokens)
    assert [int(captured.held("visited", step).sum()) for step in (1, 2, 3, 4)] == [4, 2, 0, 0]  # type: ignore[union-attr]  # held: a tensor
    with pytest.raises(InputError, match=r"step 3 \(layer 1, visit 3\) has no tokens: .* halted"):
        captured.at("Q", 3)
    _, totals, _ = totals_of(halting, tokens, torch.zeros_like(tokens))
    assert (
        totals["stage_cosine"].count[0, :, 1].tolist() == [2, 0, 0, 0, 0, 0]
        and not totals["stage_cosine"].non_finite.any()
    )
    mixed, segments = torch.tensor([[4, 5, 8, 9, 7, 7, 7]]), torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    _, totals, values = totals_of(halting, mixed, segments)
    assert totals["visit_share"].total[0].tolist() == [7, 7, 5, 3, 3, 7]
    assert values.visited(4).tolist() == [False] * 4 + [True] * 3  # type: ignore[union-attr]  # held: a tensor
    assert not any(t.non_finite.any() for t in totals.values())


def test_a_layer_that_must_run_once_still_must(halting: Any) -> None:
    handle = halting.model.halt.register_forward_hook(lambda *_: torch.zeros(1))
    with capture(halting, ["resid"]), pytest.raises(PlanError, match=r"layer 2 ran where step 1 \(layer 1, visit 1\)"):
        halting(TOKENS)
    handle.remove()


def test_routed_tokens_are_put_back_in_their_places(recursive: Any) -> None:
    """Visits of 24, 18 and 12 tokens; what a visit has are the values of the gathered tokens, in their order."""
    assert [(s.layer, s.visit) for s in recursive.plan.steps] == [
        *[(0, 1), (1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3), (3, 1)]
    ]
    given: list[Tensor] = []
    layer = recursive.body.layers[2].block[0]
    handle = layer.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    with capture(recursive, ["resid", "Q", "K", "V", "P", "PV"]) as captured:
        plain = recursive(TOKENS)
    handle.remove()
    assert torch.equal(plain, recursive(TOKENS))
    there = captured.held("visited", 3)
    assert there is not None and there.sum(1).tolist() == [18, 18]
    assert captured.held("visited", 5).sum(1).tolist() == [12, 12]  # type: ignore[union-attr]  # held: a tensor
    assert bool((captured.held("visited", 5) <= there).all()), "who was left out once stays out"  # type: ignore[operator]  # held: a tensor
    resid = captured.get("resid", 1, 2)
    assert torch.equal(resid[there].unflatten(0, (2, 18)), given[0]) and bool(resid[~there].isnan().all())
    p = captured.get("P", 1, 2)
    assert not p.movedim(1, 3)[~there].any() and not p.permute(0, 3, 1, 2)[~there].any()
    context = (p @ captured.get("V", 1, 2).nan_to_num().transpose(1, 2).repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(context[there], captured.get("PV", 1, 2)[there], atol=1e-5, rtol=1e-4)


def test_chosen_among_tokens_that_are_all_computed(recursive: Any) -> None:
    """With shared keys the layer gets every token: a visit's are those that the model takes, rows are over all keys."""
    recursions = [layer for layer in recursive.body.layers if isinstance(layer, Recursion)]
    for recursion in recursions:
        recursion.shared_keys = True
    try:
        _, totals, values = totals_of(recursive, TOKENS, torch.arange(2)[:, None].expand(2, 24))
        with capture(recursive, ["Q"]) as captured:
            recursive(TOKENS)
    finally:
        for recursion in recursions:
            recursion.shared_keys = False
    assert [int(values.visited(step).sum()) for step in (1, 3, 5)] == [48, 36, 24]  # type: ignore[union-attr]  # known
    assert not captured.get("Q", 1, 3).isnan().any()
    assert totals["stage_cosine"].count[0, :, 1].tolist() == [36, 24, 24] * 2
    assert not any(t.non_finite.any() for t in totals.values())


def test_pairs_of_routed_visits_by_hand(recursive: Any) -> None:
    """Overlaps of attention at visits 2 and 3 from the maps: keys that one visit doesn't have count as mass 0."""
    _, totals, values = totals_of(recursive, TOKENS, SEGMENTS)
    with capture(recursive, ["P"]) as captured:
        recursive(TOKENS, SEGMENTS)
    at2, at3 = (values.visited(step) for step in (3, 5))
    assert at2 is not None and at3 is not None
    maps = [captured.get("P", 1, visit).transpose(1, 2)[SEGMENTS >= 0] for visit in (2, 3)]
    mass = torch.minimum(*maps).sum(-1)
    start = torch.tensor([0] * 10 + [10] * 14 + [24] * 10 + [34] * 11)
    seen = torch.tensor([[int(at[start[i] : i + 1].sum()) for i in range(45)] for at in (at2, at3)])
    counted = at2 & at3 & (seen.min(0).values > 1)
    number = [(p.layer, p.earlier.visit, p.later.visit) for p in recursive.plan.pairs].index((1, 2, 3))
    got = totals["mass_overlap"]
    assert got.count[0, number].tolist() == [int(counted.sum())] * 4 and 10 < int(counted.sum()) < 20
    np.testing.assert_allclose(got.total[0, number], mass[counted].sum(0), rtol=1e-4)
    eight = at2 & at3 & (seen.min(0).values > 8)
    assert totals["top8_overlap"].count[0, number].tolist() == [int(eight.sum())] * 4
    assert not any(t.non_finite.any() for t in totals.values())


def test_the_guards_of_routed_visits(recursive: Any) -> None:
    guards = {guard.name: guard for guard in check(recursive, TOKENS[:1])}
    assert (
        guards["cached generation"].ok is None and "looks at the whole sequence" in guards["cached generation"].detail
    )
    with pytest.raises(InputError, match="can't generate token by token: the choice looks at the whole sequence"):
        capture_generation(recursive, TOKENS[:1, :6], 2, ["resid"])
    assert guards["observation"].ok and guards["attention rows"].ok and guards["documents"].ok, guards


def test_the_recording_keeps_who_was_there_and_shows_n(
    recursive: Any, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    text = PackedTokens(TOKENS.int().numpy(), SEGMENTS.int().numpy(), np.arange(4), np.arange(4, dtype=np.uint64))
    collector = StatisticsCollector(Geometry.of(recursive.plan, recursive.config.to_dict()), 4)
    record(recursive, text, tmp_path / "r.vlens", collector, RecordingOptions(level="tokens"), provenance={})
    rec: RecordedRun = vl.open(tmp_path / "r.vlens")
    there = rec.recording.visited(1, 3)
    assert there.dtype == bool and there.sum() == 5 + 7 + 5 + 5 and rec.recording.visited(0, 1).all()
    stored = rec.recording.token_stat("sink_mass")
    assert np.isnan(stored[5][~there]).all() and not np.isnan(stored[5][there][1:]).all()
    share = rec.stat("visit_share")
    assert share.values[5] == there.mean() and share.counts is not None and share.counts.tolist() == [45] * 8
    cosine = rec.stat("stage_cosine").mean("stage")
    assert cosine.counts is not None and cosine.to_frame()["n"].min() == 22
    assert "n = 22" in repr(cosine) and "n = 22 to 32" in cosine._repr_html_()
    table = rec.visit_matrix("stage_cosine", layer=1)
    assert table.values.shape == (3, 3, 6) and table.counts is not None
    # Of documents of 10, 14, 10 and 11 tokens, three quarters (7, 10, 7, 8) and a half (5, 7, 5, 5).
    assert table.counts[..., 1].tolist() == [[0, 32, 22], [32, 0, 22], [22, 22, 0]]
    assert any("a visit has 49% to 100% of them" in warning for warning in rec.recording.warnings)
    code, out, _ = run("info", tmp_path / "r.vlens", "--measures")
    assert code == 0 and "both_visits_share" in out
    assert run("validate", tmp_path / "r.vlens")[0] == 0
    code, _, _ = run("export", tmp_path / "r.vlens", "stage_cosine", "-o", tmp_path / "s.csv")
    assert code == 0 and "n" in (tmp_path / "s.csv").read_text().splitlines()[0].split(",")
    code, out, _ = run("figures", tmp_path / "r.vlens", "--out", tmp_path / "f", "--formats", "json")
    data = json.loads((tmp_path / "f" / "stage-cosine.json").read_text())
    assert code == 0 and any("visits" in note and "n in the table" in note for note in data["notes"])

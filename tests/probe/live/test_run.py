"""What a live run holds, against the model itself; its tables by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.tiny_live import PROMPT, hooks_left, ids_of

from visitlens.errors import InputError
from visitlens.probe.live.live_model import Tracer
from visitlens.probe.live.live_run import LiveRun, log_softmax

# Against the model itself


@pytest.mark.parametrize("visits", [1, 2, 3])
def test_observing_leaves_the_logits_bit_identical(make_live: Callable[..., Tracer], visits: int) -> None:
    live = make_live(visits)
    run = live.run(PROMPT)
    assert torch.equal(torch.from_numpy(run.logits), live.model(ids_of(run))[0])
    assert hooks_left(live.model) == 0


def test_what_a_run_holds_is_what_the_model_had(live: Tracer, run: LiveRun) -> None:
    _, cache = live.model.run_with_cache(ids_of(run))
    for step in run.plan.steps:
        at = f"blocks.{step.layer}.visit.{step.visit}."
        for head in range(run.heads):
            expected = cache[at + "attn.hook_pattern"][0, head].numpy()
            np.testing.assert_allclose(run.pattern(step.layer, step.visit, head), expected, atol=1e-6)
            np.testing.assert_allclose(run.sink_mass[step.index, :, head], expected[:, 0], atol=1e-6)
        assert (run.experts[step.index] == cache[at + "mlp.hook_expert_indices"][0].numpy()).all()
        assert (run.gates[step.index] == cache[at + "mlp.hook_expert_weights"][0].numpy()).all()
        attn, moe = cache[at + "hook_attn_out"][0], cache[at + "hook_mlp_out"][0]
        size = attn.shape[-1] ** 0.5
        np.testing.assert_allclose(run.update_rms[step.index], (attn + moe).norm(dim=-1) / size, rtol=1e-5)
        np.testing.assert_allclose(
            run.resid_rms[step.index], cache[at + "hook_resid_pre"][0].norm(dim=-1) / size, rtol=1e-5
        )


def test_each_lens_is_the_output_read_early(live: Tracer, run: LiveRun) -> None:
    _, cache = live.model.run_with_cache(ids_of(run))
    final = log_softmax(run.logits)
    step = run.plan.step(2, 1)
    state = cache["blocks.2.visit.1.hook_resid_post"][0]
    here = (live.model.ln_final(state) @ live.model.embed.W_E.T).double().log_softmax(-1).numpy()
    np.testing.assert_allclose(run.lens.entropy[step.index], -(np.exp(here) * here).sum(-1), atol=1e-4)
    np.testing.assert_allclose(run.lens.kl[step.index], (np.exp(final) * (final - here)).sum(-1), atol=1e-4)
    np.testing.assert_allclose(
        run.lens.answer[step.index], np.exp(here[np.arange(len(run)), final.argmax(-1)]), atol=1e-5
    )
    assert (run.lens.tokens[step.index, :, 0] == here.argmax(-1)).all()
    assert (run.lens.kl[-1] == 0).all(), "the last step's lens is the output"
    # Layers 1 and 2 are looped, 3 is the coda: after the last looped step the coda lens is the output, exactly.
    assert run.coda_lens is not None
    last = run.plan.step(2, 2).index
    assert (run.coda_lens.kl[last] == 0).all() and (run.coda_lens.kl[last - 1] > 0).any()
    assert np.isnan(run.coda_lens.entropy[last + 1 :]).all()
    assert [row.layer for row in run.readout(3, coda=True)] == [0, 1, 2, 1, 2]
    assert len(run.readout(3)) == 6 and run.readout()[-1].kl == 0


def test_a_lens_read_in_chunks_is_the_same(live: Tracer, run: LiveRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visitlens.probe.live.live_model._LENS_ELEMENTS", 7 * 259)
    again = live.run(PROMPT)
    np.testing.assert_allclose(again.lens.kl, run.lens.kl, atol=1e-5)
    assert (again.lens.tokens == run.lens.tokens).all()


def test_half_precision_and_no_coda(make_live: Callable[..., Tracer]) -> None:
    live = make_live(2, dtype=torch.bfloat16, loop_stop=4)
    run = live.run(PROMPT)
    assert run.coda_lens is None and torch.equal(torch.from_numpy(run.logits), live.model(ids_of(run))[0].float())
    with pytest.raises(InputError, match="no layers after a loop"):
        run.readout(coda=True)


# Tables, by hand


def with_weights(run: LiveRun, layer: int, weights: dict[int, list[float]]) -> LiveRun:
    """Head 0's attention at each visit of a layer in proportion to these weights, whatever the query."""
    queries, keys = run.queries.copy(), run.keys.copy()
    for visit, row in weights.items():
        step = run.plan.step(layer, visit).index
        queries[step, :, 0], keys[step, :, 0] = 0, 0
        queries[step, :, 0, 0] = queries.shape[-1] ** 0.5
        keys[step, : len(row), 0, 0] = np.log(row)
    return replace(run, queries=queries, keys=keys)


def test_top_keys_kept_lost_and_gained(run: LiveRun) -> None:
    earlier = [10.0, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    by_hand = with_weights(run, 1, {1: earlier, 2: earlier[::-1]})
    found = by_hand.top_keys(1, 0, query=9)
    assert {k.position for k in found if k.status == "kept"} == {2, 3, 4, 5, 6, 7}
    assert [k.position for k in found if k.status == "lost"] == [0, 1]
    assert [k.position for k in found if k.status == "gained"] == [9, 8]
    assert found[-1].earlier == pytest.approx(2 / 55) and found[-1].later == pytest.approx(9 / 55)
    assert by_hand.difference(1, 0)[9, 0] == pytest.approx(1 / 55 - 10 / 55)
    assert {k.status for k in by_hand.top_keys(1, 0, query=5)} == {"kept"}, "a query with 6 keys has no other"


def test_equal_weights_go_to_the_smaller_position(run: LiveRun) -> None:
    level = with_weights(run, 1, {1: [1.0] * 12, 2: [1.0] * 12})
    assert [k.position for k in level.top_keys(1, 0, query=11)] == list(range(8))


def test_experts_kept_dropped_and_new(run: LiveRun) -> None:
    steps, tokens = len(run.plan), len(run)
    experts = np.broadcast_to(np.arange(8), (steps, tokens, 8)).copy()
    gates = np.full((steps, tokens, 8), 0.125, dtype=np.float32)
    later = run.plan.step(1, 2).index
    experts[later], gates[later] = np.arange(4, 12), np.linspace(0.2, 0.05, 8)
    by_hand = replace(run, experts=experts, gates=gates)
    kept = by_hand.experts_kept(1)
    assert kept is not None and (kept == 4).all()
    changes = by_hand.expert_changes(1, 3)
    assert [(c.expert, c.status) for c in changes] == [
        *((e, "kept") for e in (4, 5, 6, 7)),
        *((e, "dropped") for e in (0, 1, 2, 3)),
        *((e, "new") for e in (8, 9, 10, 11)),
    ]
    assert changes[0].earlier == 0.125 and changes[0].later == pytest.approx(0.2)
    assert changes[4].later is None and changes[-1].earlier is None


def test_a_layer_with_one_visit_has_nothing_to_compare(run: LiveRun) -> None:
    assert run.pair(0) is None and run.experts_kept(0) is None
    assert {k.later for k in run.top_keys(0, 0, -1)} == {None} == {c.later for c in run.expert_changes(0, -1)}
    with pytest.raises(InputError, match=r"layer 0 has one visit; layers with more are \[1, 2\]"):
        run.difference(0, 0)


def test_three_visits_any_pair(make_live: Callable[..., Tracer]) -> None:
    run = make_live(3).run(PROMPT)
    assert len(run.plan.pairs) == 6
    np.testing.assert_allclose(
        run.difference(1, 0, (1, 3)), run.difference(1, 0, (1, 2)) + run.difference(1, 0, (2, 3)), atol=1e-6
    )
    layers, overlap = run.head_overlap((2, 3))
    earlier, later = run.pattern(2, 2, 1), run.pattern(2, 3, 1)
    assert layers == [1, 2] and overlap[1, 1] == pytest.approx(np.minimum(earlier, later).sum(-1)[1:].mean(), abs=1e-5)
    assert run.most_changed_heads((2, 3), n=1)[0][2] == pytest.approx(overlap.min())
    for wrong in ((2, 1), (1, 4), (1, 1)):
        with pytest.raises(InputError):
            run.pair(1, wrong)

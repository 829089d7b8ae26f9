"""Silencing heads, against changed weights and by hooks; every head in turn; progress and stopping."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.support.tiny_live import PROMPT, hooks_left, ids_of

from visitlens.probe.live.head_scan import KINDS
from visitlens.probe.live.live_model import Tracer
from visitlens.probe.live.live_run import LiveRun

# Ablation


@pytest.mark.parametrize(("layer", "visits"), [(0, (1,)), (1, (1, 2)), (3, (1,))])
def test_zero_ablation_everywhere_is_the_weight_taken_out(
    make_live: Callable[..., Tracer], live: Tracer, run: LiveRun, layer: int, visits: tuple[int, ...]
) -> None:
    """W_O without the head's rows, at every visit of its layer."""
    head, d = 2, live.config.head_dim
    without = make_live()
    without.model.blocks[layer].attn.W_O[head * d : (head + 1) * d] = 0
    ablation = live.ablate(run, layer, head, visits)
    np.testing.assert_allclose(ablation.logits, without.run(PROMPT).logits, atol=1e-5)
    assert ablation.kl() > 0 and hooks_left(live.model) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_ablation_at_one_visit_leaves_the_other_alone(live: Tracer, run: LiveRun, kind: str) -> None:
    name = "blocks.1.visit.2.attn.hook_z"
    carried = live.model.run_with_cache(ids_of(run))[1][name][0, :, 3]
    order = np.append(0, np.random.default_rng(0).permutation(np.arange(1, len(run))))
    elsewhere = live.model.run_with_cache(ids_of(run)[:, order])[1][name][0, :, 3]

    def silence(z: torch.Tensor, hook: object) -> torch.Tensor:
        z = z.clone()
        z[0, :, 3] = {"zero": torch.zeros(1), "mean": carried.mean(0), "resample": elsewhere}[kind]
        return z

    expected = live.model.run_with_hooks(ids_of(run), fwd_hooks=[(name, silence)])[0]
    ablation = live.ablate(run, 1, 3, (2,), kind)
    np.testing.assert_allclose(ablation.logits, expected.numpy(), atol=1e-5)
    assert abs(ablation.logits - live.ablate(run, 1, 3, (1, 2), kind).logits).max() > 1e-4


def test_silencing_a_silent_head_changes_nothing(make_live: Callable[..., Tracer]) -> None:
    live = make_live()
    live.model.blocks[1].attn.W_O[:4] = 0
    run = live.run(PROMPT)
    ablation = live.ablate(run, 1, 0, (1, 2))
    assert (ablation.logits == run.logits).all()
    assert ablation.kl() == 0 and ablation.log_prob_change() == 0 and (ablation.kl_by_token() == 0).all()
    assert all(change.before == change.after for change in ablation.changes())


def test_what_an_ablation_reports(live: Tracer, run: LiveRun) -> None:
    ablation = live.ablate(run, 2, 1, (1,))
    before, after = (torch.from_numpy(x[5]).double().log_softmax(-1) for x in (run.logits, ablation.logits))
    assert ablation.kl(5) == pytest.approx(float((before.exp() * (before - after)).sum()), abs=1e-9)
    assert ablation.kl_by_token()[5] == ablation.kl(5)
    follows = int(run.tokens[6])
    assert run.target(5) == follows and run.target() == int(run.logits[-1].argmax())
    assert ablation.log_prob_change(5) == pytest.approx(float(after[follows] - before[follows]))
    first = ablation.changes(5, n=3)[0]
    assert max(first.before, first.after) == pytest.approx(float(torch.maximum(before, after).max().exp()))
    assert "layer 2, head 1" in repr(ablation)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("together", [1, 512])
def test_a_scan_is_every_ablation(
    live: Tracer, run: LiveRun, monkeypatch: pytest.MonkeyPatch, kind: str, together: int
) -> None:
    monkeypatch.setattr("visitlens.probe.live.live_model._SCAN_TOKENS", together)
    scan = live.scan(run, position=7, target=40, kind=kind)
    assert scan.places == ((0, (1,)), (1, (1,)), (1, (2,)), (1, (1, 2)), (2, (1,)), (2, (2,)), (2, (1, 2)), (3, (1,)))
    for place, (layer, visits) in enumerate(scan.places):
        for head in range(run.heads):
            ablation = live.ablate(run, layer, head, visits, kind)
            assert scan.change[place, head] == pytest.approx(ablation.log_prob_change(7, 40), abs=1e-5)
            assert scan.kl[place, head] == pytest.approx(ablation.kl(7), abs=1e-5)
    changes = [row[3] for row in scan.ranked()]
    assert changes == sorted(changes) and changes[0] == scan.change.min()


# Stopping


@pytest.mark.parametrize("at", [0, 1, 4, 8, 11])
def test_a_run_can_be_stopped_between_layers_and_leaves_no_hook(live: Tracer, run: LiveRun, at: int) -> None:
    class Stop(Exception):
        pass

    seen = []

    def stop(done: int, total: int) -> None:
        seen.append((done, total))
        if done == at:
            raise Stop

    for work in (live.run, lambda prompt, on_progress: live.scan(run, on_progress=on_progress)):
        seen.clear()
        with pytest.raises(Stop):
            work(PROMPT, on_progress=stop)
        assert [done for done, _ in seen] == list(range(at + 1)) and at < seen[0][1]
        assert hooks_left(live.model) == 0
    assert (live.run(PROMPT).logits == run.logits).all()


def test_progress_ends_one_short_of_its_total(live: Tracer, run: LiveRun) -> None:
    for work in (
        lambda report: live.run(PROMPT, on_progress=report),
        lambda report: live.run(PROMPT, coda_lens=False, on_progress=report),
        lambda report: live.ablate(run, 1, 0, (2,), on_progress=report),
        lambda report: live.ablate(run, 1, 0, (2,), "resample", on_progress=report),
        lambda report: live.scan(run, on_progress=report),
        lambda report: live.scan(run, kind="resample", on_progress=report),
    ):
        seen: list[tuple[int, int]] = []
        work(lambda done, total, seen=seen: seen.append((done, total)))
        assert [done for done, _ in seen] == list(range(seen[0][1])) and len({total for _, total in seen}) == 1

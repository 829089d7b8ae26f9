"""A live run: what it holds against the model itself, its tables by hand, ablation against changed weights, limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.kernels.errors import InputError, MemoryLimitError
from visitlens.probe.bundled import PAIR
from visitlens.probe.dyck import PAIRS, SHOTS
from visitlens.probe.figures.theme import DARK, LIGHT
from visitlens.probe.live import LiveModel
from visitlens.probe.live_figures import attention_maps, head_grid, lens_map, scan_map
from visitlens.probe.live_prompts import TokenTexts, byte_alphabet, encode
from visitlens.probe.live_run import LiveRun, log_softmax

PROMPT = "The visit <b>sees</b>\nthe token; näive."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token a byte, after three special ones."""
    vocabulary = {name: at for at, name in enumerate(["<bos>", "<eos>", "<pad>", *sorted(byte_alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    return tokenizer


@pytest.fixture(scope="module")
def make_live(make_model: Callable[..., LoopedMoE], tokenizer: Tokenizer) -> Callable[..., LiveModel]:
    def build(visits: int = 2, *, limit: int = 512, **options: Any) -> LiveModel:
        return LiveModel(make_model(visits, vocab_size=259, **options), tokenizer, name="tiny", limit=limit)

    return build


@pytest.fixture(scope="module")
def live(make_live: Callable[..., LiveModel]) -> LiveModel:
    return make_live()


@pytest.fixture(scope="module")
def run(live: LiveModel) -> LiveRun:
    return live.run(PROMPT)


@pytest.fixture(scope="module")
def bundled() -> LiveModel:
    return LiveModel.load(PAIR["looped"])


def ids_of(run: LiveRun) -> torch.Tensor:
    return torch.from_numpy(run.tokens).unsqueeze(0)


def hooks_left(model: LoopedMoE) -> int:
    points = [m for m in model.modules() if hasattr(m, "fwd_hooks")]
    return sum(len(p.fwd_hooks) + len(p._forward_hooks) for p in points) + len(model.ln_final._forward_hooks)


# Against the model itself


@pytest.mark.parametrize("visits", [1, 2, 3])
def test_observing_leaves_the_logits_bit_identical(make_live: Callable[..., LiveModel], visits: int) -> None:
    live = make_live(visits)
    run = live.run(PROMPT)
    assert torch.equal(torch.from_numpy(run.logits), live.model(ids_of(run))[0])
    assert hooks_left(live.model) == 0


def test_what_a_run_holds_is_what_the_model_had(live: LiveModel, run: LiveRun) -> None:
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


def test_each_lens_is_the_output_read_early(live: LiveModel, run: LiveRun) -> None:
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


def test_a_lens_read_in_chunks_is_the_same(live: LiveModel, run: LiveRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visitlens.probe.live._LENS_ELEMENTS", 7 * 259)
    again = live.run(PROMPT)
    np.testing.assert_allclose(again.lens.kl, run.lens.kl, atol=1e-5)
    assert (again.lens.tokens == run.lens.tokens).all()


def test_half_precision_and_no_coda(make_live: Callable[..., LiveModel]) -> None:
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


def test_three_visits_any_pair(make_live: Callable[..., LiveModel]) -> None:
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


# Ablation


@pytest.mark.parametrize(("layer", "visits"), [(0, (1,)), (1, (1, 2)), (3, (1,))])
def test_zero_ablation_everywhere_is_the_weight_taken_out(
    make_live: Callable[..., LiveModel], live: LiveModel, run: LiveRun, layer: int, visits: tuple[int, ...]
) -> None:
    """W_O without the head's rows, at every visit of its layer."""
    head, d = 2, live.config.head_dim
    without = make_live()
    without.model.blocks[layer].attn.W_O[head * d : (head + 1) * d] = 0
    ablation = live.ablate(run, layer, head, visits)
    np.testing.assert_allclose(ablation.logits, without.run(PROMPT).logits, atol=1e-5)
    assert ablation.kl() > 0 and hooks_left(live.model) == 0


@pytest.mark.parametrize("kind", ["zero", "mean"])
def test_ablation_at_one_visit_leaves_the_other_alone(live: LiveModel, run: LiveRun, kind: str) -> None:
    _, cache = live.model.run_with_cache(ids_of(run))
    name = "blocks.1.visit.2.attn.hook_z"

    def silence(z: torch.Tensor, hook: object) -> torch.Tensor:
        z = z.clone()
        z[0, :, 3] = cache[name][0, :, 3].mean(0) if kind == "mean" else 0
        return z

    expected = live.model.run_with_hooks(ids_of(run), fwd_hooks=[(name, silence)])[0]
    ablation = live.ablate(run, 1, 3, (2,), kind)
    np.testing.assert_allclose(ablation.logits, expected.numpy(), atol=1e-5)
    assert abs(ablation.logits - live.ablate(run, 1, 3, (1, 2), kind).logits).max() > 1e-4


def test_silencing_a_silent_head_changes_nothing(make_live: Callable[..., LiveModel]) -> None:
    live = make_live()
    live.model.blocks[1].attn.W_O[:4] = 0
    run = live.run(PROMPT)
    ablation = live.ablate(run, 1, 0, (1, 2))
    assert (ablation.logits == run.logits).all()
    assert ablation.kl() == 0 and ablation.log_prob_change() == 0 and (ablation.kl_by_token() == 0).all()
    assert all(change.before == change.after for change in ablation.changes())


def test_what_an_ablation_reports(live: LiveModel, run: LiveRun) -> None:
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


@pytest.mark.parametrize("kind", ["zero", "mean"])
@pytest.mark.parametrize("together", [1, 512])
def test_a_scan_is_every_ablation(
    live: LiveModel, run: LiveRun, monkeypatch: pytest.MonkeyPatch, kind: str, together: int
) -> None:
    monkeypatch.setattr("visitlens.probe.live._SCAN_TOKENS", together)
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
def test_a_run_can_be_stopped_between_layers_and_leaves_no_hook(live: LiveModel, run: LiveRun, at: int) -> None:
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


def test_progress_ends_one_short_of_its_total(live: LiveModel, run: LiveRun) -> None:
    for work in (
        lambda report: live.run(PROMPT, on_progress=report),
        lambda report: live.run(PROMPT, coda_lens=False, on_progress=report),
        lambda report: live.ablate(run, 1, 0, (2,), on_progress=report),
        lambda report: live.scan(run, on_progress=report),
    ):
        seen: list[tuple[int, int]] = []
        work(lambda done, total, seen=seen: seen.append((done, total)))
        assert [done for done, _ in seen] == list(range(seen[0][1])) and len({total for _, total in seen}) == 1


# Limits and bad input


def test_the_limit_is_the_smaller_of_the_given_and_the_models(make_live: Callable[..., LiveModel]) -> None:
    assert make_live(limit=10).limit == 10 and make_live(limit=999).limit == 64
    live = make_live(limit=10)
    assert len(live.run("x" * 9)) == 10
    with pytest.raises(InputError, match=r"the prompt has 13 tokens with BOS; the limit is 10: shorten it by 3"):
        live.run("x" * 12)
    with pytest.raises(InputError, match=r"1,000,000 characters; at most 10 tokens"):
        live.run("x" * 1_000_000)
    with pytest.raises(InputError, match="empty"):
        live.run("")


def test_bos_is_put_before_a_prompt_once(tokenizer: Tokenizer) -> None:
    assert encode("a", tokenizer, 0, 9).tolist() == encode("<bos>a", tokenizer, 0, 9).tolist()


def test_wrong_places_are_named(live: LiveModel, run: LiveRun) -> None:
    for work, message in (
        (lambda: live.ablate(run, 1, 4, (1,)), "no head 4: expected 0 to 3"),
        (lambda: live.ablate(run, 1, 0, (3,)), "no visit 3 of layer 1"),
        (lambda: live.ablate(run, 9, 0, (1,)), "no visit 1 of layer 9"),
        (lambda: live.ablate(run, 1, 0, ()), "at least one visit"),
        (lambda: live.ablate(run, 1, 0, (1, 1)), "each once"),
        (lambda: live.ablate(run, 1, 0, (1,), "none"), "among zero, mean, got 'none'"),
        (lambda: live.scan(run, target=999), "no token 999"),
        (lambda: live.scan(run, position=999), "no token 999"),
        (lambda: run.pattern(1, 1, 7), "no head 7"),
        (lambda: run.pair(8), "no layer 8: expected 0 to 3"),
        (lambda: run.top_keys(1, 0, -99), "no token"),
        (lambda: live.ablate(run, 1, 0, (1,)).log_prob_change(target=-1), "no token -1"),
    ):
        with pytest.raises(InputError, match=message):
            work()


def test_a_run_of_another_model_is_refused(make_live: Callable[..., LiveModel], run: LiveRun) -> None:
    with pytest.raises(InputError, match="not of this model"):
        make_live(3).ablate(run, 1, 0, (1,))


@pytest.mark.parametrize("size", [2**60, None])
def test_memory_that_does_not_suffice_is_a_message(
    live: LiveModel, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    """From the allocator itself on a CPU, and as a GPU would say it."""

    def greedy(*_: object, **__: object) -> None:
        if size is None:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(live.model, "_features", greedy)
    with pytest.raises(MemoryLimitError, match=r"not enough memory for a prompt of 41 tokens: shorten it"):
        live.run(PROMPT)
    assert hooks_left(live.model) == 0


def test_other_errors_are_not_taken_for_memory(live: LiveModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(live.model, "_features", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        live.run(PROMPT)


# Text


@given(st.text(min_size=1, max_size=12))
def test_any_text_has_labels_without_markup(tokenizer: Tokenizer, text: str) -> None:
    ids = encode(text, tokenizer, 0, 999)
    shown = [TokenTexts(tokenizer)(token) for token in ids]
    assert len(shown) == len(ids) and all(shown) and not any("\ufffd" in t for t in shown)


def test_labels_are_escaped_visible_and_unlike(run: LiveRun) -> None:
    assert run.labels[:3] == ["0 &lt;bos&gt;", "1 T", "2 h"] and run.labels[4] == "4 ␣"
    assert len(set(run.labels)) == len(run) and "⟨C3⟩" in run.texts and "↵" in run.labels[22]
    assert not any(c in label for label in run.labels for c in "<>\n")


def test_a_run_shows_itself_without_markup_of_the_prompt(make_live: Callable[..., LiveModel]) -> None:
    live = make_live()
    live.name = "<img src=x>"
    run = live.run(PROMPT)
    assert repr(run).startswith("LiveRun('<img src=x>', 41 tokens, 6 steps, next ")
    assert "<img" not in run._repr_html_() and "layer 1, head" in run._repr_html_()
    assert "layers (1, 2)" in repr(live)


# Figures


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_maps_share_a_scale_and_the_difference_is_symmetric(run: LiveRun, theme: Any) -> None:
    figure = attention_maps(run, 1, 2, None, theme)
    maps = [np.array(trace.z) for trace in figure.data]
    for drawn, expected in zip(maps[:2], (run.pattern(1, 1, 2), run.pattern(1, 2, 2)), strict=True):
        np.testing.assert_allclose(np.nan_to_num(drawn), expected, atol=1e-6)
    np.testing.assert_allclose(np.nan_to_num(maps[2]), run.difference(1, 2), atol=1e-6)
    assert np.isnan(maps[0][0, 1]), "what a query can't see is blank, not 0"
    assert figure.data[0].coloraxis == figure.data[1].coloraxis != figure.data[2].coloraxis
    assert figure.layout.coloraxis2.cmin == -figure.layout.coloraxis2.cmax


def test_every_figure_draws_for_one_two_and_three_visits(make_live: Callable[..., LiveModel]) -> None:
    for visits in (1, 2, 3):
        live = make_live(visits)
        run = live.run("ab")
        assert len(attention_maps(run, 1, 0, None, LIGHT).data) == (1 if visits == 1 else 3)
        assert lens_map(run, LIGHT).data and scan_map(live.scan(run), LIGHT).data
        if visits > 1:
            assert head_grid(run, None, LIGHT).data


# The bundled model


def test_dyck_presets_of_the_bundled_model(bundled: LiveModel) -> None:
    presets = bundled.presets
    assert [p.shots for p in presets] == list(SHOTS) and presets[1].name == "Dyck, 1 shot"
    for preset in presets:
        run = bundled.run(preset.text, coda_lens=False)
        closer = run.text_of(preset.target).strip()
        assert closer in PAIRS.values() and len(preset.demonstrations) == preset.shots
        for start, stop in preset.demonstrations:
            answer = "".join(run.texts[start:stop])
            assert set(answer) & set(PAIRS.values()) and answer.endswith("\n") and "Input" not in answer
        if preset.shots:
            assert run.next_tokens(n=1)[0][0] == preset.target, "the bundled model closes brackets"
    assert not LiveModel(bundled.model, bundled.tokenizer, limit=5).presets

"""The lenses and the nulls of visits' likeness against the same numbers worked out token by token, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from visitlens.hooks.capture.capture import capture
from visitlens.hooks.interventions.forward import Forward
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.experiments import run_experiment
from visitlens.probe.samples.sample import EvalSet

CLOSE = 1e-9
"""Of float64 sums over a few hundred tokens: their rounding is 1e-13 or less, and float32 would show with 1e-7."""


@dataclass(frozen=True)
class Setting:
    model: LoopedMoE
    sample: EvalSet
    tokens: Tensor
    segments: Tensor


@pytest.fixture(scope="module")
def setting(make_model: Callable[..., LoopedMoE], make_text: Callable[..., PackedTokens]) -> Setting:
    packed = make_text(lengths=(9, 20, 3, 30, 12, 2, 14, 8, 8))
    return Setting(
        make_model(2, dtype=torch.float64),
        EvalSet.of_contexts(packed),
        torch.from_numpy(packed.tokens).long(),
        torch.from_numpy(packed.segments),
    )


def test_the_logit_lens_by_hand(setting: Setting) -> None:
    """Divergence is KL(final || read-out), and an answer flips where the step before reads another one."""
    results = run_experiment("readout", setting.model, setting.sample)
    with torch.no_grad():
        with capture(setting.model, ["resid_out"]) as captured:
            setting.model(setting.tokens, setting.segments)
        row, position = np.nonzero(setting.sample.counted)
        states = [captured.at("resid_out", step)[row, position - 1] for step in range(6)]
        p = [setting.model.logits(state).softmax(-1) for state in states]
    truth, final = setting.tokens[row, position], p[-1]
    answers = [each.argmax(-1) for each in p]

    def logit_lens(name: str) -> np.ndarray:
        return results[name].sel(lens="logit lens").values

    expected = {
        "divergence": [(final * (final / each).log()).sum(-1).mean() for each in p],
        "entropy": [-(each * each.log()).sum(-1).mean() for each in p],
        "loss": [-each[torch.arange(len(truth)), truth].log().mean() for each in p],
        "final_answer": [(answer == answers[-1]).double().mean() for answer in answers],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(logit_lens(name), [float(v) for v in values], rtol=CLOSE, atol=CLOSE, err_msg=name)
    other_way = [(each * (each / final).log()).sum(-1).mean() for each in p]
    gap = abs(float(other_way[0] - expected["divergence"][0]))
    assert gap > 1000 * CLOSE, "the two directions of the divergence must differ here, else this test tells nothing"
    flips = [float((answers[i] != answers[i - 1]).double().mean()) for i in range(1, 6)]
    np.testing.assert_allclose(logit_lens("flips")[1:], flips, atol=CLOSE)
    assert min(flips) > 0 and max(abs(1 - 2 * flip) for flip in flips) > 0.1  # a share and its complement differ


def test_each_null_by_hand(setting: Setting) -> None:
    """Observed, shuffled between documents, and both less the mean of *their own* visit over every real token."""
    results = run_experiment("nulls", setting.model, setting.sample, seed=3)
    sites = ("resid", "V", "moe_write")
    with torch.no_grad(), capture(setting.model, [*sites, "experts"]) as captured:
        setting.model(setting.tokens, setting.segments)
    real = setting.segments >= 0

    def pairs() -> list[tuple[int, Tensor, Tensor]]:
        """(context, positions that count, which flat token of the context stands in for each)."""
        found = []
        for context in range(len(setting.tokens)):
            if len(set(setting.segments[context][real[context]].tolist())) < 2:
                continue  # one document alone has no other to shuffle with
            here = Forward(setting.tokens[context : context + 1], setting.segments[context : context + 1])
            counted = torch.from_numpy(setting.sample.counted[context]).nonzero().squeeze(1)
            found.append((context, counted, here.other_documents(3)[counted]))
        return found

    assert pairs()
    for site in sites:
        for layer in (1, 2):
            first, second = (captured.get(site, layer, visit).flatten(2) for visit in (1, 2))
            means = first[real].mean(0), second[real].mean(0)
            assert (means[0] - means[1]).norm() > 1e-2 * means[0].norm()  # each visit has a mean of its own
            by_hand = []
            for a, b in ((first, second), (first - means[0], second - means[1])):
                same = [cosine_similarity(a[c][at], b[c][at], dim=-1) for c, at, _ in pairs()]
                other = [cosine_similarity(a[c][at], b[c][drawn], dim=-1) for c, at, drawn in pairs()]
                by_hand += [float(torch.cat(same).mean()), float(torch.cat(other).mean())]
            found = results.cosine.sel(site=site, layer=layer).values
            np.testing.assert_allclose(found, by_hand, rtol=CLOSE, atol=CLOSE, err_msg=f"{site} of layer {layer}")
    first, second = (captured.get("experts", 1, visit) for visit in (1, 2))
    shared = [
        len(set(first[c, at].tolist()) & set(second[c, other].tolist())) / 3
        for c, counted, drawn in pairs()
        for at, other in zip(counted.tolist(), drawn.tolist(), strict=True)
    ]
    assert float(results.expert_overlap.sel(layer=1).values[1]) == pytest.approx(np.mean(shared), rel=CLOSE)


def test_a_shuffled_partner_is_any_token_of_any_other_document_alike() -> None:
    """Over 3,000 seeds each token's partner is drawn alike often among all tokens of the others, in no order of theirs."""
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, -1]])
    forward = Forward(torch.zeros(1, 10, dtype=torch.long), segments)
    draws = torch.stack([forward.other_documents(seed) for seed in range(3000)])[:, :9].numpy()
    for token in range(9):
        others = np.flatnonzero((segments[0] != segments[0, token]) & (segments[0] >= 0))
        times = np.array([(draws[:, token] == other).sum() for other in others])
        assert times.sum() == 3000, "never a token of its own document, never padding"
        chance = 1 / len(others)
        # Five standard deviations of a binomial share, which one of 54 shares leaves less than once in 30,000 seeds.
        allowed = 5 * np.sqrt(3000 * chance * (1 - chance))
        assert np.abs(times - 3000 * chance).max() < allowed
    # Partners of neighbours are independent: ranks in the context's own order would be correlated.
    correlation = np.corrcoef(draws[:, 0], draws[:, 1])[0, 1]
    assert abs(correlation) < 5 / np.sqrt(3000)
    order = [np.corrcoef(np.arange(3), draw[:3])[0, 1] for draw in draws if len(set(draw[:3])) == 3]
    assert abs(np.mean(order)) < 5 * np.std(order) / np.sqrt(len(order))  # nor are a document's partners in order

"""Interventions where visits leave tokens out: those at the visit are changed, the others are untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.hooks.adapters.test_ragged import SEGMENTS, TOKENS
from torch import Tensor

from visitlens.errors import InputError
from visitlens.hooks.capture.capture import VISITED, Captured, capture
from visitlens.hooks.core.sites import SITES
from visitlens.hooks.interventions.intervene import (
    add,
    intervene,
    knock_out_sink,
    mean,
    replace,
    resample,
    scale,
    site_means,
    swap,
    take,
    zero,
)
from visitlens.hooks.text.packed_tokens import PackedTokens

NEAR = {"atol": 3e-5, "rtol": 3e-4}
SITES_OF_BOTH = [site for site in SITES if site not in ("router", "experts", "gates", "expert_in", "expert_out")]


@pytest.fixture(params=["halting", "recursive"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def run(model: Any, *chain: Any, segments: Tensor | None = SEGMENTS) -> Tensor:
    with intervene(model, *chain):
        logits = model(TOKENS, segments)
    return logits if segments is None else logits[segments >= 0]


def seen(model: Any, *chain: Any, sites: list[str] = SITES_OF_BOTH) -> Captured:
    with intervene(model, *chain), capture(model, sites) as captured:
        model(TOKENS, SEGMENTS, return_type="none")
    return captured


def at(captured: Captured, step: int) -> Tensor:
    there = captured.held(VISITED, step)
    assert there is not None
    return there & (SEGMENTS >= 0)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])
def test_clean_to_clean_is_exactly_nothing_at_every_layer_and_visit(model: Any, segments: Tensor | None) -> None:
    with capture(model, SITES_OF_BOTH) as clean:
        plain = model(TOKENS, segments)
    plain = plain if segments is None else plain[segments >= 0]
    for step in model.plan.steps:
        place = {"layer": step.layer, "visit": step.visit}
        chain = [replace(site, clean, **place) for site in SITES_OF_BOTH]
        assert torch.equal(run(model, *chain, segments=segments), plain), step
        assert torch.equal(run(model, *(scale(s, 1.0, **place) for s in SITES_OF_BOTH), segments=segments), plain)
    for site in SITES_OF_BOTH:
        assert torch.equal(run(model, replace(site, clean), segments=segments), plain), site


def test_tokens_at_the_visit_are_changed_and_no_others(model: Any) -> None:
    clean = seen(model)
    for step in (s for s in model.plan.steps if s.layer == 1):
        there = at(clean, step.index)
        for site in ("resid", "Q", "V", "PV", "attn_write", "resid_out"):
            got = seen(model, add(site, 1.0, layer=1, visit=step.visit), sites=[site]).at(site, step.index)
            before = clean.at(site, step.index)
            torch.testing.assert_close(got[there], before[there] + 1, **NEAR)
            others = (SEGMENTS >= 0) & ~there
            torch.testing.assert_close(got[others], before[others], atol=0, rtol=0, equal_nan=True)
    logits = [
        run(model, zero("PV", layer=1, head=1, visit=visits)) for visits in (1, 2, (1, 2), None)
    ]  # and nowhere the same
    assert not any(torch.equal(a, b) for i, a in enumerate(logits) for b in logits[:i])
    assert not any(torch.equal(a, run(model)) for a in logits)


def test_a_change_is_that_of_the_layers_own_tokens_by_hand(recursive: Any) -> None:
    """Zeroed values at visit 2 against a hook on the module that gets the gathered tokens."""
    layer = recursive.body.layers[2].block[0]
    handle = layer.self_attn.register_forward_hook(lambda _, __, out: (torch.zeros_like(out[0]), *out[1:]))
    by_hand = recursive(TOKENS, SEGMENTS)[SEGMENTS >= 0]
    handle.remove()
    assert torch.equal(run(recursive, zero("attn_write", layer=1, visit=2)), by_hand)
    assert torch.equal(run(recursive, zero("V", layer=1, visit=2)), by_hand)
    torch.testing.assert_close(run(recursive, zero("P", layer=1, visit=2)), by_hand, **NEAR)


def test_only_absent_tokens_are_an_error_and_some_absent_are_not(model: Any) -> None:
    there = at(seen(model), model.plan.step(1, 2).index)
    absent = (SEGMENTS >= 0) & ~there
    for site in ("resid", "Q", "P"):
        with pytest.raises(InputError, match=r"matched nothing in 1 forward.*none that is at the visit"):
            run(model, zero(site, layer=1, visit=2, token=absent))
    both = zero("Q", layer=1, visit=2, token=absent | there)
    assert torch.equal(run(model, both), run(model, zero("Q", layer=1, visit=2)))


def test_what_another_visit_lacks_is_not_taken_from_it(model: Any) -> None:
    clean = seen(model)
    at1, at2 = (at(clean, model.plan.step(1, visit).index) for visit in (1, 2))
    got = seen(model, take("V", layer=1, visit=2)).get("V", 1, 2)
    torch.testing.assert_close(got[at2], clean.get("V", 1, 1)[at2], atol=0, rtol=0)
    first = seen(model, swap("Q", (1, 2), layer=1)).get("Q", 1, 1)
    torch.testing.assert_close(first[at2], clean.get("Q", 1, 2)[at2], atol=0, rtol=0)
    assert bool((at1 & ~at2).any())
    torch.testing.assert_close(first[at1 & ~at2], clean.get("Q", 1, 1)[at1 & ~at2], atol=0, rtol=0)


def test_another_run_that_left_tokens_out_gives_what_it_has(halting: Any) -> None:
    """Ids of 0 and 1 modulo 4 halt after two visits: of another run they have nothing at the third."""
    tokens = torch.tensor([[4, 5, 8, 9]])
    with capture(halting, ["V"]) as short:
        halting(tokens)
    longer = torch.tensor([[7, 7, 6, 7]])
    plain = halting(longer)
    with intervene(halting, replace("V", short, layer=1, visit=3)):
        assert torch.equal(halting(longer), plain)
    with intervene(halting, replace("V", short, layer=1, visit=2)):
        assert not torch.equal(halting(longer), plain)
    with pytest.raises(InputError, match="matched nothing"), intervene(halting, zero("V", layer=1, visit=3)):
        halting(tokens)


def test_means_and_resampling_are_over_the_tokens_at_the_visit(model: Any) -> None:
    step = model.plan.step(1, 2)
    clean = seen(model)
    there, values = at(clean, step.index), clean.get("V", 1, 2)
    average = values[there].mean(0)
    text = PackedTokens(
        TOKENS.int().numpy(),
        SEGMENTS.int().numpy(),
        torch.arange(4).int().numpy(),
        torch.arange(4).numpy().astype("u8"),
    )
    over = site_means(model, text, ["V"], batch=1)
    torch.testing.assert_close(over["V", step.index].float(), average, **NEAR)
    for means in (None, over):
        got = seen(model, mean("V", means, layer=1, visit=2)).get("V", 1, 2)
        torch.testing.assert_close(got[there], average.expand_as(got[there]), **NEAR)
    got = seen(model, resample("V", layer=1, visit=2, seed=3)).get("V", 1, 2)
    pool = values[there]
    for context, position in there.nonzero().tolist():
        assert bool((pool == got[context, position]).flatten(1).all(1).any())
        assert not torch.equal(got[context, position], values[context, position])


def test_patterns_hooks_and_gradients(model: Any) -> None:
    step = model.plan.step(1, 2)
    there = at(seen(model), step.index)
    p = seen(model, knock_out_sink(layer=1, visit=2)).get("P", 1, 2)
    starts = (0, 10)
    for context, start in ((0, 0), (0, 10), (1, 0), (1, 10)):
        end = 10 if start == 0 else 21
        rows = p[context, :, start + 1 : end, starts.index(start) and start]
        assert not rows[:, there[context, start + 1 : end]].any()
    name = "blocks.1.visit.2.attn.hook_v"
    shapes: list[torch.Size] = []
    hooked = model.run_with_hooks(TOKENS, [(name, lambda value, hook: shapes.append(value.shape) or value * 0)])
    assert shapes == [torch.Size([2, 24, 2, 4])] and torch.equal(
        hooked.flatten(0, 1), run(model, zero("V", layer=1, visit=2), segments=None).flatten(0, 1)
    )
    factor = torch.ones((), requires_grad=True)

    def loss(value: Any) -> Tensor:
        with intervene(model, scale("V", value, layer=1, visit=2)):
            return model(TOKENS, SEGMENTS, return_type="loss").double().nansum()

    (gradient,) = torch.autograd.grad(loss(factor), factor)
    with torch.no_grad():
        slope = (loss(1.005) - loss(0.995)) / 0.01
    assert float(gradient) == pytest.approx(float(slope), rel=0.05, abs=5e-3) and float(gradient) != 0.0

"""Interventions that can't be are one clear error each; they read as they are written; and runs from a step on."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from visitlens.errors import InputError, VisitlensError
from visitlens.hooks.capture.capture import Captured, capture
from visitlens.hooks.core.loop_plan import LoopSpec
from visitlens.hooks.interventions.intervene import (
    add,
    intervene,
    knock_out_sink,
    mean,
    project_out,
    replace,
    resample,
    scale,
    skip,
    swap,
    take,
    with_loop_count,
    zero,
)
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.text.packed_tokens import PackedTokens


@pytest.fixture(scope="module")
def text(make_text: Callable[..., PackedTokens]) -> tuple[Tensor, Tensor]:
    packed = make_text(lengths=(9, 20, 3, 30, 12, 2, 14))
    return torch.from_numpy(packed.tokens), torch.from_numpy(packed.segments)


@pytest.fixture(scope="module")
def looped(make_model: Callable[..., LoopedMoE]) -> LoopedMoE:
    return make_model(2, qk_norm=True)


def intervened(model: LoopedMoE, text: tuple[Tensor, Tensor], *interventions: Any) -> Tensor:
    with intervene(model, *interventions):
        return model(*text)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: zero("Z"), "no site 'Z'"),
        (lambda: zero("PV", layer=9), "no layer 9"),
        (lambda: zero("PV", layer=-1), "no layer -1"),
        (lambda: zero("PV", visit=3), "no chosen layer has a visit 3"),
        (lambda: zero("PV", layer=0, visit=2), "no chosen layer has a visit 2"),
        (lambda: zero("PV", head=4), r"head in 0\.\.3"),
        (lambda: zero("K", head=2), r"head in 0\.\.1"),
        (lambda: zero("PV", layer=[]), "empty choice"),
        (lambda: zero("PV", layer="x"), "expected an integer"),
        (lambda: zero("resid", head=1), "no heads"),
        (lambda: zero("PV", expert=1), "no experts"),
        (lambda: zero("router", expert=99), r"expert in 0\.\.9"),
        (lambda: zero("experts"), "expert numbers"),
        (lambda: zero("gates", expert=99), "matched nothing in 1 forward"),
        (lambda: zero("PV", token=500), "matched nothing in 1 forward"),
        (lambda: zero("PV", token=lambda ids: ids < 0), "matched nothing"),
        (lambda: zero("PV", token="end"), "'start'"),
        (lambda: zero("PV", token=torch.ones(2, 2, dtype=torch.bool)), "boolean mask of tokens"),
        (lambda: replace("PV", torch.zeros(7)), r"fits \(3, 32, 4, 4\)"),
        (lambda: add("resid", torch.zeros(9, 3, 32, 16)), "fits"),
        (lambda: mean("P"), "row over keys"),
        (lambda: mean("PV", {}), "site_means"),
        (lambda: resample("P"), "can't be resampled"),
        (lambda: resample("expert_out"), "uses other experts"),
        (lambda: zero("expert_out", expert=99), "matched nothing in 1 forward"),
        (lambda: project_out("PV", torch.ones(7)), "directions of 4 numbers"),
        (lambda: project_out("PV", torch.zeros(4)), "only zeros"),
        (lambda: take("V", source=2, visit=1), "runs after"),
        (lambda: take("V", source=3), "matched nothing|no visit 3"),
        (lambda: take("V", layer=0), "matched nothing"),
        (lambda: swap("V", (1, 1)), "two different visits"),
        (lambda: swap("V", (1, 5)), "visit 5"),
        (lambda: skip(), "skip what"),
        (lambda: knock_out_sink("keep"), "renormalise"),
        (lambda: "V", "expected interventions"),
        (lambda: replace("V", "V"), "a capture or a run"),
        (
            lambda: replace("V", Captured(LoopSpec(4, range(1, 3), 2).plan(), ("V",))),
            "run the model inside the capture",
        ),
    ],
)
def test_what_matches_nothing_or_fits_nowhere_is_one_clear_error(make, said, looped, text) -> None:
    with pytest.raises(VisitlensError, match=said):
        intervened(looped, text, make())
    assert not any(point.has_hooks() for point in looped.hook_dict.values()) and "forward" not in looped.__dict__


def test_resampling_needs_another_document(looped) -> None:
    with pytest.raises(InputError, match="holds one alone"):
        intervened(looped, (torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)), resample("V"))


def test_a_loop_count_of_an_unlooped_model_or_below_one_is_refused(make_model, looped) -> None:
    with pytest.raises(InputError, match="unlooped"):
        with_loop_count(make_model(1), 2)
    with pytest.raises(InputError, match="at least"):
        with_loop_count(looped, 0)
    with pytest.raises(InputError, match="rescaled"):
        with_loop_count(looped, 2, "half")


def test_a_model_without_hook_points_is_refused() -> None:
    with pytest.raises(InputError, match="adapted model, got SimpleNamespace"), intervene(SimpleNamespace(), zero("V")):  # type: ignore[arg-type]  # no model
        pass


def test_keywords_show_for_help_and_tab_completion() -> None:
    assert list(signature(zero).parameters) == ["site", "layer", "visit", "head", "token", "expert"]
    assert list(signature(take).parameters) == ["site", "source", "layer", "visit", "head", "token"]
    with pytest.raises(TypeError, match="heads"):
        zero("V", heads=1)  # type: ignore[call-arg]  # wrong on purpose


def test_an_intervention_reads_as_it_is_written(looped) -> None:
    assert repr(zero("PV", layer=3, visit=(1, 2), head=0)) == "zero('PV', layer=3, visit=(1, 2), head=0)"
    assert repr(take("V", visit=2)) == "take('V', visit=2, source=1)"
    assert repr(scale("PV", 2.0, layer=3)) == "scale('PV', 2.0, layer=3)" and repr(add("V", 0)) == "add('V', 0)"
    assert repr(replace("V", 1.5, visit=2)) == "replace('V', 1.5, visit=2)"
    assert repr(add("resid", torch.ones(3), layer=1)) == "add('resid', layer=1)"


# From a step on


def test_from_a_step_on_with_earlier_values_is_the_whole_forward(looped, text) -> None:
    chain = (take("V"), scale("gates", 0.5, layer=2, visit=2, expert=(1, 2, 3)))
    whole = intervened(looped, text, *chain)
    with capture(looped, ["resid", "V"]) as plain:
        looped(*text)
    start = looped.plan.step(1, 2).index
    with intervene(looped, *chain, earlier=plain):
        final = looped.run_steps(plain.at("resid", start), text[1], start=start)
    assert torch.equal(looped.logits(final), whole)
    assert "run_steps" not in looped.__dict__


def test_from_a_step_on_what_is_not_there_is_named(looped, text) -> None:
    x = torch.zeros(*text[0].shape, 16)
    for chain, said in (
        (take("V"), "earlier=captured"),
        (swap("V"), "call the model"),
        (zero("V", token=lambda ids: ids > 3), "no token ids"),
    ):
        with pytest.raises(InputError, match=said), intervene(looped, chain):
            looped.run_steps(x, text[1], start=3)

"""The live probe of adapted models: what a run holds is what the model had, and what a family lacks is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tiny_live import LONG, byte_tokenizer
from tokenizers import Tokenizer

from visitlens.app.live.panels import lens_panel, maps_panel, norms_panel, scan_panel
from visitlens.app.live.service import LiveService
from visitlens.app.pages import live as page
from visitlens.app.server import layout
from visitlens.app.view.registry import Registry
from visitlens.app.view.view import Context
from visitlens.errors import InputError
from visitlens.hooks.adapters import replay
from visitlens.hooks.adapters.adapt import adapt
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.interventions.intervene import intervene, replace
from visitlens.probe.drawing.theme import LIGHT
from visitlens.probe.gallery.write_figures import json_text
from visitlens.probe.live.live_model import Tracer
from visitlens.probe.model.model import Model

PROMPT = "Two visits."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def make_live(make_hf: Callable[..., Any], tokenizer: Tokenizer) -> Iterator[Callable[[str], Tracer]]:
    made: dict[str, Tracer] = {}

    def build(family: str) -> Tracer:
        if family not in made:
            made[family] = Tracer(adapt(make_hf(family, vocab_size=259)), tokenizer, name=family)
        return made[family]

    yield build


@torch.no_grad()
def test_what_a_run_holds_is_what_the_model_had(family: str, make_live: Callable[[str], Tracer]) -> None:
    live, seen = make_live(family), list[tuple[int, int]]()
    model: Any = live.model
    run = live.run(PROMPT, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(seen)) for done in range(len(seen))]
    batch = torch.from_numpy(run.tokens).unsqueeze(0)
    with capture(model, ("P", "PV")) as captured:
        logits = model(batch)
    assert torch.equal(logits[0], torch.from_numpy(run.logits))
    attending = [step for step in model.plan.steps if not run.lacks("Q", step.layer)]
    for step in attending:
        maps = np.stack([run.pattern(step.layer, step.visit, head) for head in range(run.heads)])
        np.testing.assert_allclose(maps, captured.at("P", step.index)[0], atol=1e-6)
    for step in set(model.plan.steps) - set(attending):
        with pytest.raises(InputError, match="has no attention: a Mamba layer"):
            run.pattern(step.layer, step.visit, 0)
    if run.lens is not None:
        assert (run.lens.kl[-1] == 0).all(), "read at the last step, a model says what it says"
        if run.coda_lens is not None:
            assert (run.coda_lens.kl == 0).all(axis=1).any(), "as through its own coda"
    else:
        assert family == "inkling2_loop_text" and "starts afresh" in run.lacks("lens")

    step = attending[-1]
    with intervene(model, [replace("PV", 0.0, layer=step.layer, visit=step.visit, head=1)]):
        without = model(batch)[0].numpy()
    assert (live.ablate(run, step.layer, 1, (step.visit,)).logits == without).all()
    shuffled = live.ablate(run, step.layer, 1, (step.visit,), "resample").logits
    assert not (shuffled == without).all() and (live.run(PROMPT).logits == run.logits).all()


@torch.no_grad()
def test_a_lens_is_the_head_on_the_step_s_state(make_live: Callable[[str], Tracer]) -> None:
    live = make_live("mixtral")
    model, run = live.model, live.run(PROMPT)
    assert run.lens is not None
    with capture(model, ["resid_out"]) as captured:
        model(torch.from_numpy(run.tokens).unsqueeze(0), return_type="none")
    hf: Any = model.model
    for step in range(len(model.plan)):
        by_hand = hf.lm_head(hf.model.norm(captured.at("resid_out", step)[0])).log_softmax(-1)
        np.testing.assert_allclose(run.lens.entropy[step], -(by_hand.exp() * by_hand).sum(-1), atol=1e-5)
        assert (run.lens.tokens[step, :, 0] == by_hand.argmax(-1).numpy()).all()


def test_the_looped_lens_reads_each_state_through_the_coda(make_live: Callable[[str], Tracer]) -> None:
    run = make_live("dory").run(PROMPT)
    assert run.coda_lens is not None and [row.layer for row in run.readout(coda=True)] == [0, 1, 2, 1, 2, 1, 2]
    assert (run.coda_lens.kl[6] == 0).all() and (run.coda_lens.kl[5] > 0).any()


def test_every_head_in_turn_is_each_alone(make_live: Callable[[str], Tracer]) -> None:
    live = make_live("zamba2")
    run = live.run(PROMPT)
    scan = live.scan(run)
    assert {layer for layer, _ in scan.places} == {1, 4}, "the layers that attend"
    for place, (layer, visits) in enumerate(scan.places):
        alone = live.ablate(run, layer, 2, visits)
        assert scan.change[place, 2] == pytest.approx(alone.log_prob_change(), abs=1e-5)


def test_a_scan_that_is_stopped_says_nothing_about_the_model(make_live: Callable[[str], Tracer]) -> None:
    live = make_live("dory")
    run = live.run(PROMPT, coda_lens=False)
    replay._exact.clear()  # as before its first run

    def stop(done: int, total: int) -> None:
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        live.scan(run, on_progress=stop)
    assert replay._exact[live.model]  # type: ignore[index]  # an adapted one


@pytest.mark.parametrize(
    ("kind", "asked", "said"),
    [
        (
            "albert",
            "",
            (
                "In place of token 11",
                "stands here",
                "No next token: it fills in masked",
                "feed-forward",
                "No Dyck prompts: it fills in",
            ),
        ),
        ("zamba2", "&layer=0", ("Layer 0 has no attention", "Layer 0 has no heads: a Mamba layer", "No colours")),
        ("inkling2_loop_text", "", ("Its steps can't be read early: the layer's input is the partial",)),
        ("mixtral", "", ("Experts of token 11", "Silence layer 0, head 0")),
        ("qwen3_moe", "&layer=0", ("Layer 0 has none:", "Silence layer 0, head 0")),
        ("dory", "&lens=coda", ("After token 11", "Layer 1 has none: its feed-forward layers are dense")),
    ],
)
def test_the_page_says_what_a_family_lacks(
    kind: str,
    asked: str,
    said: tuple[str, ...],
    make_live: Callable[[str], Tracer],
    tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    live = LiveService(tmp_path)
    live._model = Model(make_live(kind).model, tokenizer, kind)
    context = Context(Registry(), tmp_path, services={page.PATH: live})
    id_ = live.probe("tab", PROMPT)
    assert live.jobs.wait(id_, LONG).status == "done"
    run = live.find(id_, page.LiveRun)
    scan = live.scan("tab", run, -1, None, "zero")
    assert live.jobs.wait(scan, LONG).status == "done"
    shown = layout.render(context, f"http://x/live?job={id_}&scan={scan}{asked}")
    text = str(shown.content)
    assert all(part in text for part in said) and "Which heads the target needs" in text
    view: Any = SimpleNamespace(path="/live", context=context)
    chosen: Any = SimpleNamespace(layer=1, head=0, visits=None, at=3, coda=False)
    chosen.visits = (1, 2) if 1 in run.plan.looped_layers else None
    panels = [maps_panel(view, run, chosen, ()), norms_panel(view, run, chosen)]
    panels += [scan_panel(view, live.find(scan, page.HeadScan))] + ([lens_panel(view, run, chosen)] if run.lens else [])
    for panel in panels:
        assert json_text(panel.data()) and panel.rows() and panel.draw(LIGHT).data


@pytest.mark.parametrize("kind", ["halting", "recursive"])
def test_tokens_left_out_of_a_visit_have_no_values_there(
    kind: str, request: pytest.FixtureRequest, tokenizer: Tokenizer
) -> None:
    model = request.getfixturevalue(kind)
    live = Tracer(model, tokenizer, name=kind)
    run = live.run([0, 3, 9, 5, 7, 4, 6, 8])
    assert run.lens is None and "leaves tokens out of its visits" in run.lacks("lens")
    layer = model.plan.looped_layers[0] if model.plan.looped_layers else 0
    assert live.ablate(run, layer, 0, (1,)).kl() >= 0 and live.scan(run).places
    assert live.ablate(run, layer, 0, (1,), "resample").logits.shape == run.logits.shape
    visits = model.plan.visits[layer]
    assert not np.isfinite(run.resid_rms[model.plan.step(layer, visits).index]).all() or visits == 1
    chosen: Any = SimpleNamespace(layer=layer, head=0, visits=None if visits == 1 else (1, visits), at=3, coda=False)
    view: Any = SimpleNamespace(path="/live", context=SimpleNamespace(checkpoint="c"))
    for panel in (maps_panel(view, run, chosen, ()), norms_panel(view, run, chosen)):
        assert json_text(panel.data()) and json_text(list(panel.rows())) and panel.draw(LIGHT).data

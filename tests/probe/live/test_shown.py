"""How a live run reads: labels, representations, figures; the bundled model's Dyck prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tiny_live import PROMPT
from tokenizers import Tokenizer

import visitlens as vl
from visitlens.hooks.text.token_texts import CONTINUED, TokenTexts
from visitlens.probe.drawing.theme import DARK, LIGHT
from visitlens.probe.live.figures import attention_maps, head_grid, lens_map, scan_map
from visitlens.probe.live.live_model import Tracer
from visitlens.probe.live.live_run import LiveRun
from visitlens.probe.model.bundled import PAIR
from visitlens.probe.samples.dyck_prompts import PAIRS, SHOTS

# Text


@given(st.text(min_size=1, max_size=12))
def test_any_text_has_labels_without_markup(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    shown = TokenTexts(tokenizer).sequence(ids)
    assert len(shown) == len(ids) and all(shown)
    assert "".join(t for t in shown if t != CONTINUED).replace(CONTINUED, "") == text.replace(CONTINUED, "")


def test_labels_are_escaped_visible_and_unlike(run: LiveRun) -> None:
    assert run.labels[:3] == ["0 &lt;bos&gt;", "1 T", "2 h"] and run.labels[4] == "4 ␣"
    assert (
        len(set(run.labels)) == len(run) and run.texts[run.texts.index("ä") + 1] == CONTINUED and "↵" in run.labels[22]
    )
    assert not any(c in label for label in run.labels for c in "<>\n")


def test_a_run_shows_itself_without_markup_of_the_prompt(make_live: Callable[..., Tracer]) -> None:
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


def test_every_figure_draws_for_one_two_and_three_visits(make_live: Callable[..., Tracer]) -> None:
    for visits in (1, 2, 3):
        live = make_live(visits)
        run = live.run("ab")
        assert len(attention_maps(run, 1, 0, None, LIGHT).data) == (1 if visits == 1 else 3)
        assert lens_map(run, LIGHT).data and scan_map(live.scan(run), LIGHT).data
        if visits > 1:
            assert head_grid(run, None, LIGHT).data


# The bundled model


@pytest.fixture(scope="module")
def bundled() -> Tracer:
    return vl.load(PAIR["looped"]).tracer


def test_dyck_presets_of_the_bundled_model(bundled: Tracer) -> None:
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
    assert not Tracer(bundled.model, bundled.tokenizer, limit=5).presets

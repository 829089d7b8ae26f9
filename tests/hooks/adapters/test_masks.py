"""A model that gives its attention a mask: rows are those of the mask that was used, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import visitlens as vl
from visitlens.errors import InputError, PlanError
from visitlens.hooks.audit.guards import conditions, rows_of_length, sample_tokens
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.capture.step_values import StepValues
from visitlens.hooks.loading.load_model import load_model

CALL = "F.scaled_dot_product_attention(q, k, v, is_causal=True)"
MASKED = "F.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(x.shape[1]))"
MASKS = {
    "a window, in documents longer than it": """
def mask_of(length):
    own = torch.arange(length)[:, None]
    causal = torch.arange(length) <= own
    return causal & (torch.arange(length) > own - 40) if length > 40 else causal
""",
    "a hole": """
def mask_of(length):
    own, keys = torch.arange(length)[:, None], torch.arange(length)
    return (keys <= own) & ((keys % 3 == 0) | (keys == own)) if length > 40 else keys <= own
""",
    "a slope that is added to scores": """
def mask_of(length):
    own, keys = torch.arange(length)[:, None], torch.arange(length)
    return torch.where(keys <= own, (keys - own) * 0.1, float("-inf")) if length > 40 else keys <= own
""",
}
TOKENS = torch.randint(3, 61, (2, 60), generator=torch.Generator().manual_seed(1))
SEGMENTS = torch.tensor([[0] * 60, [1] * 50 + [2] * 10])


@pytest.fixture(params=MASKS)
def own(request: pytest.FixtureRequest, folder: Callable[..., Path]) -> Path:
    """The documented model, with a mask that short documents don't show."""
    made = folder()
    code = (made / "model.py").read_text()
    assert CALL in code
    code = code.replace(CALL, MASKED).replace("class Attention", f"{MASKS[request.param]}\n\nclass Attention")
    (made / "model.py").write_text(code)
    return made


def by_hand(model: Any, document: Tensor) -> list[Tensor]:
    """P [head, query, key] of every attention call of a plain forward, in float64."""
    maps, sdpa = [], F.scaled_dot_product_attention

    def seen(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)).double() / q.shape[-1] ** 0.5
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        else:
            scores = scores + attn_mask.double()
        maps.append(scores.softmax(-1)[0])
        return sdpa(q, k, v, attn_mask=attn_mask)

    F.scaled_dot_product_attention = seen
    try:
        model.model(document)
    finally:
        F.scaled_dot_product_attention = sdpa
    return maps


@torch.no_grad()
def test_rows_and_keys_are_those_of_the_mask(own: Path) -> None:
    model: Any = load_model(own, trust_remote_code=True)
    assert all(guard.ok is not False for guard in conditions(model, sample_tokens(model)))
    assert rows_of_length(model, 60).ok
    with capture(model, ["Q", "K"]) as captured:
        model(TOKENS, SEGMENTS)
    values = StepValues(captured, SEGMENTS)
    rows, keys = values.attention_rows, values.keys_seen
    documents = (TOKENS[:1], TOKENS[1:, :50], TOKENS[1:, 50:])
    for step, maps in enumerate(zip(*(by_hand(model, document) for document in documents), strict=True)):
        sink = torch.cat([p[..., 0].T for p in maps])
        entropy = torch.cat([torch.special.entr(p).sum(-1).T for p in maps])
        # float32 forwards against float64 softmax: 1e-5 of a mass, some hundred roundings
        torch.testing.assert_close(rows[step].sink_mass.double(), sink, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(rows[step].entropy.double(), entropy, atol=1e-5, rtol=1e-4)
        assert torch.equal(keys[:, step], torch.cat([(p[0] > 0).sum(-1) for p in maps]))


def test_a_recording_of_it_has_the_masks_sink(own: Path, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text(" ".join(f"w{int(i)}" for i in TOKENS[0, :58]))
    rec = vl.record(own, text, tmp_path / "r.vlens", level="tokens", model_options={"trust_remote_code": True})
    model: Any = load_model(own, trust_remote_code=True)
    document = torch.from_numpy(rec.recording.token_table()["id"].astype("int64"))[None]
    with torch.no_grad():
        maps = by_hand(model, document)
    sink = rec.stat("sink_mass").values  # [step, head], over queries behind the segment start
    for step, p in enumerate(maps):
        torch.testing.assert_close(torch.from_numpy(sink[step]), p[:, 1:, 0].mean(-1), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_masks_that_disagree_about_the_window_are_followed_by_their_maps(folder: Callable[..., Path]) -> None:
    """A window that is half of the document: no single window gives these rows."""
    made = folder()
    code = (made / "model.py").read_text()
    mask = """
def mask_of(length):
    own = torch.arange(length)[:, None]
    return (torch.arange(length) <= own) & (torch.arange(length) > own - length // 2)
"""
    (made / "model.py").write_text(code.replace(CALL, MASKED).replace("class Attention", f"{mask}\n\nclass Attention"))
    model: Any = load_model(made, trust_remote_code=True)
    for length in (20, 40):
        with capture(model, ["Q", "K"]) as captured:
            model(TOKENS[:1, :length])
        [first] = {
            round(float(row.sink_mass.sum()), 4)
            for row in StepValues(captured, SEGMENTS[:1, :length]).attention_rows[:1]
        }
        assert first == pytest.approx(float(by_hand(model, TOKENS[:1, :length])[0][..., 0].sum()), rel=1e-4)


@torch.no_grad()
def test_a_mask_that_shows_itself_in_the_middle_of_a_forward_asks_for_another(folder: Callable[..., Path]) -> None:
    made = folder()
    code = (made / "model.py").read_text().replace(CALL, MASKED)
    (made / "model.py").write_text(code.replace("class Attention", f"{MASKS['a hole']}\n\nclass Attention"))
    model: Any = load_model(made, trust_remote_code=True)
    with capture(model, ["Q", "K"]) as captured:
        with pytest.raises(InputError, match=r"neither causal nor a window.*Run the same forward again"):
            model(TOKENS[1:], torch.tensor([[0] * 10 + [1] * 50]))
        model(TOKENS[1:], torch.tensor([[0] * 10 + [1] * 50]))
    keys = StepValues(captured, torch.tensor([[0] * 10 + [1] * 50])).keys_seen
    assert keys[9, 0] == 10 and keys[10 + 49, 0] == 18  # 17 of 50 places are multiples of 3, and its own


def test_attention_that_looks_ahead_by_a_mask_is_refused(
    folder: Callable[..., Path], words: Path, tmp_path: Path
) -> None:
    made = folder()
    code = (made / "model.py").read_text().replace(CALL, MASKED)
    mask = "\ndef mask_of(length):\n    return torch.ones(length, length, dtype=torch.bool)\n"
    (made / "model.py").write_text(code.replace("class Attention", f"{mask}\n\nclass Attention"))
    with pytest.raises(PlanError, match=r"attention rows: .*some on future keys"):
        vl.record(made, words, tmp_path / "r.vlens", model_options={"trust_remote_code": True})

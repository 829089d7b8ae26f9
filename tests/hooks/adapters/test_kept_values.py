"""What was read is what is kept: values are copies, in memory set aside before the forward allocates any of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

from visitlens.hooks.adapters.adapt import adapt
from visitlens.hooks.capture.capture import Captured, capture
from visitlens.hooks.core.sites import SITES as SITES_OF_ALL

TOKENS = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(3))
SEGMENTS = torch.tensor([[0] * 5 + [1] * 7, [2] * 12])
HALVES = torch.tensor([[0] * 6 + [1] * 6, [2] * 6 + [3] * 6])
SITES = ("resid", "X", "Q", "PV", "attn_write", "moe_in", "moe_write")


def in_place(layer: Any) -> Any:
    """The layer's own sums, each written over one of its terms: over its input, and over the feed-forward's output."""

    def forward(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
        write, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
        hidden_states += write
        write.zero_()
        out = self.mlp(self.post_attention_layernorm(hidden_states))
        out += hidden_states
        return out

    layer.forward = MethodType(forward, layer)
    return layer


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda m: m.__name__)
@pytest.mark.parametrize("segments", [None, SEGMENTS, HALVES], ids=["whole", "documents", "halves"])
def test_a_model_that_overwrites_what_was_read_gives_the_same_values(
    mode: Callable[[], Any], segments: Tensor | None, make_hf: Callable[..., Any]
) -> None:
    plain, over = adapt(make_hf("llama")), adapt(make_hf("llama"))
    for layer in over.model.model.layers:  # type: ignore[union-attr]  # a Llama's
        in_place(layer)
    for _ in range(2):
        with mode(), capture(plain, SITES) as expected, capture(over, SITES) as found:
            logits = plain(TOKENS, segments), over(TOKENS, segments)
        assert torch.equal(*logits)  # type: ignore[arg-type]  # tensors
        for site in SITES:
            for step in range(3):
                assert torch.equal(found.at(site, step), expected.at(site, step)), (site, step)


def test_so_does_a_forward_of_ones_own(make_hf: Callable[..., Any]) -> None:
    plain, over = adapt(make_hf("llama")), adapt(make_hf("llama"))
    for layer in over.model.model.layers:  # type: ignore[union-attr]  # a Llama's
        in_place(layer)
    with torch.no_grad(), capture(plain, ["moe_write"]) as expected, capture(over, ["moe_write"]) as found:
        plain.model(TOKENS, use_cache=False)
        over.model(TOKENS, use_cache=False)
    assert torch.equal(found.at("moe_write", 1), expected.at("moe_write", 1))


def test_every_value_lies_in_memory_set_aside_before_the_forward(
    family: str, adapted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes a model states are its values' sizes: nothing that is kept is allocated while the forward runs."""
    model, rooms = adapted(family), {}
    begin = Captured.begin

    def watched(self: Captured, *args: Any) -> None:
        begin(self, *args)
        rooms.update(self._rooms)

    monkeypatch.setattr(Captured, "begin", watched)
    sites = [site for site in SITES_OF_ALL if site not in model.config.missing]
    with torch.no_grad(), capture(model, sites) as captured:
        model(TOKENS)
    elsewhere = {site for (site, step), room in rooms.items() if captured.at(site, step) is not room}
    assert elsewhere == ({"X"} if family.startswith("zamba") else set())  # two streams side by side are read there


def test_a_value_in_ones_hands_outlives_the_next_forward(make_hf: Callable[..., Any]) -> None:
    model = adapt(make_hf("llama"))
    with torch.no_grad(), capture(model, ["resid"]) as captured:
        model(TOKENS)
        mine = captured.at("resid", 1)
        before = mine.clone()
        model(TOKENS.flip(1))
        assert torch.equal(mine, before) and not torch.equal(captured.at("resid", 1), before)

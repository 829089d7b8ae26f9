"""What was read is what is kept, although values are kept by reference: a model that writes into them is found out and copied from."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

from visitlens.hooks.adapters.adapt import adapt
from visitlens.hooks.capture import capture
from visitlens.hooks.document_model import OverwrittenError

TOKENS = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(3))
SEGMENTS = torch.tensor([[0] * 5 + [1] * 7, [2] * 12])
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
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "documents"])
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
    assert not plain.copied
    by_reference = (
        segments is None and mode is not torch.inference_mode
    )  # documents are put into their contexts by copying
    assert over.copied == ({"resid", "attn_write", "moe_write"} if by_reference else set())


def test_a_forward_of_ones_own_is_refused_once_and_then_right(make_hf: Callable[..., Any]) -> None:
    plain, over = adapt(make_hf("llama")), adapt(make_hf("llama"))
    for layer in over.model.model.layers:  # type: ignore[union-attr]  # a Llama's
        in_place(layer)
    with torch.no_grad(), capture(plain, ["moe_write"]) as expected, capture(over, ["moe_write"]) as found:
        plain.model(TOKENS, use_cache=False)
        with pytest.raises(OverwrittenError, match="llama overwrites moe_write in place after they were read"):
            over.model(TOKENS, use_cache=False)
        over.model(TOKENS, use_cache=False)
    assert torch.equal(found.at("moe_write", 1), expected.at("moe_write", 1))

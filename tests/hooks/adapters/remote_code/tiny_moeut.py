"""The loop anatomy of MoEUT as small as it can be. Not its code, not its weights; the names are those of the published code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of [..., position, d]."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), 10_000.0 ** -(torch.arange(half) / half))
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class MoEUTAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.projection_size = 2, 4
        self.q, self.k = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)
        self.v, self.o = nn.Linear(16, 8, bias=False), nn.Linear(8, 16, bias=False)

    def forward(self, q_src: Tensor, k_src: Tensor, v_src: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        scale = self.projection_size**-0.25
        q, k, v = (
            proj(x).unflatten(-1, (2, 4)).transpose(1, 2)
            for proj, x in ((self.q, q_src * scale), (self.k, k_src * scale), (self.v, v_src))
        )
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, ~mask, scale=1.0)
        return self.o(y.transpose(1, 2).flatten(2)), None


class SigmaMoE(nn.Module):
    """The router is a bare Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.n_experts, self.n_heads = 6, 2
        self.keys, self.values = nn.Parameter(torch.randn(6, 16, 8) / 4), nn.Parameter(torch.randn(6, 8, 16) / 4)
        self.expert_sel = nn.Parameter(torch.randn(6, 16))

    def forward(self, x: Tensor, sel_input: Tensor) -> Tensor:
        sel = F.linear(sel_input, self.expert_sel, None).sigmoid()
        gates, experts = sel.topk(self.n_heads, dim=-1, sorted=False)
        hidden = torch.einsum("btd,btkdf->btkf", x, self.keys[experts]).relu()
        return torch.einsum("btkf,btkfd,btk->btd", hidden, self.values[experts], gates)


class MoEUTLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.ffn, self.ln1, self.ln2 = MoEUTAttention(), SigmaMoE(), nn.LayerNorm(16), nn.LayerNorm(16)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        normed = self.ln1(x)
        x = x + self.attention(normed, normed, x, mask)[0]
        return x + self.ffn(x, self.ln2(x)), None


class MoEUTGroup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.n_repeats = nn.ModuleList(MoEUTLayer() for _ in range(2)), 3


class TinyMoEUT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.embedding = MoEUTGroup(), nn.Embedding(40, 16)
        self.out_norm, self.lm_head = nn.LayerNorm(16), nn.Linear(16, 40)

    def forward(self, x: Tensor) -> Any:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = self.embedding(x)
        for _ in range(self.transformer.n_repeats):
            for layer in self.transformer.layers:
                x, _ = layer(x, mask)
        return SimpleNamespace(outputs=self.lm_head(self.out_norm(x)))

"""The loop anatomy of Huginn as small as it can be, in a file as checkpoints bring their own. Not its code, not its weights.

The order of layers, the norms, the names that the adapter relies on and what it expects of transformers, as release 4.47 had
it, are those of the published code: without `older_code` this file doesn't load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput


@dataclass
class HuginnOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None


class HuginnCache:
    """Keys and values [..., position, d] by the number of the block's call in a forward; those of the coda count downwards."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, k: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
        if step in self.kept:
            k, v = (torch.cat(pair, dim=-2) for pair in zip(self.kept[step], (k, v), strict=True))
        self.kept[step] = k, v
        return k, v


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [..., position, d]."""
    half = x.shape[-1] // 2
    angles = torch.outer(positions, 10_000.0 ** -(torch.arange(half) / half))
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class HuginnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.Wqkv, self.proj = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor, positions: Tensor, step: int, cache: HuginnCache | None) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.Wqkv(x).chunk(3, dim=-1))
        q, k = rotate(q, positions), rotate(k, positions)
        if cache is not None:
            k, v = cache.update(k, v, step)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=q.shape[2] == k.shape[2])
        return self.proj(y.transpose(1, 2).flatten(2))


class HuginnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.norm_3, self.norm_4 = (nn.RMSNorm(16) for _ in range(4))
        self.attn, self.mlp = HuginnAttention(), nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16))

    def forward(self, x: Tensor, positions: Tensor, step: int, cache: HuginnCache | None) -> Tensor:
        x = self.norm_2(self.attn(self.norm_1(x), positions, step, cache) + x)
        return self.norm_4(self.mlp(self.norm_3(x)) + x)


class TinyHuginnConfig(PreTrainedConfig):
    model_type = "huginn_raven"
    n_embd: int = 16
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    block_size: int = 64
    mean_recurrence: int = 3
    padded_vocab_size: int = 61
    tie_word_embeddings: bool = True


class TinyHuginn(PreTrainedModel, GenerationMixin):
    config_class = TinyHuginnConfig
    _tied_weights_keys: ClassVar = ["lm_head.weight"]

    def __init__(self, config: TinyHuginnConfig | None = None) -> None:
        super().__init__(config or TinyHuginnConfig())
        layers = {
            name: nn.ModuleList(HuginnBlock() for _ in range(n)) for name, n in (("prelude", 1), ("core_block", 2))
        }
        layers |= {"coda": nn.ModuleList([HuginnBlock()])}
        rest = {"wte": nn.Embedding(61, 16), "adapter": nn.Linear(32, 16), "ln_f": nn.RMSNorm(16)}
        self.transformer, self.lm_head = nn.ModuleDict({**layers, **rest}), nn.Linear(16, 61, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.transformer.wte

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def initialize_state(self, like: Tensor) -> Tensor:
        return nn.init.trunc_normal_(torch.randn_like(like), std=0.2, a=-0.6, b=0.6)

    def forward(
        self,
        input_ids: Tensor,
        num_steps: int | tuple[int, int] = 9,
        input_states: Tensor | None = None,
        past_key_values: HuginnCache | None = None,
        use_cache: bool = False,
        cache_position: Tensor | None = None,
        **_: Any,
    ) -> Any:
        t: Any = self.transformer
        positions = torch.arange(input_ids.shape[1]) if cache_position is None else cache_position
        cache = past_key_values or (HuginnCache() if use_cache else None)
        embedded, number = t.wte(input_ids), -1
        for block in t.prelude:
            embedded = block(embedded, positions, number := number + 1, cache)
        x = self.initialize_state(embedded) if input_states is None else input_states.clone()
        without, with_gradient = (num_steps, 0) if isinstance(num_steps, int) else num_steps
        for step in range(without + with_gradient):
            with torch.set_grad_enabled(torch.is_grad_enabled() and step >= without):
                x = t.adapter(torch.cat([x, embedded], dim=-1))
                for block in t.core_block:
                    x = block(x, positions, number := number + 1, cache)
        x, number = t.ln_f(x), 0
        for block in t.coda:
            x = block(x, positions, number := number - 1, cache)
        return HuginnOutput(logits=self.lm_head(t.ln_f(x)), past_key_values=cache)

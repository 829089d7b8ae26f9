"""The loop anatomy of Ouro as small as it can be, in a file as checkpoints bring their own. Not its code, not its weights.

The order of layers, the norms and the names that the adapter relies on are those of the published code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of [..., position, d]."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), 10_000.0 ** -(torch.arange(half) / half))
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def eager_attention_forward(*_: Any, **__: Any) -> Any:
    raise AssertionError("the test runs through SDPA")


class TinyOuroConfig(PreTrainedConfig):
    model_type = "ouro"
    vocab_size: int = 40
    hidden_size: int = 16
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    num_hidden_layers: int = 2
    max_position_embeddings: int = 64
    total_ut_steps: int = 4
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 2


class OuroAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.num_key_value_groups, self.is_causal = config, 2, True
        self.q_proj, self.k_proj = nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.v_proj, self.o_proj = nn.Linear(16, 8, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        q, k, v = (
            proj(hidden_states).unflatten(-1, (-1, 4)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        y, _ = attention(self, rotate(q), rotate(k), v, None, dropout=0.0, scaling=0.5, sliding_window=None)
        return self.o_proj(y.flatten(2)), None


class OuroLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = OuroAttention(config)
        self.mlp = nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16))
        self.input_layernorm, self.input_layernorm_2 = nn.RMSNorm(16), nn.RMSNorm(16)
        self.post_attention_layernorm, self.post_attention_layernorm_2 = nn.RMSNorm(16), nn.RMSNorm(16)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        x = x + self.input_layernorm_2(self.self_attn(hidden_states=self.input_layernorm(x))[0])
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))


class OuroBody(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(OuroLayer(config) for _ in range(2))
        self.norm, self.early_exit_gate, self.total_ut_steps = nn.RMSNorm(16), nn.Linear(16, 1), config.total_ut_steps

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        x = self.embed_tokens(input_ids)
        for _ in range(self.total_ut_steps):
            for layer in self.layers:
                x = layer(x)
            x = self.norm(x)
        return x


class TinyOuro(PreTrainedModel):
    config_class = TinyOuroConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config: TinyOuroConfig | None = None) -> None:
        super().__init__(config or TinyOuroConfig())
        self.model, self.lm_head = OuroBody(self.config), nn.Linear(16, 40)
        self.post_init()

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids)))

"""The loop anatomy of Ouro as small as it can be, in a file as checkpoints bring their own. Not its code, not its weights.

The order of layers, the norms, the names that the adapter relies on and what it expects of transformers, as release 4.55 had
it, are those of the published code: without `older_code` this file doesn't load.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of [..., position, d] by [position, d / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class OuroCache(Cache):
    """Keys and values by pass and layer, in lists of its own; no more than the configuration's passes have."""

    def __init__(self, most: int) -> None:
        self.most, self.layers, self.kept = most, [], []

    def update(self, key: Tensor, value: Tensor, index: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # as it was
        if index >= self.most:
            raise IndexError(f"{index} of {self.most}")
        self.kept += [(key[:, :, :0], value[:, :, :0])] * (index + 1 - len(self.kept))
        self.kept[index] = tuple(torch.cat(pair, dim=2) for pair in zip(self.kept[index], (key, value), strict=True))
        return self.kept[index]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.kept[layer_idx][0].shape[2] if layer_idx < len(self.kept) else 0


class OuroRotaryEmbedding(nn.Module):
    """Its frequencies are in no checkpoint: they are filled in when the weights are loaded."""

    inv_freq: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.rope_type = config, "default"
        frequencies, self.attention_scaling = ROPE_INIT_FUNCTIONS[self.rope_type](config, None)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.original_inv_freq = self.inv_freq

    def forward(self, positions: Tensor) -> Tensor:
        return torch.outer(positions.float(), self.inv_freq)


def eager_attention_forward(*_: Any, **__: Any) -> Any:
    raise AssertionError("the test runs through SDPA")


class TinyOuroConfig(PreTrainedConfig):
    model_type = "ouro"
    vocab_size: int = 61
    hidden_size: int = 16
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    num_hidden_layers: int = 2
    max_position_embeddings: int = 64
    total_ut_steps: int = 4
    rope_theta: float = 100.0
    eos_token_id: int | list[int] | None = 1


class OuroAttention(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer, self.config, self.num_key_value_groups, self.is_causal = layer, config, 2, True
        self.q_proj, self.k_proj = nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.v_proj, self.o_proj = nn.Linear(16, 8, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, hidden_states: Tensor, angles: Tensor, mask: Any, cache: Any, run: int) -> tuple[Tensor, None]:
        q, k, v = (
            proj(hidden_states).unflatten(-1, (-1, 4)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, angles), rotate(k, angles)
        if cache is not None:
            k, v = cache.update(k, v, run * self.config.num_hidden_layers + self.layer)
        attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        y, _ = attention(self, q, k, v, mask, dropout=0.0, scaling=0.5, sliding_window=None)
        return self.o_proj(y.flatten(2)), None


class OuroLayer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.self_attn = OuroAttention(config, layer)
        self.mlp = nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16))
        self.input_layernorm, self.input_layernorm_2 = nn.RMSNorm(16), nn.RMSNorm(16)
        self.post_attention_layernorm, self.post_attention_layernorm_2 = nn.RMSNorm(16), nn.RMSNorm(16)

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        x = hidden_states
        x = x + self.input_layernorm_2(self.self_attn(hidden_states=self.input_layernorm(x), **options)[0])
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))


class TinyOuroBase(PreTrainedModel):
    config_class = TinyOuroConfig
    base_model_prefix = "model"
    _supports_sdpa = True


class OuroBody(TinyOuroBase):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed_tokens, self.rotary_emb = nn.Embedding(61, 16, config.pad_token_id), OuroRotaryEmbedding(config)
        self.layers = nn.ModuleList(OuroLayer(config, i) for i in range(2))
        self.norm, self.early_exit_gate, self.total_ut_steps = nn.RMSNorm(16), nn.Linear(16, 1), config.total_ut_steps
        self.post_init()

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = False) -> tuple[Tensor, Any]:
        x = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = OuroCache(self.config.num_hidden_layers * self.config.total_ut_steps)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        positions = torch.arange(past, past + x.shape[1])
        mask = create_causal_mask(
            config=self.config,
            input_embeds=x,
            attention_mask=None,
            cache_position=positions,
            past_key_values=past_key_values,
            position_ids=positions.unsqueeze(0),
        )
        angles = self.rotary_emb(positions)
        for run in range(self.total_ut_steps):
            for layer in self.layers:
                x = layer(x, angles=angles, mask=mask, cache=past_key_values, run=run)
            x = self.norm(x)
        return x, past_key_values


class TinyOuro(TinyOuroBase, GenerationMixin):
    _tied_weights_keys: ClassVar = ["lm_head.weight"]

    def __init__(self, config: TinyOuroConfig | None = None) -> None:
        super().__init__(config or TinyOuroConfig())
        self.model, self.lm_head = OuroBody(self.config), nn.Linear(16, 61, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = False, **_: Any) -> Any:
        x, cache = self.model(input_ids, past_key_values=past_key_values, use_cache=use_cache)
        return CausalLMOutputWithPast(logits=self.lm_head(x), past_key_values=cache)

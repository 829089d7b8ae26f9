"""Inkling2-Loop: layers [start, end) run `loop_num_passes` times. Each later pass restarts from the state before the loop and
receives messages from the pass before it, by gates that only later visits have.

The layer's input is the partial sum of a block, not a residual stream: a block boundary starts it afresh, and earlier blocks
come in by an attention over block states. Scores hold a relative position bias and rows a sink per token, so P comes from the
model's own weights. The router adds a bias before its top k and scores by sigmoid.
"""

from __future__ import annotations

from typing import Any

from visitlens.errors import InputError
from visitlens.hooks.adapters.families.deepseek import SIGMOID
from visitlens.hooks.adapters.family import Anatomy, Family, Layer, Read

_PARTIAL = (
    "the layer's input is the partial sum of a block that starts afresh at each block boundary, no residual stream"
)


class Inkling2Loop(Family):
    model_types = ("inkling2_loop_text",)
    learned_sink = True
    loops = "config.loop_num_passes"

    def anatomy(self, model: Any) -> Anatomy:
        config = self.text_config(model)
        layers = tuple(Layer((f"layers.{i}",), _READS) for i in range(config.num_hidden_layers))
        start, end = config.loop_layer_index_start, config.loop_layer_index_end
        order = [*range(start), *[*range(start, end)] * config.loop_num_passes, *range(end, len(layers))]
        return Anatomy(
            layers,
            tuple(order),
            missing={"resid": _PARTIAL, "resid_out": _PARTIAL, "sum of writes": _PARTIAL, "softmax router": SIGMOID},
            notes=(
                "visits from the second on restart from the state before the loop; the first looped layer's input is the same",
                "X is the input of the queries; keys and values read others, with message gates at later visits",
                "writes are taken after the short convolution, where they enter the partial sum",
                "attention rows sum to 1 together with a sink slot of each token",
                "gates include the routed scaling factor",
            ),
        )

    def sizes(self, model: Any) -> dict[str, Any]:
        config = self.text_config(model)
        sliding = (config.swa_num_attention_heads, config.swa_num_key_value_heads, config.swa_head_dim)
        full = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        if sliding != full and len(set(config.layer_types)) > 1:
            raise InputError(
                f"expected layers of equal heads, got (heads, key/value heads, d) {full} in full and {sliding} in sliding layers"
            )
        return {
            **super().sizes(model),
            "num_experts": config.n_routed_experts,
            "experts_per_token": config.num_experts_per_tok,
        }


_READS = (
    Read("X", "self_attn", "input"),
    Read("O", "self_attn"),
    Read("attn_write", "post_attention_convolution"),
    Read("moe_in", "post_attention_layernorm"),
    Read("moe_write", "post_mlp_convolution"),
    Read("router", "mlp.gate"),
    Read("experts", "mlp.experts", "input", 1, "top_k_index"),
    Read("gates", "mlp.experts", "input", 2, "top_k_weights"),
    Read("expert_in", "mlp.experts", "input"),
)

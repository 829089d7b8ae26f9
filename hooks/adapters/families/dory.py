"""Dory: input layers, recurrent layers that run several times, output layers; on the unit sphere, as nGPT.

Re-entry is `norm(h) + input`. Each sub-layer's output is normalised and the stream moves towards it at a learned rate per
channel, with a normalisation in between: outputs are directions, and no sum of them is the next residual.
"""

from __future__ import annotations

from typing import Any

from visitlens.hooks.adapters.family import NO_ROUTER, Anatomy, Family, Layer, Read

NGPT = (
    "nGPT interpolation: each sub-layer's output is normalised and the stream moves towards it at a learned rate, so "
    "outputs don't add up to the change of the residual"
)


class Dory(Family):
    model_types = ("dory",)
    loops = "config.n_recurrent_loops"

    def anatomy(self, model: Any) -> Anatomy:
        config = model.config
        reads = (
            Read("resid", "", "input"),
            Read("X", "self_attn", "input"),  # the norms' outputs themselves lie on the stream
            Read("O", "self_attn"),
            Read("attn_write", "post_attention_layernorm"),
            Read("moe_in", "mlp", "input"),
            Read("moe_write", "post_feedforward_layernorm"),
            Read("resid_out", ""),
        )
        first, loop = config.n_input_layers, config.n_recurrent_layers
        last = config.num_hidden_layers - config.n_output_layers
        order = [*range(first), *[*range(first, first + loop)] * config.n_recurrent_loops]
        order += range(last, config.num_hidden_layers)
        return Anatomy(
            tuple(Layer((f"layers.{i}",), reads) for i in range(config.num_hidden_layers)),
            tuple(order),
            missing={"sum of writes": NGPT, **NO_ROUTER},
            notes=(
                "attn_write and moe_write are the normalised outputs before the learned interpolation: directions",
                "the recurrent part re-enters as norm(h) + the input layers' normalised output",
                "the attention output is gated by a sigmoid of the layer input after PV",
            ),
        )

"""gpt-oss: alternating sliding windows, and a learned sink, one logit a head that takes attention mass and gives nothing.

A row of P sums to 1 together with that slot: `learned_sink_mass` is what it takes, `sink_mass` the mass on the segment start, beside it.
"""

from __future__ import annotations

from visitlens.hooks.adapters.families.moe import MoEDecoder


class GptOss(MoEDecoder):
    model_types = ("gpt_oss",)
    learned_sink = True
    router = "router"

    def notes(self) -> tuple[str, ...]:
        return (
            "attention rows sum to 1 together with a learned sink slot (learned_sink_mass); sink_mass is that on the segment start",
            "the router's softmax is over the chosen experts; router_entropy is that of the softmax over all",
        )

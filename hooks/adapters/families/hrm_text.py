"""HRM-Text: two stacks in nested cycles. Each high cycle runs the L stack `L_cycles` times, then the H stack once.

Physical layers are numbered L stack first. `config.num_hidden_layers` counts cache slots and isn't their number. A stack ends
with a norm, and its input is the sum of both states.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from visitlens.hooks.adapters.family import NO_ROUTER, Anatomy, Family, Layer, pre_norm_reads


class HrmText(Family):
    model_types = ("hrm_text",)
    loops = "config.H_cycles"

    @contextmanager
    def running(self, model: Any) -> Iterator[None]:
        """Its code gives gradients to the last few low cycles of a high one, by a list: here all have them."""
        body: Any = self.body(model)
        before = body.L_bp_cycles_padded
        body.L_bp_cycles_padded = [model.config.L_cycles] * model.config.H_cycles
        try:
            yield
        finally:
            body.L_bp_cycles_padded = before

    def anatomy(self, model: Any) -> Anatomy:
        config = model.config
        per_stack = config.num_layers_per_stack
        low, high = range(per_stack), range(per_stack, 2 * per_stack)
        cycle = [*[*low] * config.L_cycles, *high]
        paths = [f"{stack}.layers.{i}" for stack in ("L_module", "H_module") for i in range(per_stack)]
        return Anatomy(
            tuple(Layer((path,), pre_norm_reads()) for path in paths),
            tuple(cycle * config.H_cycles),
            missing=NO_ROUTER,
            notes=(
                "a stack's input is the sum of the slow and the fast state, and its output is normalised: residuals chain "
                "within a run of a stack only",
                "the attention output is gated by a sigmoid of the layer input after PV",
                "run causally; the bidirectional prefix of instructions isn't used",
            ),
        )

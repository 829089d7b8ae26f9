"""HookedModel: a model with a TransformerLens hook point for each (layer, visit, site), as an `InstrumentedModel`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.HookedRootModule import HookedRootModule

from visitlens.hooks.core.loop_plan import Step
from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.core.sites import SITES
from visitlens.hooks.core.visit_clock import VisitClock
from visitlens.hooks.models.hook_names import NamedHooks

if TYPE_CHECKING:
    from visitlens.hooks.capture.capture import Captured


class HookedModel(NamedHooks, InstrumentedModel):
    """`hook_embed` fires first, at [context, position, hidden], and `ln_final` is called last."""

    hook_embed: HookPoint
    ln_final: nn.Module

    @contextmanager
    def observing(self, captured: Captured) -> Iterator[None]:
        clock = VisitClock(captured.plan)

        def begin(embedded: Tensor, hook: Any) -> None:
            nonlocal clock
            self.check_turn()
            clock = VisitClock(captured.plan)  # the last forward may have ended in an error
            captured.begin(embedded.shape[0], embedded.shape[1], embedded)

        def enter(_: Tensor, hook: Any, layer: int) -> None:
            clock.enter(layer)

        def store(value: Tensor, hook: Any, site: str, step: int) -> None:
            captured.store(site, step, value)

        hooks: list[tuple[str | Callable[..., Any], Callable[..., Any]]] = [("hook_embed", begin)]
        for step in captured.plan.steps:
            hooks.append((hook_name("resid", step), partial(enter, layer=step.layer)))
            hooks += [(hook_name(site, step), partial(store, site=site, step=step.index)) for site in captured.sites]
        with HookedRootModule.hooks(self, fwd_hooks=hooks):  # names are right, and nothing is returned
            # Not a hook on the model: TransformerLens' run_with_hooks calls `forward` and passes those by.
            handle = self.ln_final.register_forward_hook(lambda *_: clock.finish())
            try:
                yield
            finally:
                handle.remove()

    @contextmanager
    def changing(self, places: Collection[tuple[str, Step]], change: Callable[..., Tensor | None]) -> Iterator[None]:
        def changed(value: Tensor, hook: Any, site: str, step: Step) -> Tensor | None:
            return change(site, step, value, None)

        with self.hooks(
            fwd_hooks=[(hook_name(site, step), partial(changed, site=site, step=step)) for site, step in places]
        ):
            yield

    def get_caching_hooks(
        self,
        names_filter: Any = None,
        incl_bwd: bool = False,
        device: Any = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Any = None,
    ) -> tuple[dict, list, list]:
        """TransformerLens' own, except that `pos_slice` cuts positions of rotated queries and keys: 4.3 cuts heads."""
        cache, forward, backward = super().get_caching_hooks(
            self.names_chosen(names_filter), incl_bwd, device, remove_batch_dim, cache, pos_slice
        )

        def turned(save: Any, suffix: str) -> Any:
            def save_turned(value: Tensor, hook: HookPoint) -> None:
                save(value.transpose(-3, -2), hook=hook)  # [context, head, position, d]
                kept = cache[f"{hook.name}{suffix}"]
                cache[f"{hook.name}{suffix}"] = kept.transpose(-3, -2) if kept.ndim > 3 - remove_batch_dim else kept

            return save_turned

        def all_of(hooks: list, suffix: str) -> list:
            rotated = ("hook_rot_q", "hook_rot_k")
            return [(name, turned(save, suffix) if name.endswith(rotated) else save) for name, save in hooks]

        return cache, all_of(forward, ""), all_of(backward, "_grad")


def hook_name(site: str, step: Step) -> str:
    """Such as `blocks.4.visit.2.attn.hook_rot_q`."""
    return f"blocks.{step.layer}.visit.{step.visit}.{SITES[site].hook}"

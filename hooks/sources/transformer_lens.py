"""TransformerLens as a source: a `TransformerBridge` whose hooks and cache keep every visit apart.

A bridge fires a looped layer's hook points once a visit under one name, and its own cache keeps the last. Here each firing
is named with its visit, in the shape of visitlens' native hooks: `L_blocks.0.attn.hook_rot_q` fires as
`L_blocks.0.visit.2.attn.hook_rot_q`. The order of steps is read from one forward, and every later forward is held to it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from visitlens.errors import InputError, PlanError
from visitlens.hooks.adapters.document_model import Change, DocumentModel
from visitlens.hooks.adapters.family import first_id
from visitlens.hooks.adapters.transformer_lens_calls import Hook, NamesFilter, VisitPoint, cut
from visitlens.hooks.capture.capture import Captured
from visitlens.hooks.core.evaluation import evaluating
from visitlens.hooks.core.loop_plan import ExecutionPlan, Step
from visitlens.hooks.core.model_interface import ModelFacts
from visitlens.hooks.core.sites import SITES
from visitlens.hooks.core.visit_clock import VisitClock

_BLOCK = re.compile(r"(?P<block>\w*blocks\.\d+)\.(?:visit\.(?P<visit>\w+|\*)\.)?(?P<point>.+)")
_POINTS = {
    "resid": ("hook_in",),
    "X": ("ln1.hook_out",),
    "Q": ("attn.hook_rot_q",),
    "K": ("attn.hook_rot_k",),
    "V": ("attn.v.hook_out",),
    "P": ("attn.hook_pattern",),
    "PV": ("attn.o.hook_in",),
    "O": ("attn.hook_out",),
    "attn_write": ("attn.hook_out",),
    "moe_in": ("ln2.hook_out",),
    "moe_write": ("mlp.hook_out",),
    "resid_out": ("hook_out",),
}
"""Site -> the bridge's canonical hook point below a block."""
_NOT_IN_BRIDGE = "a TransformerLens bridge has no hook point for it; visitlens.adapt(bridge.original_model) may"


class _Stop(Exception):
    """Ends a forward where its result is known."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


class VisitBridge(DocumentModel):
    """A bridge by visit. `blocks` names the block of each physical layer, in order of first run.

    `run_with_cache`, `run_with_hooks`, `names_filter` and `pos_slice` are TransformerLens'; names hold the visit.
    """

    def __init__(self, bridge: Any) -> None:
        self.bridge = bridge
        fired: list[str] = []
        probe = torch.zeros(1, 2, dtype=torch.long, device=next(bridge.parameters()).device)
        with torch.no_grad(), evaluating(bridge), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that some hook points are switched off
            bridge.run_with_hooks(probe, fwd_hooks=[(lambda name: True, lambda _, hook: fired.append(str(hook.name)))])
        blocks = [name.removesuffix(".hook_in") for name in fired if _is_entry(name)]
        if not blocks:
            raise InputError("this bridge has no blocks with a hook_in: its steps can't be followed")
        self.blocks = tuple(dict.fromkeys(blocks))
        number = {block: n for n, block in enumerate(self.blocks)}
        self.plan = ExecutionPlan.from_layers(number[block] for block in blocks)
        self._number = number
        self._points = tuple(dict.fromkeys(fired))  # those that are switched on, by their canonical names
        order = tuple(step.layer for step in self.plan.steps)
        self.config = _facts(bridge, self.blocks, order, self._points)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.bridge.parameters()

    def run_documents(self, documents: Tensor, return_type: str) -> Tensor | None:
        with evaluating(self.bridge):
            logits = self.bridge(documents, return_type="logits")
        return None if return_type == "none" else logits

    @contextmanager
    def observing(self, captured: Captured) -> Iterator[None]:
        wanted: dict[str, list[str]] = {}
        for site in captured.sites:
            wanted.setdefault(_POINTS[site][0], []).append(site)

        def store(value: Tensor, hook: VisitPoint) -> None:
            match = _BLOCK.fullmatch(hook.name)
            if hook.step is None or match is None:
                return
            for site in wanted[match["point"]]:
                self.place(captured, site, hook.step.index, self._by_head(site, value), tuple(value.shape[:2]))

        hooks = [(f"{block}.visit.*.{point}", store) for block in self.blocks for point in wanted]
        with self.hooks(hooks, partial(self.begin, captured)):
            yield

    @contextmanager
    def changing(self, places: Collection[tuple[str, Step]], change: Change) -> Iterator[None]:
        def put(value: Tensor, hook: VisitPoint, site: str, step: Step) -> Tensor | None:
            new = self.changed(change, site, step, self._by_head(site, value), tuple(value.shape[:2]))
            return None if new is None else new.reshape(value.shape)

        names = [
            (f"{self.blocks[step.layer]}.visit.{step.visit}.{_POINTS[site][0]}", site, step) for site, step in places
        ]
        with self.hooks([(name, partial(put, site=site, step=step)) for name, site, step in names]):
            yield

    def _by_head(self, site: str, value: Tensor) -> Tensor:
        if site not in ("V", "PV") or value.ndim != 3:
            return value
        return value.unflatten(-1, (self.config.num_kv_heads if site == "V" else self.config.num_heads, -1))

    # TransformerLens' calls, by visit

    def run_with_hooks(self, tokens: Tensor, fwd_hooks: Sequence[tuple[str, Hook]] = ()) -> Tensor:
        """Logits, with hook functions `(value, hook)` at named visits; what one returns takes the value's place.

        A name is `BLOCK.visit.N.POINT`, or `BLOCK.visit.*.POINT` for every visit; outside blocks it is the bridge's.

        Raises:
            InputError: no such hook point, no such visit, or a looped block's name without a visit.
        """
        with self.hooks(fwd_hooks), evaluating(self.bridge):
            return self.bridge(tokens, return_type="logits")

    def run_with_cache(
        self,
        tokens: Tensor,
        names_filter: NamesFilter = None,
        pos_slice: slice | int | None = None,
        remove_batch_dim: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits and every visit's values, by name with the visit. `names_filter` is a name (with a visit, `*` or none),
        several, or a function of the name with its visit; `pos_slice` cuts positions.

        Raises:
            InputError: a name that matches no hook point.
        """
        cache: dict[str, Tensor] = {}
        length = tokens.shape[1]

        def keep(value: Any, hook: VisitPoint) -> None:
            if isinstance(value, Tensor):
                cache[hook.name] = cut(value.detach(), hook.name, length, pos_slice, remove_batch_dim)

        names = self._named(names_filter)
        chosen = names_filter if callable(names_filter) else lambda name: True

        def keep_chosen(value: Any, hook: VisitPoint) -> None:
            if chosen(hook.name):
                keep(value, hook)

        with self.hooks([(name, keep_chosen) for name in names]):
            logits = self.bridge(tokens, return_type="logits")
        return logits, cache

    def run_to(self, tokens: Tensor, layer: int, visit: int) -> Tensor:
        """The residual stream [context, position, hidden] at a step's input; nothing after it runs.

        Raises:
            InputError: no such visit.
        """
        step = self.plan.step(layer, visit)

        def stop(value: Tensor, hook: VisitPoint) -> None:
            raise _Stop(value)

        try:
            self.run_with_hooks(tokens, [(f"{self.blocks[layer]}.visit.{step.visit}.hook_in", stop)])
        except _Stop as stopped:
            return stopped.value
        raise PlanError(f"{step} never ran")

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[tuple[str, Hook]],
        begin: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Hook functions at named visits, for every forward inside."""
        by_point: dict[str, list[tuple[int | None, Hook, str]]] = {}
        for name, function in fwd_hooks:
            point, visit = self._resolve(name)
            asked = _BLOCK.fullmatch(name)  # it may have been asked for by an alias, and is called so
            by_point.setdefault(point, []).append((visit, function, asked["point"] if asked else name))
        clock = VisitClock(self.plan)
        now: dict[str, Step] = {}

        def enter(block: str) -> None:
            now[block] = clock.enter(self._number[block])

        def fire(value: Any, hook: Any, point: str) -> Any:
            match = _BLOCK.fullmatch(point)
            step = now.get(match["block"]) if match else None
            changed = None
            for visit, function, asked in by_point.get(point, ()):
                if visit is None or step is None or step.visit == visit:
                    name = asked if match is None or step is None else f"{match['block']}.visit.{step.visit}.{asked}"
                    result = function(value if changed is None else changed, hook=VisitPoint(name, step))
                    changed = changed if result is None else result
            return changed

        def first(*_: Any) -> None:
            nonlocal clock
            clock = VisitClock(self.plan)
            now.clear()
            begin()

        def entered(value: Any, hook: Any, block: str) -> Any:
            enter(block)
            return fire(value, hook, f"{block}.hook_in")

        attached: list[tuple[str, Hook]] = [
            (f"{block}.hook_in", lambda value, hook, block=block: entered(value, hook, block)) for block in self.blocks
        ]
        attached += [
            (point, lambda value, hook, point=point: fire(value, hook, point))
            for point in by_point
            if not _is_entry(point)
        ]
        handles = [self.bridge.original_model.register_forward_pre_hook(first)]
        handles.append(self.bridge.original_model.register_forward_hook(lambda *_: clock.finish()))
        try:
            with self.bridge.hooks(fwd_hooks=attached):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _resolve(self, name: str) -> tuple[str, int | None]:
        """The bridge's hook point and the visit (None: all) that a name means."""
        match = _BLOCK.fullmatch(name)
        if match is None or match["block"] not in self._number:
            if name not in self._points:
                raise InputError(f"no hook point {name!r}; blocks are {', '.join(self.blocks)}")
            return name, None
        point = f"{match['block']}.{match['point']}"
        if point not in self._points and point in self.bridge.hook_dict:
            point = str(self.bridge.hook_dict[point].name)  # one of TransformerLens' aliases, such as hook_resid_pre
        if point not in self._points:
            have = [p.removeprefix(match["block"] + ".") for p in self._points if p.startswith(match["block"] + ".")]
            raise InputError(f"no hook point {match['point']!r} in {match['block']}; it has {', '.join(have)}")
        visits = self.plan.visits[self._number[match["block"]]]
        if match["visit"] is None and visits > 1:
            raise InputError(
                f"{match['block']} runs {visits} times: name the visit, {match['block']}.visit.1.{match['point']}, "
                f"or all of them, {match['block']}.visit.*.{match['point']}"
            )
        if match["visit"] in (None, "*"):
            return point, None
        if not match["visit"].isdigit() or not 1 <= int(match["visit"]) <= visits:
            raise InputError(f"no visit {match['visit']} of {match['block']}: it runs {visits} times")
        return point, int(match["visit"])

    def _named(self, names_filter: NamesFilter) -> list[str]:
        """Names with visits, for `hooks`."""
        if names_filter is None or callable(names_filter):
            names = []
            for point in self._points:
                match = _BLOCK.fullmatch(point)
                inside = match is not None and match["block"] in self._number
                names.append(f"{match['block']}.visit.*.{match['point']}" if match and inside else point)
            return names
        wanted = [names_filter] if isinstance(names_filter, str) else list(names_filter)
        names = []
        for name in wanted:
            match = _BLOCK.fullmatch(name)
            if match is not None and match["block"] in self._number and match["visit"] is None:
                name = f"{match['block']}.visit.*.{match['point']}"
            self._resolve(name)
            names.append(name)
        return names


def from_transformer_lens(bridge: Any) -> VisitBridge:
    """A TransformerLens `TransformerBridge` by visit: its hooks and cache, and visitlens' capture, recorder and statistics.

    Raises:
        InputError: not a bridge, or one without blocks.
    """
    if not hasattr(bridge, "hook_dict") or not hasattr(bridge, "original_model"):
        raise InputError(f"expected a TransformerLens TransformerBridge, got {type(bridge).__name__}")
    return VisitBridge(bridge)


def _is_entry(point: str) -> bool:
    return re.fullmatch(r"\w*blocks\.\d+\.hook_in", point) is not None


def _facts(bridge: Any, blocks: tuple[str, ...], order: tuple[int, ...], points: Sequence[str]) -> ModelFacts:
    cfg = bridge.cfg
    missing = {
        site: _NOT_IN_BRIDGE
        for site in SITES
        if site not in _POINTS or any(f"{block}.{_POINTS[site][0]}" not in points for block in blocks)
    }
    if any(f"{block}.attn.gate.hook_out" in points for block in blocks):
        missing["PV"] = "its attention output is gated, and the bridge's hook_z comes after the gate"
    missing["sum of writes"] = (
        "a bridge doesn't say how its family forms the residual; visitlens.adapt(bridge.original_model) may"
    )
    hf = bridge.original_model.config
    heads = int(cfg.n_heads)
    ids = {name: first_id(getattr(hf, name, None)) for name in ("bos_token_id", "eos_token_id")}
    return ModelFacts(
        family=f"transformer_lens:{hf.model_type}",
        vocab_size=int(cfg.d_vocab),
        hidden_size=int(cfg.d_model),
        num_layers=len(blocks),
        num_heads=heads,
        num_kv_heads=int(getattr(cfg, "n_key_value_heads", None) or heads),
        head_dim=int(cfg.d_head),
        value_dim=int(cfg.d_head),
        context_length=int(cfg.n_ctx),
        missing=missing,
        notes=("read through a TransformerLens bridge, whose attention forms a map at each step",),
        order=order,
        layer_names=blocks,
        bos_token_id=ids["bos_token_id"],
        eos_token_id=ids["eos_token_id"],
        pad_token_id=first_id(getattr(hf, "pad_token_id", None)) or 0,
    )

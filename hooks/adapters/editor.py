"""StepEditor: the hooks of one `intervene` on an adapted model. It sees what a capture sees, and puts other values in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from visitlens.errors import InputError
from visitlens.hooks.adapters.attention_calls import AttentionCall, TorchCall
from visitlens.hooks.adapters.document_model import Change
from visitlens.hooks.adapters.family import Inside, Read
from visitlens.hooks.adapters.observer import StepObserver, in_place, recomputing, taken
from visitlens.hooks.capture.capture import Captured
from visitlens.hooks.core.loop_plan import Step

if TYPE_CHECKING:
    from visitlens.hooks.adapters.adapted_model import AdaptedModel

_TOPK = (torch.topk, torch.Tensor.topk)
_ROUTES = {"router": "no linear map onto", "experts": "no top k over"}
"""Sites that are changed by what runs inside the router's module."""


class StepEditor(StepObserver):
    """`change` gets the values at `places` and says what takes their place; see `InstrumentedModel.changing`.

    A router's scores and choices are changed inside it, where it scores and where it takes its top k, so that choices
    and gates follow by the family's own rule.
    """

    def __init__(self, adapted: AdaptedModel, places: Collection[tuple[str, Step]], change: Change) -> None:
        super().__init__(adapted, Captured(adapted.plan, tuple({site: None for site, _ in places})))
        self.change, self.edited = change, {(site, step.index) for site, step in places}
        self.ended = False
        self._reached: set[tuple[str, int]] = set()

    def remove(self) -> None:
        self.ended = True
        super().remove()

    def attention_editors(self) -> Mapping[nn.Module, StepEditor]:
        return dict.fromkeys(self.attention_observers(), self)

    def torch_editors(self) -> dict[nn.Module, TorchCall]:
        editors = self.torch_observers()
        if {"router", "experts"} & set(self.captured.sites):
            for layer in self.adapted.anatomy.layers:
                for read in layer.reads:
                    if read.site == "router" and read.end == "output":
                        modules = [self._module(path, read.module) for path in layer.modules]
                        editors |= dict.fromkeys(modules, self._route)
        return editors

    def _watch(self, module: nn.Module, read: Read) -> None:
        if read.site not in ("router", "experts"):  # these are changed by `_route`
            super()._watch(module, read)

    def before(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The attention call's inputs [batch, head, token, d], changed."""
        new = q.shape[2]
        return self._with_past("Q", q, new), self._with_past("K", k, new), self._with_past("V", v, new)

    def _with_past(self, site: str, x: Tensor, new: int) -> Tensor:
        """[batch, head, token, d] with its last `new` tokens changed, and those before as they were changed in their turn."""
        if self.step is None or (site, self.step) not in self.edited:
            return x
        past, cache, key = x.shape[2] - new, self.adapted.cache, (self, site, self.step)
        before = None if cache is None or not past else cache.changed.get(key)
        whole = x if before is None else torch.cat([before[:, :, -past:], x[:, :, past:]], dim=2)
        changed = self._store(site, x[:, :, past:].transpose(1, 2))
        if changed is not None:
            own = changed.transpose(1, 2)
            whole = torch.cat([whole[:, :, :past], own], dim=2) if past else own
        if cache is not None and site != "Q" and whole is not x:
            cache.changed[key] = whole
        return whole

    def after(self, call: AttentionCall) -> AttentionCall:
        """Its pattern and its output, changed. The pattern is formed only where it is asked for."""
        output, weights = call.output, call.weights
        if ("P", self.step) in self.edited:
            pattern = self._store("P", self._pattern(call, self._rule(call)))
            if pattern is not None:
                weights = pattern
                spread = call.v.repeat_interleave(pattern.shape[1] // call.v.shape[1], dim=1)
                output = (pattern.to(spread.dtype) @ spread).transpose(1, 2)
        output = self._with("PV", output)
        if output is call.output:
            return call
        return AttentionCall(call.q, call.k, call.v, output.contiguous(), weights, call.options)  # models view it

    def _route(self, func: Any, args: tuple, _: Any, result: Any) -> Any:
        experts = self.adapted.config.num_experts
        if func is torch.nn.functional.linear and result.shape[-1] == experts:
            return self._store("router", result)
        tokens = args[0].shape[:-1] if func in _TOPK and args and args[0].shape[-1] == experts else None
        if tokens is not None and (len(tokens) == 1 or tokens == self.shape):  # else groups of experts are chosen
            return self._chosen(args[0], result)
        return None

    def _see(self, module: nn.Module, inside: Inside) -> TorchCall:
        def look(func: Any, args: tuple, _: Any, result: Any) -> Any:
            values = inside.read(module, func, args, result)
            if func in _TOPK and "experts" in values:
                chosen = self._chosen(args[0], result)
                values = {**values, "gates": (chosen or result)[0]}
                gates = self._store("gates", values["gates"])
                return chosen if gates is None else type(result)((gates, (chosen or result)[1]))
            changed = {site: self._store(site, value) for site, value in values.items() if value is result}
            return next((new for new in changed.values() if new is not None), None)

        return look

    def _chosen(self, scores: Tensor, result: Any) -> Any:
        """The top k of scores with other choices, and their scores."""
        new = self._store("experts", result[1])
        return None if new is None else type(result)((scores.gather(-1, new), new))

    def _with(self, site: str, value: Tensor) -> Tensor:
        new = self._store(site, value)
        return value if new is None else new

    def _store(self, site: str, value: Tensor) -> Tensor | None:
        if self.step is None or (site, self.step) not in self.edited or recomputing():
            return None
        self._reached.add((site, self.step))
        step, places = self.adapted.plan.steps[self.step], self.places
        if places is None:
            return self.adapted.changed(self.change, site, step, value, self.shape, self.there)
        laid = in_place(site, value, self.shape, places, self.whole, 0.0)
        after = self.adapted.changed(self.change, site, step, laid, self.whole, self.there)
        return None if after is None else taken(site, after, places).reshape(value.shape)

    def _end(self, *_: Any) -> None:
        if recomputing():
            return
        self.clock.finish()
        skipped, absent = {step.index for step in self.clock.skipped}, self.adapted.config.absent
        for site, index in sorted(self.edited - self._reached):
            step = self.adapted.plan.steps[index]
            if site in _ROUTES and index not in skipped and step.layer not in absent.get(site, {}):
                raise InputError(
                    f"{site} can't be changed at {step}: {_ROUTES[site]} the {self.adapted.config.num_experts} experts ran inside the "
                    f"module from which the adapter for {self.adapted.config.family} reads the router. Do it in that module, or read the "
                    "routing by Inside (docs/adapters.md)"
                )

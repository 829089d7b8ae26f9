"""StepObserver: the hooks of one capture of an adapted model. It follows the plan and stores each site at its step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from visitlens.hooks.adapters.attention_calls import AttentionCall, TorchCall
from visitlens.hooks.adapters.family import Inside, Read
from visitlens.hooks.attention_rule import AttentionRule
from visitlens.hooks.capture import Captured
from visitlens.hooks.visit_clock import VisitClock
from visitlens.kernels.errors import InputError, PlanError

if TYPE_CHECKING:
    from visitlens.hooks.adapters.adapted import AdaptedModel

_ATTENTION_SITES = ("Q", "K", "V", "P", "PV")
_EXPERT_INPUTS = ("hidden_states", "top_k_index", "top_k_weights")


class StepObserver:
    def __init__(self, adapted: AdaptedModel, captured: Captured) -> None:
        self.adapted, self.captured = adapted, captured
        self.clock = VisitClock(adapted.plan)
        self.step: int | None = None
        self.shape = (0, 0)  # (batch, positions) of the forward at work
        self._handles: list[Any] = []

    def install(self) -> None:
        body = self.adapted.body
        self._handles.append(body.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._handles.append(body.register_forward_hook(self._end))
        for number, layer in enumerate(self.adapted.anatomy.layers):
            modules = {self._module(path): path for path in layer.modules}  # one module may stand in several places
            for module, path in modules.items():
                # The layer's own hooks come first: reads of its input need the step.
                enter = partial(self._enter, layer=number)
                self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                for read in layer.reads:
                    if read.site in self.captured.sites:
                        self._watch(self._module(path, read.module), read)
                    if read.site == "experts" and read.end == "input" and "expert_out" in self.captured.sites:
                        self._watch_experts(self._module(path, read.module))
                self._handles.append(module.register_forward_hook(self._leave))

    def remove(self) -> None:
        self.adapted.expert_outputs.clear()
        for handle in self._handles:
            handle.remove()

    def attention_observers(self) -> dict[nn.Module, Callable[[AttentionCall], None]]:
        """By the module that calls attention; none where no site of attention is wanted."""
        if not set(_ATTENTION_SITES) & set(self.captured.sites):
            return {}
        return {
            self._module(path, layer.attention): self._attention
            for layer in self.adapted.anatomy.layers
            if layer.attention is not None
            for path in layer.modules
        }

    def torch_observers(self) -> dict[nn.Module, TorchCall]:
        """For sites that only the torch functions inside a module show."""
        return {
            self._module(path, inside.module): self._see(self._module(path, inside.module), inside)
            for layer in self.adapted.anatomy.layers
            for inside in layer.inside
            if set(inside.sites) & set(self.captured.sites)
            for path in layer.modules
        }

    def _see(self, module: nn.Module, inside: Inside) -> TorchCall:
        def look(func: Any, args: tuple, _: Any, result: Any) -> None:
            for site, value in inside.read(module, func, args, result).items():
                if site in self.captured.sites:
                    self._store(site, value)

        return look

    def _module(self, *paths: str) -> nn.Module:
        path = ".".join(p for p in paths if p)
        try:
            return self.adapted.body.get_submodule(path)
        except AttributeError as error:
            raise InputError(
                f"the adapter for {self.adapted.config.family} doesn't fit this model: no module {path!r} ({error})"
            ) from error

    def _watch(self, module: nn.Module, read: Read) -> None:
        if read.end == "output":

            def output(_: Any, __: Any, result: Any) -> Any:
                if not isinstance(result, tuple):
                    return self._store(read.site, result)
                new = self._store(read.site, result[read.item])
                return None if new is None else (*result[: read.item], new, *result[read.item + 1 :])

            self._handles.append(module.register_forward_hook(output))
            return

        def entry(_: Any, args: tuple, kwargs: dict) -> Any:
            if read.item >= len(args):
                new = self._store(read.site, kwargs[read.name])
                return None if new is None else (args, {**kwargs, read.name: new})
            new = self._store(read.site, args[read.item])
            return None if new is None else ((*args[: read.item], new, *args[read.item + 1 :]), kwargs)

        self._handles.append(module.register_forward_pre_hook(entry, with_kwargs=True))

    def _watch_experts(self, module: Any) -> None:
        """Each expert's own output, had by running the bank once more with one expert a row and no weighing."""

        known = self.adapted.expert_outputs  # of this call, as changed by whoever watched before

        def outputs(_: Any, args: tuple, kwargs: dict, result: Tensor) -> Tensor | None:
            hidden, experts, gates = (*args, *(kwargs[name] for name in _EXPERT_INPUTS[len(args) :]))
            if module not in known:
                rows = hidden.reshape(-1, hidden.shape[-1]).repeat_interleave(experts.shape[-1], dim=0)
                each = module.forward(rows, experts.reshape(-1, 1), torch.ones_like(gates).reshape(-1, 1))
                known[module] = each.view(*experts.shape, -1)
            new = self._store("expert_out", known[module])
            if new is None:
                return None
            known[module] = new
            return (new * gates.unsqueeze(-1)).sum(-2).to(result.dtype).view_as(result)

        self._handles.append(module.register_forward_pre_hook(lambda *_: _forget(known, module)))
        self._handles.append(module.register_forward_hook(outputs, with_kwargs=True))

    def _begin(self, _: Any, args: tuple, kwargs: dict) -> None:
        if recomputing():
            return
        self.clock, self.step = VisitClock(self.adapted.plan), None  # the last forward may have ended in an error
        positions = kwargs.get("position_ids")
        if positions is not None and positions.shape[-1] > 1 and bool((positions.diff(dim=-1) <= 0).any()):
            raise InputError(
                "position ids restart inside a sequence: packed documents leak into each other in several families. Call the "
                "adapted model with token ids and segment ids, which runs each document alone"
            )
        part = self.adapted.part
        if part is None or part.first:
            self.captured.clear()

    def _end(self, *_: Any) -> None:
        if recomputing():
            return
        self.clock.finish()
        for site in self.captured.sites:
            absent = self.captured.absent.get(site, {})
            for step in self.adapted.plan.steps:
                if step.index not in absent and self.captured.held(site, step.index) is None:
                    raise PlanError(
                        f"{step} ran and gave no {site!r}: the adapter for {self.adapted.config.family} doesn't fit this model, or its "
                        'attention goes past what is watched (load it with attn_implementation="sdpa")'
                    )

    def _enter(self, _: Any, args: tuple, kwargs: dict, layer: int) -> None:
        if recomputing():
            return
        hidden = args[0] if args else kwargs["hidden_states"]
        self.shape = tuple(hidden.shape[:2])
        self.step = self.clock.enter(layer).index

    def _leave(self, *_: Any) -> None:
        self.step = None

    def _attention(self, call: AttentionCall) -> None:
        if self.step is None:
            return
        wanted, new = self.captured.sites, call.q.shape[2]
        rule = self.captured.rules[self.step] = self._rule(call)
        per_token = {"Q": call.q.transpose(1, 2), "PV": call.output}
        per_token |= {"K": call.k[:, :, -new:].transpose(1, 2), "V": call.v[:, :, -new:].transpose(1, 2)}
        for site, value in per_token.items():
            if site in wanted:
                self._store(site, value)
        if "P" in wanted or (rule.from_map and {"Q", "K"} <= set(wanted)):
            self._store("P", self._pattern(call, rule))

    def _rule(self, call: AttentionCall) -> AttentionRule:
        options = call.options
        scale = options.get("scaling")
        # A bias of each query and key, or a sink of each query: Q and K alone don't give the rows.
        sinks = options.get("s_aux")
        from_map = any(options.get(name) is not None for name in ("position_bias", "sinks"))
        return AttentionRule(
            scale=float(call.q.shape[-1] ** -0.5 if scale is None else scale),
            window=options.get("sliding_window"),
            causal=self.adapted.family.causal,
            sinks=None if sinks is None else sinks.detach(),
            soft_cap=options.get("softcap"),
            from_map=from_map,
        )

    def _pattern(self, call: AttentionCall, rule: AttentionRule) -> Tensor:
        if call.weights is not None:
            return call.weights
        if rule.from_map or call.k.shape[2] != call.q.shape[2]:
            raise InputError(
                f"{self.adapted.config.family} doesn't give its attention weights in this setting; "
                'load it with attn_implementation="eager" to read site P'
            )
        return rule.pattern(call.q.transpose(1, 2), call.k.transpose(1, 2)).to(call.q.dtype)

    def _store(self, site: str, value: Tensor) -> Tensor | None:
        """Keeps a value; what it returns, which is nothing here, takes the value's place."""
        if self.step is not None and not recomputing():
            self.adapted.place(self.captured, site, self.step, value, self.shape)
        return None


def recomputing() -> bool:
    """Whether a backward pass is at work: activation checkpointing runs modules again there, which is no new visit."""
    return torch._C._current_graph_task_id() != -1


def _forget(known: dict[nn.Module, Tensor], module: nn.Module) -> None:
    known.pop(module, None)

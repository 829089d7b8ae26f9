"""StepObserver: the hooks of one capture of an adapted model. It follows the plan and stores each site at its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from visitlens.errors import InputError, PlanError
from visitlens.hooks.adapters.attention_calls import AttentionCall, TorchCall
from visitlens.hooks.adapters.family import Inside, Read, Visited, bank_inputs
from visitlens.hooks.capture.attention_rule import AttentionRule
from visitlens.hooks.capture.capture import VISITED, Captured
from visitlens.hooks.core.sites import SITES, token_shape
from visitlens.hooks.core.visit_clock import VisitClock

if TYPE_CHECKING:
    from visitlens.hooks.adapters.adapted_model import AdaptedModel

_STREAM = ("resid", "attn_write", "moe_write", "resid_out")
_ATTENTION_SITES = ("Q", "K", "V", "P", "PV")
_UNSEEN = {
    "registry": 'its attention goes past what is watched (load it with attn_implementation="sdpa")',
    "sdpa": "its attention doesn't call torch.nn.functional.scaled_dot_product_attention inside the module that `attention` names: let "
    "it call that, or say attention=None, which leaves out what needs Q, K, V, P or PV",
}
"""`attention_calls` -> why a step may give no site of attention."""


class StepObserver:
    def __init__(self, adapted: AdaptedModel, captured: Captured) -> None:
        self.adapted, self.captured = adapted, captured
        self.clock = VisitClock(adapted.plan, adapted.anatomy.ragged)
        self.step: int | None = None
        self.shape = (0, 0)  # (batch, positions) of what the layer at work is given
        self.whole = (0, 0)  # (batch, positions) of the forward at work
        self.places: Tensor | None = None  # [batch, n] where the layer is given some of the tokens
        self.there: Tensor | None = None  # [batch, position] which tokens are at the step, where not all are
        self._routed: dict[nn.Module, Tensor] = {}  # the last value there, of what says which tokens come next
        self._handles: list[Any] = []
        self._masks = adapted.masks

    def install(self) -> None:
        body = self.adapted.body
        self._handles.append(body.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._handles.append(body.register_forward_hook(self._end))
        for number, layer in enumerate(self.adapted.anatomy.layers):
            modules = {self._module(path): path for path in layer.modules}  # one module may stand in several places
            for module, path in modules.items():
                # The layer's own hooks come first: reads of its input need the step.
                enter = partial(self._enter, layer=number, path=path)
                self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                for read in layer.reads:
                    if read.site in self.captured.sites:
                        self._watch(self._module(path, read.module), read)
                    if read.site == "experts" and read.end == "input" and "expert_out" in self.captured.sites:
                        self._watch_experts(self._module(path, read.module), bank_inputs(layer))
                self._handles.append(module.register_forward_hook(self._leave))
        for layer in self.adapted.anatomy.layers:
            if layer.visited is not None and layer.visited.at_body and layer.visited.read is not None:
                self._watch_routing(self._module(layer.visited.read.module), layer.visited.read)

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
        """For sites, and the routing of tokens to visits, that only the torch functions inside a module show."""
        watched = {
            self._module(path, inside.module): self._see(self._module(path, inside.module), inside)
            for layer in self.adapted.anatomy.layers
            for inside in layer.inside
            if set(inside.sites) & set(self.captured.sites)
            for path in layer.modules
        }
        for layer in self.adapted.anatomy.layers:
            if layer.visited is not None and layer.visited.routes is not None:
                modules = [self._module(_up(path, layer.visited.above)) for path in layer.modules]
                watched |= {module: self._see_routing(module, layer.visited.routes) for module in modules}
        return watched

    def _see_routing(self, module: nn.Module, routes: Callable[[Any, tuple, Any], Tensor | None]) -> TorchCall:
        def look(func: Any, args: tuple, _: Any, result: Any) -> None:
            value = routes(func, args, result)
            if value is not None:
                self._routed[module] = value

        return look

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
                if read.item >= len(result):
                    raise InputError(
                        f"{read.site!r} is read from output {read.item} of {read.module or 'the layer'!r}, which gave {len(result)}: mend the "
                        "Read's `item`"
                    )
                new = self._store(read.site, result[read.item])
                return None if new is None else (*result[: read.item], new, *result[read.item + 1 :])

            self._handles.append(module.register_forward_hook(output))
            return

        def entry(_: Any, args: tuple, kwargs: dict) -> Any:
            new = self._store(read.site, _argument(read, args, kwargs))
            return None if new is None else _with_argument(read, args, kwargs, new)

        self._handles.append(module.register_forward_pre_hook(entry, with_kwargs=True))

    def _watch_routing(self, module: nn.Module, read: Read) -> None:
        def look(_: Any, args: tuple, kwargs: dict, result: Any) -> None:
            output = result[read.item] if isinstance(result, tuple) else result
            self._routed[module] = output if read.end == "output" else _argument(read, args, kwargs)

        self._handles.append(module.register_forward_hook(look, with_kwargs=True))

    def _watch_experts(self, module: Any, inputs: Mapping[str, Read]) -> None:
        """Each expert's own output, had by running the bank once more with one expert a row and no weighing."""

        known = self.adapted.expert_outputs  # of this call, as changed by whoever watched before

        def outputs(_: Any, args: tuple, kwargs: dict, result: Tensor) -> Tensor | None:
            hidden, experts, gates = (_argument(read, args, kwargs) for read in inputs.values())
            if module not in known:
                rows = hidden.reshape(-1, hidden.shape[-1]).repeat_interleave(experts.shape[-1], dim=0)
                alone = (rows, experts.reshape(-1, 1), torch.ones_like(gates).reshape(-1, 1))
                for read, value in zip(inputs.values(), alone, strict=True):
                    args, kwargs = _with_argument(read, args, kwargs, value)
                known[module] = module.forward(*args, **kwargs).view(*experts.shape, -1)
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
        self.adapted.check_turn()
        # Afresh: the last forward may have ended in an error.
        self.clock, self.step = VisitClock(self.adapted.plan, self.adapted.anatomy.ragged), None
        self._routed.clear()
        self._masks.begin()
        self.whole = next((x.shape[0], x.shape[1]) for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        positions = kwargs.get("position_ids")
        if positions is not None and positions.shape[-1] > 1 and bool((positions.diff(dim=-1) <= 0).any()):
            raise InputError(
                "position ids restart inside a sequence: packed documents leak into each other in several families. Call the "
                "adapted model with token ids and segment ids, which runs each document alone"
            )
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and (mask.ndim > 2 or not bool(mask.all())):
            raise InputError(
                "an attention mask that leaves tokens out: families ignore it, or shift positions by it, in several settings, and "
                "rows would count what it hides. Call the adapted model with token ids and segment ids, < 0 for padding"
            )
        self.adapted.begin(self.captured, self.whole)

    def _end(self, *_: Any) -> None:
        if recomputing():
            return
        self.clock.finish()
        skipped = {step.index for step in self.clock.skipped}
        for step in skipped:
            nobody = torch.zeros(self.whole, dtype=torch.bool)
            self.adapted.place(self.captured, VISITED, step, nobody, self.whole)
        for site in self.captured.sites:
            absent = self.captured.absent.get(site, {})
            for step in self.adapted.plan.steps:
                if step.index not in (*absent, *skipped) and self.captured.held(site, step.index) is None:
                    raise PlanError(
                        f"{step} ran and gave no {site!r}: the adapter for {self.adapted.config.family} doesn't fit this model"
                        + (f", or {_UNSEEN[self.adapted.family.attention_calls]}" if site in _ATTENTION_SITES else "")
                    )

    def _enter(self, _: Any, args: tuple, kwargs: dict, layer: int, path: str) -> None:
        if recomputing():
            return
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        self.shape, self.places, self.there = tuple(hidden.shape[:2]), None, None
        self.step = self.clock.enter(layer).index
        if (visited := self.adapted.anatomy.layers[layer].visited) is not None:
            self._note_visited(visited, path, args, kwargs)
        if self.places is None:
            self._check_layout(tuple(hidden.shape))

    def _check_layout(self, shape: tuple[int, ...]) -> None:
        """Of what a layer is given: [context, position, ...], as the token ids are."""
        if shape[:2] == self.whole:
            return
        batch, positions = self.whole
        if shape[:2] == (positions, batch):
            why = "its layers take [position, context, ...], which isn't read: transpose once before the loop and once behind it"
        elif len(shape) > 1 and shape[0] == batch and shape[1] > positions:
            why = (
                f"its layers have {shape[1] - positions} positions more than there are tokens (a prefix, registers, or padding to a "
                "multiple): values at them belong to no token, and visitlens reads models whose layers see the tokens alone"
            )
        else:
            why = "a layer's first argument is its hidden state, one vector a token: let `modules` name the modules that take that"
        raise InputError(
            f"{self.adapted.plan.steps[self.step or 0]} was given values of shape {shape}, expected {self.whole} (contexts, positions) "
            f"and a width: {why}"
        )

    def _note_visited(self, visited: Visited, path: str, args: tuple, kwargs: dict) -> None:
        if visited.routes is not None:
            value = self._routed.get(self._module(_up(path, visited.above)))
        elif visited.at_body and visited.read is not None:
            value = self._routed.get(self._module(visited.read.module))
        else:
            value = None if visited.read is None else _argument(visited.read, args, kwargs)
        there = torch.ones(self.whole, dtype=torch.bool)
        if value is not None and visited.gathered:
            places = value.detach().reshape(len(value), -1).long()
            there = torch.zeros(self.whole, dtype=torch.bool, device=value.device).scatter_(1, places, True)
            if places.shape == self.shape:  # else the layer computes every token, and the model takes these
                self.places = places
        elif value is not None:
            there = value.detach().reshape(self.whole).bool()
        self.there = there
        self.adapted.place(self.captured, VISITED, self.step or 0, there, self.whole)

    def _leave(self, *_: Any) -> None:
        self.step = None

    def _attention(self, call: AttentionCall) -> None:
        if self.step is None:
            return
        wanted, new = self.captured.sites, call.q.shape[2]
        rule = self.captured.rules[self.step] = self._masks.joined(
            self.step, self._rule(call), call, first=self.adapted.part is None or self.adapted.part.first
        )
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
            among_visited=self.places is not None,
        )

    def _pattern(self, call: AttentionCall, rule: AttentionRule) -> Tensor:
        if call.weights is not None:
            return call.weights
        if rule.from_map and not rule.masked:
            raise InputError(
                f"{self.adapted.config.family} doesn't give its attention weights in this setting; "
                'load it with attn_implementation="eager" to read site P'
            )
        mask = call.options.get("attention_mask") if rule.masked else None
        return rule.pattern(call.q.transpose(1, 2), call.k.transpose(1, 2), mask).to(call.q.dtype)

    def _store(self, site: str, value: Tensor) -> Tensor | None:
        """Keeps a value; what it returns, which is nothing here, takes the value's place."""
        if self.step is None or recomputing():
            return None
        self._check_shape(site, value)
        shape = self.shape
        if self.places is not None:
            value, shape = in_place(site, value, shape, self.places, self.whole, float("nan")), self.whole
        self.adapted.place(self.captured, site, self.step, value, shape)
        return None

    def _check_tokens(self, site: str, shape: tuple[int, ...]) -> None:
        """That a value has the layer's tokens, in its order: [context, position, ...], or flat ones."""
        axes = len(SITES[site].axes)
        tokens = (shape[0], shape[2]) if site == "P" and len(shape) == 4 else shape[: len(shape) - axes]
        if tokens not in (self.shape, (self.shape[0] * self.shape[1],)):
            raise InputError(
                f"{self.adapted.plan.steps[self.step or 0]} gave {site!r} of shape {shape}, whose tokens are {tokens}, where the layer has "
                f"{self.shape} (contexts, positions): read it where it is [context, position, ...], or flat in that order"
            )

    def _check_shape(self, site: str, value: Tensor) -> None:
        """Of what has heads, experts or a k. What attention reads may be wider than the stream (Zamba)."""
        config, axes = self.adapted.config, SITES[site].axes
        expected = token_shape(site, config)
        self._check_tokens(site, tuple(value.shape))
        if site in _STREAM and value.shape[-1] != config.hidden_size:
            raise InputError(
                f"{self.adapted.plan.steps[self.step or 0]} gave {site!r} {value.shape[-1]} wide, where the residual stream of "
                f"{config.family} is {config.hidden_size}: layers of different widths (an hourglass) aren't compared. Let `layers` name "
                "those of one width, and `hidden_size` be it"
            )
        found = tuple(value.shape[1:2] if site == "P" else value.shape[-len(axes) :])
        if found != expected and axes != ("hidden",):
            repeated = ". K and V count as attention gets them: where they are repeated for grouped queries, num_kv_heads is num_heads"
            raise InputError(
                f"{self.adapted.plan.steps[self.step or 0]} gave {site!r} of shape {found} a token, and by the sizes of the adapter for "
                f"{config.family} it is {expected} ({', '.join(axis for axis in axes if axis != 'key')}): mend its `sizes`, or where "
                f"{site!r} is read{repeated if site in ('K', 'V') else ''}"
            )


def _up(path: str, names: int) -> str:
    return path.rsplit(".", names)[0]


def _argument(read: Read, args: tuple, kwargs: dict) -> Tensor:
    if read.item >= len(args) and read.name not in kwargs:
        raise InputError(
            f"{read.site!r} is read from argument {read.item} of {read.module or 'the layer'!r}, or its keyword {read.name!r}, and it was "
            f"called with {len(args)} arguments and the keywords {', '.join(kwargs) or '(none)'}: mend the Read's `item` or `name`"
        )
    return args[read.item] if read.item < len(args) else kwargs[read.name]


def _with_argument(read: Read, args: tuple, kwargs: dict, value: Tensor) -> tuple[tuple, dict]:
    if read.item < len(args):
        return (*args[: read.item], value, *args[read.item + 1 :]), kwargs
    return args, {**kwargs, read.name: value}


def in_place(
    site: str, value: Tensor, given: tuple[int, ...], places: Tensor, whole: tuple[int, ...], fill: float
) -> Tensor:
    """The values of some tokens where these are among all: `fill` elsewhere (0 in a pattern, and for expert ids)."""
    axes = SITES[site].axes
    if value.ndim == 1 + len(axes):  # routers and experts see flat tokens
        value = value.unflatten(0, given)
    rows = torch.arange(len(places), device=places.device)[:, None]
    if site == "P":
        full = value.new_zeros(whole[0], value.shape[1], whole[1], whole[1])
        full[rows[..., None], :, places[:, :, None], places[:, None, :]] = value.permute(0, 2, 3, 1)
        return full
    full = value.new_full((*whole, *value.shape[2:]), fill if value.is_floating_point() else 0)
    full[rows, places] = value
    return full


def taken(site: str, whole: Tensor, places: Tensor) -> Tensor:
    """The inverse of `in_place`: the values of some tokens."""
    rows = torch.arange(len(places), device=places.device)[:, None]
    if site == "P":
        return whole[rows[..., None], :, places[:, :, None], places[:, None, :]].permute(0, 3, 1, 2)
    return whole[rows, places]


def recomputing() -> bool:
    """Whether a backward pass is at work: activation checkpointing runs modules again there, which is no new visit."""
    return torch._C._current_graph_task_id() != -1


def _forget(known: dict[nn.Module, Tensor], module: nn.Module) -> None:
    known.pop(module, None)

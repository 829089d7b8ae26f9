"""Generation, captured: the sites of every prompt token and every generated token, by visit.

A generated token is a forward of its own, in which a looped layer runs all its visits: so a value belongs to (token, visit),
and generating 4 tokens at r = 2 makes 8 calls of a looped layer and no third visit. The cached run is held against one
forward over the whole text: a cache that mixes visits up is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from visitlens.errors import InputError, PlanError
from visitlens.hooks.capture.capture import VISITED, Captured, capture
from visitlens.hooks.capture.sampling import GREEDY, Sampling
from visitlens.hooks.core.loop_plan import ExecutionPlan, Step
from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.core.sites import SITES

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_HALF_PRECISION = 5e-2
"""Relative to the site's largest value; roundings may flip an expert of a token here and there."""


@dataclass(frozen=True)
class TokenLabel:
    """Whose value it is. `generated` counts generated tokens from 0, None in the prompt (`phase` "prefill")."""

    position: int
    phase: str
    generated: int | None
    step: Step


@dataclass(frozen=True)
class CapturedGeneration:
    """`tokens [context, position]`: the prompt and what was generated; `values[site][step]` is [context, position, ...], of an
    attention map [context, head, query, key], each generated token's row over the keys so far."""

    plan: ExecutionPlan
    tokens: Tensor
    prompt_length: int
    values: dict[str, dict[int, Tensor]]

    def get(self, site: str, layer: int, visit: int, generated: int | None = None) -> Tensor:
        """[context, position, ...] of a site at one visit (a map [context, head, query, key]); of one generated token,
        [context, ...] (of a map its row [context, head, key]).

        Raises:
            InputError: a site that wasn't captured, no such visit or generated token.
        """
        if site not in self.values:
            raise InputError(f"no site {site!r}; captured are {', '.join(self.values)}")
        step = self.plan.step(layer, visit).index
        if step not in self.values[site]:
            raise InputError(f"{self.plan.steps[step]} has no site {site!r}")
        value = self.values[site][step]
        if generated is None:
            return value
        new = self.tokens.shape[1] - self.prompt_length
        if not 0 <= generated < new:
            raise InputError(f"no generated token {generated}: there are {new}, counted from 0")
        return _by_query(site, value)[:, self.prompt_length + generated]

    def at(self, site: str, step: int) -> Tensor:
        """[context, position, ...] of a site at a step: what `replace(site, generation)` takes from it."""
        return self.get(site, self.plan.steps[step].layer, self.plan.steps[step].visit)

    def labels(self) -> Iterator[TokenLabel]:
        """By position, then step."""
        for position in range(self.tokens.shape[1]):
            new = position - self.prompt_length
            phase, generated = ("decode", new) if new >= 0 else ("prefill", None)
            for step in self.plan.steps:
                yield TokenLabel(position, phase, generated, step)


@torch.no_grad()
def capture_generation(
    model: InstrumentedModel,
    prompt: Tensor,
    max_new_tokens: int,
    sites: Iterable[str],
    *,
    check: bool = True,
    sampling: Sampling = GREEDY,
) -> CapturedGeneration:
    """Continues prompts [context, position] of equal length (greedily, or as `sampling` says), keeping the sites of every
    token, by visit.

    `check` runs the whole text once more without a cache and compares.

    Raises:
        InputError: a site that the model doesn't have; a model that has no cache.
        PlanError: the model leaves its plan, or its cached generation isn't the full forward.
    """
    sites = tuple(sites)
    if prompt.ndim != 2 or prompt.numel() == 0 or max_new_tokens < 1:
        raise InputError(f"expected a prompt [context, position] and at least 1 new token, got {tuple(prompt.shape)}")
    decode, choose = _decoder(model), sampling.chooser()
    parts: dict[str, dict[int, list[Tensor]]] = {site: {} for site in sites}
    tokens, new = prompt, prompt
    with capture(model, sites) as captured:
        for generated in range(max_new_tokens + 1):  # the last token's own states are kept too
            logits = decode(new)
            for site, step, value in _values(captured, sites):
                parts[site].setdefault(step, []).append(value)
            if generated < max_new_tokens:
                new = choose(logits[:, -1])
                tokens = torch.cat([tokens, new], dim=1)
    join = {site: _whole_map if site == "P" else partial(torch.cat, dim=1) for site in sites}
    values = {site: {step: join[site](p) for step, p in steps.items()} for site, steps in parts.items()}
    result = CapturedGeneration(model.plan, tokens, prompt.shape[1], values)
    if check:
        _compare(model, result)
    return result


@torch.no_grad()
def generate(
    model: InstrumentedModel,
    prompt: Tensor,
    max_new_tokens: int,
    stop: int | None = None,
    choose: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Prompts [context, position] of equal length continued through the model's cache (greedily, or by `choose`, as from
    `Sampling.chooser`) by `max_new_tokens`, or until all have come to the token `stop` at once. Inside `intervene`, every
    forward is intervened on.

    Raises:
        InputError: a model that has no cache.
    """
    decode, choose = _decoder(model), choose or GREEDY.chooser()
    tokens, new = prompt, prompt
    for _ in range(max_new_tokens):
        new = choose(decode(new)[:, -1])
        tokens = torch.cat([tokens, new], dim=1)
        if stop is not None and bool((new == stop).all()):
            break
    return tokens


@torch.no_grad()
def replay(model: InstrumentedModel, captured: Captured, tokens: Tensor, generated: Tensor) -> Captured:
    """Runs texts as they were written, inside a capture: each prompt at once, then token by token through the model's cache.

    `tokens`, `generated [context, position]`: one text a context; 0 in the prompt, n at the n-th token after it, -1 behind
    the text. The values of all contexts, [context, position, ...] as of one forward over them.
    """
    whole = Captured(captured.plan, captured.sites, captured.absent, captured.sizes)
    for row in range(len(tokens)):
        decode = _decoder(model)
        prompt, length = int((generated[row] == 0).sum()), int((generated[row] >= 0).sum())
        for first, last in [(0, prompt), *((at, at + 1) for at in range(prompt, length))]:
            decode(tokens[row : row + 1, first:last])
            whole.rules.update(captured.rules)
            # P is kept unasked where rows can't be had from Q and K.
            for site, step, value in _values(captured, dict.fromkeys((*captured.sites, "P", VISITED))):
                _put(whole, site, step, value[0], row, first, tuple(tokens.shape))
    return whole


def _put(whole: Captured, site: str, step: int, value: Tensor, row: int, first: int, shape: tuple[int, ...]) -> None:
    """Values of a text's tokens from `first` on, in their places. Of a pattern [head, query, key] the keys are the last ones up
    to the query: a cache of a sliding window keeps no others."""
    buffer = whole.held(site, step)
    if buffer is None:
        contexts, length = shape
        sizes = (contexts, len(value), length, length) if site == "P" else (contexts, length, *value.shape[1:])
        buffer = value.new_full(sizes, float("nan") if value.is_floating_point() and site != "P" else 0)
        whole.hold(site, step, buffer)
    if site == "P":
        last = first + value.shape[1]
        buffer[row, :, first:last, last - value.shape[2] : last] = value
    else:
        buffer[row, first : first + len(value)] = value


def check_generation(model: InstrumentedModel, tokens: Tensor, prompt_length: int, sites: Iterable[str]) -> None:
    """Raises PlanError unless a text [1, position], run as it was written, has the values of one forward over it."""
    sites = [site for site in sites if site not in ("experts", "P")]
    generated = torch.zeros_like(tokens)
    generated[:, prompt_length:] = torch.arange(1, tokens.shape[1] - prompt_length + 1)
    with capture(model, sites) as captured:
        values = replay(model, captured, tokens, generated)
    parts = {
        site: {s: values.at(site, s) for s in range(len(model.plan)) if values.held(site, s) is not None}
        for site in sites
    }
    _compare(model, CapturedGeneration(model.plan, tokens, prompt_length, parts))


def _values(captured: Captured, sites: Iterable[str]) -> Iterator[tuple[str, int, Tensor]]:
    for site in sites:
        for step in captured.plan.steps:
            value = captured.held(site, step.index)
            if value is not None:
                yield site, step.index, value


def _by_query(site: str, value: Tensor) -> Tensor:
    """[context, position, ...]; of a map [context, head, query, key] by query."""
    return value.transpose(1, 2) if site == "P" else value


def _whole_map(parts: list[Tensor]) -> Tensor:
    """[context, head, query, key] of the rows of one forward after another, each over the keys up to its last query."""
    contexts, heads = parts[0].shape[:2]
    length = sum(rows.shape[2] for rows in parts)
    whole, first = parts[0].new_zeros(contexts, heads, length, length), 0
    for rows in parts:
        last = first + rows.shape[2]
        whole[:, :, first:last, last - rows.shape[3] : last] = rows
        first = last
    return whole


def _decoder(model: InstrumentedModel) -> Callable[[Tensor], Tensor]:
    """Logits of the tokens that go on from those before, which an own cache holds."""
    forward: Any = model
    cache = model.new_cache()
    return lambda new: forward(new, cache=cache)


def _compare(model: InstrumentedModel, generation: CapturedGeneration) -> None:
    """Against one forward over all tokens. A cache that mixes visits spoils every token; a flipped expert spoils few."""
    sites = [site for site in generation.values if site != "experts"]
    with capture(model, sites) as captured:
        model(generation.tokens, return_type="none")
    for site, step, whole in _values(captured, sites):
        cached = generation.values[site][step]
        limit = _TOLERANCE.get(whole.dtype, _HALF_PRECISION) * whole.abs().amax().clamp(min=1e-30)
        cached, whole = _by_query(site, cached), _by_query(site, whole)
        off = ((cached - whole).flatten(2).abs().amax(-1) > limit)[:, generation.prompt_length :]
        if float(off.float().mean()) > 0.5:
            raise PlanError(
                f"cached generation isn't the full forward: {SITES[site].title} at {generation.plan.steps[step]} differs at "
                f"{int(off.sum())} of {off.numel()} generated tokens. The model's cache may share keys between visits; record the "
                "generated text instead, or pass check=False"
            )

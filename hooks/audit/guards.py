"""Guards: what must hold of an adapted model before its numbers mean anything, checked on a few tokens; and what its own
packing, padding and caching settings get wrong, measured.

The first group (`conditions`) fails or passes, and runs before a recording is made. The second is why visitlens runs documents one by one: it is reported, not relied on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from visitlens.hooks.adapters.adapted_model import AdaptedModel
from visitlens.hooks.adapters.cache import cache_of
from visitlens.hooks.adapters.family import bank_inputs
from visitlens.hooks.capture.capture import VISITED, Captured, capture
from visitlens.hooks.core.sites import SITES

_NEAR = {torch.float64: 1e-6, torch.float32: 1e-3}
_NEAR_HALF = 5e-2
"""Differences allowed, of the largest value: roundings differ between shapes of a batch. In half precision they may flip an
expert of a token here and there, so the median over tokens counts, elsewhere the largest."""


_LAST_QUERIES = 64


@dataclass(frozen=True)
class Guard:
    """`ok` is None where the model doesn't allow the check, or where the result is a fact about it and no condition."""

    name: str
    ok: bool | None
    detail: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check(model: AdaptedModel, tokens: Tensor) -> list[Guard]:
    """Every guard, on token ids [1, position], at least 8; and what the model's own settings do.

    Raises:
        PlanError: the model leaves its plan.
    """
    with torch.no_grad():
        return [*conditions(model, tokens), *_own_packing(model, tokens), *_own_padding(model, tokens)]


@torch.no_grad()
def conditions(model: AdaptedModel, tokens: Tensor) -> list[Guard]:
    """The guards that fail or pass: about fifteen forwards over the tokens [1, position], and one more for each of half of them.

    Raises:
        PlanError: the model leaves its plan.
    """
    plan = Guard("plan", True, f"{len(model.plan)} steps ran in the plan's order")  # or a PlanError follows
    return [
        _observation(model, tokens),
        plan,
        _writes(model, tokens),
        _rows(model, tokens),
        *_experts(model, tokens),
        *_router(model, tokens),
        _documents(model, tokens),
        _layout(model, tokens),
        _padding(model, tokens),
        _caching(model, tokens),
    ]


@torch.no_grad()
def rows_of_length(model: AdaptedModel, length: int) -> Guard:
    """The guard of attention rows on one document as long as those of a recording, by its last queries: a window, or a mask that
    only longer documents are given, leaves out keys there. One forward over `length` tokens."""
    name = f"attention rows at {length:,} tokens"
    if why := next((model.config.missing[site] for site in ("P", "PV") if site in model.config.missing), None):
        return Guard(name, None, why)
    captured = _observe(model, ["Q", "K", "V", "PV"], sample_tokens(model, length))
    groups = model.config.num_heads // model.config.num_kv_heads
    worst, last = 0.0, slice(-_LAST_QUERIES, None)
    for step in _steps(captured, "PV"):
        rule, there = captured.rules[step], captured.held(VISITED, step)
        if there is not None and not bool(there.all()):
            continue  # of documents of any length, the guard on few tokens compares those
        v = captured.at("V", step)[0].repeat_interleave(groups, dim=1).transpose(0, 1)
        q, k = captured.at("Q", step)[0, last], captured.at("K", step)[0]
        p = captured.at("P", step)[0, :, last] if rule.from_map else rule.pattern(q, k)
        context = (p.to(v.dtype) @ v).transpose(0, 1)
        worst = max(worst, difference(context.unsqueeze(0), captured.at("PV", step)[:, last]))
    return Guard(name, worst < tolerance(model), f"P V = PV at the last queries, within {worst:.1e} of its size")


def sample_tokens(model: AdaptedModel, length: int = 24) -> Tensor:
    """Random token ids [1, position] of its vocabulary, on its device; always the same."""
    length = min(length, model.config.context_length)
    tokens = torch.randint(0, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    return tokens.to(next(model.parameters()).device)


def _observe(model: AdaptedModel, sites: list[str], tokens: Tensor, segments: Tensor | None = None) -> Captured:
    with capture(model, [site for site in sites if site not in model.config.missing]) as captured:
        model(tokens, segments, return_type="none")
    return captured


def _steps(captured: Captured, site: str) -> list[int]:
    """Those that have it; where visits leave tokens out, a loop may have ended early."""
    return [step.index for step in captured.plan.steps if captured.held(site, step.index) is not None]


def tolerance(model: AdaptedModel) -> float:
    """How far a model's values may lie apart by rounding alone, as `difference` counts."""
    return _NEAR.get(next(model.parameters()).dtype, _NEAR_HALF)


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference of [context, position, ...], in units of the largest value; in half precision the median over
    positions. Where neither has a value (NaN) there is none."""
    half = b.dtype not in _NEAR
    off = (a.double() - b.double()).abs().masked_fill(a.isnan() & b.isnan(), 0)
    by_token = off.flatten(2).amax(-1) if off.ndim > 2 else off
    size = b.double().nan_to_num().abs().max().clamp(min=1e-30)
    return float((by_token.median() if half else by_token.max()) / size)


def _logits(model: AdaptedModel, tokens: Tensor, **options: Any) -> Tensor:
    with model.as_planned():
        result = model.model(tokens, **{**model.family.call, **model.family.start(model.model, tokens), **options})
    return model.family.logits(result)


def _observation(model: AdaptedModel, tokens: Tensor) -> Guard:
    plain = model(tokens)
    with capture(model, [site for site in SITES if site not in model.config.missing and site != "P"]):
        seen = model(tokens)
    same = plain is not None and seen is not None and torch.equal(plain, seen)
    return Guard(
        "observation", same, "logits are bit-identical under observation" if same else "logits change when observed"
    )


def _writes(model: AdaptedModel, tokens: Tensor) -> Guard:
    if why := model.config.missing.get("sum of writes"):
        return Guard("writes", None, why)
    captured = _observe(model, ["resid", "attn_write", "moe_write"], tokens)
    outputs: list[Tensor] = []

    def keep(_: Any, __: Any, out: Any) -> None:
        outputs.append(out[0] if isinstance(out, tuple) else out)

    paths = [path for layer in model.anatomy.layers for path in layer.modules]
    handles = [model.body.get_submodule(path).register_forward_hook(keep) for path in paths]
    model(tokens, return_type="none")
    for handle in handles:
        handle.remove()
    worst = 0.0
    for step, out in zip(_steps(captured, "resid"), outputs, strict=True):
        total = captured.at("resid", step) + captured.at("attn_write", step) + captured.at("moe_write", step)
        there = captured.held(VISITED, step)
        if there is not None and total.shape != out.shape:  # the layer was given some of the tokens
            total = total[there].unflatten(0, out.shape[:2])
        worst = max(worst, difference(total, out))
    return Guard(
        "writes", worst < tolerance(model), f"residual in + writes = residual out, within {worst:.1e} of its size"
    )


def _rows(model: AdaptedModel, tokens: Tensor) -> Guard:
    """Rows formed from Q and K by the model's rule, against the context that the model computed: P V = PV."""
    if why := model.config.missing.get("P"):
        return Guard("attention rows", None, why)
    captured = _observe(model, ["Q", "K", "V", "P", "PV"], tokens)
    groups = model.config.num_heads // model.config.num_kv_heads
    worst, future, off = 0.0, False, 0.0
    for step in _steps(captured, "P"):
        p, v = captured.at("P", step), captured.at("V", step).repeat_interleave(groups, dim=2).nan_to_num()
        there = captured.held(VISITED, step) if captured.rules[step].among_visited else None
        context = (p.to(v.dtype) @ v.transpose(1, 2)).transpose(1, 2)
        if there is not None:
            context = context.masked_fill(~there[..., None, None], torch.nan)
        worst = max(worst, difference(context, captured.at("PV", step)))
        sums = p.double().sum(-1).transpose(1, 2)
        sums = sums if there is None else sums[there]
        off = max(off, float((sums - 1).clamp(min=0).max() if model.config.learned_sink else (sums - 1).abs().max()))
        future |= captured.rules[step].causal and bool(p.triu(1).any())
    slot = " together with the learned sink" if model.config.learned_sink else ""
    ok = worst < tolerance(model) and not future and off < tolerance(model)
    return Guard(
        "attention rows",
        ok,
        f"sum to 1{slot} within {off:.1e}, {'some' if future else 'none'} on future keys, P V = PV within {worst:.1e} of its size",
    )


def _experts(model: AdaptedModel, tokens: Tensor) -> list[Guard]:
    """Each expert's output, which is had by running the bank again, against what the bank gave. None of a model without."""
    if "expert_out" in model.config.missing:
        return []
    banks = [
        model.body.get_submodule(f"{path}.{bank_inputs(layer)['experts'].module}")
        for layer in model.anatomy.layers
        if bank_inputs(layer)
        for path in layer.modules
    ]
    given: list[Tensor] = []

    def keep(_: Any, __: Any, out: Any) -> None:
        given.append(out)

    handles = [bank.register_forward_hook(keep) for bank in dict.fromkeys(banks)]
    try:
        captured = _observe(model, ["expert_out", "gates"], tokens)
    finally:
        for handle in handles:
            handle.remove()
    worst = 0.0
    for step, out in zip(_steps(captured, "expert_out"), given, strict=True):
        total = (captured.at("expert_out", step) * captured.at("gates", step).unsqueeze(-1)).sum(-2)
        there = captured.held(VISITED, step)
        if there is not None and total.numel() != out.numel():  # the layer was given some of the tokens
            total = total[there]
        worst = max(worst, difference(total, out.view(total.shape)))
    return [
        Guard(
            "experts",
            worst < tolerance(model),
            f"gates times outputs = what the bank gave, within {worst:.1e} of its size",
        )
    ]


def _router(model: AdaptedModel, tokens: Tensor) -> list[Guard]:
    """Gates against a softmax over the router's scores, both as shares of the experts used. None of a model that says its router
    is another, or has none."""
    config = model.config
    if any(name in config.missing for name in ("softmax router", "router", "experts", "gates")):
        return []
    captured, worst = _observe(model, ["router", "experts", "gates"], tokens), 0.0
    for step in _steps(captured, "router"):
        scores, experts, gates = (captured.at(site, step) for site in ("router", "experts", "gates"))
        wide = torch.promote_types(scores.dtype, torch.float32)
        shares = scores.to(wide).softmax(-1).gather(-1, experts.long())
        shares, gates = (x.to(wide) / x.to(wide).sum(-1, keepdim=True) for x in (shares, gates))
        worst = max(worst, difference(gates.to(scores.dtype), shares.to(scores.dtype)))
    ok = worst < 10 * tolerance(model)  # what comes behind a softmax in lower precision is rounded more often
    said = f"gates are a softmax of the router's scores over the experts used, within {worst:.1e}"
    advice = '; say missing={"softmax router": "its scores are sigmoids"}, or name the family that reads it so'
    return [Guard("router", ok, said if ok else said.replace("are", "aren't", 1).replace("within", "off by") + advice)]


def _documents(model: AdaptedModel, tokens: Tensor) -> Guard:
    half = tokens.shape[1] // 2
    segments = (torch.arange(tokens.shape[1]) >= half).long().unsqueeze(0)
    together, first, second = model(tokens, segments), model(tokens[:, :half]), model(tokens[:, half:])
    assert together is not None and first is not None and second is not None
    worst = max(difference(together[:, :half], first), difference(together[:, half:], second))
    return Guard(
        "documents", worst < tolerance(model), f"a document among others is the document alone, within {worst:.1e}"
    )


def _layout(model: AdaptedModel, tokens: Tensor) -> Guard:
    """Every site of two contexts that run side by side, against each context alone: values laid out otherwise are mixed."""
    length = tokens.shape[1] // 2
    both = torch.cat([tokens[:, :length], tokens[:, length : 2 * length]])
    sites = [site for site in SITES if site not in ("P", "experts")]
    together, worst, place = _observe(model, sites, both), 0.0, ""
    for row in range(2):
        alone = _observe(model, sites, both[row : row + 1])
        for site in alone.sites:
            for step in _steps(alone, site):
                if (held := together.held(site, step)) is None:
                    continue  # the loop ended earlier
                off = difference(held[row : row + 1], alone.at(site, step))
                if off > worst:
                    worst, place = off, f", at most at {site} of {model.plan.steps[step]}"
    return Guard(
        "layout",
        worst < tolerance(model),
        f"each site of a context among others is that of the context alone, within {worst:.1e}{place}",
    )


def _padding(model: AdaptedModel, tokens: Tensor) -> Guard:
    """On both sides, in a batch with a context that has none."""
    length, pads = tokens.shape[1], 2
    inner = tokens[:, : length - 2 * pads]
    segments = torch.zeros(2, length, dtype=torch.long)
    segments[0, :pads] = segments[0, length - pads :] = -1
    segments[1] = 1
    padded, plain = model(tokens.roll(pads, 1).expand(2, -1), segments), model(inner)
    assert padded is not None and plain is not None
    worst = difference(padded[:1, pads : length - pads], plain)
    return Guard(
        "padding",
        worst < tolerance(model),
        f"a padded context is the unpadded one at each real token, within {worst:.1e}",
    )


def _caching(model: AdaptedModel, tokens: Tensor) -> Guard:
    if why := model.config.missing.get("cached generation"):
        return Guard("cached generation", None, why)
    if not getattr(model.model, "can_generate", lambda: False)():
        return Guard("cached generation", None, "the model doesn't generate")
    full = _observe(model, ["resid", "Q", "K"], tokens)
    sites, start = full.sites, tokens.shape[1] // 2
    worst, place, held = 0.0, "", {}
    with capture(model, sites) as captured, model.as_planned():
        for first, last in [(0, start), *((i, i + 1) for i in range(start, tokens.shape[1]))]:
            state = model.family.start(model.model, tokens[:, first:last], first)
            result = model.model(tokens[:, first:last], **{**model.family.call, "use_cache": True, **state, **held})
            if not (held := cache_of(result, model.model)):
                return Guard("cached generation", None, "the model returns no cache")
            for site in sites:
                for step in _steps(captured, site):
                    off = difference(captured.at(site, step), full.at(site, step)[:, first:last])
                    if off > worst:
                        worst, place = off, f"{site} at {model.plan.steps[step]}, token {first}"
    at = f", at most at {place}" if worst else ""
    ok = worst < 10 * tolerance(model)
    return Guard("cached generation", ok, f"equals the full prefill at every (token, visit) within {worst:.1e}{at}")


def _own_packing(model: AdaptedModel, tokens: Tensor) -> list[Guard]:
    """How far the model's own settings for packed documents let the first document into the second."""
    half = tokens.shape[1] // 2
    rest = tokens.shape[1] - half
    positions = torch.cat([torch.arange(half), torch.arange(rest)]).unsqueeze(0)
    other = tokens.clone()
    other[:, :half] = tokens[:, :half].flip(-1)
    settings: dict[str, dict[str, Any]] = {
        "position ids, no cache, no mask": {"position_ids": positions, "use_cache": False},
        "position ids, default cache": {"position_ids": positions, "use_cache": True},
        "position ids, all-ones mask": {
            "position_ids": positions,
            "use_cache": False,
            "attention_mask": torch.ones_like(tokens),
        },
    }
    found = []
    for name, options in settings.items():
        options = {k: v for k, v in options.items() if k != "use_cache" or "use_cache" in model.family.call}
        leak = _measured(lambda o=options: difference(*(_logits(model, t, **o)[:, half:] for t in (other, tokens))))
        said = leak if isinstance(leak, str) else ("leaks" if leak > 1e-6 else "doesn't leak")
        size = (
            ""
            if isinstance(leak, str)
            else f" (another first document moves the second's logits by {leak:.1e} of their size)"
        )
        found.append(Guard(f"own packing: {name}", None, said + size))
    return found


def _own_padding(model: AdaptedModel, tokens: Tensor) -> list[Guard]:
    """How far padding with a mask moves the logits of real tokens."""
    pad = torch.full((1, 3), model.config.pad_token_id)
    plain = _logits(model, tokens)
    found = []
    for side in ("right", "left"):
        parts = (tokens, pad) if side == "right" else (pad, tokens)
        mask = torch.cat([torch.full_like(part, int(part is tokens)) for part in parts], dim=1)
        real = slice(0, tokens.shape[1]) if side == "right" else slice(3, None)

        def moved(parts: tuple[Tensor, ...] = parts, mask: Tensor = mask, real: slice = real) -> float:
            return difference(_logits(model, torch.cat(parts, dim=1), attention_mask=mask)[:, real], plain)

        shift = _measured(moved)
        said = shift if isinstance(shift, str) else f"moves the logits of real tokens by {shift:.1e} of their size"
        found.append(Guard(f"own padding: {side}", None, said))
    return found


def _measured(measure: Callable[[], float]) -> float | str:
    """The number, or why the model's own setting isn't to be had: it may raise anything."""
    try:
        return measure()
    except (TypeError, ValueError, RuntimeError, IndexError, NotImplementedError, AttributeError) as error:
        return f"not to be had ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"

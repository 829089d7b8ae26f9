"""Head ablation: every head of the looped block, one at a time, at each visit alone and at all of them together.

The ablated unit is one query head's attended context PV before W_O. No step before the ablated one is computed again: an adapted model
replays what its layers gave (`Replay`); the native one starts from the intact residual stream there, and runs all heads of a layer side by
side as contexts of one batch. A run that is ablated at every visit forks from the one that is ablated at the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from visitlens.errors import InputError
from visitlens.hooks.adapters.adapted_model import AdaptedModel
from visitlens.hooks.adapters.replay import replay_of
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.core.loop_plan import ExecutionPlan, Step, visit_choices
from visitlens.hooks.core.model_interface import InstrumentedModel
from visitlens.hooks.interventions.intervene import Intervention, intervene
from visitlens.hooks.interventions.intervene import replace as put_in
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.analyses.results.modes import MODES
from visitlens.probe.samples.sample import EvalSet
from visitlens.probe.samples.scores import check_predicts, device_of

Metric = Callable[[Tensor, Tensor], Tensor]
"""(logits [target, vocab], true token [target]) -> a number a target, higher is worse."""


@dataclass(frozen=True)
class Task:
    """What is asked of a model. `tokens`, `document [context, position]`, document -1 = padding; `segments` as the model
    takes them, None if a context is one document. Target i is the token at `context[i], position[i]`, predicted from the
    one before it; `group[i]` is its document's group, the unit of intervals and tests."""

    tokens: np.ndarray
    segments: np.ndarray | None
    document: np.ndarray
    context: np.ndarray
    position: np.ndarray
    group: np.ndarray

    @property
    def documents(self) -> int:
        return int(self.document.max()) + 1


@dataclass(frozen=True)
class AblationSums:
    """Sums over targets by group: the metric of the intact model `intact [group]`, its change `change [group, visits, layer,
    head]`, and the number of targets `count [group]`. `visits` are the visits ablated together."""

    visits: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    intact: np.ndarray
    change: np.ndarray
    count: np.ndarray


Ablated = tuple[np.ndarray, Iterator[list[tuple[tuple[int, ...], int, np.ndarray]]]]
"""The metric of the intact model [target], and for each layer (visits, place of the head, metric [target])."""


def nll(logits: Tensor, truth: Tensor) -> Tensor:
    """Nats per target."""
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), truth, reduction="none")


def text_task(packed: PackedTokens, groups: int = 128) -> Task:
    """Every token but the first of its segment, in packed text."""
    document = np.where(packed.segments >= 0, packed.segment_document[packed.segments], -1)
    inside = (packed.segments[:, 1:] == packed.segments[:, :-1]) & (packed.segments[:, 1:] >= 0)
    context, position = np.nonzero(inside)
    group = packed.document_groups(groups)[document[context, position + 1]]
    return Task(packed.tokens, packed.segments, document, context, position + 1, group)


def sample_task(sample: EvalSet) -> Task:
    """The predictions that count in a sample; each of its documents' groups is one of the bootstrap's."""
    context, position = np.nonzero(sample.counted)
    document = sample.document_of
    group = sample.groups[document[context, position]]
    return Task(sample.contexts.tokens, sample.contexts.segments, document, context, position, group)


@torch.inference_mode()
def ablate_heads(
    model: InstrumentedModel,
    task: Task,
    *,
    mode: str = "zero",
    metric: Metric = nll,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    tokens_at_once: int = 8192,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> AblationSums:
    """The change of the metric when a head is ablated, for every head and every choice of visits.

    Args:
        mode: what PV becomes. zero; mean: its mean over all tokens of the sample; resample: its value in another document,
            at the same position (again from the start where that document is shorter).
        metric: of the logits at the targets; nats by default.
        layers: those of the loop by default, all layers of an unlooped model. They must run equally often.
        tokens_at_once: tokens in a batch, all heads and visits counted; the speed hardly depends on it.

    Raises:
        InputError: an unknown mode, layer or head; layers that run unequally often; resampling with one document; a model without PV.
    """
    plan, config = model.plan, model.config
    model.check_sites(["PV"])
    without = model.config.absent.get("PV", {})
    usual = [layer for layer in plan.looped_layers or range(config.num_layers) if layer not in without]
    chosen = tuple(usual if layers is None else layers)
    which = tuple(heads if heads is not None else range(config.num_heads))
    visits = _check(plan, config.num_heads, mode, chosen, which)
    choices = visit_choices(visits)
    steps = {layer: [s.index for s in plan.steps if s.layer == layer] for layer in chosen}
    replace = _replacement(model, task, mode, [i for indices in steps.values() for i in indices], seed, tokens_at_once)
    groups = int(task.group.max()) + 1
    change = np.zeros((groups, len(choices), len(chosen), len(which)))
    intact, count = np.zeros(groups), np.bincount(task.group, minlength=groups).astype(float)
    batches = list(_batches(task, tokens_at_once))
    done, total = 0, len(batches) * len(chosen)
    for batch in batches:
        asked = (batch.on(device_of(model)), steps, which, metric, partial(replace, rows=batch.rows))
        if model.in_parts:
            plain, ablated = _in_turn(model, *asked)
        else:
            plain, ablated = _side_by_side(model, *asked, tokens_at_once)
        np.add.at(intact, batch.group, plain)
        for at, scored in enumerate(ablated):
            for choice, j, values in scored:
                np.add.at(change[:, choices.index(choice), at, j], batch.group, values - plain)
            done += 1
            on_progress(done, total)
    return AblationSums(choices, chosen, which, intact, change, count)


def _check(plan: ExecutionPlan, num_heads: int, mode: str, layers: tuple[int, ...], heads: tuple[int, ...]) -> int:
    """How often each of the layers runs."""
    if mode not in MODES:
        raise InputError(f"expected a mode among {', '.join(MODES)}, got {mode!r}")
    if any(layer not in plan.visits for layer in layers) or any(not 0 <= head < num_heads for head in heads):
        raise InputError(
            f"expected layers among 0..{max(plan.visits)} and heads among 0..{num_heads - 1}, got {layers} and {heads}"
        )
    by_count: dict[int, list[int]] = {}
    for layer in layers:
        by_count.setdefault(plan.visits[layer], []).append(layer)
    if len(by_count) != 1:
        groups = "; ".join(f"layers {', '.join(map(str, group))} run {n} times" for n, group in by_count.items())
        example = ",".join(map(str, next(iter(by_count.values()))))
        raise InputError(f"{groups}: ablate those that run equally often together (--layers {example})")
    return next(iter(by_count))


@dataclass(frozen=True)
class _Batch:
    """Some contexts of a task, cut behind their last target, and their targets."""

    rows: slice
    tokens: Tensor
    segments: Tensor | None
    context: Tensor
    predictor: Tensor
    truth: Tensor
    group: np.ndarray

    def on(self, device: torch.device) -> _Batch:
        moved = {n: x.to(device) for n, x in vars(self).items() if isinstance(x, Tensor)}
        return replace_fields(self, **moved)


def _batches(task: Task, tokens_at_once: int) -> Iterator[_Batch]:
    """As many contexts as leave room for several heads; contexts without a target are passed over."""
    step = max(1, tokens_at_once // (task.tokens.shape[1] * 8))
    for start in range(0, len(task.tokens), step):
        rows = slice(start, start + step)
        here = (task.context >= start) & (task.context < start + step)
        if not here.any():
            continue
        position, context = task.position[here], task.context[here] - start
        length = int(position.max())  # the last target itself is never read
        tokens = torch.from_numpy(task.tokens[rows]).long()
        segments = None if task.segments is None else torch.from_numpy(task.segments[rows, :length])
        truth = tokens[context, position]
        predictor = torch.from_numpy(position - 1)
        context = torch.from_numpy(context)
        yield _Batch(rows, tokens[:, :length], segments, context, predictor, truth, task.group[here])


def _side_by_side(
    model: InstrumentedModel,
    batch: _Batch,
    steps: dict[int, list[int]],
    heads: Sequence[int],
    metric: Metric,
    replace: Callable[..., Tensor | float],
    tokens_at_once: int,
) -> Ablated:
    """The native model: all heads of a layer run as contexts of one batch, from the step where the first is ablated."""
    before = _residuals(model, batch.tokens, batch.segments, sorted(i for indices in steps.values() for i in indices))
    score = partial(_scores, model, batch, metric)
    plain = score(before.pop(len(model.plan)).unsqueeze(0))[0]

    def layer_by_layer() -> Iterator[list[tuple[tuple[int, ...], int, np.ndarray]]]:
        for indices in steps.values():
            together = max(1, tokens_at_once // (batch.tokens.numel() * len(visit_choices(len(indices)))))
            found = []
            for first in range(0, len(heads), together):
                part = heads[first : first + together]
                for choice, x in _forked_runs(model, before, indices, part, batch.segments, replace).items():
                    scores = enumerate(score(x.unflatten(0, (len(part), -1))), first)
                    found += [(choice, j, values) for j, values in scores]
            yield found

    return plain, layer_by_layer()


def _in_turn(
    model: InstrumentedModel,
    batch: _Batch,
    steps: dict[int, list[int]],
    heads: Sequence[int],
    metric: Metric,
    replace: Callable[..., Tensor | float],
) -> Ablated:
    """Other models: a forward for each head and choice of visits; of an adapted one, from the step where it is ablated."""
    check_predicts(model)

    def score(*chain: Intervention) -> np.ndarray:
        with intervene(model, chain):
            logits = model(batch.tokens, batch.segments)
        assert logits is not None
        return metric(logits[batch.context, batch.predictor], batch.truth).double().cpu().numpy()

    def put(layer: int, visit: int, head: int) -> Intervention:
        value = replace(steps[layer][visit - 1])
        value = value[..., : batch.tokens.shape[1], :, :] if isinstance(value, Tensor) and value.ndim == 4 else value
        return put_in("PV", value, layer=layer, visit=visit, head=head)

    clean = replay_of(model) if isinstance(model, AdaptedModel) else None
    with clean.going_on(keep=max(map(max, steps.values()))) if clean else nullcontext():
        plain = score()

    def layer_by_layer() -> Iterator[list[tuple[tuple[int, ...], int, np.ndarray]]]:
        for layer, indices in steps.items():
            found = []
            for j, head in enumerate(heads):
                whole = ((choice, choice, nullcontext()) for choice in visit_choices(len(indices)))
                for choice, to_change, going_on in clean.changed_at(indices) if clean else whole:
                    with going_on:
                        found.append((choice, j, score(*(put(layer, visit, head) for visit in to_change))))
            yield found

    return plain, layer_by_layer()


def _residuals(
    model: InstrumentedModel, tokens: Tensor, segments: Tensor | None, steps: Sequence[int]
) -> dict[int, Tensor]:
    """The intact residual stream before each of the steps, and (key L_eff) after the last."""
    kept: dict[int, Tensor] = {}

    def keep(site: str, step: Step, value: Tensor, there: Tensor | None) -> None:
        kept[step.index + (site == "resid_out")] = value

    places = [*(("resid", model.plan.steps[index]) for index in steps), ("resid_out", model.plan.steps[-1])]
    with model.changing(places, keep):
        model(tokens, segments, return_type="none")
    return kept


def _scores(model: InstrumentedModel, batch: _Batch, metric: Metric, x: Tensor) -> list[np.ndarray]:
    """The metric [target] of each of the runs' last residual streams [run, context, position, H]."""
    device = x.device
    at_targets = x[:, batch.context.to(device), batch.predictor.to(device)]
    truth = batch.truth.to(device)
    return [metric(model.logits(run), truth).double().cpu().numpy() for run in at_targets]


def _forked_runs(
    model: InstrumentedModel,
    before: dict[int, Tensor],
    steps: Sequence[int],
    heads: Sequence[int],
    segments: Tensor | None,
    replace: Callable[..., Tensor | float],
) -> dict[tuple[int, ...], Tensor]:
    """Choice of visits -> the last residual stream [head * context, position, H] with each head ablated there.

    From one visit of the layer to its next, all runs go side by side: those ablated at an earlier visit, the one
    ablated at every visit so far, and the one whose first ablation is here.
    """
    runs: dict[tuple[int, ...], Tensor] = {}
    for visit, start in enumerate(steps, 1):
        stop = steps[visit] if visit < len(steps) else len(model.plan)
        so_far = tuple(range(1, visit))
        passed = {choice: x for choice, x in runs.items() if len(choice) == 1}
        hit: dict[tuple[int, ...], Tensor] = {(visit,): before[start].repeat(len(heads), 1, 1)}
        if visit > 1:
            hit[(*so_far, visit)] = runs[so_far]
        x = torch.cat([*passed.values(), *hit.values()])
        several = None if segments is None else segments.repeat(len(x) // len(segments), 1)
        changed = partial(_ablated, heads=heads, passed=len(passed), hit=len(hit), value=replace(start))
        with model.changing([("PV", model.plan.steps[start])], lambda site, step, z, there, by=changed: by(z)):
            x = model.run_steps(x, several, start=start, stop=stop)
        runs = dict(zip([*passed, *hit], x.chunk(len(passed) + len(hit)), strict=True))
    return {choice: runs[choice] for choice in visit_choices(len(steps))}


def _ablated(z: Tensor, heads: Sequence[int], passed: int, hit: int, value: Tensor | float) -> Tensor:
    """PV [run * head * context, position, head, d] with each run's head replaced, in the runs that are hit here."""
    z = z.unflatten(0, (passed + hit, len(heads), -1)).clone()
    for j, head in enumerate(heads):
        z[passed:, j, :, :, head] = value[..., head, :][..., : z.shape[3], :] if isinstance(value, Tensor) else value
    return z.flatten(0, 2)


def _replacement(
    model: InstrumentedModel, task: Task, mode: str, steps: Sequence[int], seed: int, tokens_at_once: int
) -> Callable[..., Tensor | float]:
    """`replace(step, rows=...)`: 0.0, the mean [1, head, d], or another document's PV [context, position, head, d]."""
    if mode == "zero":
        return lambda step, rows: 0.0
    kept: dict[int, list[Tensor]] = {step: [] for step in steps}
    several, device = max(1, tokens_at_once // task.tokens.shape[1]), device_of(model)
    with capture(model, ["PV"]) as captured:
        for start in range(0, len(task.tokens), several):
            rows = slice(start, start + several)
            segments = None if task.segments is None else torch.from_numpy(task.segments[rows]).to(device)
            model(torch.from_numpy(task.tokens[rows]).long().to(device), segments, return_type="none")
            for step, parts in kept.items():
                parts.append(captured.at("PV", step))
    pv = {step: torch.cat(parts) for step, parts in kept.items()}
    if mode == "mean":
        real = torch.from_numpy(task.document >= 0)
        means = {step: z[real.to(z.device)].mean(0, keepdim=True) for step, z in pv.items()}
        return lambda step, rows: means[step]
    donors = torch.from_numpy(_donors(task, seed))
    return lambda step, rows: pv[step].flatten(0, 1)[donors[rows].to(pv[step].device)]


def _donors(task: Task, seed: int) -> np.ndarray:
    """[context, position] the flat index of the token whose PV takes its place: of the next document in a random circle."""
    if task.documents < 2:
        raise InputError(
            "resampling takes another document's values and needs at least two documents; use zero or mean"
        )
    flat = task.document.ravel()
    tokens = [np.flatnonzero(flat == document) for document in range(task.documents)]
    circle = np.random.default_rng(seed).permutation(task.documents)
    donors = np.arange(flat.size)
    for document, giver in zip(circle, np.roll(circle, 1), strict=True):
        own, other = tokens[document], tokens[giver]
        donors[own] = other[np.arange(len(own)) % len(other)]
    return donors.reshape(task.document.shape)

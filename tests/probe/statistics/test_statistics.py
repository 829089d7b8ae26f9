"""Every measure against a plain computation from full attention maps and raw activations, token by token in float64.

The plain computation follows the definitions in the docs and calls nothing of the statistics or kernels. A new measure
needs its definition here too: the test names the one that is missing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
import torch

from visitlens.hooks.capture.capture import capture
from visitlens.hooks.capture.step_values import StepValues
from visitlens.hooks.core.loop_plan import ExecutionPlan
from visitlens.hooks.core.sites import SITES
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.recording.format.totals import GroupTotals
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.measures.collector import registered

Array = np.ndarray
SITES_USED = tuple(name for name in SITES if name != "P")


@dataclass
class Raw:
    """A text's activations: `at[site][step]` is float64 [token, ...] over real tokens; pieces are (start, stop)."""

    plan: ExecutionPlan
    at: dict[str, list[Array]]
    pieces: list[tuple[int, int]]
    groups: Array
    heads: int
    experts: int
    k: int

    @property
    def tokens(self) -> int:
        return len(self.groups)

    def pairs(self) -> list[tuple[int, int]]:
        """Steps of every two visits of one layer, by layer, then visits."""
        layers = sorted({s.layer for s in self.plan.steps})
        visits = [[s.index for s in self.plan.steps if s.layer == layer] for layer in layers]
        return [pair for steps in visits for pair in combinations(steps, 2)]

    def keys_seen(self) -> Array:
        return np.concatenate([np.arange(1, stop - start + 1) for start, stop in self.pieces])


def run(model: LoopedMoE, text: PackedTokens, collector, batch: int) -> tuple[Raw, dict[str, GroupTotals]]:
    """The collector's totals, and the raw activations of the very same forwards."""
    steps = range(len(model.plan))
    at: dict[str, list[list[Array]]] = {site: [[] for _ in steps] for site in SITES_USED}
    groups_of_documents, groups = text.document_groups(128), []
    pieces: list[tuple[int, int]] = []
    for first in range(0, len(text.tokens), batch):
        rows = slice(first, first + batch)
        segments = torch.from_numpy(text.segments[rows])
        with capture(model, SITES_USED) as captured:
            model(torch.from_numpy(text.tokens[rows]), segments)
        real = text.segments[rows] >= 0
        for site in SITES_USED:
            for step in steps:
                at[site][step].append(captured.at(site, step).double().numpy()[real])
        ids = text.segments[rows][real]
        batch_groups = groups_of_documents[text.segment_document[ids]]
        groups.append(batch_groups)
        for _, count in sorted(Counter(ids.tolist()).items()):
            start = pieces[-1][1] if pieces else 0
            pieces.append((start, start + count))
        collector.update(StepValues(captured, segments, "torch"), torch.from_numpy(batch_groups))
    flat = {site: [np.concatenate(parts) for parts in values] for site, values in at.items()}
    c = model.config
    sizes = (c.num_heads, c.num_experts, c.experts_per_token)
    return Raw(model.plan, flat, pieces, np.concatenate(groups), *sizes), collector.take()


# The plain definitions: measure -> [token, *axes], NaN where the definition leaves the token out


def size(x: Array) -> Array:
    return np.sqrt((x**2).sum(-1) / x.shape[-1])


def cos(a: Array, b: Array) -> Array:
    return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))


def update(raw: Raw, step: int) -> Array:
    return raw.at["attn_write"][step] + raw.at["moe_write"][step]


def components(raw: Raw, step: int) -> list[Array]:
    parts = [update(raw, step), *(raw.at[site][step] for site in ("attn_write", "moe_write", "X", "moe_in"))]
    return [size(part) for part in parts]


def shared(raw: Raw, token: int, a: int, b: int) -> int:
    chosen = raw.at["experts"]
    return len(set(chosen[a][token].tolist()) & set(chosen[b][token].tolist()))


def gate_overlap(raw: Raw, token: int, a: int, b: int) -> float:
    gates = {s: raw.at["gates"][s][token] / raw.at["gates"][s][token].sum() for s in (a, b)}
    one, two = (dict(zip(raw.at["experts"][s][token], gates[s], strict=True)) for s in (a, b))
    return sum(min(one.get(e, 0.0), two.get(e, 0.0)) for e in range(raw.experts))


def router_entropy(raw: Raw, step: int) -> Array:
    logits = raw.at["router"][step]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return -(p * np.log(p)).sum(1)


def used(raw: Raw, step: int) -> Array:
    table = np.zeros((raw.tokens, raw.experts))
    for token, chosen in enumerate(raw.at["experts"][step].astype(int)):
        for expert in chosen:
            table[token, expert] += 1
    return table


def attention_maps(raw: Raw, step: int) -> list[Array]:
    """P [head, query, key] of each piece."""
    maps = []
    for start, stop in raw.pieces:
        q, k = raw.at["Q"][step][start:stop], raw.at["K"][step][start:stop]
        shared_by = raw.heads // k.shape[1]
        heads = []
        for h in range(raw.heads):
            scores = q[:, h] @ k[:, h // shared_by].T / math.sqrt(q.shape[2])
            scores[np.triu_indices(stop - start, 1)] = -np.inf
            p = np.exp(scores - scores.max(1, keepdims=True))
            heads.append(p / p.sum(1, keepdims=True))
        maps.append(np.stack(heads))
    return maps


def per_query(raw: Raw, value: Callable[[Array], float], step: int, more_than: int) -> Array:
    """[token, head] of a function of one row of P (its visible keys)."""
    out = []
    for p in attention_maps(raw, step):
        for i in range(p.shape[1]):
            seen = i + 1 > more_than
            out.append([value(p[h, i, : i + 1]) if seen else np.nan for h in range(raw.heads)])
    return np.array(out)


def per_query_pair(
    raw: Raw, value: Callable[[Array, Array], float], one: list[Array], two: list[Array], more_than: int
) -> Array:
    out = []
    for p, other in zip(one, two, strict=True):
        for i in range(p.shape[1]):
            seen = i + 1 > more_than
            out.append([value(p[h, i, : i + 1], other[h, i, : i + 1]) if seen else np.nan for h in range(len(p))])
    return np.array(out)


def top(row: Array, count: int) -> set[int]:
    """Ties to the smaller position."""
    return set(sorted(range(len(row)), key=lambda j: (-row[j], j))[:count])


def top1_match(p: Array, other: Array) -> float:
    return float(top(p, 1) == top(other, 1))


def top8_overlap(p: Array, other: Array) -> float:
    return len(top(p, 8) & top(other, 8)) / 8


def mass_overlap(p: Array, other: Array) -> float:
    return float(np.minimum(p, other).sum())


def entropy(p: Array) -> float:
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def across_visits(value: Callable[[Array, Array], float], more_than: int) -> Callable[[Raw], Array]:
    def compute(raw: Raw) -> Array:
        maps = [attention_maps(raw, step) for step in range(len(raw.plan))]
        return np.stack([per_query_pair(raw, value, maps[a], maps[b], more_than) for a, b in raw.pairs()], axis=1)

    return compute


def across_heads(value: Callable[[Array, Array], float], more_than: int) -> Callable[[Raw], Array]:
    """Head h against (h + n_h // 2) mod n_h, of looped layers; nothing to compare with where there's one head."""

    def compute(raw: Raw) -> Array:
        result = np.full((raw.tokens, len(raw.plan), raw.heads), np.nan)
        for step in sorted({step for pair in raw.pairs() for step in pair}) if raw.heads > 1 else []:
            maps = attention_maps(raw, step)
            others = [p[[(h + raw.heads // 2) % raw.heads for h in range(raw.heads)]] for p in maps]
            result[:, step] = per_query_pair(raw, value, maps, others, more_than)
        return result

    return compute


def by_step(compute: Callable[[Raw, int], Array]) -> Callable[[Raw], Array]:
    return lambda raw: np.stack([compute(raw, step) for step in range(len(raw.plan))], axis=1)


def by_pair(compute: Callable[[Raw, int, int], Array]) -> Callable[[Raw], Array]:
    return lambda raw: np.stack([compute(raw, a, b) for a, b in raw.pairs()], axis=1)


def by_pair_and_token(compute: Callable[[Raw, int, int, int], float]) -> Callable[[Raw], Array]:
    return by_pair(lambda raw, a, b: np.array([compute(raw, token, a, b) for token in range(raw.tokens)]))


def stages(raw: Raw, a: int, b: int) -> Array:
    names = ("X", "Q", "K", "V", "PV", "attn_write")
    return np.stack([cos(*(raw.at[n][s].reshape(raw.tokens, -1) for s in (a, b))) for n in names], axis=1)


DEFINITIONS: dict[str, Callable[[Raw], Array]] = {
    "resid_rms": by_step(lambda raw, s: size(raw.at["resid"][s])),
    "update_rms": by_step(lambda raw, s: size(update(raw, s))),
    "relative_update": by_step(lambda raw, s: size(update(raw, s)) / size(raw.at["resid"][s])),
    "attn_write_rms": by_step(lambda raw, s: size(raw.at["attn_write"][s])),
    "moe_write_rms": by_step(lambda raw, s: size(raw.at["moe_write"][s])),
    "norm_output_attn_rms": by_step(lambda raw, s: size(raw.at["X"][s])),
    "norm_output_moe_rms": by_step(lambda raw, s: size(raw.at["moe_in"][s])),
    "update_cosine": by_step(
        lambda raw, s: np.stack([cos(update(raw, s), update(raw, t)) for t in range(len(raw.plan))], axis=1)
    ),
    "token_norm_ratio": by_pair(
        lambda raw, a, b: np.stack([y / x for x, y in zip(components(raw, a), components(raw, b), strict=True)], axis=1)
    ),
    "stage_cosine": by_pair(stages),
    "stage_cosine_heads": by_pair(
        lambda raw, a, b: np.stack([cos(raw.at[n][a], raw.at[n][b]) for n in ("Q", "PV")], axis=1)
    ),
    "stage_cosine_kv_heads": by_pair(
        lambda raw, a, b: np.stack([cos(raw.at[n][a], raw.at[n][b]) for n in ("K", "V")], axis=1)
    ),
    "shared_expert_count": by_pair_and_token(shared),
    "shared_experts": by_pair(
        lambda raw, a, b: np.array([np.eye(raw.k + 1)[shared(raw, token, a, b)] for token in range(raw.tokens)])
    ),
    "gate_overlap": by_pair_and_token(gate_overlap),
    "expert_load": by_step(used),
    "router_entropy": by_step(router_entropy),
    "expert_transitions": by_pair(lambda raw, a, b: used(raw, a)[:, :, None] * used(raw, b)[:, None, :]),
    "sink_mass": by_step(lambda raw, s: per_query(raw, lambda p: p[0], s, 1)),
    "first4_mass": by_step(lambda raw, s: per_query(raw, lambda p: p[:4].sum(), s, 4)),
    "attention_entropy": by_step(lambda raw, s: per_query(raw, entropy, s, 1)),
    "top1_match": across_visits(top1_match, 1),
    "top8_overlap": across_visits(top8_overlap, 8),
    "mass_overlap": across_visits(mass_overlap, 1),
    "top1_match_control": across_heads(top1_match, 1),
    "top8_overlap_control": across_heads(top8_overlap, 8),
    "mass_overlap_control": across_heads(mass_overlap, 1),
}
UNGROUPED = {"expert_transitions"}

CASES: dict[str, dict] = {
    "baseline": {"visits": 1},
    "two visits": {"visits": 2},
    "three visits, odd heads, one kv head": {"visits": 3, "num_heads": 3, "num_kv_heads": 1},
    "odd heads, as many kv heads": {"visits": 2, "num_heads": 5, "num_kv_heads": 5},
    "one head": {"visits": 2, "num_heads": 1, "num_kv_heads": 1},
    "every expert": {"visits": 2, "num_experts": 3},
    "qk norm, untied": {"visits": 2, "qk_norm": True, "tie_embeddings": False},
    "the whole model looped": {"visits": 2, "loop_start": 0, "loop_stop": 4},
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-6}
"""Relative, of a mean over tokens; absolute for cosines and shares, which are at most 1, and for entropies. The
activations are given: what is compared is the arithmetic on them, float32 at least."""


def check(case: dict, dtype: torch.dtype, batch: int, make_model, make_text, make_collector) -> None:
    text = make_text(seed=11, context=32)
    model = make_model(**case, dtype=dtype)
    collector = make_collector(model, text)
    raw, totals = run(model, text, collector, batch)
    missing = set(totals) - set(DEFINITIONS)
    assert not missing, f"no plain definition of {sorted(missing)}: add it to DEFINITIONS"
    for name, got in totals.items():
        values = DEFINITIONS[name](raw)
        left_out = np.isnan(values)
        groups = np.zeros(raw.tokens, dtype=int) if name in UNGROUPED else raw.groups
        shape = (1 if name in UNGROUPED else collector.num_groups, *values.shape[1:])
        total, count = np.zeros(shape), np.zeros(shape)
        np.add.at(total, groups, np.where(left_out, 0.0, values))
        np.add.at(count, groups, ~left_out)
        np.testing.assert_array_equal(got.count, count, err_msg=name)
        np.testing.assert_array_equal(got.left_out, left_out.sum(0), err_msg=name)
        assert not got.non_finite.any(), name
        with np.errstate(invalid="ignore"):
            means = got.total / got.count, total / count
            overall = got.total.sum(0) / got.count.sum(0), total.sum(0) / count.sum(0)
        tolerance = TOLERANCE[dtype]
        np.testing.assert_allclose(*means, rtol=tolerance, atol=tolerance, err_msg=name)
        np.testing.assert_allclose(*overall, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_measure_is_its_definition_in_float64(case: dict, make_model, make_text, make_collector) -> None:
    check(case, torch.float64, 2, make_model, make_text, make_collector)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("visits", [1, 3])
def test_every_measure_is_its_definition_in_lower_precision(
    visits: int, dtype: torch.dtype, make_model, make_text, make_collector
) -> None:
    check({"visits": visits}, dtype, 1, make_model, make_text, make_collector)


def test_every_registered_measure_has_a_plain_definition() -> None:
    """But those of what the native model doesn't have: by hand in test_statistics_by_hand.py and test_ragged.py."""
    elsewhere = {"learned_sink_mass", "visit_share", "both_visits_share"}
    assert {m.name for cls in registered() for m in cls.measures} == set(DEFINITIONS) | elsewhere

"""Statistics of made-up activations whose answers can be worked out on paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from visitlens.hooks.capture.attention_rule import AttentionRule, map_overlaps
from visitlens.hooks.capture.capture import Captured
from visitlens.hooks.capture.step_values import StepValues
from visitlens.hooks.core.loop_plan import LoopSpec
from visitlens.hooks.recording.format.totals import GroupTotals
from visitlens.kernels.segments import Segments
from visitlens.probe.measures.collector import StatisticsCollector
from visitlens.probe.measures.statistic import Geometry

LOOPED = LoopSpec(1, range(1), 2).plan()
"""One layer, visited twice."""


def measure(
    name: str,
    sites: Mapping[str, Sequence[Tensor]],
    segments: Sequence[int] | None = None,
    rules: Mapping[int, AttentionRule] | None = None,
    **sizes: int,
) -> GroupTotals:
    """Totals of the statistic that defines `name`, from [token, ...] values of each visit; one group."""
    tokens = len(next(iter(sites.values()))[0])
    captured = Captured(LOOPED, tuple(sites))
    for site, visits in sites.items():
        for step, value in enumerate(visits):
            captured.store(site, step, value.unsqueeze(0))
    captured.rules.update(rules or {})
    ids = torch.tensor(segments if segments is not None else [0] * tokens).unsqueeze(0)
    defaults = {"hidden_size": 4, "num_heads": 1, "num_kv_heads": 1, "num_experts": 16, "experts_per_token": 8}
    collector = StatisticsCollector(Geometry(LOOPED, **{**defaults, **sizes}), 1, [name])
    collector.update(StepValues(captured, ids, "torch"), torch.zeros(tokens, dtype=torch.long))
    return collector.take()[name]


def mean(totals: GroupTotals) -> np.ndarray:
    return totals.total.sum(0) / totals.count.sum(0)


def routed(*chosen: Sequence[int]) -> dict[str, list[Tensor]]:
    """One token's experts at each visit, with equal gates."""
    k = len(chosen[0])
    return {"experts": [torch.tensor([list(c)]) for c in chosen], "gates": [torch.full((1, k), 1 / k) for _ in chosen]}


# Experts


def test_experts_0_to_7_and_4_to_11_share_4() -> None:
    both = routed(range(8), range(4, 12))
    assert mean(measure("shared_expert_count", both)).tolist() == [4.0]
    assert mean(measure("shared_experts", both)).tolist() == [[0, 0, 0, 0, 1, 0, 0, 0, 0]]
    # 4 experts in common, a gate of 1/8 each at both visits.
    assert mean(measure("gate_overlap", both)).tolist() == [0.5]


def test_the_order_of_the_experts_does_not_matter() -> None:
    assert mean(measure("shared_expert_count", routed(range(8), [3, 2, 1, 0, 7, 6, 5, 4]))).tolist() == [8.0]


def test_gates_overlap_by_their_smaller_one() -> None:
    """Expert 1: min(0.7, 0.2) = 0.2; expert 2: min(0.3, 0.5) = 0.3; expert 5 has no gate at the first visit."""
    sites = {
        "experts": [torch.tensor([[1, 2, 9]]), torch.tensor([[5, 2, 1]])],
        "gates": [torch.tensor([[0.7, 0.3, 0.0]]).double(), torch.tensor([[0.3, 0.5, 0.2]]).double()],
    }
    assert mean(measure("gate_overlap", sites, experts_per_token=3)).tolist() == pytest.approx([0.5])


def test_loads_and_transitions_of_two_tokens() -> None:
    """Visit 1: {0, 1} and {0, 2}; visit 2: {2, 3} and {0, 2}. Expert 0 then 2 in both tokens, 1 then 3 in one."""
    sites = {
        "experts": [torch.tensor([[0, 1], [0, 2]]), torch.tensor([[2, 3], [0, 2]])],
        "gates": [torch.full((2, 2), 0.5)] * 2,
        "router": [torch.zeros(2, 4)] * 2,
    }
    sizes = {"num_experts": 4, "experts_per_token": 2}
    assert mean(measure("expert_load", sites, **sizes)).tolist() == [[1, 0.5, 0.5, 0], [0.5, 0, 1, 0.5]]
    table = mean(measure("expert_transitions", sites, **sizes))[0]
    assert table.tolist() == [[0.5, 0, 1, 0.5], [0, 0, 0.5, 0.5], [0.5, 0, 0.5, 0], [0, 0, 0, 0]]
    assert table.sum() == 4  # k * k
    np.testing.assert_allclose(mean(measure("router_entropy", sites, **sizes)), [math.log(4)] * 2)


# Identical visits


def test_identical_visits_agree_in_everything() -> None:
    torch.manual_seed(0)
    n = 12

    def twice(*shape: int) -> list[Tensor]:
        return [torch.randn(n, *shape, dtype=torch.float64)] * 2

    experts = torch.rand(n, 16).argsort(1)[:, :8]
    vectors = {site: twice(4) for site in ("X", "attn_write", "moe_write", "moe_in", "resid")}
    heads = {site: twice(2, 3) for site in ("Q", "PV")} | {site: twice(1, 3) for site in ("K", "V")}
    gates = [torch.rand(n, 8, dtype=torch.float64).softmax(1)] * 2
    sites = {**vectors, **heads, "experts": [experts] * 2, "gates": gates}
    sizes = {"num_heads": 2}
    for name in ("top1_match", "top8_overlap", "mass_overlap", "gate_overlap", "token_norm_ratio"):
        np.testing.assert_allclose(mean(measure(name, sites, **sizes)), 1, atol=1e-12, err_msg=name)
    for name in ("stage_cosine", "stage_cosine_heads", "stage_cosine_kv_heads", "update_cosine"):
        np.testing.assert_allclose(mean(measure(name, sites, **sizes)), 1, atol=1e-12, err_msg=name)
    assert measure("shared_experts", sites, **sizes).total.tolist() == [[[0] * 8 + [n]]]


# Norms and cosines


def test_a_write_1_5_times_the_first_has_norm_ratio_1_5() -> None:
    torch.manual_seed(0)
    first = {site: torch.randn(6, 4, dtype=torch.float64) for site in ("attn_write", "moe_write", "X", "moe_in")}
    sites = {site: [value, value * 1.5] for site, value in first.items()}
    np.testing.assert_allclose(mean(measure("token_norm_ratio", sites)), np.full((1, 5), 1.5), rtol=1e-12)


def test_norms_of_a_3_4_vector() -> None:
    """||(3, 4, 0, 0)|| / sqrt(4) = 2.5; d = (3, 0, 0, 0) + (0, 4, 0, 0) is as long; x has norm 10."""
    attn, moe = torch.tensor([[3.0, 0, 0, 0]]), torch.tensor([[0, 4.0, 0, 0]])
    ones = torch.ones(1, 4)
    sites = {
        "resid": [torch.tensor([[0, 0, 6.0, 8.0]]), ones],
        "attn_write": [attn, attn],
        "moe_write": [moe, moe],
        "X": [ones * 2, ones],
        "moe_in": [ones * 3, ones],
    }
    expected = {
        "resid_rms": 5,
        "update_rms": 2.5,
        "relative_update": 0.5,
        "attn_write_rms": 1.5,
        "moe_write_rms": 2,
        "norm_output_attn_rms": 2,
        "norm_output_moe_rms": 3,
    }
    for name, value in expected.items():
        assert mean(measure(name, sites))[0] == pytest.approx(value), name


def test_update_cosine_of_orthogonal_and_opposite_updates() -> None:
    """Two tokens, cosines 0 and -1 between the visits: mean -0.5. Each step agrees with itself."""
    nothing = torch.zeros(2, 4)
    first = torch.tensor([[1.0, 0, 0, 0], [0, 2.0, 0, 0]])
    second = torch.tensor([[0, 0, 5.0, 0], [0, -0.5, 0, 0]])
    sites = {"attn_write": [first, nothing], "moe_write": [nothing, second]}
    np.testing.assert_allclose(mean(measure("update_cosine", sites)), [[1, -0.5], [-0.5, 1]], atol=1e-7)


def test_stage_cosine_is_of_all_heads_together_and_by_head_apart() -> None:
    """Head 0 (length 1) agrees, head 1 (length 2) is opposite: together (1 - 4) / (sqrt 5 sqrt 5) = -0.6."""
    q1, q2 = torch.tensor([[[1.0, 0], [0, 2.0]]]), torch.tensor([[[1.0, 0], [0, -2.0]]])
    same_kv, same = torch.ones(1, 2, 2), torch.ones(1, 4)
    sites = {"Q": [q1, q2], "PV": [q1, q2], "K": [same_kv] * 2, "V": [same_kv] * 2}
    sites |= {"X": [same, same], "attn_write": [same, same]}
    sizes = {"num_heads": 2, "num_kv_heads": 2}
    whole = mean(measure("stage_cosine", sites, **sizes))[0]  # X, Q, K, V, PV, O
    np.testing.assert_allclose(whole, [1, -0.6, 1, 1, -0.6, 1], atol=1e-6)
    heads = mean(measure("stage_cosine_heads", sites, **sizes))[0]
    np.testing.assert_allclose(heads, [[1, -1], [1, -1]], atol=1e-6)


def test_a_zero_vector_has_no_direction_and_is_counted() -> None:
    sites = {"attn_write": [torch.zeros(2, 4), torch.ones(2, 4)], "moe_write": [torch.zeros(2, 4)] * 2}
    totals = measure("update_cosine", sites)
    assert totals.non_finite.tolist() == [[2, 2], [2, 0]]
    assert totals.count.tolist() == [[[0, 0], [0, 2]]]
    assert np.isfinite(totals.total).all()


# Attention


def attention(q: Sequence[Tensor], k: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
    return {"Q": q, "K": k}


def test_uniform_attention_has_sink_mass_1_over_n_and_entropy_ln_n() -> None:
    """Zero queries: every score is 0. Ten tokens of one document; the segment start is left out."""
    n = 10
    sites = attention([torch.zeros(n, 1, 2)] * 2, [torch.randn(n, 1, 2)] * 2)
    expected = {
        "sink_mass": np.mean([1 / i for i in range(2, n + 1)]),
        "attention_entropy": np.mean([math.log(i) for i in range(2, n + 1)]),
        "first4_mass": np.mean([4 / i for i in range(5, n + 1)]),
        "mass_overlap": 1.0,
        "top1_match": 1.0,
        "top8_overlap": 1.0,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(mean(measure(name, sites)), value, rtol=1e-6, err_msg=name)
    assert measure("sink_mass", sites).left_out.tolist() == [[1], [1]]
    assert measure("first4_mass", sites).left_out.tolist() == [[4], [4]]
    assert measure("top8_overlap", sites).left_out.tolist() == [[8]]
    assert measure("mass_overlap", sites).left_out.tolist() == [[1]]


def test_a_head_that_attends_only_to_the_segment_start_has_sink_mass_1() -> None:
    """In two documents of 5 and 4 tokens; the second's start is its own, not the first's."""
    k = torch.zeros(9, 1, 2)
    k[[0, 5], 0, 0] = 1000.0
    q = torch.zeros(9, 1, 2)
    q[:, 0, 0] = 1.0
    sites, segments = attention([q, q], [k, k]), [0] * 5 + [1] * 4
    assert mean(measure("sink_mass", sites, segments)).tolist() == [[1], [1]]
    np.testing.assert_allclose(mean(measure("attention_entropy", sites, segments)), [[0], [0]], atol=1e-7)
    assert measure("sink_mass", sites, segments).count.tolist() == [[[7], [7]]]


def test_a_sliding_window_leaves_out_no_query_of_the_first_4() -> None:
    """Six equal keys, a window of 4: queries 4 and 5 see keys 1-4 and 2-5, of which 3 and 2 are among the first 4."""
    equal = torch.zeros(6, 1, 2)
    sites, rules = {"Q": [equal, equal], "K": [equal, equal]}, dict.fromkeys((0, 1), AttentionRule(1.0, window=4))
    first4 = measure("first4_mass", sites, rules=rules)
    assert first4.count.tolist() == [[[2], [2]]]
    np.testing.assert_allclose(mean(first4).ravel(), [(3 / 4 + 2 / 4) / 2] * 2)
    assert measure("sink_mass", sites, rules=rules).count.tolist() == [[[5], [5]]]


def test_where_attention_goes_both_ways_every_query_sees_its_document() -> None:
    """Documents of 9, 8 and 1: all of the first see more than 8 keys, all of the second more than 1."""
    equal = torch.zeros(18, 1, 2)
    sites, rules = {"Q": [equal, equal], "K": [equal, equal]}, dict.fromkeys((0, 1), AttentionRule(1.0, causal=False))
    segments = [0] * 9 + [1] * 8 + [2]
    assert measure("top8_overlap", sites, segments, rules).count.tolist() == [[[9]]]
    assert measure("top1_match", sites, segments, rules).count.tolist() == [[[17]]]


@pytest.mark.parametrize("from_map", [False, True], ids=["kernel", "map"])
def test_a_learned_sink_takes_its_share_of_each_row(from_map: bool) -> None:
    """Equal scores and a sink of logit ln 2: it takes 2 parts of 3 from the first query, 2 of 4 from the second. From a map it
    is what a row lacks to 1."""
    q = torch.zeros(2, 1, 2)
    sites = attention([q, q], [q, q])
    if from_map:
        sites["P"] = [torch.tensor([[[1 / 3, 0.0], [1 / 4, 1 / 4]]])] * 2
    rule = AttentionRule(1.0, sinks=torch.tensor([math.log(2)]), from_map=from_map)
    totals = measure("learned_sink_mass", sites, rules={0: rule, 1: rule})
    np.testing.assert_allclose(mean(totals), [[(2 / 3 + 2 / 4) / 2]] * 2, rtol=1e-6)
    assert totals.left_out.tolist() == [[0], [0]]


def test_visits_that_attend_to_different_tokens_share_nothing() -> None:
    """Visit 1 looks at token 1 alone, visit 2 at token 0 alone; from the third token on both are there."""
    n, q = 3, torch.ones(3, 1, 2)
    one, two = torch.zeros(n, 1, 2), torch.zeros(n, 1, 2)
    one[1] = 1000.0
    two[0] = 1000.0
    sites = attention([q, q], [one, two])
    # Query 1 and query 2 are counted, query 0 sees one key.
    assert mean(measure("mass_overlap", sites)).tolist() == [[0]]
    assert mean(measure("top1_match", sites)).tolist() == [[0]]


def test_top_8_of_ten_keys_that_differ_in_two() -> None:
    """The last query of 10 tokens. Visit 1 prefers keys 0-7, visit 2 keys 2-9: 6 in common, 6/8."""
    n = 10
    one, two = torch.zeros(n, 1, 2), torch.zeros(n, 1, 2)
    one[:8, 0, 0] = 1.0
    two[2:, 0, 0] = 1.0
    q = torch.zeros(n, 1, 2)
    q[:, 0, 0] = 1.0
    totals = measure("top8_overlap", attention([q, q], [one, two]))
    # The query before it sees 9 keys: 0-7 against 2-8 and, of the tied rest, the smallest, 0: 0 and 2-7, 7/8.
    assert totals.total.tolist() == [[[7 / 8 + 6 / 8]]]
    assert totals.count.tolist() == [[[2]]]


def test_the_control_compares_a_head_with_the_one_half_the_heads_away() -> None:
    """Heads 0 and 2 look at the start, head 1 at the query's own token, head 3 at the start too. h + 2 mod 4: 0-2 and
    1-3 are compared; 0-2 agree, 1-3 don't."""
    n = 4
    q = torch.zeros(n, 4, 4)
    k = torch.zeros(n, 1, 4)
    k[0, 0, 0] = 1000.0
    k[torch.arange(n), 0, 3] = torch.arange(n) * 1000.0  # grows with the position: the last visible key wins
    q[:, [0, 2, 3], 0] = 1.0
    q[:, 1, 3] = 1.0
    totals = measure("mass_overlap_control", attention([q, q], [k, k]), num_heads=4)
    assert mean(totals).tolist() == [[1, 0, 1, 0]] * 2
    assert mean(measure("top1_match_control", attention([q, q], [k, k]), num_heads=4)).tolist() == [[1, 0, 1, 0]] * 2


def test_the_control_of_an_odd_number_of_heads_goes_up_and_round() -> None:
    """Of three heads, 0 and 1 look at the start and 2 at its own token. Half of three heads is one: 0 is compared with 1 (alike),
    1 with 2 and 2 with 0 (not alike). One head down instead of up, head 1 would be the one that agrees."""
    n = 4
    q = torch.zeros(n, 3, 4)
    k = torch.zeros(n, 1, 4)
    k[0, 0, 0] = 1000.0
    k[torch.arange(n), 0, 3] = torch.arange(n) * 1000.0
    q[:, :2, 0] = 1.0
    q[:, 2, 3] = 1.0
    start, own = torch.zeros(n, n), torch.eye(n)
    start[:, 0] = 1.0
    p = torch.stack([start, start, own])
    of_maps = map_overlaps([AttentionRule(1.0)], lambda v, start, end: p, Segments((0, n)), overlaps=True).control
    assert of_maps is not None
    for name in ("mass_overlap", "top1_match"):
        totals = measure(f"{name}_control", attention([q, q], [k, k]), num_heads=3)
        assert mean(totals).tolist() == [[1, 0, 0]] * 2
        # The first token sees one key alone, on which all heads agree.
        assert getattr(of_maps[0], name).double()[1:].tolist() == [[1, 0, 0]] * (n - 1)


def test_a_model_with_one_head_has_no_control() -> None:
    sites = attention([torch.randn(12, 1, 2)] * 2, [torch.randn(12, 1, 2)] * 2)
    totals = measure("mass_overlap_control", sites)
    assert totals.count.tolist() == [[[0], [0]]] and totals.left_out.tolist() == [[12], [12]]


@pytest.mark.parametrize(("length", "counted"), [(1, 0), (2, 1), (8, 7), (9, 8)])
def test_short_documents_are_left_out_by_rule_and_counted(length: int, counted: int) -> None:
    """Queries that see one key are left out everywhere; of the top 8, those that see at most 8."""
    torch.manual_seed(0)
    qk = attention([torch.randn(length, 1, 2)] * 2, [torch.randn(length, 1, 2)] * 2)
    for name in ("top1_match", "mass_overlap"):
        totals = measure(name, qk)
        assert (int(totals.count.sum()), totals.left_out.tolist()) == (counted, [[1]])
    totals = measure("top8_overlap", qk)
    assert (int(totals.count.sum()), totals.left_out.tolist()) == (max(length - 8, 0), [[min(length, 8)]])

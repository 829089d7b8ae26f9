"""Windows, soft caps, learned sinks, distance biases, token sets and top keys against full maps in float64.

Every implementation does all of it; Triton runs in its interpreter in `test_attention_rows_triton`, on these cases.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from visitlens.errors import InputError
from visitlens.kernels.attention.results import OverlapStatistics, RowStatistics
from visitlens.kernels.attention.rows import row_statistics, visit_overlaps
from visitlens.kernels.segments import Segments

IMPLEMENTATIONS = [
    "torch",
    pytest.param("numba", marks=pytest.mark.skipif(find_spec("numba") is None, reason="numba isn't installed")),
]
both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def naive_map(q, k, segments, scale=None, window=None, soft_cap=None, sinks=None, bias=None) -> tuple[Tensor, Tensor]:
    """Scores and P [head, query, key] in float64; scores are -inf where a query doesn't see the key."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    token, starts = torch.arange(len(q)), segments.starts()
    distance = token[:, None] - token
    if bias is not None:
        scores = scores + bias.double()[:, distance.clamp(0, bias.shape[1] - 1)]
    visible = (distance >= 0) & (starts == starts[:, None]) & (distance < (window or len(q)))
    scores = scores.masked_fill(~visible, -math.inf)
    column = torch.full((q.shape[1], len(q), 1), -math.inf, dtype=torch.float64)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand_as(column)
    return scores, torch.cat([scores, column], dim=-1).softmax(-1)


def check(visits, segments, implementation, token_sets=None, tolerance=2e-5, **rule) -> None:
    maps = [naive_map(q, k, segments, **rule) for q, k in visits]
    options = {"implementation": implementation, "token_sets": token_sets, "top_keys": True, **rule}
    result = visit_overlaps(visits, segments, **options)
    for (q, k), rows, (scores, p) in zip(visits, result.rows, maps, strict=True):
        check_rows(rows, scores, p, segments, token_sets, rule.get("sinks"), tolerance)
        check_rows(
            row_statistics(q, k, segments, **options), scores, p, segments, token_sets, rule.get("sinks"), tolerance
        )
    heads = visits[0][0].shape[1]
    for a, b in combinations(range(len(visits)), 2):
        check_overlap(result.across[a, b], maps[a], maps[b], tolerance)
    for overlap, (scores, p) in zip(result.control or [], maps, strict=heads > 1):
        check_overlap(overlap, (scores, p), (scores.roll(-(heads // 2), 0), p.roll(-(heads // 2), 0)), tolerance)


def check_rows(
    rows: RowStatistics, scores: Tensor, p: Tensor, segments: Segments, sets, sinks, tolerance: float
) -> None:
    token, starts = torch.arange(scores.shape[1]), segments.starts()
    p, learned = p[..., :-1], p[..., -1]
    first4 = sum(p[:, token, (starts + n).clamp(max=len(token) - 1)] * (starts + n <= token) for n in range(4))
    total = scores.logsumexp(-1)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.double()[:, None])
        close(rows.learned_sink_mass, learned.T, tolerance)
    else:
        assert rows.learned_sink_mass is None
    close(rows.log_sum_exp, total.T, tolerance * max(1, float(scores[scores.isfinite()].abs().max()) / 8))
    close(rows.sink_mass, p[:, token, starts].T, tolerance)
    close(rows.first4_mass, first4.T, tolerance)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    close(rows.entropy, entropy.T, tolerance * 4)
    if sets is None:
        assert rows.set_mass is None
    else:
        close(rows.set_mass, torch.einsum("hij,sj->ihs", p, sets.double()), tolerance)
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    values, order = (
        torch.nn.functional.pad(x[..., :8], (0, max(0, 8 - x.shape[-1])), value=v)
        for x, v in ((values, -math.inf), (order, 0))
    )
    expected = order.where(values > -math.inf, -1).transpose(0, 1)
    assert rows.top_keys is not None and rows.top_keys.dtype == torch.int64
    assert torch.equal(rows.top_keys >= 0, expected >= 0)
    # Where the order differs, the scores are as good as equal.
    got = scores.transpose(0, 1).gather(-1, rows.top_keys.clamp(min=0)).where(expected >= 0, 0)
    wanted = values.transpose(0, 1).where(expected >= 0, 0)
    assert (got - wanted).abs().max() <= resolution(scores)
    assert (rows.top_keys == expected).double().mean() > 0.98


def check_overlap(
    overlap: OverlapStatistics, one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor], tolerance: float
) -> None:
    close(overlap.mass_overlap, torch.minimum(one[1][..., :-1], two[1][..., :-1]).sum(-1).T, tolerance)
    tops, decided1, decided8 = [], True, True
    for scores, _ in (one, two):
        values, order = scores.sort(dim=-1, descending=True, stable=True)
        values = torch.nn.functional.pad(values, (0, 9), value=-math.inf)
        gaps = (values[..., :-1] - values[..., 1:]).nan_to_num(nan=1)
        unclear = (gaps > 0) & (gaps < resolution(scores))
        decided1, decided8 = decided1 & ~unclear[..., 0], decided8 & ~unclear[..., 7]
        tops.append(
            (
                order[..., 0],
                torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :8], True) & (scores > -math.inf),
            )
        )
    match, shared = tops[0][0] == tops[1][0], (tops[0][1] & tops[1][1]).sum(-1)
    assert torch.equal(overlap.top1_match[decided1.T], match.T[decided1.T]) and decided1.double().mean() > 0.9
    assert torch.equal(overlap.top8_shared[decided8.T], shared.T[decided8.T]) and decided8.double().mean() > 0.9


def resolution(scores: Tensor) -> float:
    return 4e-6 * max(1.0, float(scores[scores.isfinite()].abs().max()))


def close(value: Tensor | None, expected: Tensor, tolerance: float) -> None:
    assert value is not None
    torch.testing.assert_close(value.double(), expected.double(), atol=tolerance, rtol=0)


def draw(
    visits: int, tokens: int, heads: int, kv_heads: int, d: int, seed: int = 0, dtype=torch.float32
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(tokens, n, d, generator=generator).to(dtype) for n in (heads, kv_heads)) for _ in range(visits)
    ]  # fmt: skip


BOUNDS = (0, 3, 4, 64, 129, 130, 300)


def alibi(heads: int, distances: int) -> Tensor:
    slopes = 2.0 ** -torch.arange(1, heads + 1)
    return -slopes[:, None] * torch.arange(distances)


@both
@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 33, 64, 65, 128, 1000])
def test_windows(implementation, window):
    check(draw(2, 300, 4, 2, 16), Segments(BOUNDS), implementation, window=window)


@both
def test_a_window_that_is_never_reached_changes_nothing(implementation):
    visits, segments = draw(2, 300, 3, 1, 8), Segments(BOUNDS)
    plain = visit_overlaps(visits, segments, implementation=implementation)
    wide = visit_overlaps(visits, segments, implementation=implementation, window=170)
    assert torch.equal(plain.rows[0].entropy, wide.rows[0].entropy)
    assert torch.equal(plain.across[0, 1].mass_overlap, wide.across[0, 1].mass_overlap)


@both
@pytest.mark.parametrize("cap", [2.0, 30.0, 1e4])
def test_soft_caps(implementation, cap):
    check(draw(2, 200, 4, 2, 16), Segments((0, 90, 200)), implementation, soft_cap=cap, scale=0.7)


@both
@pytest.mark.parametrize("size", [0.0, 1.0, -200.0, 60.0])
def test_learned_sinks(implementation, size):
    sinks = size + torch.tensor([0.0, 0.5, -1.0])
    check(draw(2, 200, 3, 1, 16), Segments((0, 90, 200)), implementation, sinks=sinks)


@both
def test_a_cap_that_all_scores_reach(implementation):
    """Scores of plus and minus the cap: P is uniform over the keys of the larger."""
    q, k = torch.ones(12, 1, 1), torch.full((12, 1, 1), -1e3)
    k[[0, 5, 7]] = 1e3
    rows = row_statistics(q, k, Segments((0, 12)), 1.0, implementation, soft_cap=20.0, top_keys=True)
    assert rows.top_keys is not None
    torch.testing.assert_close(rows.log_sum_exp[11, 0], torch.tensor(20 + math.log(3)))
    torch.testing.assert_close(rows.sink_mass[11, 0], torch.tensor(1 / 3))
    assert rows.top_keys[11, 0].tolist() == [0, 5, 7, 1, 2, 3, 4, 6]


@both
def test_a_learned_sink_of_minus_infinity_is_none(implementation):
    (q, k), segments = draw(1, 50, 2, 1, 8)[0], Segments((0, 50))
    plain = row_statistics(q, k, segments, implementation=implementation)
    none = row_statistics(q, k, segments, implementation=implementation, sinks=torch.full((2,), -math.inf))
    torch.testing.assert_close(none.entropy, plain.entropy)
    assert none.learned_sink_mass is not None and not none.learned_sink_mass.any()


@both
@pytest.mark.parametrize("bounds", [(0, 200), (0, 5, 20, 52, 200)], ids=str)
def test_distance_biases(implementation, bounds):
    bias = torch.randn(4, 250, generator=torch.Generator().manual_seed(5))
    check(draw(2, 200, 4, 2, 16), Segments(bounds), implementation, bias=bias)
    check(draw(2, 200, 4, 2, 16), Segments(bounds), implementation, bias=alibi(4, 200))


@both
def test_everything_at_once(implementation):
    """As gpt-oss and Gemma 2 mix them; a bias as long as the window, an odd number of heads, three visits."""
    sets = torch.rand(3, 300, generator=torch.Generator().manual_seed(6)) < torch.tensor([[0.5], [0.01], [2.0]])
    check(
        draw(3, 300, 5, 1, 42, dtype=torch.bfloat16), Segments(BOUNDS), implementation, token_sets=sets, window=40,
        soft_cap=2.0, sinks=torch.linspace(-2, 2, 5), bias=alibi(5, 40), scale=0.3,
    )  # fmt: skip


@both
def test_set_masses_add_up(implementation):
    (q, k), segments = draw(1, 150, 4, 2, 16)[0], Segments((0, 20, 150))
    first = (segments.positions() == 0)[None]
    rows = row_statistics(q, k, segments, implementation=implementation, token_sets=torch.cat([first, ~first]))
    assert rows.set_mass is not None
    torch.testing.assert_close(rows.set_mass[..., 0], rows.sink_mass)
    torch.testing.assert_close(rows.set_mass.sum(-1), torch.ones(150, 4))


@both
@settings(deadline=None, max_examples=12, derandomize=True)
@given(data=st.data())
def test_any_rule(implementation, data):
    kv_heads, group, d = (data.draw(st.integers(1, n)) for n in (2, 3, 9))
    heads = kv_heads * group
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    window = data.draw(st.none() | st.integers(1, 100))
    seed = data.draw(st.integers(0, 100))
    generator = torch.Generator().manual_seed(seed)
    rule = {
        "window": window,
        "soft_cap": data.draw(st.none() | st.floats(0.1, 50)),
        "sinks": data.draw(st.none() | st.just(torch.randn(heads, generator=generator))),
        "bias": data.draw(st.none() | st.just(torch.randn(heads, 90, generator=generator))),
    }
    sets = data.draw(st.none() | st.just(torch.rand(2, bounds[-1], generator=generator) < 0.3))
    check(
        draw(data.draw(st.integers(1, 3)), bounds[-1], heads, kv_heads, d, seed),
        Segments(tuple(bounds)),
        implementation,
        sets,
        **rule,
    )


@both
def test_ties_of_equal_scores_are_listed_by_position(implementation):
    q, k = torch.zeros(30, 2, 4), torch.ones(30, 1, 4)
    rows = row_statistics(q, k, Segments((0, 12, 30)), implementation=implementation, window=10, top_keys=True)
    assert rows.top_keys is not None
    assert rows.top_keys[11, 0].tolist() == list(range(2, 10))
    assert rows.top_keys[12, 1].tolist() == [12] + [-1] * 7
    assert rows.top_keys[25, 0].tolist() == list(range(16, 24))


@both
def test_nan_has_no_top_keys(implementation):
    (q, k), segments = draw(1, 200, 2, 1, 4)[0], Segments((0, 200))
    k[140] = math.nan
    rows = row_statistics(
        q, k, segments, implementation=implementation, window=12, soft_cap=5.0, sinks=torch.zeros(2), top_keys=True,
        token_sets=torch.ones(1, 200, dtype=torch.bool), bias=alibi(2, 12),
    )  # fmt: skip
    assert rows.top_keys is not None and rows.set_mass is not None and rows.learned_sink_mass is not None
    bad = torch.zeros(200, 2, dtype=torch.bool)
    bad[140:152] = True
    assert torch.equal(rows.top_keys[..., 0] < 0, bad)
    for values in (rows.entropy, rows.sink_mass, rows.first4_mass, rows.set_mass[..., 0], rows.learned_sink_mass):
        assert torch.equal(values.isnan(), bad)


@both
def test_visits_may_differ_in_key_heads(implementation):
    """A visit whose keys are stored once for all heads, beside one with more."""
    (q, k), (q2, k2), segments = draw(1, 80, 6, 2, 8)[0], draw(1, 80, 6, 3, 8, seed=1)[0], Segments((0, 30, 80))
    spread = [(q, k.repeat_interleave(3, dim=1)), (q2, k2.repeat_interleave(2, dim=1))]
    one = visit_overlaps([(q, k), (q2, k2)], segments, implementation=implementation)
    two = visit_overlaps(spread, segments, implementation=implementation)
    torch.testing.assert_close(one.across[0, 1].mass_overlap, two.across[0, 1].mass_overlap, atol=1e-6, rtol=0)
    assert torch.equal(one.across[0, 1].top8_shared, two.across[0, 1].top8_shared)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 0}, "at least 1 key"),
        ({"window": 2.5}, "at least 1 key"),
        ({"soft_cap": 0.0}, "soft cap"),
        ({"soft_cap": math.nan}, "soft cap"),
        ({"sinks": torch.zeros(3)}, "one learned sink logit a head, \\[4\\], got \\[3\\]"),
        ({"bias": torch.zeros(4, 9)}, "4 heads and at least 10 distances"),
        ({"bias": torch.zeros(1, 10)}, "4 heads and at least 10 distances"),
        ({"token_sets": torch.zeros(10, dtype=torch.bool)}, "bool \\[set, token\\]"),
        ({"token_sets": torch.zeros(1, 10)}, "bool \\[set, token\\]"),
    ],
)
def test_wrong_rules_say_so(options, words):
    with pytest.raises(InputError, match=words):
        row_statistics(torch.ones(10, 4, 8), torch.ones(10, 2, 8), Segments((0, 10)), **options)

"""Attention-row statistics against a full-map float64 reference, by both implementations.

The reference computes the scores of the same (rounded) q and k in float64. Tops are compared with the order of the
reference's scores: exactly where those are exact (integers) or float64, and otherwise except in rows where two
scores around the decision are closer than float32 resolves.
"""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from visitlens.errors import InputError, UnavailableError
from visitlens.kernels.attention import dispatch
from visitlens.kernels.attention.results import OverlapStatistics, RowStatistics
from visitlens.kernels.attention.rows import per_document, row_statistics, visit_overlaps
from visitlens.kernels.segments import Segments

IMPLEMENTATIONS = [
    "torch",
    pytest.param("numba", marks=pytest.mark.skipif(find_spec("numba") is None, reason="numba isn't installed")),
]
both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-5, torch.float16: 2e-5, torch.float64: 1e-9}


def naive_scores(q: Tensor, k: Tensor, segments: Segments, scale: float | None = None) -> Tensor:
    """[head, query, key] in float64, -inf where a query doesn't see the key."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) * (q.shape[2] ** -0.5 if scale is None else scale)
    token, starts = torch.arange(len(q)), segments.starts()
    visible = (token <= token[:, None]) & (starts == starts[:, None])
    return scores.masked_fill(~visible, -math.inf)


class Map:
    """The reference of one visit: P, its order, and which keys are among the top 8, [head, query, key]."""

    def __init__(self, scores: Tensor, tolerance: float) -> None:
        self.scores, self.p = scores, scores.softmax(-1)
        values, order = scores.sort(dim=-1, descending=True, stable=True)
        self.first = order[..., 0]
        self.top8 = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :8], True)
        size = values.where(values.isfinite(), 0).abs().max()
        resolution = size * (4e-6 if tolerance > 1e-6 else 1e-14)
        # Two scores at a decision that differ by less than rounding tells apart leave it open.
        gaps = values[..., :-1] - values[..., 1:]
        close = torch.nn.functional.pad((gaps > 0) & (gaps < resolution), (0, 8))
        self.open_top1, self.open_top8 = close[..., 0], close[..., 7]

    def rolled(self, shift: int) -> Map:
        """Head h + shift in place of head h."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            setattr(other, name, value.roll(-shift, 0))
        return other


def check_rows(rows: RowStatistics, reference: Map, segments: Segments, tolerance: float) -> None:
    p = reference.p
    token, starts = torch.arange(len(segments.starts())), segments.starts()
    first4 = torch.stack([p[:, token, (starts + n).clamp(max=token)] * (starts + n <= token) for n in range(4)]).sum(0)
    expected = {
        "log_sum_exp": reference.scores.logsumexp(-1),
        "sink_mass": p[:, token, starts],
        "first4_mass": first4,
        "entropy": -torch.special.xlogy(p, p).sum(-1),
    }
    for name, value in expected.items():
        rtol = 2e-6 if name == "log_sum_exp" else 0.0  # a huge log-sum-exp has the resolution of its scores
        torch.testing.assert_close(
            getattr(rows, name).double(), value.T, atol=tolerance, rtol=rtol, msg=lambda m, name=name: f"{name}: {m}"
        )
        assert getattr(rows, name).dtype == (torch.float64 if tolerance < 1e-6 else torch.float32)


def check_overlap(overlap: OverlapStatistics, one: Map, two: Map, segments: Segments, tolerance: float) -> None:
    mass = torch.minimum(one.p, two.p).sum(-1)
    torch.testing.assert_close(overlap.mass_overlap.double(), mass.T, atol=tolerance, rtol=0)
    assert overlap.top1_match.dtype == torch.bool
    decided = ~(one.open_top1 | two.open_top1).T
    assert torch.equal(overlap.top1_match[decided], (one.first == two.first).T[decided])
    assert decided.double().mean() > 0.9
    visible, decided = segments.positions() + 1, ~(one.open_top8 | two.open_top8).T
    shared = torch.where(visible <= 8, visible, (one.top8 & two.top8).sum(-1))
    assert torch.equal(overlap.top8_shared[decided], shared.T[decided])
    assert decided.double().mean() > 0.9


def check(
    visits: list[tuple[Tensor, Tensor]],
    segments: Segments,
    implementation: str,
    tolerance: float | None = None,
    scale: float | None = None,
) -> None:
    """All of `visit_overlaps`, and `row_statistics` of each visit, against the reference."""
    if visits[0][0].dtype == torch.float64 and implementation == "numba":
        with pytest.raises(InputError, match="float64"):
            visit_overlaps(visits, segments, scale, implementation)
        return
    tolerance = tolerance or TOLERANCE[visits[0][0].dtype]
    maps = [Map(naive_scores(q, k, segments, scale), tolerance) for q, k in visits]
    result = visit_overlaps(visits, segments, scale, implementation)
    for (q, k), reference, rows in zip(visits, maps, result.rows, strict=True):
        check_rows(rows, reference, segments, tolerance)
        alone = row_statistics(q, k, segments, scale, implementation)
        check_rows(alone, reference, segments, tolerance)
    expected_pairs = [(a, b) for a in range(len(visits)) for b in range(a + 1, len(visits))]
    assert list(result.across) == expected_pairs
    for (a, b), overlap in result.across.items():
        check_overlap(overlap, maps[a], maps[b], segments, tolerance)
    heads = visits[0][0].shape[1]
    if heads == 1:
        assert result.control is None
        return
    assert result.control is not None
    for reference, overlap in zip(maps, result.control, strict=True):
        check_overlap(overlap, reference, reference.rolled(heads // 2), segments, tolerance)


def random_visits(visits, tokens, heads, kv_heads, d, dtype=torch.float32, seed=0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return [(draw(tokens, heads, d), draw(tokens, kv_heads, d)) for _ in range(visits)]


@both
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d"), [(6, 3, 12), (4, 1, 42), (3, 3, 44), (5, 1, 16), (1, 1, 7)], ids=str
)
def test_head_layouts_and_dtypes(implementation, dtype, heads, kv_heads, d):
    segments = Segments((0, 3, 4, 64, 129, 130, 300))
    check(random_visits(2, 300, heads, kv_heads, d, dtype), segments, implementation)


@both
@pytest.mark.parametrize(
    "bounds",
    [(0, 1), (0, 63), (0, 64), (0, 65), (0, 8, 17), (0, 64, 128, 256), (0, 1, 2, 3, 4), (0, 32, 33, 65, 162, 162, 163)],
    ids=str,
)
def test_lengths_around_tile_borders(implementation, bounds):
    check(random_visits(2, bounds[-1], 4, 2, 16), Segments(bounds), implementation)


@both
def test_long_document(implementation):
    check(random_visits(2, 1511, 2, 1, 16), Segments((0, 1500, 1511)), implementation)


@both
def test_many_short_documents(implementation):
    lengths = torch.randint(1, 40, (25,), generator=torch.Generator().manual_seed(1))
    bounds = (0, *lengths.cumsum(0).tolist())
    check(random_visits(2, bounds[-1], 3, 1, 16), Segments(bounds), implementation)


@both
def test_three_visits_give_every_pair(implementation):
    check(random_visits(3, 150, 4, 2, 16), Segments((0, 70, 150)), implementation)


@both
@pytest.mark.parametrize("heads", [4, 3])
@pytest.mark.parametrize("levels", [1, 2, 5])
def test_exact_ties_go_to_the_smaller_position(implementation, heads, levels):
    """Integer scores are exact in float32 too, so every tie of the reference is one of ours."""
    generator = torch.Generator().manual_seed(levels)

    def draw(n: int) -> Tensor:
        return torch.randint(-levels, levels + 1, (400, n, 3), generator=generator).float()

    check([(draw(heads), draw(1)) for _ in range(2)], Segments((0, 5, 100, 400)), implementation, scale=0.3)


@both
@pytest.mark.parametrize("scale", [1e-12, 1.0, 3.7])
def test_scales(implementation, scale):
    check(random_visits(2, 200, 2, 1, 8), Segments((0, 90, 200)), implementation, 1e-4, scale=scale)


@both
@pytest.mark.parametrize("size", [1e4, 1e-6])
def test_huge_and_tiny_logits(implementation, size):
    """Integers times a power of two keep the products exact, so that 1e4 leaves no rounding to blow up."""
    visits = [((q * 4).round(), (k * 4).round()) for q, k in random_visits(2, 200, 4, 2, 8)]
    largest = max((q @ k[:, :1].mT).abs().max().item() for q, k in visits)
    scale = 2.0 ** round(math.log2(size / largest))
    check(visits, Segments((0, 60, 200)), implementation, 5e-5, scale=scale)


@both
def test_zero_queries_attend_uniformly(implementation):
    """Equal scores over n keys: sink mass 1/n, entropy ln n, two maps the same."""
    tokens = 150
    q, (_, k) = torch.zeros(tokens, 4, 16), random_visits(1, tokens, 4, 2, 16)[0]
    result = visit_overlaps([(q, k), (q, k + 1)], Segments((0, 50, tokens)), implementation=implementation)
    n = torch.cat([torch.arange(1.0, 51), torch.arange(1.0, 101)])[:, None].expand(-1, 4)
    for rows in result.rows:
        torch.testing.assert_close(rows.sink_mass, 1 / n)
        torch.testing.assert_close(rows.first4_mass, n.clamp(max=4) / n)
        torch.testing.assert_close(rows.entropy, n.log(), atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(rows.log_sum_exp, n.log(), atol=2e-6, rtol=2e-6)
    assert result.control is not None
    for overlap in (result.across[0, 1], *result.control):
        torch.testing.assert_close(overlap.mass_overlap, torch.ones(tokens, 4))
        assert overlap.top1_match.all()
        assert torch.equal(overlap.top8_shared, n.clamp(max=8).long())


@both
def test_hand_computed_two_tokens(implementation):
    """Scores (0, ln 3) against (ln 3, 0): P = (1/4, 3/4) and (3/4, 1/4)."""
    q = torch.ones(2, 1, 1)
    one, two = (torch.tensor(x).view(2, 1, 1) for x in ([0.0, math.log(3)], [math.log(3), 0.0]))
    result = visit_overlaps([(q, one), (q, two)], Segments((0, 2)), 1.0, implementation)
    torch.testing.assert_close(result.rows[0].sink_mass[:, 0], torch.tensor([1.0, 0.25]))
    torch.testing.assert_close(result.rows[0].log_sum_exp[:, 0], torch.tensor([0.0, math.log(4)]))
    torch.testing.assert_close(result.rows[1].entropy[1, 0], torch.tensor(math.log(4) - 0.75 * math.log(3)))
    assert result.across[0, 1].top1_match.tolist() == [[True], [False]]
    assert result.across[0, 1].top8_shared.tolist() == [[1], [2]]
    torch.testing.assert_close(result.across[0, 1].mass_overlap[:, 0], torch.tensor([1.0, 0.5]))


@both
def test_nan_shows_in_its_rows_and_nowhere_else(implementation):
    segments = Segments((0, 20, 40, 240))
    visits = random_visits(2, 240, 4, 2, 16)
    clean = visit_overlaps(visits, segments, implementation=implementation)
    visits[0][0][60, 1, 3] = math.nan  # one row of head 1
    visits[0][1][100, 1, 0] = math.nan  # rows from 100 on of heads 2 and 3
    visits[0][1][25, 0, 0] = math.nan  # rows 25 to 39 of heads 0 and 1
    bad = torch.zeros(240, 4, dtype=torch.bool)
    bad[60, 1] = bad[100:, 2:] = bad[25:40, :2] = True
    result = visit_overlaps(visits, segments, implementation=implementation)
    alone = row_statistics(*visits[0], segments, implementation=implementation)
    for rows in (result.rows[0], alone):
        for name in ("log_sum_exp", "sink_mass", "first4_mass", "entropy"):
            expected = getattr(clean.rows[0], name).masked_fill(bad, math.nan)
            torch.testing.assert_close(getattr(rows, name), expected, equal_nan=True)
    assert torch.equal(result.rows[1].entropy, clean.rows[1].entropy)
    assert result.control is not None and clean.control is not None
    for overlap, before, bad_rows in (
        (result.across[0, 1], clean.across[0, 1], bad),
        (result.control[0], clean.control[0], bad | bad.roll(2, 1)),
    ):
        expected = before.mass_overlap.masked_fill(bad_rows, math.nan)
        torch.testing.assert_close(overlap.mass_overlap, expected, equal_nan=True)
        assert torch.equal(overlap.top1_match, before.top1_match & ~bad_rows)
        assert torch.equal(overlap.top8_shared, before.top8_shared.masked_fill(bad_rows, 0))


@both
def test_minus_infinity_scores(implementation):
    """A key that scores -inf is a visible key without mass; with fewer than 8 others it can be among the top 8."""
    visits = random_visits(2, 120, 2, 1, 1)
    for q, k in visits:
        q.abs_()
        k[torch.rand(120, generator=torch.Generator().manual_seed(2)) < 0.8] = -math.inf
        k[[0, 50]] = 1.0  # every row has a finite score
    check(visits, Segments((0, 50, 120)), implementation)


@both
def test_all_scores_minus_infinity_is_nan(implementation):
    q, k = torch.ones(20, 2, 1), torch.full((20, 2, 1), -math.inf)
    result = visit_overlaps([(q, k)], Segments((0, 20)), implementation=implementation)
    assert result.control is not None
    assert result.rows[0].entropy.isnan().all() and result.control[0].mass_overlap.isnan().all()
    assert not result.control[0].top1_match.any()


@both
@settings(deadline=None, max_examples=25, derandomize=True)
@given(data=st.data())
def test_any_shape(implementation, data):
    visits = data.draw(st.integers(1, 3))
    kv_heads, group, d = (data.draw(st.integers(1, n)) for n in (3, 3, 9))
    lengths = data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=5).filter(any))
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    seed = data.draw(st.integers(0, 100))
    check(
        random_visits(visits, bounds[-1], kv_heads * group, kv_heads, d, dtype, seed),
        Segments(tuple(bounds)),
        implementation,
    )


@both
def test_strided_inputs_and_gradients(implementation):
    """Views of a fused projection give the same, and no graph is kept."""
    fused = torch.randn(100, 8, 16, generator=torch.Generator().manual_seed(3), requires_grad=True)
    q, k = fused[:, :4], fused[:, 4:6]
    rows = row_statistics(q, k, Segments((0, 40, 100)), implementation=implementation)
    copied = row_statistics(
        q.detach().clone(), k.detach().clone(), Segments((0, 40, 100)), implementation=implementation
    )
    assert torch.equal(rows.entropy, copied.entropy) and not rows.entropy.requires_grad


@both
def test_no_tokens(implementation):
    result = visit_overlaps([(torch.empty(0, 4, 8), torch.empty(0, 2, 8))] * 2, Segments((0,)), None, implementation)
    assert result.rows[0].entropy.shape == result.across[0, 1].top1_match.shape == (0, 4)


def test_implementations_agree():
    pytest.importorskip("numba", reason="the extra visitlens[fast] is optional")
    visits, segments = random_visits(2, 400, 6, 3, 12), Segments((0, 150, 400))
    one, two = (visit_overlaps(visits, segments, implementation=name) for name in ("torch", "numba"))
    torch.testing.assert_close(one.across[0, 1].mass_overlap, two.across[0, 1].mass_overlap, atol=2e-6, rtol=0)
    assert (one.across[0, 1].top8_shared == two.across[0, 1].top8_shared).float().mean() > 0.999


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, s: ([], s, None), "at least one visit"),
        (lambda q, k, s: ([(q[..., :3], k)], s, None), "q \\[token, n_h, d\\]"),
        (lambda q, k, s: ([(q[:, :3], k)], s, None), "multiple of n_kv"),
        (lambda q, k, s: ([(q, k)], Segments((0, 9)), None), "segments of all 10 tokens"),
        (lambda q, k, s: ([(q, k)], Segments((0, 12, 10)), None), "segments of all 10 tokens"),
        (lambda q, k, s: ([(q, k.double())], s, None), "one dtype"),
        (lambda q, k, s: ([(q.int(), k.int())], s, None), "float tensors"),
        (lambda q, k, s: ([(q, k), (q[:, :2], k)], s, None), "same shapes"),
        (lambda q, k, s: ([(q, k)], s, 0.0), "positive, finite scale"),
    ],
)
def test_wrong_inputs_say_so(change, words):
    visits, segments, scale = change(torch.ones(10, 4, 8), torch.ones(10, 2, 8), Segments((0, 10)))
    with pytest.raises(InputError, match=words):
        visit_overlaps(visits, segments, scale)


def test_dispatch(monkeypatch):
    choose = dispatch.choose_attention_rows
    with pytest.raises(InputError, match="'torch', 'numba', 'triton'"):
        choose("cpu", torch.float32, "cuda")
    monkeypatch.setattr(dispatch, "_numba_is_installed", lambda: True)
    assert choose("cpu", torch.bfloat16, "auto") == choose("cpu", torch.float32, "numba") == "numba"
    assert choose("cpu", torch.float64, "auto") == choose("cuda", torch.float32, "auto") == "torch"
    assert choose("cpu", torch.float32, "torch") == "torch"
    with pytest.raises(InputError, match="float64 on cpu"):
        choose("cpu", torch.float64, "numba")
    monkeypatch.setattr(dispatch, "_numba_is_installed", lambda: False)
    assert choose("cpu", torch.float32, "auto") == "torch"
    with pytest.raises(UnavailableError, match="visitlens\\[fast\\]"):
        choose("cpu", torch.float32, "numba")


def test_import_leaves_numba_alone():
    code = "import sys, visitlens.kernels.attention.rows; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_statistic_by_document_is_the_mean_over_its_queries_that_count():
    values = torch.tensor([[1.0, 10.0], [2.0, 20.0], [6.0, 60.0], [5.0, 50.0]])
    segments = Segments((0, 3, 4))  # three tokens, then one
    assert per_document(values, segments).tolist() == [[3.0, 30.0], [5.0, 50.0]]
    beyond_start = per_document(values, segments, segments.positions() > 0)
    assert beyond_start[0].tolist() == [4.0, 40.0] and beyond_start[1].isnan().all()  # the second has no such query
    rows = row_statistics(torch.randn(4, 2, 8), torch.randn(4, 1, 8), segments)
    assert per_document(rows.sink_mass, segments).shape == (2, 2)
    assert float(per_document(rows.sink_mass, segments)[1, 0]) == 1.0

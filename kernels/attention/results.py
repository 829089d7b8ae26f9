"""Statistics of attention rows, of one visit and between two; how an implementation's tiles become them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from visitlens.kernels.attention.rule import AttentionRule

TOP = 8


@dataclass(frozen=True)
class RowStatistics:
    """What the attention rows of one visit look like, each `[token, head]` (float64 for float64 inputs).

    Attributes:
        log_sum_exp: of the scores, the learned sink's among them, nats.
        sink_mass: P[i, segment start]; 1 at the segment start itself, which callers leave out; 0 beyond the window.
        first4_mass: P on the segment's first 4 tokens, those of them that query i sees.
        entropy: - sum over keys of P ln P, nats; what a learned sink takes isn't in it.
        learned_sink_mass: what the learned sink takes, so that P sums to 1 without it; None without learned sinks.
        set_mass: [token, head, set] P on each of the token sets; None where none were asked for.
        top_keys: [token, head, 8] int64, token indices of the 8 highest-scored keys, highest first; -1 where a row
            sees fewer (a key that scores -inf isn't seen). None where they weren't asked for.
    """

    log_sum_exp: Tensor
    sink_mass: Tensor
    first4_mass: Tensor
    entropy: Tensor
    learned_sink_mass: Tensor | None = None
    set_mass: Tensor | None = None
    top_keys: Tensor | None = None


@dataclass(frozen=True)
class OverlapStatistics:
    """How far two attention maps attend to the same tokens, each `[token, head]`.

    Attributes:
        top1_match: bool, the highest-scored key is the same.
        top8_shared: int64, keys that are among the 8 highest-scored in both (all visible keys where there are <= 8).
        mass_overlap: sum over keys of min(P1, P2); without a learned sink, that is 1 - total variation.
    """

    top1_match: Tensor
    top8_shared: Tensor
    mass_overlap: Tensor


@dataclass(frozen=True)
class VisitOverlaps:
    """Row statistics of each visit and the overlaps between them.

    Attributes:
        rows: one per visit.
        across: (a, b), 0-based with a < b: visit a's heads against the same heads at visit b.
        control: one per visit: head h against head `(h + n_h // 2) % n_h` of the same visit, entry h for head h.
            None where there's a single head, which has no other head to be compared with.
    """

    rows: list[RowStatistics]
    across: dict[tuple[int, int], OverlapStatistics]
    control: list[OverlapStatistics] | None


@dataclass(frozen=True)
class Wanted:
    """What an implementation is asked for beyond the four row statistics."""

    overlaps: bool = False
    token_sets: Tensor | None = None
    top_keys: bool = False


def row_results(rows: Tensor, rule: AttentionRule, wanted: Wanted, top_keys: Tensor | None) -> list[RowStatistics]:
    """One for each visit, from [4 + sets, visit, head, token] and the top keys [visit, head, token, 8]."""
    values = rows[:4].transpose(2, 3).contiguous()
    results = []
    for v in range(rows.shape[1]):
        log_sum_exp, sink, first4, entropy = values[:, v]
        learned = None if rule.sinks is None else (rule.sinks - log_sum_exp).exp()
        mass = None if wanted.token_sets is None else rows[4:, v].permute(2, 1, 0).contiguous()
        top = None if top_keys is None else top_keys[v].transpose(0, 1).masked_fill(entropy.isnan().unsqueeze(2), -1)
        results.append(RowStatistics(log_sum_exp, sink, first4, entropy, learned, mass, top))
    return results


def overlap_results(compared: Tensor, visible: Tensor) -> list[OverlapStatistics]:
    """One for each comparison, from top-1 match, top-8 shared and mass overlap, [3, comparison, head, token].

    Fills in what tiles leave open: rows that see up to 8 keys (`visible [token]`) share all of them, rows with a NaN
    score none.
    """
    match, shared, mass = compared.transpose(2, 3).contiguous()
    undefined, visible = mass.isnan(), visible.unsqueeze(1)
    shared = shared.masked_fill(undefined, 0).long().where(visible > TOP, visible).masked_fill_(undefined, 0)
    match = (match == 1).logical_and_(~undefined)
    return [OverlapStatistics(*x) for x in zip(match, shared, mass, strict=True)]

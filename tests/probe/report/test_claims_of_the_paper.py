"""What each claim of Section 6 says, number by number: a mistyped range or sign changes verdicts in silence."""

from __future__ import annotations

import re

import pytest

from visitlens.probe.report.findings import CLAIMS

Range = tuple[float, float] | None

PAPER: dict[str, tuple[int, Range, Range]] = {
    "expert-overlap": (1, None, None),
    "expert-overlap-load": (1, None, None),
    "norm-ratio-update": (1, (1.2, 3.5), None),
    "norm-ratio-attn-write": (1, (1.2, 3.5), None),
    "norm-ratio-moe-write": (1, (1.2, 3.5), None),
    "norm-ratio-norm-output": (1, (1.2, 3.5), None),
    "relative-update": (1, None, None),
    "update-cosine": (1, (0.42, 0.65), (0.16, 0.16)),
    "stage-q": (1, (0.89, 0.93), (0.84, 0.93)),
    "stage-k": (1, (0.89, 0.93), (0.84, 0.93)),
    "stage-v": (-1, (0.65, 0.74), (0.84, 0.93)),
    "stage-pv": (-1, (0.56, 0.69), (0.65, 0.74)),
    "stage-o": (-1, (0.49, 0.64), (0.56, 0.69)),
    "top1-match": (1, None, None),
    "top8-overlap": (1, (0.56, 0.66), (0.28, 0.34)),
    "mass-overlap": (1, None, None),
    "dyck-bos": (-1, (0.02, 0.02), (0.60, 0.60)),
    "dyck-answers": (1, (0.85, 0.85), (0.24, 0.24)),
    "sink-visits": (-1, None, None),
    "sink-baseline": (1, None, None),
}
"""Claim -> the direction it claims, the paper's range of what is measured and of what that is compared with."""


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.key)
def test_each_claim_has_the_papers_direction_and_ranges(claim) -> None:
    assert (claim.direction, claim.published, claim.published_against) == PAPER[claim.key]


def test_no_claim_of_the_paper_is_left_out() -> None:
    assert [claim.key for claim in CLAIMS] == list(PAPER)


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.published], ids=lambda claim: claim.key)
def test_the_ranges_of_a_claim_are_those_that_its_text_prints(claim) -> None:
    """Percentages in the text are shares in the range."""
    printed = {float(number) for number in re.findall(r"\d+\.\d+", claim.paper)}
    if "%" in claim.paper and not printed:
        printed = {int(number) / 100 for number in re.findall(r"\d+", claim.paper)}
    assert {*claim.published, *(claim.published_against or ())} <= printed


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.published_against], ids=lambda claim: claim.key)
def test_the_papers_own_numbers_point_the_way_that_is_claimed(claim) -> None:
    ours, against = (sum(bounds) / 2 for bounds in (claim.published, claim.published_against))
    assert (ours - against) * claim.direction > 0

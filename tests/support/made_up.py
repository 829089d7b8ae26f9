"""Analyses with made-up numbers, for tests that only read, check or draw them."""

from __future__ import annotations

import numpy as np

from visitlens.hooks.core.loop_plan import visit_choices
from visitlens.probe.analyses.ablation.ablate_recording import head_ablation
from visitlens.probe.analyses.ablation.dyck_study import MASS, SCORES
from visitlens.probe.analyses.ablation.heads import AblationSums
from visitlens.probe.analyses.results.head_ablation import HeadAblation
from visitlens.probe.analyses.results.store import DyckExample, DyckStudy
from visitlens.probe.measures.grouped import Grouped

PROMPTS = 12
ABOUT = {"documents": PROMPTS, "tokens": 500, "provenance": {"recording": "made up"}}


def ablation(visits: int, layers: tuple[int, ...] = (1, 2), heads: int = 4) -> HeadAblation:
    """Head 3 of layer 2 matters most."""
    rng = np.random.default_rng(0)
    choices = visit_choices(visits)
    change = rng.normal(0, 0.05, (PROMPTS, len(choices), len(layers), heads))
    change[:, :, -1, 3] += 1.5
    count = np.full(PROMPTS, 3.0)
    sums = AblationSums(choices, layers, tuple(range(heads)), rng.random(PROMPTS), change, count)
    return head_ablation(sums, name="dyck-zero", metric="Dyck target loss", mode="zero", about=ABOUT)


def dyck_study(visits: int) -> DyckStudy:
    """Layer 2, head 3: from the segment start to the answers. One token is markup."""
    rng = np.random.default_rng(1)
    shots = [1, 2, 4, 8]
    count = np.full((PROMPTS, len(shots), 3, visits, 2), 3.0)
    shift = np.linspace(0, 1, visits)
    mean = np.stack([0.6 - 0.5 * shift, 0.2 + 0.6 * shift], -1)
    total = count * (mean + rng.normal(0, 0.02, count.shape))
    labels = {
        "shots": shots,
        "heads": ["dyck head", "other heads", "uniform"],
        "visit": list(range(1, visits + 1)),
        "part": ["bos", "answers"],
    }
    pieces = ("BOS", "<b>", " ", ")", "\n", "<", "Out", ")", "]", "}")
    maps = rng.random((visits, 3, len(pieces)))
    example = DyckExample(1, pieces, (7, 8, 9), ((3, 5),), maps / maps.sum(-1, keepdims=True))
    scores = {
        name: Grouped(measure, {"shots": [0, *shots]}, rng.random((PROMPTS, 5)), np.ones((PROMPTS, 5)))
        for name, measure in SCORES.items()
    }
    return DyckStudy("zero", 2, 3, scores, Grouped(MASS, labels, total, count), (example,), ABOUT)

"""What the instruments find, as text: Markdown tables that read well in a terminal, and sentences. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from visitlens.probe.drawing.series import aligned
from visitlens.probe.ladder.tables import table
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.scaling.downstream import Downstream, Wins
from visitlens.probe.scaling.frontier import Marked
from visitlens.probe.scaling.law import Fit
from visitlens.probe.scaling.paper import paper_levels, printed
from visitlens.probe.scaling.shots import Gap
from visitlens.probe.scaling.study import Laws, Study, paper_laws
from visitlens.probe.scaling.surface import COEFFICIENTS
from visitlens.probe.scaling.table import describe


def law_text(fits: Mapping[str, Fit], residuals: bool = False) -> str:
    """Coefficients, error, condition and windows of each fit; with `residuals`, every endpoint's."""
    header = ("architecture", *COEFFICIENTS, "gamma", "RMSE (nats)", "endpoints", "condition")
    rows = [
        (
            arch,
            *(
                f"{v:.4g}" if name in "AK" else f"{v:.4f}"
                for name, v in zip(COEFFICIENTS, fit.surface.as_array(), strict=True)
            ),
            f"{fit.surface.gamma:.4f}",
            f"{fit.rmse:.5f}",
            len(fit.endpoints),
            f"{fit.condition:.2g}",
        )
        for arch, fit in fits.items()
    ]
    windows = [
        (arch, *(f"{low:.3g} to {high:.3g}" for low, high in (w.compute, w.flops_per_token, w.tokens)))
        for arch, w in ((arch, fit.window) for arch, fit in fits.items())
    ]
    parts = [
        "L = E + A (1-S)^b / F^a + K / D^c, in nats per token:",
        table(header, rows),
        "The runs span:",
        table(("architecture", "C (FLOPs)", "F (FLOPs per token)", "D (tokens)"), windows),
    ]
    if residuals:
        ends = [(fit, i) for fit in fits.values() for i in range(len(fit.endpoints))]
        lines = [
            (
                describe(f.endpoints, i),
                f"{f.endpoints['loss'][i]:.4f}",
                f"{f.fitted[i]:.4f}",
                f"{1e3 * f.residuals[i]:+.2f}",
            )
            for f, i in ends
        ]
        parts += ["Residuals:", table(("endpoint", "loss", "fitted", "millinats"), lines)]
    return "\n\n".join([*parts, *sentences(w for fit in fits.values() for w in fit.warnings)])


def laws_text(laws: Laws, what: Sequence[str] = ("frontier", "tpp", "gain")) -> str:
    """Frontier losses, tokens per parameter and compute saved at the budgets of `laws`, with intervals and marks."""
    parts: list[str] = []
    notes: list[str] = list(laws.warnings)
    for arch in laws.archs if "frontier" in what else ():
        found = laws.frontier(arch)
        parts += [f"Frontier loss of {arch} (nats per token):", marked_table(found, "{:.4f}")]
        notes += _marks(found)
    for arch in laws.archs if "tpp" in what else ():
        found = laws.tpp(arch)
        parts += [f"Compute-optimal tokens per dense-equivalent parameter of {arch}:", marked_table(found, "{:.1f}")]
        notes += _marks(found)
    if "gain" in what and laws.target:
        found = laws.gain()
        parts += [
            f"Compute that {laws.target} saves over {laws.reference} at the same loss:",
            marked_table(found, "{:.1%}"),
        ]
        notes += _marks(found)
    if laws.draws is not None:
        notes.append(f"brackets are 95% percentile intervals of {laws.draws.describe()}")
    return "\n\n".join([*parts, *sentences(dict.fromkeys(notes))])


def marked_table(found: Marked, form: str) -> str:
    """Budgets down, levels across; * marks what the runs don't support."""
    stat = found.stat
    low, high = stat.interval()
    rows = []
    for i, budget in enumerate(stat.labels["budget"]):
        cells = []
        for j in range(len(stat.labels["level"])):
            value = "none" if np.isnan(stat.values[i, j]) else form.format(stat.values[i, j])
            bracket = "" if np.isnan(low[i, j]) else f" [{form.format(low[i, j])}, {form.format(high[i, j])}]"
            cells.append(value + bracket + ("*" if found.marks[i][j] else ""))
        rows.append((f"{budget:.3g}", *cells))
    return table(("budget (FLOPs)", *(f"S {level}" for level in stat.labels["level"])), rows)


def stat_table(stat: StatArray, form: str = "{:.4f}") -> str:
    """A statistic of one or two axes."""
    low, high = stat.interval()
    rows, values = stat.labels[stat.axes[0]], stat.values.reshape(stat.values.shape[0], -1)
    bounds = low.reshape(values.shape), high.reshape(values.shape)
    names = list(map(str, stat.labels[stat.axes[1]])) if len(stat.axes) == 2 else ["value"]

    def cell(i: int, j: int) -> str:
        text = form.format(values[i, j])
        return (
            text
            if np.isnan(bounds[0][i, j])
            else f"{text} [{form.format(bounds[0][i, j])}, {form.format(bounds[1][i, j])}]"
        )

    return table(
        (stat.axes[0], *names), [(str(r), *(cell(i, j) for j in range(len(names)))) for i, r in enumerate(rows)]
    )


def downstream_text(study: Study, found: Sequence[tuple[Downstream, StatArray]], counts: Sequence[Wins]) -> str:
    """Mean residuals by group, wins, and what to beware of."""
    groups = list(dict.fromkeys(str(g) for _, stat in found for g in stat.labels["group"]))
    rows = []
    for one, stat in found:
        low, high = stat.interval()
        cells = dict(zip(map(str, stat.labels["group"]), zip(stat.values, low, high, strict=True), strict=True))
        rows.append(
            (one.scores.metric, f"{one.curve.r2:.3f}", *(_bracket(*cells[g]) if g in cells else None for g in groups))
        )
    win_rows = [(w.metric, f"{w.wins} of {w.pairs}", w.left_out) for w in counts]
    parts = [
        f"Mean residual of {study.target} beyond what the curve of {study.reference} predicts from its loss (positive: better):",
        table(("task", "R2", *groups), rows),
        f"Pairs in which {study.target} is better:",
        table(("task", "wins", "left out near chance"), win_rows),
    ]
    return "\n\n".join([*parts, *sentences(w for one, _ in found for w in one.warnings)])


def shots_text(found: Gap) -> str:
    """Accuracy and gap by k."""
    left = sentences(f"left out: {task} ({reason})" for task, reason in found.left_out.items())
    gap = stat_table(found.gap)
    return "\n\n".join([f"Accuracy over {len(found.tasks)} tasks:", stat_table(found.accuracy), "Gap:", gap, *left])


def paper_text() -> str:
    """The printed gains and tokens per parameter beside those recomputed from the printed coefficients."""
    laws, levels = paper_laws(), paper_levels()
    gains, rows = laws.gain(), []
    for row in printed()["compute_gain"]["rows"]:
        value = 100 * float(gains.stat.sel(budget=row["budget"], level=row["level"]).values)
        rows.append(
            (
                f"gain at {row['budget']:.0e}, S {row['level']}",
                f"{row['percent']:.1f}%",
                f"{value:.2f}%",
                f"{value - row['percent']:+.2f}",
            )
        )
    budget = printed()["tokens_per_parameter"]["budget"]
    for row in printed()["tokens_per_parameter"]["rows"]:
        level = next(level for level in levels if level.name == row["level"])
        value = float(laws.surfaces[row["arch"]].tokens_per_parameter(budget, level.sparsity))
        rows.append(
            (
                f"TPP of {row['arch']}, S {row['level']}",
                f"{row['value']:.0f}",
                f"{value:.2f}",
                f"{value - row['value']:+.2f}",
            )
        )
    return table(("quantity", "printed", "recomputed", "difference"), rows)


def sentences(notes: Any) -> list[str]:
    """One paragraph of the notes, each a sentence; none where there are no notes."""
    texts = [f"{note[0].upper()}{note[1:].rstrip('.')}." for note in notes]
    return ["\n".join(texts)] if texts else []


def _marks(found: Marked) -> list[str]:
    stat = found.stat
    return [
        f"* S {level} at {budget:.3g} FLOPs: {mark}"
        for budget, row in zip(stat.labels["budget"], found.marks, strict=True)
        for level, mark in zip(stat.labels["level"], row, strict=True)
        if mark
    ]


def _bracket(value: float, low: float, high: float) -> str:
    if np.isnan(low):
        return f"{value:.4f}"
    texts = aligned(float(value), float(low), float(high))
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"

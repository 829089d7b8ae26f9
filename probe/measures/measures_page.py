"""Writes docs/measures.md from the Measure objects themselves.

python -m visitlens.probe.measures.measures_page > docs/measures.md
"""

from __future__ import annotations

from collections.abc import Iterable

from visitlens.probe.measures import derived
from visitlens.probe.measures.collector import registered
from visitlens.probe.measures.measure import Measure

_HEAD = """# Measures

Generated from the code by `python -m visitlens.probe.measures.measures_page`; every recording carries these definitions of its own.
Section and figure numbers are those of SMELT (arXiv 2609.01343 v3); "ours" marks what the paper leaves open or doesn't have.

**Axes.** `step` is a (layer, visit) in execution order; `pair` is two visits of one layer, the earlier first; `head` is a
query head, `kv_head` a key/value head; `stage` is X, Q, K, V, PV, O.

**Averages** are uniform over tokens, then over heads and layers where a figure says so. Sums are kept in float64 per document
group (up to 1,024, see [Uncertainty](uncertainty.md); documents fall into groups by a hash of their tokens; with no more documents than groups each is
its own). **Intervals** are 95 % jackknife intervals over those groups, studentised and corrected for skewness
([Uncertainty](uncertainty.md) has what they cover), paired between measures and between both recordings of a pair of the same documents. A token whose value is NaN or infinite is counted and
never averaged in; tokens that a definition leaves out are counted too.

"""
_TABLE = """| measure | axes | unit | definition | paper |
|---|---|---|---|---|
"""
_DERIVED = """
## Derived

Computed from recorded measures when they are asked for: `rec.derived("expert_overlap", visits=(1, 2))`, `visitlens export RECORDING --what expert_overlap`. `layer` is a looped
layer, compared at two visits; `layer_pair` two different ones.

"""


def measures_page() -> str:
    """The page, as Markdown."""
    recorded = _rows(measure for statistic in registered() for measure in statistic.measures)
    computed = _rows(found.measure for found in derived.registered().values())
    return f"{_HEAD}{_TABLE}{recorded}{_DERIVED}{_TABLE}{computed}"


def _rows(measures: Iterable[Measure]) -> str:
    rows = []
    for measure in measures:
        cells = (f"`{measure.name}`", ", ".join(measure.axes), measure.unit, measure.definition, measure.paper)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(sorted(rows))


if __name__ == "__main__":
    print(measures_page(), end="")

"""What the report of a grid has instead of a pair's: a row a model, and the findings of every cell side by side. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from visitlens.probe.drawing.page import escape
from visitlens.probe.drawing.series import digits, span
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.reading.pair_grid import PairGrid
from visitlens.probe.report.finding import HOLDS, UNMEASURED, Finding, number_tested

_SIGNS = {HOLDS: "yes", "does not hold": "no", "not decided": "open", UNMEASURED: "–"}


def summary(grid: PairGrid) -> str:
    """The models' table: one row a model, one for each missing cell."""
    heads = ("Cell", "Model", "Loop", "Width", "Heads", "Experts", "Documents", "Tokens", "Weights", "Recording")
    rows = []
    for cell in grid.every_cell():
        if cell.pair is None:
            rows.append(
                f'<tr><th scope="row">{escape(cell.title)}</th><td colspan="9">missing: {escape(cell.missing)}</td></tr>'
            )
            continue
        for side, model in cell.pair.describe().items():
            if model is None:
                continue
            parts = (
                "looped model" if side == "looped" else "Baseline",
                f"{len(set(model['layers']))} layers; {span(model)}",
                f"{model['hidden_size']}",
                f"{model['num_heads']} ({model['num_kv_heads']})",
                f"{model['experts_per_token']} of {model['num_experts']}",
                f"{model['documents']:,}",
                f"{model['tokens']:,}" + ("" if model["complete"] else " (incomplete)"),
                str(model["weights_sha256"])[:8],
                str(model["recording"])[:8],
            )
            cells = "".join(f"<td>{escape(part)}</td>" for part in parts)
            rows.append(f'<tr><th scope="row">{escape(cell.title)}</th>{cells}</tr>')
    titles = "".join(f'<th scope="col">{head}</th>' for head in heads)
    return f"""<section id="models">
<h2>Models</h2>
<div class="scroll" tabindex="0" role="region" aria-label="Models">
<table><thead><tr>{titles}</tr></thead><tbody>
{chr(10).join(rows)}
</tbody></table></div>
</section>"""


def findings_table(grid: PairGrid, found: Mapping[str, Sequence[Finding]], classes: Mapping[str, str]) -> str:
    """One row a claim, one column a cell: our value and whether the direction holds there; then claims over several cells."""
    cells = [where for where in found if where != grid.name]
    rows = []
    for number, first in enumerate(found[cells[0]]):
        each = [found[cell][number] for cell in cells]
        measured = [finding for finding in each if finding.verdict != UNMEASURED]
        told = f"{sum(f.verdict == HOLDS for f in measured)} of {len(measured)}" if measured else "–"
        values = "".join(_cell(finding, classes) for finding in each)
        claim = first.claim
        rows.append(
            f'<tr><th scope="row">{escape(claim.statement)} <span class="muted">({escape(claim.section)}; {escape(claim.ours_is)}, '
            f"{escape(claim.unit)}; against {escape(claim.against_is)})</span></th><td>{escape(claim.paper)}</td>"
            f'<td class="count">{told}</td>{values}</tr>'
        )
    for finding in found[grid.name]:
        claim = finding.claim
        reason = "" if finding.verdict != UNMEASURED else f" {escape(finding.reason)}"
        values = (
            _cell(finding, classes).replace("<td", f'<td colspan="{len(cells)}"').replace("</td>", f"{reason}</td>")
        )
        rows.append(
            f'<tr><th scope="row">{escape(claim.statement)} <span class="muted">({escape(claim.section)}; the whole grid)</span></th>'
            f'<td>{escape(claim.paper)}</td><td class="count">–</td>{values}</tr>'
        )
    every = [finding for each in found.values() for finding in each]
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in cells)
    return f"""<section id="findings">
<h2>Findings against the paper</h2>
<p>Each cell holds our value, what it is compared with, and whether the <b>direction</b> of the paper's finding holds there: yes if the whole 95%
interval of the difference lies on the claimed side of zero, no if all of it lies on the other, open if it contains zero. Of {number_tested(every)} that
are tested some would be decided by chance: with all in view a direction is decided only if its p value is at most 0.05 after Holm's correction, and where that changes
the verdict both are shown. The paper's models are of 100M to 1.6B scale and saw up to 215 billion tokens.</p>
<div class="scroll" tabindex="0" role="region" aria-label="Findings">
<table><thead><tr><th scope="col">Finding</th><th scope="col">Paper</th><th scope="col">Holds in</th>{heads}</tr></thead>
<tbody>
{chr(10).join(rows)}
</tbody></table></div>
<p class="downloads">Download: <a href="findings.json" download>JSON</a></p>
</section>"""


def _cell(finding: Finding, classes: Mapping[str, str]) -> str:
    verdict = f'<span class="verdict {classes[finding.verdict]}">{_SIGNS[finding.verdict]}</span>'
    if finding.family_verdict != finding.verdict:
        verdict += f" <span class='muted'>({_SIGNS[finding.family_verdict]} among all)</span>"
    if finding.ours is None or finding.against is None or finding.verdict == UNMEASURED:
        return f"<td>{verdict}</td>"
    against = finding.against.values if isinstance(finding.against, StatArray) else finding.against
    return f'<td class="count">{digits(finding.ours.values)} / {digits(against)}<br>{verdict}</td>'

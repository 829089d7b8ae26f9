"""The one-page report of a pair of models, or of a grid of pairs: summary, findings against the paper, every figure. Opens offline. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from visitlens.probe.drawing.page import caption, chart, document, escape
from visitlens.probe.drawing.series import aligned, digits, span
from visitlens.probe.drawing.theme import Theme, find_theme
from visitlens.probe.gallery.write_figures import (
    Drawing,
    Progress,
    Warn,
    check_formats,
    json_text,
    prepare,
    warn,
    write_drawings,
    write_file,
    write_plotly_js,
)
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.pair_grid import PairGrid
from visitlens.probe.report import report_grid
from visitlens.probe.report.finding import FAILS, HOLDS, OPEN, UNMEASURED, Finding, number_tested
from visitlens.probe.report.findings import findings, findings_data, grid_findings, grid_findings_data

_FILES = ("png", "svg", "json", "csv")
_CLASSES = {HOLDS: "holds", FAILS: "fails", OPEN: "open", UNMEASURED: "muted"}


def write_report(
    source: Pair | PairGrid,
    folder: str | Path,
    slugs: Iterable[str] | None = None,
    *,
    formats: Sequence[str] = _FILES,
    theme: str = "light",
    on_progress: Progress = lambda done, total: None,
    on_warning: Warn = warn,
) -> Path:
    """Writes `report.html`, `findings.json`, the figures' files and one `plotly.min.js` into a folder; returns the page.

    The page needs nothing but that folder, follows the reader's light or dark preference, and prints.

    Args:
        slugs: figures to show, as `find` takes them; None shows all that the recordings allow.
        formats: files beside the page to download, of those that `write_figures` writes.
        theme: of these files: light, dark, paper or paper-dark. The page takes the light or dark one of the same colours.
        on_progress: called with the number of files done and the number wanted.

    Raises:
        InputError: no looped recording, or an unknown figure, format or theme.
        StorageError: the folder can't be written.
    """
    check_formats(formats)
    chosen = find_theme(theme)
    folder = Path(folder)
    said: list[str] = []

    def note(message: str) -> None:
        said.append(message)
        on_warning(message)

    if isinstance(source, Pair):
        found = findings(source)
        data, summary, table = findings_data(source, found), _summary(source), _findings(found)
    else:
        by_cell = grid_findings(source)
        data, summary = grid_findings_data(source, by_cell), report_grid.summary(source)
        table = report_grid.findings_table(source, by_cell, _CLASSES)
    drawings = prepare(source, slugs, note)
    written = write_drawings(drawings, folder, formats, chosen, on_progress, note)
    write_plotly_js(folder)
    write_file(folder / "findings.json", json_text(data))
    body = "\n".join(
        [
            _header(_title(source), drawings),
            _warnings([*source.warnings(), *(f"{message[0].upper()}{message[1:]}." for message in said)]),
            summary,
            table,
            *(
                _figure(drawing, chosen, [path.name for path in written if path.stem == drawing.figure.slug])
                for drawing in drawings
            ),
            _footer(),
        ]
    )
    return write_file(folder / "report.html", document(_title(source), body, "auto"))


def _title(source: Pair | PairGrid) -> str:
    if isinstance(source, PairGrid):
        return f"What each visit does: grid {source.name}"
    names = [run.name for run in (source.looped, source.baseline) if run is not None]
    return f"What each visit does: {' and '.join(names)}"


def _header(title: str, drawings: Sequence[Drawing]) -> str:
    links = "".join(f'<li><a href="#section-{d.figure.slug}">{escape(d.figure.title)}</a></li>' for d in drawings)
    return f"""<header>
<h1>{escape(title)}</h1>
<p class="lead">A looped transformer runs some of its layers more than once. This page compares the visits of those layers
with each other, with chance, and with the model that runs each layer once (the Baseline).
Layers are numbered from 0, visits from 1.</p>
<nav aria-label="Contents"><ul>
<li><a href="#models">Models</a></li><li><a href="#findings">Findings</a></li>{links}
</ul></nav>
</header>"""


def _warnings(messages: Sequence[str]) -> str:
    if not messages:
        return ""
    items = "".join(f"<li>{escape(message)}</li>" for message in messages)
    return f'<section class="warnings" aria-label="Warnings"><ul>{items}</ul></section>'


def _summary(pair: Pair) -> str:
    models = [(side, model) for side, model in pair.describe().items() if model is not None]
    heads = "".join(f'<th scope="col">{"Looped model" if side == "looped" else "Baseline"}</th>' for side, _ in models)
    rows = "".join(
        f'<tr><th scope="row">{label}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>\n'
        for label, cells in _summary_rows([model for _, model in models])
    )
    return f"""<section id="models" class="summary">
<h2>Models</h2>
<div class="scroll" tabindex="0" role="region" aria-label="Models">
<table><thead><tr><td></td>{heads}</tr></thead><tbody>
{rows}</tbody></table></div>
</section>"""


def _summary_rows(models: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    def known(value: Any) -> str:
        return escape(f"{value:,}" if isinstance(value, int) else str(value)) if value is not None else "not recorded"

    def extent(model: dict[str, Any]) -> str:
        planned = f" of {model['tokens_planned']:,}, incomplete" if not model["complete"] else ""
        return f"{model['tokens']:,}{planned}"

    cells = {
        "Name": lambda m: escape(m["name"]),
        "Layers": lambda m: f"{len(set(m['layers']))}, {len(m['layers'])} steps",
        "Loop": lambda m: escape(span(m)),
        "Hidden size": lambda m: known(m["hidden_size"]),
        "Heads": lambda m: f"{known(m['num_heads'])} ({known(m['num_kv_heads'])} key/value)",
        "Experts per layer": lambda m: f"{known(m['experts_per_token'])} of {known(m['num_experts'])} per token",
        "Documents": lambda m: f"{m['documents']:,}",
        "Tokens": extent,
        "Recording level": lambda m: escape(m["level"]),
        "Recorded": lambda m: known(m["created"]),
        "Checkpoint": lambda m: known(m["checkpoint"]),
        "Text": lambda m: known(m["text"]),
        "Recording": lambda m: f"<code>{known(m['recording'])}</code>",
        "Configuration (SHA-256)": lambda m: f"<code>{known(m['config_sha256'])}</code>",
        "Weights (SHA-256)": lambda m: f"<code>{known(m['weights_sha256'])}</code>",
        "Data (SHA-256)": lambda m: f"<code>{known(m['data_sha256'])}</code>",
    }
    return [(label, [cell(model) for model in models]) for label, cell in cells.items()]


def _findings(found: Sequence[Finding]) -> str:
    counts = Counter(finding.verdict for finding in found)
    told = ", ".join(f"<b>{verdict}</b> {counts[verdict]}" for verdict in _CLASSES if counts[verdict])
    rows = "\n".join(_finding_row(finding) for finding in found)
    return f"""<section id="findings">
<h2>Findings against the paper</h2>
<p>{len(found)} findings: {told}{_in_family(found)}. What is compared is the direction of each finding, not its size: the paper's models are of
100M to 1.6B scale and saw up to 215 billion tokens.</p>
<p class="muted">A direction <b>holds</b> if the whole 95% interval of the difference lies on the claimed side of zero,
<b>does not hold</b> if all of it lies on the other, and is <b>not decided</b> if it contains zero. Of {number_tested(found)} that
are tested some would be decided by chance: with all in view a direction is decided only if its p value is at most 0.05 after Holm's correction, and where that
changes the verdict both are shown. A direction can hold by a margin of no account: read the difference.</p>
<div class="scroll" tabindex="0" role="region" aria-label="Findings">
<table><caption>Means over looped layers with 95% intervals over documents; “layers” counts those whose own mean has the
claimed direction.</caption>
<thead><tr><th scope="col">Finding (section; unit)</th><th scope="col">Paper</th><th scope="col">Here</th><th scope="col">Compared with</th>
<th scope="col">Difference</th><th scope="col">Layers</th><th scope="col">Direction</th></tr></thead>
<tbody>
{rows}
</tbody></table></div>
<p class="downloads">Download: <a href="findings.json" download>JSON</a></p>
</section>"""


def _in_family(found: Sequence[Finding]) -> str:
    """How many of the decided ones stay so with all in view; nothing where all do."""
    decided = [finding for finding in found if finding.verdict in (HOLDS, FAILS)]
    kept = sum(finding.family_verdict == finding.verdict for finding in decided)
    return "" if kept == len(decided) else f" ({kept} of these {len(decided)} decided also with all claims in view)"


def _finding_row(finding: Finding) -> str:
    claim = finding.claim
    layers = f"{finding.layers[0]} of {finding.layers[1]}" if finding.layers else "–"
    ours, against, difference = (_cell(value) for value in (finding.ours, finding.against, finding.difference))
    said = finding.reason if finding.verdict == UNMEASURED else finding.note
    if finding.family_verdict != finding.verdict:
        said = "; ".join(
            filter(None, [f"{finding.family_verdict} with all claims in view (p = {finding.p_family:.2f})", said])
        )
    reason = f'<br><span class="muted">{escape(said)}</span>' if said else ""
    return (
        f'<tr><th scope="row">{escape(claim.statement)} <span class="muted">({escape(claim.section)}; {escape(claim.unit)})</span></th>'
        f"<td>{escape(claim.paper)}</td><td>{escape(claim.ours_is)}<br>{ours}</td>"
        f"<td>{escape(claim.against_is)}<br>{against}</td><td>{difference}</td><td class='count'>{layers}</td>"
        f'<td><span class="verdict {_CLASSES[finding.verdict]}">{finding.verdict}</span>{reason}</td></tr>'
    )


def _cell(value: StatArray | float | None) -> str:
    if value is None:
        return "–"
    if not isinstance(value, StatArray):
        return digits(value)
    low, high = value.interval()
    if np.isnan(low):
        return digits(value.values)
    text, *bounds = aligned(float(value.values), float(low), float(high))
    return f'{text} <span class="interval">[{", ".join(bounds)}]</span>'


def _figure(drawing: Drawing, chosen: Theme, files: Sequence[str]) -> str:
    figure, data = drawing.figure, drawing.data
    picture = next((file for file in files if file.endswith((".svg", ".png"))), None)
    charts = chart(data, {scheme: drawing.plot(theme) for scheme, theme in chosen.by_scheme.items()}, picture)
    return f"""<section id="section-{figure.slug}">
<h2>{escape(figure.title)}</h2>
<p class="lead">{escape(figure.question)}</p>
<figure>
{charts}
{caption(data, files)}
</figure>
</section>"""


def _footer() -> str:
    return """<footer><p>Made by visitlens. Definitions follow SMELT (arXiv 2609.01343 v3), Section 6; where the paper leaves
a choice open, the choice is ours and each definition says so.</p></footer>"""

"""Where the Dyck head looks when it predicts closing brackets, visit by visit (SMELT 6.4, html Figure 27)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import plotly.graph_objects as go

from visitlens.errors import RecordingError
from visitlens.probe.analyses.results.store import DyckStudy
from visitlens.probe.drawing.drawing import diverging, frame, largest, line, sequential
from visitlens.probe.drawing.series import series, with_interval
from visitlens.probe.drawing.theme import ORANGE, Style, Theme, token_text
from visitlens.probe.gallery.figure import Figure
from visitlens.probe.measures.intervals import over
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.recorded_run import RecordedRun

_MAP = Measure(
    "dyck_attention",
    "Attention of the Dyck head at its targets",
    ("target", "key"),
    "share of mass",
    "P of the Dyck head at the positions that predict the three targets, in one prompt.",
    "6.4, html Figure 27",
)
_PARTS = {"bos": "the segment start", "answers": "the demonstrations' answers"}


class DyckMap(Figure):
    slug = "dyck-map"
    html, pdf = "27", "18"
    title = "Where the Dyck head looks"
    question = "When the head that brackets depend on most runs again, does it leave the segment start for the demonstrations' answers?"

    def content(self, looped: RecordedRun, pair: Pair) -> dict[str, Any]:
        study = dyck_study(looped)
        example = study.examples[0]
        a, b = 1, len(study.mass.labels["visit"])
        maps = {f"visit_{v}": example.maps[v - 1] for v in dict.fromkeys((a, b))}
        maps["difference"] = example.maps[b - 1] - example.maps[a - 1]
        labels = {"target": list(range(len(example.targets))), "key": list(range(len(example.pieces)))}
        about: dict[str, Any] = {"documents": 1, "tokens": len(example.pieces), "aggregation": "one prompt"}
        about["provenance"] = study.mass.provenance
        words = {"difference": f"visit {b} minus visit {a}"}
        drawn = {
            name: series(
                StatArray(_MAP, values, labels, **about), "looped", "observed", words.get(name, name.replace("_", " "))
            )
            for name, values in maps.items()
        }
        for part in _PARTS:
            for of, role in (("dyck head", "observed"), ("other heads", "control"), ("uniform", "control")):
                for visit in (a, b) if of != "uniform" else (a,):
                    stat = study.mass.sel(heads=of, visit=visit, part=part)
                    label = of if of == "uniform" else f"{of.replace('dyck', 'Dyck')}, visit {visit}"
                    drawn[f"{part}.{of.replace(' ', '_')}.visit_{visit}"] = series(stat, "looped", role, label)
        return {
            "series": drawn,
            "visits": [a, b],
            "head": [study.layer, study.head],
            "shots": example.shots,
            "n": f"{study.mass.documents} prompts; maps of one prompt",
            "pieces": list(example.pieces),
            "targets": list(example.targets),
            "demonstrations": [list(span) for span in example.demonstrations],
            "interval": over("prompts"),
            "notes": _notes(study, example.shots, a, b, looped),
        }

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        a, b = data["visits"]
        keys = len(data["pieces"])
        panels = {
            "rows": 4,
            "cols": 2,
            "specs": [[{"colspan": 2}, None]] * 3 + [[{}, {}]],
            "row_heights": [0.18, 0.18, 0.18, 0.46],
            "vertical_spacing": 0.09,
            "horizontal_spacing": 0.1,
            "subplot_titles": [
                f"visit {a}",
                f"visit {b}",
                f"visit {b} minus visit {a}",
                *(f"attention on {words}" for words in _PARTS.values()),
            ],
        }
        layer, head = data["head"]
        titled = {**data, "title": f"{data['title']}: layer {layer}, head {head}"}
        figure = frame(titled, theme, width=max(1000, 130 + 9 * keys), height=920, panels=panels)
        drawn = data["series"]
        for row, name in enumerate((f"visit_{a}", f"visit_{b}", "difference"), 1):
            axis = "coloraxis2" if name == "difference" else "coloraxis"
            _map(figure, data, drawn[name], theme, row, axis)
        for col, part in enumerate(_PARTS, 1):
            for visit in dict.fromkeys((a, b)):
                style = theme.visit(visit)
                figure.add_trace(
                    line(_shots(drawn[f"{part}.dyck_head.visit_{visit}"]), style, legend=col == 1), row=4, col=col
                )
                other = Style(theme.muted, style.symbol, style.dash)
                entry = _shots(drawn[f"{part}.other_heads.visit_{visit}"])
                figure.add_trace(line(entry, other, legend=col == 1, width=1.2), row=4, col=col)
            uniform = line(
                _shots(drawn[f"{part}.uniform.visit_{a}"]),
                Style(theme.chance, "circle", "dot"),
                legend=col == 1,
                width=1.4,
            )
            figure.add_trace(uniform.update(mode="lines", error_y=None), row=4, col=col)
        figure.update_xaxes(type="category", title_text="demonstrations k", row=4)
        shares = [v for key, e in drawn.items() if "." in key for v in [*e["values"], *e["high"]] if v is not None]
        figure.update_yaxes(range=[0, min(1.03, 1.1 * max(*shares, 0.05))], row=4)
        figure.update_xaxes(title_text="tokens of the prompt (keys)", title_standoff=0, row=3)
        figure.update_yaxes(title_text="share of mass", row=4, col=1)
        reach = largest(drawn["difference"]["values"])
        both = sequential(max(largest(drawn[f"visit_{v}"]["values"]) for v in (a, b)), "share of mass")
        change = diverging(reach, "difference")
        for bar, middle, long in ((both, 0.81, 0.36), (change, 0.505, 0.17)):
            bar["colorbar"] |= {"len": long, "y": middle, "yanchor": "middle"}
        return figure.update_layout(coloraxis=both, coloraxis2=change)


def dyck_study(run: RecordedRun) -> DyckStudy:
    """The stored study, that of ablation by zero first.

    Raises:
        RecordingError: there is none.
    """
    found = run.dyck()
    if not found:
        raise RecordingError(f"{run.recording.path}: no Dyck study is kept here; make one with `visitlens ablate`")
    return found.get("zero") or next(iter(found.values()))


def _map(
    figure: go.Figure, data: Mapping[str, Any], entry: Mapping[str, Any], theme: Theme, row: int, axis: str
) -> None:
    """One visit's rows, its token labels, and orange marks above the demonstrations' answers."""
    tokens = [token_text(piece) for piece in data["pieces"]]
    targets = [f"{tokens[at]} ({number})" for number, at in enumerate(data["targets"], 1)]
    figure.add_trace(
        go.Heatmap(
            z=entry["values"],
            x=list(range(len(tokens))),
            y=list(range(len(targets))),
            coloraxis=axis,
            customdata=[[[token, target] for token in tokens] for target in targets],
            hovertemplate="key %{x} %{customdata[0]}, target %{customdata[1]}: %{z}<extra></extra>",
            zhoverformat=".4f",
            ygap=1,
        ),
        row=row,
        col=1,
    )
    marked = [at for first, stop in data["demonstrations"] for at in range(first, stop)]
    figure.add_scatter(
        x=marked,
        y=[-0.85] * len(marked),
        mode="markers",
        name="demonstration answers",
        marker={"symbol": "square", "size": 7, "color": ORANGE, "line": {"width": 1, "color": "#5C3D00"}},
        hovertemplate="key %{x}: demonstration answer<extra></extra>",
        showlegend=row == 1,
        row=row,
        col=1,
    )
    places = key_labels(data["pieces"])
    shown = list(places)[:: max(1, -(-len(places) // 200))]
    figure.update_xaxes(
        tickvals=shown,
        ticktext=[places[at] for at in shown],
        tickangle=0,
        tickfont={"size": 8},
        ticks="",
        showgrid=False,
        range=[-0.6, len(tokens) - 0.4],
        row=row,
        col=1,
    )
    figure.update_yaxes(
        tickvals=list(range(len(targets))),
        ticktext=targets,
        range=[len(targets) - 0.5, -1.3],
        showgrid=False,
        row=row,
        col=1,
    )
    if row == 2:
        figure.update_yaxes(title_text="target", row=row, col=1)


def key_labels(pieces: Sequence[str]) -> dict[float, str]:
    """Labels by position, upright: brackets turned on their side look like others. A word of several tokens and the colon
    after it are one label in their middle; the first token, BOS, is a line below; spaces before a sign are left out."""
    found: dict[float, str] = {0.0: "<br>" + token_text(pieces[0])}
    for word, group in groupby(range(1, len(pieces)), lambda at: pieces[at].strip(" ").isalpha() or pieces[at] == ":"):
        places = list(group)
        if word:
            found[(places[0] + places[-1]) / 2] = token_text("".join(pieces[at] for at in places).strip(" "))
        else:
            found |= {float(at): token_text(pieces[at].strip(" ") or pieces[at]) for at in places}
    return found


def _shots(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**entry, "axes": {"shots": [str(k) for k in entry["axes"]["shots"]]}}


def _notes(study: DyckStudy, shots: int, a: int, b: int, run: RecordedRun) -> list[str]:
    """The masses in words, and how the head was found."""

    def told(part: str, of: str) -> str:
        first, last = (
            with_interval(series(study.mass.sel(shots=shots, heads=of, visit=v, part=part), "looped", "observed", ""))
            for v in (a, b)
        )
        return f"{first} at visit {a}, {last} at visit {b}"

    uniform = study.mass.sel(shots=shots, heads="uniform", visit=a, part="answers").values
    count = study.mass.documents
    notes = [
        f"Over {count} prompts with {shots} demonstrations, mean over the three targets: on the segment start {told('bos', 'dyck head')}; "
        f"on the demonstrations' answers {told('answers', 'dyck head')}.",
        f"The other heads of the loop: on the segment start {told('bos', 'other heads')}; on the answers {told('answers', 'other heads')}; "
        f"uniform attention would put {np.round(float(uniform), 3)} on the answers. Intervals: over prompts.",
    ]
    ablation = run.ablations().get(f"dyck-{study.name}")
    return [*notes, ablation.note()] if ablation is not None else notes

"""The Live probe's figures: a head's maps, heads by change, a scan of heads, a token's norms, the lens. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from visitlens.app.live.choice import LiveChoice
from visitlens.app.panels.components import selector
from visitlens.app.panels.panel import Panel
from visitlens.app.view.view import View
from visitlens.probe.drawing.theme import Theme
from visitlens.probe.live.figures import attention_maps, head_grid, lens_map, norm_lines, place_label, scan_map
from visitlens.probe.live.head_scan import HeadScan
from visitlens.probe.live.live_run import LiveRun

_ROWS = 1000


def maps_panel(view: View, run: LiveRun, chosen: LiveChoice, answers: tuple[tuple[int, int], ...]) -> Panel:
    layer, head, visits = chosen.layer, chosen.head, chosen.visits
    texts = run.texts

    def draw(theme: Theme) -> go.Figure:
        return attention_maps(run, layer, head, visits, theme, query=chosen.at, marks=answers)

    def rows() -> list[dict[str, Any]]:
        names = [f"visit {v}" for v in visits] if visits else ["visit 1"]
        maps = [run.pattern(layer, v, head) for v in visits or (1,)]
        by = abs(maps[-1] - maps[0]) if visits else maps[0]
        places = zip(*_largest(by), strict=True)
        return [
            {
                "query": q,
                "query text": texts[q],
                "key": k,
                "key text": texts[k],
                **{n: float(m[q, k]) for n, m in zip(names, maps, strict=True)},
            }
            for q, k in places
        ]

    caption = [
        "Rows are queries, columns keys. Both visits share one scale; the difference is symmetric about zero. Colours follow the "
        "square root of the weight. n = 1 prompt; no interval: single attention weights.",
        _ledger(run, chosen, answers),
    ]
    return Panel(
        key="map",
        title=f"Attention of layer {layer}, head {head}",
        draw=draw,
        caption=caption,
        data=lambda: {
            "layer": layer,
            "head": head,
            "tokens": texts,
            **{f"visit {v}": run.pattern(layer, v, head).round(5).tolist() for v in visits or (1,)},
        },
        rows=rows,
        code=_code(view, run, f"run.plot(layer={layer}, head={head}, visits={visits})"),
        links={"path": view.path, "y": "at"},
        morph=(0, 1) if visits else None,
        linked=True,
        wide=True,
    )


def _ledger(run: LiveRun, chosen: LiveChoice, answers: tuple[tuple[int, int], ...]) -> str:
    """Where the chosen query's attention lies at each visit: on the first token, on the demonstrations' answers."""
    rows = [run.pattern(chosen.layer, v, chosen.head)[chosen.at] for v in chosen.visits or (1,)]
    parts = ["first token " + " → ".join(f"{row[0]:.2f}" for row in rows)]
    if answers:
        places = [at for start, stop in answers for at in range(start, stop)]
        parts.append("demonstrations' answers " + " → ".join(f"{row[places].sum():.2f}" for row in rows))
    return f"Mass of token {chosen.at}'s query: {', '.join(parts)}."


def heads_panel(view: View, run: LiveRun, chosen: LiveChoice) -> Panel:
    layers, overlap = run.head_overlap(chosen.visits)
    return Panel(
        key="heads",
        title="Attention mass shared by the visits, by head",
        draw=lambda theme: head_grid(run, chosen.visits, theme),
        caption=[
            "Sum over keys of min(P1, P2), mean over this prompt's queries but the first; low is a head that looks elsewhere. "
            "A cell opens its head. n = 1 prompt; no interval."
        ],
        data=lambda: {"layers": layers, "mass_overlap": known(overlap.round(6))},
        rows=lambda: [
            {"layer": layer, "head": head, "mass overlap": value}
            for layer, head, value in run.most_changed_heads(chosen.visits, n=_ROWS)
        ],
        code=_code(view, run, f"run.most_changed_heads(visits={chosen.visits})"),
        links={"path": view.path, "x": "head", "y": "layer"},
    )


def scan_panel(view: View, scan: HeadScan) -> Panel:
    run = scan.run

    def rows() -> list[dict[str, Any]]:
        return [
            {
                "place": place_label(layer, visits, run.plan.visits[layer]),
                "head": head,
                "change of log P, nats": change,
                "KL, nats": kl,
            }
            for layer, head, visits, change, kl in scan.ranked()
        ]

    return Panel(
        key="scan",
        title=f"Which heads the target needs {'after' if run.predicts_next else 'in place of'} token {scan.position}",
        draw=lambda theme: scan_map(scan, theme),
        caption=[
            "Change of the target's log-probability with one head silenced, nats. A cell opens its head. n = 1 prompt; no interval."
        ],
        data=lambda: {
            "target": run.text_of(scan.target),
            "kind": scan.kind,
            "places": scan.places,
            "change": scan.change.round(6).tolist(),
            "kl": scan.kl.round(6).tolist(),
        },
        rows=rows,
        code=_code(
            view, run, f"model.scan(run, position={scan.position}, target={scan.target}, kind={scan.kind!r}).ranked()"
        ),
        links={"path": view.path, "x": "head", "y": "layer"},
        wide=True,
    )


def norms_panel(view: View, run: LiveRun, chosen: LiveChoice) -> Panel:
    named = {
        "update": run.update_rms,
        "attention write": run.attn_write_rms,
        f"{run.feed_forward} write": run.moe_write_rms,
        "residual": run.resid_rms,
    }
    return Panel(
        key="norms",
        title=f"Writes into the residual stream at token {chosen.at}",
        draw=lambda theme: norm_lines(run, chosen.at, theme),
        caption=[f"Norm / sqrt(hidden size) of what each step adds{_adds(run)}. n = 1 token; no interval."],
        data=lambda: {name: known(values[:, chosen.at]) for name, values in named.items()},
        rows=lambda: [
            {
                "layer": s.layer,
                "visit": s.visit,
                **{name: known(values[s.index, chosen.at]) for name, values in named.items()},
            }
            for s in run.plan.steps
        ],
        code=_code(
            view,
            run,
            f"run.update_rms[:, {chosen.at}], run.attn_write_rms[:, {chosen.at}], run.moe_write_rms[:, {chosen.at}]",
        ),
    )


def lens_panel(view: View, run: LiveRun, chosen: LiveChoice) -> Panel:
    lens = run.coda_lens if chosen.coda and run.coda_lens else run.lens
    assert lens is not None, "the page draws it where there is one"
    tools = []
    if run.coda_lens is not None:
        choices = [("logit", "logit lens"), ("coda", "coda lens")]
        tools = [selector("read by", "lens", choices, "coda" if chosen.coda else "logit")]

    def rows() -> list[dict[str, Any]]:
        return [
            {
                "token": at,
                "text": run.texts[at],
                "layer": row.layer,
                "visit": row.visit,
                "says": row.top[0][0],
                "probability": row.top[0][1],
                "entropy": row.entropy,
                "KL": row.kl,
            }
            for at in range(len(run))
            for row in run.readout(at, coda=chosen.coda)
        ]

    return Panel(
        key="lens",
        title="What each step would say, token by token",
        draw=lambda theme: lens_map(run, theme, coda=chosen.coda, query=chosen.at),
        caption=[
            "KL(final || lens), nats: how far a step's own reading is from the output. n = 1 prompt; no interval. The two lenses are known to disagree."
        ],
        data=lambda: {"tokens": run.texts, "kl": known(lens.kl.round(5)), "entropy": known(lens.entropy.round(5))},
        rows=rows,
        code=_code(view, run, f"run.readout({chosen.at}, coda={chosen.coda})"),
        links={"path": view.path, "x": "at"},
        tools=tools,
        wide=True,
    )


def _adds(run: LiveRun) -> str:
    """What a write and an update are in this model, to go on a sentence."""
    if "family" not in run.model["config"]:  # the native model
        return ", after the 1/r scale"
    if why := run.lacks("resid_out"):
        return f". No update: {why}"
    if why := run.lacks("sum of writes"):
        return f"; the update is the residual out less that in, which isn't the sum of the writes: {why}"
    return ""


def known(values: Any) -> Any:
    """Numbers as lists; None for what isn't there."""
    whole = np.asarray(values, dtype=np.float64)
    return np.asarray(np.where(np.isnan(whole), None, whole)).tolist()  # type: ignore[call-overload]  # None among numbers


def _largest(values: Any) -> tuple[list[int], list[int]]:
    """Rows and columns of the largest values."""
    order = (-values).argsort(axis=None, kind="stable")[:_ROWS]
    rows, columns = divmod(order, values.shape[1])
    return rows.tolist(), columns.tolist()


def _code(view: View, run: LiveRun, line: str) -> str:
    options = "".join(f", {name}={value!r}" for name, value in run.model["options"].items())
    return (
        f"import visitlens as vl\n\nmodel = vl.load({str(view.context.checkpoint)!r}{options})\n"
        f"run = model.trace({run.prompt!r})\n{line}\n"
    )

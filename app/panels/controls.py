"""The selectors above a page: recording, measure, visits, layer, head and the rest; what a page asks for by name. No torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from visitlens.app.panels.attention_maps import looped_layer
from visitlens.app.panels.components import selector
from visitlens.app.view.segments import segment_choices
from visitlens.app.view.selection import AGGREGATIONS, common_visits
from visitlens.app.view.view import View, describe_needs
from visitlens.errors import VisitlensError
from visitlens.probe.measures.measure import Measure
from visitlens.probe.reading.recorded_run import RecordedRun


def controls(page: ModuleType | None, view: View) -> list[Any]:
    """The recording's always; the page's own where what it needs is there and can be read."""
    entries = view.context.registry.entries()
    if not entries or view.entry is None:
        return []
    runs = [(e.id, e.name + ("" if e.run else " (can't be read)")) for e in entries]
    found = [selector("recording", "run", runs, view.entry.id)]
    if view.run is None or page is None or describe_needs(view, page.NEEDS):
        return found
    try:
        return found + [c for name in getattr(page, "CONTROLS", ()) for c in _CONTROLS[name](page, view)]
    except VisitlensError:  # a damaged shard: the page itself says which
        return found


def _visits(page: ModuleType, view: View) -> list[Any]:
    most = common_visits(view.recorded.plan)
    pairs = [(a, b) for a in range(1, most) for b in range(a + 1, most + 1)]
    a, b = view.visits
    choices = [(f"{x}-{y}", f"{x} and {y}") for x, y in pairs]
    return [selector("visits", "visits", choices, f"{a}-{b}")] if pairs else []


def _layers(page: ModuleType, view: View) -> list[Any]:
    plan = view.recorded.plan
    looped = "looped" in page.NEEDS
    layers = plan.looped_layers if looped else sorted(plan.visits)
    shown = looped_layer(view) if looped else view.layer
    return [selector("layer", "layer", [(str(n), str(n)) for n in layers], str(shown))]


def _heads(page: ModuleType, view: View) -> list[Any]:
    heads = range(view.recorded.recording.config["num_heads"])
    return [selector("head", "head", [(str(n), str(n)) for n in heads], str(view.head))]


def _metrics(page: ModuleType, view: View) -> list[Any]:
    offered = page.METRICS(view) if hasattr(page, "METRICS") else measures(view)
    chosen = page.metric(view) if hasattr(page, "metric") else view.selection.metric
    return [selector("measure", "metric", [(m.name, m.title) for m in offered], chosen)]


def _aggregations(page: ModuleType, view: View) -> list[Any]:
    texts = {"mean": "mean over heads", "each": "each head", "token": "token by token"} | getattr(
        page, "AGGREGATIONS", {}
    )
    names = getattr(page, "AGGREGATIONS", None) or {name: texts[name] for name in AGGREGATIONS}
    return [selector("aggregation", "agg", [(n, texts[n]) for n in names], view.selection.agg or next(iter(names)))]


def _others(page: ModuleType, view: View) -> list[Any]:
    entries = [e for e in view.context.registry.entries() if e.run and view.entry and e.id != view.entry.id]
    other = view.selection.other
    if not other and view.entry is not None and (mate := view.context.registry.partner(view.entry.id)):
        other = mate.id
    return [selector("compared with", "other", [(e.id, e.name) for e in entries], other)] if entries else []


def _segments(page: ModuleType, view: View) -> list[Any]:
    choices, value = segment_choices(view)
    return [selector("document", "segment", choices, value)]


_CONTROLS = {
    "visits": _visits,
    "layer": _layers,
    "head": _heads,
    "metric": _metrics,
    "agg": _aggregations,
    "other": _others,
    "segment": _segments,
}


def layered(run: RecordedRun, name: str) -> bool:
    """Whether a measure has a value for each layer."""
    axes = run.recording.totals[name].attributes["axes"].split(",")
    return axes[0] in ("step", "pair") and "later_step" not in axes


def measures(view: View) -> list[Measure]:
    """Those of the run that have a value a layer, by title."""
    run = view.recorded
    found = [run.stat(name).measure for name in run.measures if layered(run, name)]
    return sorted(found, key=lambda measure: measure.title.lower())

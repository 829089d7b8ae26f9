"""A drawn series as JSON: values, interval and definition of a StatArray or of a computed reference; and as CSV rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypedDict

import numpy as np

from visitlens.hooks.core.loop_plan import ExecutionPlan, Step
from visitlens.probe.measures.intervals import METHOD
from visitlens.probe.measures.measure import Measure, StatArray, json_numbers

INTERVAL = METHOD
_STEP_AXES = {"step": ("layer", "visit"), "later_step": ("later_layer", "later_visit")}


class Meaning(TypedDict):
    """What a drawn number means: a Measure without its axes."""

    name: str
    title: str
    unit: str
    definition: str
    paper: str


def series(stat: StatArray, model: str, role: str, label: str) -> dict[str, Any]:
    """`model` is looped or baseline; `role` is observed, control or summary. Steps become their index."""
    low, high = stat.interval()
    return {
        "model": model,
        "role": role,
        "label": label,
        "measure": _describe(stat.measure),
        "axes": {axis: [_json_label(label) for label in stat.labels[axis]] for axis in stat.axes},
        "values": json_numbers(stat.values),
        "low": json_numbers(low),
        "high": json_numbers(high),
        **({"n": json_numbers(stat.counts)} if stat.counts is not None and stat.ragged else {}),
        "documents": stat.documents,
        "tokens": stat.tokens,
        "aggregation": stat.aggregation,
        "provenance": dict(stat.provenance),
    }


def reference(
    values: float | Sequence[float], label: str, measure: Measure, axes: Mapping[str, Sequence[int]] | None = None
) -> dict[str, Any]:
    """A chance level computed from the model's configuration alone: exact, so without interval or counts."""
    array = np.asarray(values, dtype=np.float64)
    nothing = json_numbers(np.full(array.shape, np.nan))
    return {
        "model": "looped",
        "role": "chance",
        "label": label,
        "measure": _describe(measure),
        "axes": {axis: list(labels) for axis, labels in (axes or {}).items()},
        "values": json_numbers(array),
        "low": nothing,
        "high": nothing,
        "documents": None,
        "tokens": None,
        "aggregation": "computed, not measured",
        "provenance": {},
    }


def plan_of(model: Mapping[str, Any]) -> ExecutionPlan:
    """The execution plan of a described model."""
    return ExecutionPlan.from_layers(model["layers"])


def span(model: Mapping[str, Any]) -> str:
    """A described model's loop, in words."""
    looped = model["looped_layers"]
    if not looped:
        return "no layer is run twice"
    contiguous = looped == list(range(looped[0], looped[-1] + 1))
    layers = f"{looped[0]} to {looped[-1]}" if contiguous and len(looped) > 1 else ", ".join(map(str, looped))
    return f"layer{'s' if len(looped) > 1 else ''} {layers} run {model['visits']} times"


def with_interval(entry: Mapping[str, Any]) -> str:
    """A scalar series as text: `0.560 [0.551, 0.568]`."""
    if entry["values"] is None:
        return "not measured"
    if entry["low"] is None:
        return digits(entry["values"])
    value, low, high = aligned(entry["values"], entry["low"], entry["high"])
    return f"{value} [{low}, {high}]"


def aligned(value: float, low: float, high: float) -> tuple[str, str, str]:
    """A value and its interval with the same decimals: three, or as many as give the interval's width two digits, at most six.
    A width below the sixth decimal is none: roundings differ by as much."""
    width = high - low
    decimals = min(max(1 - math.floor(math.log10(width)), 3), 6) if width >= 1e-6 else 3
    first, second, third = (
        f"{round(number, decimals) + 0.0:.{decimals}f}".replace("-", "−") for number in (value, low, high)
    )
    return first, second, third


def digits(value: Any) -> str:
    """Three decimals, or two digits of what these would show as 0; with a minus sign, not a hyphen."""
    number = float(value)
    return (
        f"{number:.3f}".replace("-", "−") if not number or abs(number) >= 0.0005 else f"{number:.1e}".replace("-", "−")
    )


def csv_rows(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a drawn number; the columns are the union of the figure's axes. Steps also get their layer and visit."""
    axes = dict.fromkeys(axis for entry in data["series"].values() for axis in entry["axes"])
    columns = [c for axis in axes for c in (axis, *_STEP_AXES.get(axis, ()))]
    return [row for name, entry in data["series"].items() for row in _rows(data, name, entry, columns)]


def _rows(
    data: Mapping[str, Any], name: str, entry: Mapping[str, Any], columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    model = data["models"][entry["model"]]
    steps: list[Step] = list(plan_of(model).steps) if any(axis in entry["axes"] for axis in _STEP_AXES) else []
    arrays = {key: np.asarray(entry[key], dtype=object) for key in ("values", "low", "high")}
    sizes = [range(len(labels)) for labels in entry["axes"].values()]
    for index in product(*sizes):
        places = {axis: labels[i] for (axis, labels), i in zip(entry["axes"].items(), index, strict=True)}
        for axis, (layer, visit) in _STEP_AXES.items():
            if axis in places:
                step = steps[places[axis]]
                places |= {layer: step.layer, visit: step.visit}
        yield {
            "figure": data["slug"],
            "series": name,
            "label": entry["label"],
            "role": entry["role"],
            "model": entry["model"],
            **{column: places.get(column) for column in columns},
            "value": arrays["values"][index],
            "low": arrays["low"][index],
            "high": arrays["high"][index],
            "unit": entry["measure"]["unit"],
            "measure": entry["measure"]["name"],
            "documents": entry["documents"],
            "tokens": np.asarray(entry["n"])[index] if "n" in entry else entry["tokens"],
            "aggregation": entry["aggregation"],
            "recording": model["recording"],
        }


def _describe(measure: Measure) -> Meaning:
    return {
        "name": measure.name,
        "title": measure.title,
        "unit": measure.unit,
        "definition": measure.definition,
        "paper": measure.paper,
    }


def _json_label(label: Any) -> int | str:
    if isinstance(label, Step):
        return label.index
    return int(label) if isinstance(label, int | np.integer) else str(label)

"""Grouped, an average with its document groups still apart, as JSON; and the checks of what such a file says. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from visitlens.probe.measures.estimate import mean_of
from visitlens.probe.measures.measure import Measure, StatArray, json_numbers

VERSION = 1
"""Of the files."""
_TEXT = 4000
"""Characters of the longest text in a file."""


@dataclass(frozen=True)
class Grouped:
    """Sums `total`, `count` [group, *axes] of one measure: an average with its document groups still apart."""

    measure: Measure
    labels: Mapping[str, Sequence[Any]]
    total: np.ndarray
    count: np.ndarray

    def stat(self, **about: Any) -> StatArray:
        """The mean with its replicates; `about` are further fields of StatArray."""
        return mean_of(self.measure, (self.total, self.count), self.labels, **about)

    def to_dict(self) -> dict[str, Any]:
        stat = self.stat()
        low, high = stat.interval()
        return {
            "measure": {"name": self.measure.name, **self.measure.to_attributes()},
            "labels": {axis: list(labels) for axis, labels in self.labels.items()},
            "total": short(self.total),
            "count": short(self.count),
            "values": json_numbers(stat.values),
            "low": json_numbers(low),
            "high": json_numbers(high),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Grouped:
        """Raises ValueError, KeyError or TypeError on what doesn't fit."""
        attributes = {
            key: checked_text(data["measure"][key]) for key in ("name", "title", "axes", "unit", "definition", "paper")
        }
        measure = Measure.from_attributes(attributes.pop("name"), attributes, True)
        labels = {axis: [_label(label) for label in data["labels"][axis]] for axis in measure.axes}
        total, count = (np.array(data[key], dtype=np.float64) for key in ("total", "count"))
        shape = tuple(len(labels[axis]) for axis in measure.axes)
        if total.shape != count.shape or total.shape[1:] != shape or not len(total):
            raise ValueError(f"{measure.name}: sums {total.shape} and counts {count.shape} for axes of {shape}")
        if not np.isfinite(total).all() or not np.isfinite(count).all() or (count < 0).any():
            raise ValueError(f"{measure.name}: sums and counts must be finite, counts not negative")
        return cls(measure, labels, total, count)


def header(kind: str, name: str, about: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": f"visitlens-{kind}", "version": VERSION, "name": name, "about": dict(about)}


def about_stat(about: Mapping[str, Any]) -> dict[str, Any]:
    provenance = about.get("provenance")
    return {
        "documents": int(about.get("documents", 0)),
        "tokens": int(about.get("tokens", 0)),
        "aggregation": "mean over targets",
        "provenance": provenance if isinstance(provenance, dict) else {},
    }


def short(array: np.ndarray) -> Any:
    """Nested lists of numbers with nine digits."""
    return [short(row) for row in array] if array.ndim else float(f"{float(array):.9g}")


def checked_text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _TEXT:
        raise TypeError(f"expected a text of at most {_TEXT} characters, got {str(value)[:80]!r}")
    return value


def _label(value: Any) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return checked_text(value)


def checked_about(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("expected an object")
    for key in ("documents", "tokens"):
        check_integers([value.get(key, 0)])
    return value


def check_integers(*lists: Sequence[Any]) -> None:
    for value in (value for values in lists for value in values):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
            raise ValueError(f"expected a whole number, got {str(value)[:80]!r}")

"""Analyses kept with a recording, as `analyses/KIND-NAME.json`: head ablations and Dyck studies. No torch.

Each file is self-contained: format and version, what was done, sums per document group (from which means and intervals
follow, as in the recording itself), and the means and intervals once more for other readers. A file is data from
somewhere: its size, shapes, numbers and texts are checked before anything is made of it.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from visitlens.hooks.shards import commit
from visitlens.kernels.errors import InputError, RecordingError
from visitlens.probe.bootstrap import mean_and_replicates, resampling_weights
from visitlens.probe.measure import Measure, StatArray, json_numbers

FOLDER, VERSION = "analyses", 1
ABLATION, DYCK = "ablation", "dyck"
MAX_BYTES = 64_000_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
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
        """The mean with its bootstrap replicates; `about` are further fields of StatArray."""
        weights = resampling_weights(len(self.total)) if len(self.total) > 1 else None
        values, replicates = mean_and_replicates(self.total, self.count, weights)
        return StatArray(self.measure, values, self.labels, replicates, **about)

    def to_dict(self) -> dict[str, Any]:
        stat = self.stat()
        low, high = stat.interval()
        return {
            "measure": {"name": self.measure.name, **self.measure.to_attributes()},
            "labels": {axis: list(labels) for axis, labels in self.labels.items()},
            "total": _short(self.total),
            "count": _short(self.count),
            "values": json_numbers(stat.values),
            "low": json_numbers(low),
            "high": json_numbers(high),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Grouped:
        """Raises ValueError, KeyError or TypeError on what doesn't fit."""
        attributes = {
            key: _text(data["measure"][key]) for key in ("name", "title", "axes", "unit", "definition", "paper")
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


@dataclass(frozen=True)
class TopHead:
    """The head whose ablation hurts most, by how much, and how surely: `p_holm` is corrected for all heads tried, `lead`
    is its effect minus the runner-up's."""

    layer: int
    head: int
    effect: StatArray
    p_holm: float
    runner_up: tuple[int, int] | None
    lead: StatArray | None


@dataclass(frozen=True)
class HeadAblation:
    """What the metric changes by when a head is ablated. `about` holds settings and provenance."""

    name: str
    metric: str
    mode: str
    grouped_intact: Grouped
    grouped_effect: Grouped
    about: Mapping[str, Any]

    @cached_property
    def effect(self) -> StatArray:
        """[visits, layer, head] metric with the head ablated minus without; `visits` labels are "1", "2", "1+2"."""
        return self.grouped_effect.stat(**_about(self.about))

    @cached_property
    def intact(self) -> StatArray:
        """The metric of the intact model."""
        return self.grouped_intact.stat(**_about(self.about))

    @property
    def every_visit(self) -> str:
        """The label of ablation at all visits together."""
        return self.effect.labels["visits"][-1]

    def p_values(self, visits: str | None = None) -> np.ndarray:
        """[layer, head] two-sided, from the effect over its bootstrap standard error; NaN where there is no interval."""
        chosen = self.effect.sel(visits=visits or self.every_visit)
        if chosen.replicates is None:
            return np.full(chosen.values.shape, np.nan)
        spread = chosen.replicates.std(0, ddof=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            score = np.abs(chosen.values) / spread
        score[(chosen.values == 0) & (spread == 0)] = 0.0  # a head that does nothing at all
        return np.vectorize(lambda z: math.erfc(z / math.sqrt(2)), otypes=[float])(score)

    def p_holm(self, visits: str | None = None) -> np.ndarray:
        """[layer, head] p values, corrected by Holm's method for all these heads."""
        return holm(self.p_values(visits))

    def top(self, visits: str | None = None) -> TopHead:
        """The head whose ablation raises the metric most; at all visits together by default."""
        chosen = self.effect.sel(visits=visits or self.every_visit)
        order = np.argsort(-chosen.values, axis=None, kind="stable")
        (layer, head), *rest = (np.unravel_index(i, chosen.values.shape) for i in order[:2])
        layers, heads = chosen.labels["layer"], chosen.labels["head"]
        effect = chosen.sel(layer=layers[layer], head=heads[head])
        runner_up, lead = None, None
        if rest:
            runner_up = layers[rest[0][0]], heads[rest[0][1]]
            second = chosen.sel(layer=runner_up[0], head=runner_up[1])
            lead = effect.combine(second, np.subtract, effect.measure)
        return TopHead(layers[layer], heads[head], effect, float(self.p_holm(visits)[layer, head]), runner_up, lead)

    def note(self) -> str:
        """The finding in one or two sentences."""
        top = self.top()
        heads = self.effect.values[0].size
        low, high = top.effect.interval()
        text = (
            f"Ablating layer {top.layer}, head {top.head} at every visit raises {self.metric} most: by {top.effect.values:.4g} "
            f"[{low:.4g}, {high:.4g}] {self.effect.measure.unit} over {self.intact.values:.4g}"
        )
        if not math.isnan(top.p_holm):
            p = "p < 0.001" if top.p_holm < 0.001 else f"p = {top.p_holm:.3f}"
            text += f" ({p} by Holm's correction for {heads} heads)"
        if top.lead is not None and top.runner_up is not None:
            low, high = top.lead.interval()
            text += (
                f"; that is {top.lead.values:.4g} [{low:.4g}, {high:.4g}] more than the next, "
                f"layer {top.runner_up[0]}, head {top.runner_up[1]}"
            )
        return text + "."

    def to_dict(self) -> dict[str, Any]:
        return {
            **_header(ABLATION, self.name, self.about),
            "metric": self.metric,
            "mode": self.mode,
            "note": self.note(),
            "p_holm": json_numbers(np.stack([self.p_holm(visits) for visits in self.effect.labels["visits"]])),
            "intact": self.grouped_intact.to_dict(),
            "effect": self.grouped_effect.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HeadAblation:
        intact, effect = Grouped.from_dict(data["intact"]), Grouped.from_dict(data["effect"])
        if effect.measure.axes != ("visits", "layer", "head") or intact.measure.axes or not effect.total[0].size:
            raise ValueError(f"axes {intact.measure.axes} and {effect.measure.axes}")
        if not all(isinstance(label, str) for label in effect.labels["visits"]):
            raise ValueError("visits must be texts")
        _check_integers(effect.labels["layer"], effect.labels["head"])
        return cls(*(_text(data[key]) for key in ("name", "metric", "mode")), intact, effect, _object(data["about"]))


@dataclass(frozen=True)
class DyckExample:
    """One prompt and the head's attention at its targets: `maps [visit, target, key]`; position 0 is the segment start."""

    shots: int
    pieces: tuple[str, ...]
    targets: tuple[int, ...]
    demonstrations: tuple[tuple[int, int], ...]
    maps: np.ndarray


@dataclass(frozen=True)
class DyckStudy:
    """The Dyck head's attention, and how well the model completes brackets, by number of shots.

    `grouped_scores` are exact_match, accuracy and nll, each [shots]; `grouped_mass` is [shots, heads, visit, part]: the
    share of attention at the targets that lies on the segment start ("bos") and on the demonstrations' answers
    ("answers"), for the Dyck head and, as a control, for the mean over the other heads of the loop.
    """

    name: str
    layer: int
    head: int
    grouped_scores: Mapping[str, Grouped]
    grouped_mass: Grouped
    examples: tuple[DyckExample, ...]
    about: Mapping[str, Any]

    @cached_property
    def mass(self) -> StatArray:
        """[shots, heads, visit, part]; heads: "dyck head", "other heads", "uniform"; part: "bos", "answers"."""
        return self.grouped_mass.stat(**_about(self.about))

    @cached_property
    def scores(self) -> dict[str, StatArray]:
        """exact_match, accuracy, nll and perplexity by shots, over the whole answer; target_* at the targets alone."""
        found = {name: grouped.stat(**_about(self.about)) for name, grouped in self.grouped_scores.items()}
        for name in [name for name in found if name.endswith("nll")]:
            perplexity = replace(
                found[name].measure, name=name.replace("nll", "perplexity"), title="Perplexity", unit="ratio"
            )
            found[perplexity.name] = found[name].combine(1.0, lambda nats, one: np.exp(nats) * one, perplexity)
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            **_header(DYCK, self.name, self.about),
            "layer": self.layer,
            "head": self.head,
            "scores": {name: grouped.to_dict() for name, grouped in self.grouped_scores.items()},
            "mass": self.grouped_mass.to_dict(),
            "examples": [
                {
                    "shots": e.shots,
                    "pieces": list(e.pieces),
                    "targets": list(e.targets),
                    "demonstrations": [list(span) for span in e.demonstrations],
                    "maps": _short(e.maps),
                }
                for e in self.examples
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DyckStudy:
        mass = Grouped.from_dict(data["mass"])
        if mass.measure.axes != ("shots", "heads", "visit", "part"):
            raise ValueError(f"mass has axes {mass.measure.axes}")
        scores = {_text(name): Grouped.from_dict(grouped) for name, grouped in data["scores"].items()}
        if any(grouped.measure.axes != ("shots",) for grouped in scores.values()):
            raise ValueError("scores must have the axis shots alone")
        _check_integers([data["layer"], data["head"]], mass.labels["visit"], mass.labels["shots"])
        examples = tuple(_example(e, len(mass.labels["visit"])) for e in data["examples"])
        return cls(_text(data["name"]), data["layer"], data["head"], scores, mass, examples, _object(data["about"]))


_KINDS = {ABLATION: HeadAblation, DYCK: DyckStudy}


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's step-down correction over all elements; NaN stays NaN and isn't counted."""
    flat = p.ravel()
    known = np.flatnonzero(~np.isnan(flat))
    order = known[np.argsort(flat[known], kind="stable")]
    corrected = np.full(flat.shape, np.nan)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(flat[order] * np.arange(len(order), 0, -1)))
    return corrected.reshape(p.shape)


def check_name(name: str) -> str:
    """Raises InputError: not fit for a file name."""
    if not _NAME.fullmatch(name):
        raise InputError(f"expected a name of letters, digits, '.', '_' and '-', at most 64, got {name!r}")
    return name


def store(recording: Path, analysis: HeadAblation | DyckStudy) -> Path:
    """Writes the analysis into the recording's folder in one step, in place of one of the same kind and name.

    Raises:
        InputError: its name isn't fit for a file.
        RecordingError: the analyses folder is a link.
        StorageError: no room or no permission.
    """
    kind = ABLATION if isinstance(analysis, HeadAblation) else DYCK
    file = recording / FOLDER / f"{kind}-{check_name(analysis.name)}.json"
    if file.parent.is_symlink():
        raise RecordingError(f"{file.parent}: a link, not a folder of this recording")
    file.parent.mkdir(exist_ok=True)
    commit(file, (json.dumps(analysis.to_dict(), ensure_ascii=False, allow_nan=False) + "\n").encode())
    return file


def stored(recording: Path, kind: str) -> list[str]:
    """Names of the analyses of a kind, sorted."""
    folder = recording / FOLDER
    if folder.is_symlink() or not folder.is_dir():
        return []
    names = (path.name.removeprefix(f"{kind}-").removesuffix(".json") for path in folder.glob(f"{kind}-*.json"))
    return sorted(name for name in names if _NAME.fullmatch(name))


def load(recording: Path, kind: str, name: str) -> Any:
    """A HeadAblation or DyckStudy.

    Raises:
        RecordingError: the file is no such analysis, is too large, or holds something that doesn't fit.
    """
    file = recording / FOLDER / f"{kind}-{check_name(name)}.json"
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as opened:  # noqa: PTH123 (a descriptor, not a path)
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_BYTES:
                raise ValueError(f"expected a regular file of at most {MAX_BYTES:,} bytes")
            data = json.loads(opened.read(MAX_BYTES), parse_constant=_refuse_constant)
        if data["format"] != f"visitlens-{kind}" or data["version"] != VERSION or data["name"] != name:
            raise ValueError(
                f"format {data['format']!r}, version {data['version']!r}, name {data['name']!r}; this visitlens reads "
                f"'visitlens-{kind}', version {VERSION}"
            )
        return _KINDS[kind].from_dict(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecordingError(
            f"{file}: not a readable {kind} analysis ({error!r}); make it again with `visitlens ablate`"
        ) from error


def _header(kind: str, name: str, about: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": f"visitlens-{kind}", "version": VERSION, "name": name, "about": dict(about)}


def _about(about: Mapping[str, Any]) -> dict[str, Any]:
    provenance = about.get("provenance")
    return {
        "documents": int(about.get("documents", 0)),
        "tokens": int(about.get("tokens", 0)),
        "aggregation": "mean over targets",
        "provenance": provenance if isinstance(provenance, dict) else {},
    }


def _example(data: Mapping[str, Any], visits: int) -> DyckExample:
    pieces = tuple(_text(piece) for piece in data["pieces"])
    targets = tuple(data["targets"])
    spans = tuple((first, stop) for first, stop in data["demonstrations"])
    maps = np.array(data["maps"], dtype=np.float64)
    _check_integers([data["shots"]], targets, [bound for span in spans for bound in span])
    if maps.shape != (visits, len(targets), len(pieces)) or not np.isfinite(maps).all():
        raise ValueError(f"maps {maps.shape} for {visits} visits, {len(targets)} targets and {len(pieces)} tokens")
    inside = all(0 < at < len(pieces) for at in targets) and all(0 <= a <= b <= len(pieces) for a, b in spans)
    if not inside:
        raise ValueError("targets or demonstrations lie outside the prompt")
    return DyckExample(data["shots"], pieces, targets, spans, maps)


def _short(array: np.ndarray) -> Any:
    """Nested lists of numbers with nine digits."""
    return [_short(row) for row in array] if array.ndim else float(f"{float(array):.9g}")


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _TEXT:
        raise TypeError(f"expected a text of at most {_TEXT} characters, got {str(value)[:80]!r}")
    return value


def _label(value: Any) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return _text(value)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("expected an object")
    for key in ("documents", "tokens"):
        _check_integers([value.get(key, 0)])
    return value


def _check_integers(*lists: Sequence[Any]) -> None:
    for value in (value for values in lists for value in values):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
            raise ValueError(f"expected a whole number, got {str(value)[:80]!r}")


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")

"""A measure at two visits side by side, its difference and its control, for any recorded measure. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from visitlens.errors import InputError, RecordingError
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.reading.recorded_run import RecordedRun


@dataclass(frozen=True)
class TwoVisits:
    """`earlier`, `later` and their `difference` (later - earlier); or, of a measure that compares visits, `between`
    and its `control` (None: there is none). All with a `layer` axis first."""

    name: str
    visits: tuple[int, int]
    earlier: StatArray | None = None
    later: StatArray | None = None
    difference: StatArray | None = None
    between: StatArray | None = None
    control: StatArray | None = None
    control_is: str = ""

    @property
    def present(self) -> dict[str, StatArray]:
        """What there is, by its label."""
        a, b = self.visits
        parts = {
            f"visit {a}": self.earlier,
            f"visit {b}": self.later,
            f"visits {a} and {b}": self.between,
            self.control_is: self.control,
        }
        return {label: stat for label, stat in parts.items() if stat is not None}

    def mean(self, *axes: str) -> TwoVisits:
        """Averaged over these axes, where a part has them."""
        parts = {name: getattr(self, name) for name in ("earlier", "later", "difference", "between", "control")}
        return replace(self, **{name: mean_over(stat, axes) for name, stat in parts.items()})

    @property
    def other_axes(self) -> tuple[str, ...]:
        """Beside `layer`."""
        stat = self.between if self.between is not None else self.earlier
        return () if stat is None else stat.axes[1:]


def two_visits(run: RecordedRun, name: str, visits: tuple[int, int] | None = None) -> TwoVisits:
    """Any measure with a step or pair axis.

    Raises:
        RecordingError: the run doesn't hold it, or isn't looped.
        InputError: the measure has no value a layer, or the visits don't exist.
    """
    axes = run.stat(name).axes
    if not run.looped:
        raise RecordingError(f"{run.name}: an unlooped model has one visit a layer, so there are no visits to compare")
    pair = run.plan.visit_pairs(*visits) if visits else run.plan.visit_pairs()
    chosen = visits or (pair[0].earlier.visit, pair[0].later.visit)
    if "pair" in axes:
        control, control_is = _control(run, name, visits)
        return TwoVisits(name, chosen, between=run.between_visits(name, visits), control=control, control_is=control_is)
    if axes[:1] != ("step",) or "later_step" in axes:
        raise InputError(f"{name} has axes {', '.join(axes)}: it isn't one value a layer and visit")
    earlier, later = run.both_visits(name, visits)
    measure = replace(
        later.measure,
        name=f"{name}_difference",
        title=f"{later.measure.title}: visit {chosen[1]} minus visit {chosen[0]}",
    )
    return TwoVisits(name, chosen, earlier, later, later.combine(earlier, np.subtract, measure))


def by_layer_once(run: RecordedRun, name: str) -> StatArray:
    """A step measure of an unlooped model, its axis relabelled `layer`."""
    stat = run.stat(name)
    axes = tuple("layer" if axis == "step" else axis for axis in stat.axes)
    labels = {a: labels for a, labels in stat.labels.items() if a != "step"}
    layers = [step.layer for step in run.plan.steps]
    return replace(stat, measure=replace(stat.measure, axes=axes), labels={**labels, "layer": layers})


def mean_over(stat: StatArray | None, axes: tuple[str, ...]) -> StatArray | None:
    for axis in axes:
        if stat is not None and axis in stat.axes:
            stat = stat.mean(axis)
    return stat


def largest_change(
    run: RecordedRun, name: str = "sink_mass", visits: tuple[int, int] | None = None
) -> tuple[int, int, float]:
    """Layer and head whose value changes most between the visits, and by how much."""
    difference = two_visits(run, name, visits).difference
    if difference is None or difference.axes != ("layer", "head") or np.isnan(difference.values).all():
        raise InputError(f"{name} has no value a head that could change between visits")
    at = np.unravel_index(np.nanargmax(np.abs(difference.values)), difference.values.shape)
    row, column = int(at[0]), int(at[1])
    layer, head = difference.labels["layer"][row], difference.labels["head"][column]
    return int(layer), int(head), float(difference.values[row, column])


def _control(run: RecordedRun, name: str, visits: tuple[int, int] | None) -> tuple[StatArray | None, str]:
    """What chance or an unrelated head gives, for the measures that have it."""
    if f"{name}_control" in run.measures:
        return run.attended_control(name, visits), "other-head control"
    if name == "shared_expert_count":
        k = run.recording.config["experts_per_token"]
        chance = run.expert_overlap_chance_by_load(visits)
        measure = Measure(
            "load_aware_chance",
            "Shared experts expected from expert loads",
            ("layer",),
            "experts",
            chance.measure.definition,
            "ours",
        )
        return chance.combine(k, np.multiply, measure), "load-aware chance"
    return None, ""

"""A recording opened for reading: every measure and every statistic of the paper's Section 6, as StatArrays. No torch.

import visitlens as vl
rec = vl.open("run.vlens")
rec.expert_overlap().plot()
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from visitlens.errors import InputError, RecordingError
from visitlens.hooks.core.loop_plan import Step, VisitPair
from visitlens.hooks.recording.format.totals import GroupTotals
from visitlens.hooks.recording.read.recording import Recording
from visitlens.plugins import is_installed
from visitlens.probe.analyses.results import store as analyses
from visitlens.probe.measures import derived
from visitlens.probe.measures.axes import labels_of
from visitlens.probe.measures.estimate import mean_of
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.measures.phases import PHASES, of_phase
from visitlens.probe.measures.visit_matrix import at_steps, relabel, visit_matrix


def open_recording(path: str | Path, *, trusted: bool = False) -> RecordedRun:
    """Opens a recording, a folder or `s3://bucket/run.vlens`; reads its manifest now, its summary at the first statistic, arrays only
    when asked (of a URL, shards are fetched then).

    Every file is checked before its data are read (docs/recording.md); `trusted=True`, for recordings of your own, spares
    the costly part of that.

    Examples:
        >>> rec = vl.open("run.vlens")
        >>> rec
        RecordedRun(run: 8 layers, 4 layers run 2 times, ...
    """
    return RecordedRun(Recording(path, trusted=trusted))


class RecordedRun:
    """Statistics of one recording. `rec.recording` gives tokens, experts, per-token scalars and activations.

    Methods that compare visits take `visits=(a, b)`, 1-based; the default is the first and the last. Layer axes are
    labelled by 0-based physical layer and hold looped layers only.

    Examples:
        >>> rec = vl.open("run.vlens")
        >>> rec.expert_overlap(visits=(1, 2)).labels["layer"]
        [2, 3, 4, 5]
        >>> rec.at_visit("sink_mass", visit=2).axes
        ('layer', 'head')
    """

    def __init__(
        self,
        recording: Recording,
        phase: str | None = None,
        groups: str = "",
        totals: Mapping[str, GroupTotals] | None = None,
    ) -> None:
        self.recording, self._phase, self._groups, self._given = recording, phase, groups, totals
        self.plan = recording.plan
        self._stats: dict[str, StatArray] = {}

    @property
    def name(self) -> str:
        return self.recording.path.name.removesuffix(".vlens")

    @property
    def looped(self) -> bool:
        return bool(self.plan.looped_layers)

    @property
    def measures(self) -> tuple[str, ...]:
        """What `stat` can return."""
        return tuple(sorted(self._totals))

    @property
    def absent_packages(self) -> dict[str, tuple[str, ...]]:
        """Package -> the measures of it that this recording holds, of packages that aren't installed here.

        Their numbers and definitions are read all the same; only recording them again needs the package.
        """
        found: dict[str, tuple[str, ...]] = {}
        for name in self.measures:
            package = self._totals[name].attributes.get("package", "")
            if package and not is_installed(package):
                found[package] = (*found.get(package, ()), name)
        return found

    def phase(self, name: str) -> RecordedRun:
        """Its statistics over one phase of generated texts: "prefill", the prompts, or "decode", what the model wrote.

        Raises:
            InputError: another name, or a recording of texts that weren't generated.
        """
        if name not in PHASES or not self.recording.generated:
            raise InputError(
                f"expected a phase among {', '.join(PHASES)} of a recording made with --generate, got {name!r} of {self.name}"
                + ("" if self.recording.generated else ", whose texts weren't generated")
            )
        return RecordedRun(self.recording, name, self._groups, self._given)

    @property
    def _all(self) -> Mapping[str, GroupTotals]:
        """Of every phase."""
        return self.recording.totals if self._given is None else self._given

    @property
    def _totals(self) -> Mapping[str, GroupTotals]:
        return of_phase(self._all, None) if self._phase is None else self._phase_totals

    @cached_property
    def _phase_totals(self) -> dict[str, GroupTotals]:
        return of_phase(self._all, self._phase)

    @cached_property
    def tokens(self) -> int:
        """Recorded so far; of a phase, those of it."""
        counted = [int(t.count.sum(0).max(initial=0)) for t in self._totals.values()] if self._phase else []
        return max(counted) if counted else self.recording.tokens

    @cached_property
    def groups(self) -> int:
        return max(t.total.shape[0] for t in self._totals.values())

    @property
    def group_names(self) -> str:
        """Which groups of documents the sums are of: recordings with the same are paired."""
        return self._groups or f"{self.recording.run['config']['data_sha256']} in {self.groups}"

    def stat(self, name: str) -> StatArray:
        """A recorded measure over all its axes; `step` labels are `Step`, `pair` labels `VisitPair`.

        Raises:
            RecordingError: the recording doesn't hold it (the message names what it holds, or why not).
        """
        totals = self._totals.get(name)
        if totals is None:
            near = difflib.get_close_matches(name, self.measures, 3)
            hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(self.measures)}"
            why = "" if self.looped else " (an unlooped model has one visit a layer, so nothing to compare)"
            if reason := self.recording.run.get("left_out", {}).get(name):
                raise RecordingError(f"{self.recording.place}: {name} was left out of this model: {reason}")
            raise RecordingError(f"{self.recording.place}: no measure {name!r}{why}; {hint}")
        if name in self._stats:
            return self._stats[name]
        grouped = totals.total.shape[0] == self.groups
        measure = Measure.from_attributes(name, totals.attributes, grouped)
        sizes = zip(measure.axes, totals.total.shape[1:], strict=True)
        self._stats[name] = mean_of(
            measure,
            (totals.total, totals.count),
            {axis: self._labels(measure, axis, size) for axis, size in sizes},
            groups=self.group_names,
            documents=self.recording.documents,
            tokens=self.tokens,
            provenance=self.provenance,
            counts=totals.count.sum(0),
            ragged=bool(self.recording.config.get("ragged")),
        )
        return self._stats[name]

    def sums(self, name: str) -> GroupTotals:
        """What a measure's means are formed of, by document group. Raises as `stat`."""
        self.stat(name)
        return self._totals[name]

    @property
    def provenance(self) -> dict[str, Any]:
        run = self.recording.run
        return {
            "recording": run["run_uuid"],
            "config_sha256": run["config_sha256"],
            "weights_sha256": run["config"]["weights_sha256"],
            "data_sha256": run["config"]["data_sha256"],
            **({"phase": self._phase} if self._phase else {}),
        }

    def derived(self, name: str, visits: tuple[int, int] | None = None) -> StatArray:
        """A number computed from recorded measures, over its axes; docs/measures.md lists them.

        Raises:
            InputError: no such number.
            RecordingError: the recording doesn't hold a measure that it is computed from.
        """
        return derived.find(name).of(self, visits)

    def regrouped(self, places: np.ndarray, groups: int, name: str) -> RecordedRun:
        """The same recording with its sums in other document groups: group i goes to `places[i]` of `groups`, `name` says which they
        are. The phase stays."""
        moved = {
            measure: totals.regrouped(places, groups) if totals.total.shape[0] == self.groups else totals
            for measure, totals in self._all.items()
        }
        return RecordedRun(self.recording, self._phase, name, moved)

    # One visit pair, or one visit, of the looped layers

    def pairs(self, visits: tuple[int, int] | None = None) -> tuple[VisitPair, ...]:
        """These two visits of each looped layer, by default the first and the last.

        Raises:
            RecordingError: an unlooped recording.
            InputError: no such visits.
        """
        if not self.looped:
            raise RecordingError(
                f"{self.recording.place}: an unlooped model has one visit a layer, so there are no visits to compare"
            )
        return self.plan.visit_pairs(*visits) if visits else self.plan.visit_pairs()

    def between_visits(self, name: str, visits: tuple[int, int] | None = None) -> StatArray:
        """A `pair` measure for one pair of visits, the axis relabelled `layer`."""
        chosen = self.pairs(visits)
        stat = self.stat(name).sel(pair=lambda pair: pair in chosen)
        return relabel(stat, "pair", "layer", [pair.layer for pair in chosen])

    def visit_matrix(self, name: str, layer: int) -> StatArray:
        """A `pair` measure of one layer as [visit, later_visit, ...], r x r, whatever its number of visits.

        NaN on the diagonal; and below it where earlier and later can't be exchanged (ratios, transitions).

        Raises:
            InputError: the layer isn't looped, or the measure doesn't compare visits.
        """
        return visit_matrix(self.stat(name), self.plan, layer)

    def at_visit(self, name: str, visit: int) -> StatArray:
        """A `step` measure at one visit of each looped layer, the axis relabelled `layer`."""
        steps = [s for s in self.plan.steps if s.visit == visit and s.layer in self.plan.looped_layers]
        if not steps:
            raise InputError(f"no looped layer has a visit {visit}; visits per layer are {self.plan.visits}")
        return at_steps(self.stat(name), steps)

    def both_visits(self, name: str, visits: tuple[int, int] | None = None) -> tuple[StatArray, StatArray]:
        """A `step` measure at the earlier and at the later visit of each looped layer, each with a `layer` axis."""
        pairs = self.pairs(visits)
        stat = self.stat(name)
        return at_steps(stat, [p.earlier for p in pairs]), at_steps(stat, [p.later for p in pairs])

    # Expert routing (6.1)

    def expert_overlap(self, visits: tuple[int, int] | None = None) -> StatArray:
        """[layer] shared experts / k."""
        return self.derived("expert_overlap", visits)

    def shared_experts(self, visits: tuple[int, int] | None = None) -> StatArray:
        """[layer, shared] share of tokens that share 0..k experts."""
        return self.between_visits("shared_experts", visits)

    def expert_overlap_chance(self) -> float:
        """k / E: the overlap of two independent uniform choices (the paper's dashed line is k times this)."""
        return self.recording.config["experts_per_token"] / self.recording.config["num_experts"]

    def expert_overlap_chance_by_load(self, visits: tuple[int, int] | None = None) -> StatArray:
        """[layer] overlap expected if each visit chose independently by its own expert loads."""
        return self.derived("expert_overlap_chance_by_load", visits)

    def load_imbalance(self) -> StatArray:
        """[step] E times the sum of squared shares of routed slots: 1 if balanced, E / k if the same k experts take every token."""
        return self.derived("load_imbalance")

    # Residual stream (6.2)

    def norm_ratio(self, component: str = "update", visits: tuple[int, int] | None = None) -> StatArray:
        """[layer] mean norm at the later visit over mean norm at the earlier.

        `component`: update, attn_write, moe_write, norm_output (the mean of both norms' ratios), norm_output_attn,
        norm_output_moe. The token-by-token alternative is `between_visits("token_norm_ratio")`.
        """
        prefix = "norm_ratio_"
        known = [name.removeprefix(prefix) for name in derived.registered() if name.startswith(prefix)]
        if component not in known:
            raise InputError(f"expected a component among {', '.join(known)}, got {component!r}")
        return self.derived(prefix + component, visits)

    def update_cosine(self) -> StatArray:
        """[step, later_step] cosine between the updates of every two steps."""
        return self.stat("update_cosine")

    def update_cosine_same_layer(self, visits: tuple[int, int] | None = None) -> StatArray:
        """[layer] cosine between a layer's updates at two visits: the cross-visit diagonal."""
        return self.derived("update_cosine_same_layer", visits)

    def update_cosine_other_layers(self, visits: tuple[int, int] | None = None) -> StatArray:
        """[layer_pair] the same between different layers of the two visits: what the diagonal is compared with."""
        return self.derived("update_cosine_other_layers", visits)

    # Attention (6.3, 6.4)

    def stage_cosine(self, visits: tuple[int, int] | None = None) -> StatArray:
        """[layer, stage] cosine between two visits of X, Q, K, V, PV, O."""
        return self.between_visits("stage_cosine", visits)

    def attended(self, name: str, visits: tuple[int, int] | None = None) -> StatArray:
        """[layer, head] of `top1_match`, `top8_overlap` or `mass_overlap` between two visits."""
        return self.between_visits(name, visits)

    def attended_control(self, name: str, visits: tuple[int, int] | None = None) -> StatArray:
        """[layer, head] of the same between head h and head h + n_h/2 at one visit, averaged over the two visits."""
        first, second = self.both_visits(f"{name}_control", visits)
        return first.combine(second, lambda x, y: (x + y) / 2, first.measure)

    def sink_mass(self) -> StatArray:
        """[step, head] attention on the segment start."""
        return self.stat("sink_mass")

    # Analyses kept with the recording (`visitlens ablate`)

    def ablations(self) -> dict[str, analyses.HeadAblation]:
        """By name, such as "dyck-zero": what ablating each head does to a metric. Empty where none was stored.

        Raises:
            RecordingError: a stored analysis can't be read.
        """
        path = self.recording.path
        return {n: analyses.load(path, analyses.ABLATION, n) for n in analyses.stored(path, analyses.ABLATION)}

    def dyck(self) -> dict[str, analyses.DyckStudy]:
        """By name, such as "zero": the Dyck head's attention, and bracket completion by shots. Raises as `ablations`."""
        path = self.recording.path
        return {n: analyses.load(path, analyses.DYCK, n) for n in analyses.stored(path, analyses.DYCK)}

    def _labels(self, measure: Measure, axis: str, size: int) -> list[Any]:
        own = measure.own_labels.get(axis, ())
        return list(own) if len(own) == size else labels_of(axis, self.plan, self.recording.config, size)

    def _repr_html_(self) -> str:
        from visitlens.probe.drawing.notebook_html import recording_html

        return recording_html(self)

    def __repr__(self) -> str:
        r = self.recording
        loop = (
            f"{len(self.plan.looped_layers)} layers run {max(self.plan.visits.values())} times"
            if self.looped
            else "unlooped"
        )
        state = "complete" if r.complete else f"{r.tokens / r.run['tokens']:.0%} recorded"
        absent = "".join(f"; {sentence}" for sentence in absent_sentences(self))
        phase = f" ({self._phase} alone)" if self._phase else ""
        return f"RecordedRun({self.name}{phase}: {len(self.plan.visits)} layers, {loop}, {self.tokens:,} tokens of {r.documents} document{'s' * (r.documents != 1)}, level {r.level}, {state}{absent})"


def absent_sentences(run: RecordedRun) -> list[str]:
    """One for each package that isn't installed here and defines measures of the recording."""
    return [
        f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} of the package {package}, which isn't installed"
        for package, names in run.absent_packages.items()
    ]


def step_label(step: Step) -> str:
    """Short, for axes: `3·2` is layer 3 at visit 2."""
    return f"{step.layer}·{step.visit}"

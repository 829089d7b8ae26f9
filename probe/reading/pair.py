"""Pair: a looped model's recording and that of its unlooped Baseline, the input of every figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from visitlens.errors import InputError, RecordingError
from visitlens.probe.measures.intervals import FEWEST
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.reading.recorded_run import RecordedRun, absent_sentences

_FEW_DOCUMENTS = 30


@dataclass(frozen=True)
class Pair:
    """Either may be missing; a figure says what it needs.

    Raises:
        InputError: both are missing, or a recording is on the wrong side.

    Examples:
        >>> pair = vl.Pair(vl.open("run.vlens"))  # or Pair(looped, baseline)
        >>> pair.warnings()[-1]
        "No Baseline's recording was given: what compares the two models is left out."
    """

    looped: RecordedRun | None
    baseline: RecordedRun | None = None

    def __post_init__(self) -> None:
        if self.looped is None and self.baseline is None:
            raise InputError("expected a looped recording, its Baseline's, or both; got neither")
        if self.looped is not None and not self.looped.looped:
            raise InputError(
                f"{self.looped.name}: expected a looped model's recording, got an unlooped one; give it as the Baseline"
            )
        if self.baseline is not None and self.baseline.looped:
            raise InputError(
                f"{self.baseline.name}: expected an unlooped Baseline's recording, got a looped one; give it as the looped model"
            )

    def need_looped(self, what: str) -> RecordedRun:
        """The looped recording.

        Raises:
            InputError: there is none.
        """
        if self.looped is None:
            raise InputError(
                f"{what} compares visits and needs a looped model's recording; only an unlooped Baseline's was given"
            )
        return self.looped

    def from_baseline(self, read: Callable[[RecordedRun], StatArray]) -> tuple[StatArray | None, str]:
        """What `read` takes from the Baseline; or None and why it is missing."""
        if self.baseline is None:
            return None, "no Baseline recording was given"
        try:
            return read(self.baseline), ""
        except RecordingError:
            return None, "the Baseline's recording doesn't hold this measure"

    def describe(self) -> dict[str, Any]:
        """JSON-ready: what each model is, by side."""
        sides = {"looped": self.looped, "baseline": self.baseline}
        return {side: None if run is None else describe(run) for side, run in sides.items()}

    def warnings(self) -> list[str]:
        """What a reader of the numbers must know, in sentences."""
        found = [warning for run in (self.looped, self.baseline) if run is not None for warning in _run_warnings(run)]
        if self.looped is None or self.baseline is None:
            missing = "looped model's" if self.looped is None else "Baseline's"
            return [*found, f"No {missing} recording was given: what compares the two models is left out."]
        if self.looped.provenance["data_sha256"] != self.baseline.provenance["data_sha256"]:
            found.append("The two recordings are of different documents: compare them with care.")
        return found


def describe(run: RecordedRun) -> dict[str, Any]:
    """JSON-ready: identity, geometry and extent of one recording; None where the model's configuration doesn't say."""
    recording, config = run.recording, run.recording.config
    geometry = {
        name: config.get(name)
        for name in ("hidden_size", "num_heads", "num_kv_heads", "num_experts", "experts_per_token")
    }
    return {
        "name": run.name,
        **run.provenance,
        **geometry,
        "layers": [step.layer for step in run.plan.steps],
        "looped_layers": list(run.plan.looped_layers),
        "visits": max(run.plan.visits.values()),
        "documents": recording.documents,
        "tokens": recording.tokens,
        "tokens_planned": recording.run["tokens"],
        "complete": recording.complete,
        "level": recording.level,
        **{name: recording.provenance.get(name) for name in ("checkpoint", "text", "created")},
    }


def first_and_last(run: RecordedRun) -> list[int]:
    """The two visits that figures compare by default."""
    pair = run.plan.visit_pairs()[0]
    return [pair.earlier.visit, pair.later.visit]


def _run_warnings(run: RecordedRun) -> list[str]:
    recording = run.recording
    found = []
    if any("random weights" in str(value).lower() for value in recording.provenance.values()):
        found.append(f"{run.name}: the weights are random, not trained; its numbers say nothing about a trained model.")
    if not recording.complete:
        found.append(
            f"{run.name}: incomplete, {recording.tokens:,} of {recording.run['tokens']:,} tokens are recorded."
        )
    if not run.provenance["weights_sha256"]:
        found.append(f"{run.name}: the recording doesn't say which weights it is of.")
    if recording.documents < _FEW_DOCUMENTS:
        found.append(
            f"{run.name}: {recording.documents} documents are few: "
            + (
                "there are no intervals."
                if recording.documents < FEWEST
                else "intervals of skewed values are too narrow."
            )
        )
    found += [f"{run.name}: {sentence}." for sentence in absent_sentences(run)]
    for name, totals in recording.totals.items():
        if lost := int(totals.non_finite.sum()):
            found.append(f"{run.name}: {lost:,} values of {name} were NaN or infinite and are left out.")
    return found

"""The numbers that stand for a whole run: one scalar each, what it is compared with, the paper's range. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from visitlens.errors import VisitlensError
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.reading.recorded_run import RecordedRun
from visitlens.probe.reading.two_visits import two_visits

Visits = tuple[int, int] | None


def _nothing(run: RecordedRun, visits: Visits) -> float | None:
    return None


def _one(run: RecordedRun, visits: Visits) -> float | None:
    return 1.0


@dataclass(frozen=True)
class Headline:
    """`value` is a mean over looped layers; `against` what it is compared with; `page` and `metric` where it is taken apart.

    `paper` is what SMELT prints for its own models; `paper_range` the same as bounds, where it prints such.
    """

    key: str
    short: str
    title: str
    unit: str
    paper: str
    page: str
    code: str
    value: Callable[[RecordedRun, Visits], StatArray]
    against_is: str = ""
    against: Callable[[RecordedRun, Visits], float | None] = _nothing
    metric: str = ""
    paper_range: tuple[float, float] | None = None


def value_of(item: Headline, run: RecordedRun, visits: Visits = None) -> StatArray | None:
    """None where the run doesn't hold it."""
    try:
        return item.value(run, visits)
    except VisitlensError:
        return None


def place_in_range(item: Headline, value: float) -> str:
    """Where a value lies: "in the paper's range", "below" or "above" it; "" where the paper gives none."""
    if item.paper_range is None or value != value:
        return ""
    low, high = item.paper_range
    return "below it" if value < low else "above it" if value > high else "in this range"


def headlines() -> tuple[Headline, ...]:
    return _HEADLINES


def headline(key: str) -> Headline:
    """By key; the first where there is none of that key."""
    return next((item for item in _HEADLINES if item.key == key), _HEADLINES[0])


def _sink_change(run: RecordedRun, visits: Visits) -> StatArray:
    difference = two_visits(run, "sink_mass", visits).mean("head", "layer").difference
    assert difference is not None
    return difference


def _attended(name: str) -> Callable[[RecordedRun, Visits], StatArray]:
    return lambda run, visits: run.attended(name, visits).mean("head").mean("layer")


def _attended_control(name: str) -> Callable[[RecordedRun, Visits], float | None]:
    def control(run: RecordedRun, visits: Visits) -> float | None:
        try:
            return float(run.attended_control(name, visits).mean("head").mean("layer").values)
        except VisitlensError:
            return None

    return control


def _other_layers(run: RecordedRun, visits: Visits) -> float | None:
    other = run.update_cosine_other_layers(visits)
    return float(other.mean("layer_pair").values) if other.values.size else None


def _ratio(component: str, words: str, key: str) -> Headline:
    return Headline(
        key,
        f"{words} ratio",
        f"{words[0].upper()}{words[1:]}: later visit over earlier",
        "ratio",
        "1.2 to 3.5",
        "/residual",
        f"rec.norm_ratio({component!r}).mean('layer')",
        lambda run, visits: run.norm_ratio(component, visits).mean("layer"),
        "no change",
        _one,
        paper_range=(1.2, 3.5),
    )


_HEADLINES = (
    Headline(
        "expert-overlap",
        "expert overlap",
        "Expert overlap between two visits",
        "share of k",
        "near 1 at S = 0, 0.25 to 0.4 at S ≈ 97%",
        "/routing",
        "rec.expert_overlap().mean('layer')",
        lambda run, visits: run.expert_overlap(visits).mean("layer"),
        "chance",
        lambda run, visits: run.expert_overlap_chance(),
    ),
    Headline(
        "update-cosine",
        "update cosine",
        "Update cosine, same layer at two visits",
        "cosine",
        "0.42 to 0.65 at 1.6B",
        "/residual",
        "rec.update_cosine_same_layer().mean('layer')",
        lambda run, visits: run.update_cosine_same_layer(visits).mean("layer"),
        "other layers",
        _other_layers,
        paper_range=(0.42, 0.65),
    ),
    _ratio("update", "update norm", "update"),
    _ratio("attn_write", "attention write", "attn-write"),
    _ratio("moe_write", "MoE write", "moe-write"),
    Headline(
        "top8-overlap",
        "top-8 key overlap",
        "Overlap of a head's top-8 keys between two visits",
        "share of 8",
        "0.56 to 0.66 at S = 85%",
        "/heads",
        "rec.attended('top8_overlap').mean('head').mean('layer')",
        _attended("top8_overlap"),
        "other head",
        _attended_control("top8_overlap"),
        "top8_overlap",
        (0.56, 0.66),
    ),
    Headline(
        "mass-overlap",
        "attention mass overlap",
        "Overlap of a head's attention mass between two visits",
        "share of mass",
        "drawn, not printed",
        "/heads",
        "rec.attended('mass_overlap').mean('head').mean('layer')",
        _attended("mass_overlap"),
        "other head",
        _attended_control("mass_overlap"),
        "mass_overlap",
    ),
    Headline(
        "sink-change",
        "sink mass change",
        "Attention on the segment start: later visit minus earlier",
        "share of mass",
        "lower at the later visit",
        "/heads",
        "earlier, later = rec.both_visits('sink_mass')",
        _sink_change,
        "no change",
        lambda run, visits: 0.0,
        "sink_mass",
    ),
)

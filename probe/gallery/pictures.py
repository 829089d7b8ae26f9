"""figure and figures: registered figures as Plotly pictures, for notebooks. No torch."""

from __future__ import annotations

import plotly.graph_objects as go

from visitlens.probe.drawing.theme import find_theme
from visitlens.probe.gallery.figure import find
from visitlens.probe.gallery.write_figures import prepare, warn
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.pair_grid import PairGrid
from visitlens.probe.reading.recorded_run import RecordedRun

Source = RecordedRun | Pair | PairGrid


def figure(name: str, source: Source, baseline: RecordedRun | None = None, *, theme: str = "light") -> go.Figure:
    """One figure of a recording, a pair or a grid.

    Args:
        name: its slug (`sink-heads`), or the paper's number (`html:28`, `pdf:19a`).
        source: a looped model's recording, a `Pair`, or a grid of pairs.
        baseline: the unlooped Baseline's recording to compare with, where `source` is a recording.
        theme: light, dark, paper or paper-dark.

    Raises:
        InputError: no such figure or theme, or no looped recording.
        RecordingError: the recording doesn't hold a measure that the figure draws.

    Examples:
        >>> vl.figure("sink-heads", vl.open("run.vlens")).layout.title.text
        '<b>Attention on the segment start by head</b>'
    """
    chosen, drawn = find_theme(theme), find(name)
    return drawn.draw(drawn.data(_source(source, baseline)), chosen)


def figures(source: Source, baseline: RecordedRun | None = None, *, theme: str = "light") -> dict[str, go.Figure]:
    """Every figure that the recordings allow, by slug; each that is left out is a warning with the reason.

    Arguments and errors are those of `figure`.

    Examples:
        >>> sorted(vl.figures(vl.open("run.vlens")))[-2:]
        ['token-overlap', 'update-cosine']
    """
    chosen = find_theme(theme)
    return {drawing.figure.slug: drawing.plot(chosen) for drawing in prepare(_source(source, baseline), None, warn)}


def _source(source: Source, baseline: RecordedRun | None) -> Pair | PairGrid:
    return Pair(source, baseline) if isinstance(source, RecordedRun) else source

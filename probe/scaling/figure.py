"""TableFigure, one picture of a table of runs; the register, filled by the files of `probe/scaling/figures`. Torch-free."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go

from visitlens import plugins
from visitlens.errors import InputError
from visitlens.probe.drawing.series import series
from visitlens.probe.drawing.theme import Style, Theme, escape, find_theme
from visitlens.probe.gallery.write_figures import Drawing, check_formats, warn, write_drawings
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.scaling.study import Study

PAPER = "arXiv 2609.01343 v3"
CELLS = "95% percentile interval of a bootstrap over cells (scale at a sparsity level)"


class TableFigure(ABC):
    """One file in `probe/scaling/figures` holds one figure; being there is being registered.

    `paper` says where SMELT has it ("ours" where it hasn't); `needs` are the columns without which there is no figure; `pair`: it compares
    two architectures.
    """

    slug: ClassVar[str]
    paper: ClassVar[str]
    title: ClassVar[str]
    question: ClassVar[str]
    order: ClassVar[int]
    interval: ClassVar[str] = CELLS
    needs: ClassVar[tuple[str, ...]] = ()
    pair: ClassVar[bool] = False

    def data(self, study: Study) -> dict[str, Any]:
        """JSON-ready: everything that is drawn, with intervals, counts and definitions.

        Raises:
            InputError: the table lacks a column that the figure draws, or can't carry the fit it needs; says which.
        """
        if gone := [c for c in self.needs if not study.table.has(c)]:
            raise InputError(
                f"figure {self.slug} needs the column {', '.join(gone)}; {study.table.name} has none or only empty cells"
            )
        if self.pair:
            study.need_pair(f"figure {self.slug}")
        content = self.content(study)
        return self.headed(content, study.table.name, study.archs, f"{len(study.table)} rows")

    def headed(self, content: Mapping[str, Any], table: str, archs: Sequence[str], counts: str) -> dict[str, Any]:
        """What `content` gives, with title, place in the paper and counts."""
        name = Path(table).name
        paper = {} if self.paper == "ours" else {"paper": {"source": PAPER, "place": self.paper}}
        return {
            "slug": self.slug,
            "title": self.title,
            "question": self.question,
            **paper,
            "interval": self.interval,
            "sides": [],
            "models": {arch: {"name": arch, "recording": name} for arch in archs},
            "archs": list(archs),
            "counts": f"{name}: {counts}",
            "subtitle": f"{escape(name)}: {escape(content.get('counted') or counts)}",
            **content,
        }

    @abstractmethod
    def content(self, study: Study) -> dict[str, Any]:
        """`series` (name -> a drawn series), `notes` (sentences for the caption) and what else `draw` needs."""

    @abstractmethod
    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        """The picture, from `data` alone."""


@cache
def registered() -> tuple[TableFigure, ...]:
    """Every figure of `probe/scaling/figures`, in the paper's order."""
    plugins.modules("visitlens.probe.scaling.figures")
    return tuple(sorted((cls() for cls in TableFigure.__subclasses__()), key=lambda figure: figure.order))


def find(slug: str) -> TableFigure:
    """Raises InputError: no such figure; names those there are."""
    for figure in registered():
        if figure.slug == slug:
            return figure
    slugs = [figure.slug for figure in registered()]
    near = difflib.get_close_matches(slug, slugs, 1)
    raise InputError(
        f"no figure {slug!r} of a table{f', did you mean {near[0]!r}?' if near else ';'} there are {', '.join(slugs)}"
    )


def write_table_figures(
    study: Study,
    folder: str | Path,
    slugs: Iterable[str] | None = None,
    formats: Sequence[str] = ("html", "png", "svg", "json", "csv"),
    *,
    theme: str = "light",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_warning: Callable[[str], None] = warn,
) -> list[Path]:
    """Writes `SLUG.FORMAT` for each figure; as `write_figures`, of a table.

    Args:
        slugs: figures to write; None writes all that the table allows, with a warning for each other.

    Raises:
        InputError: an unknown figure, format or theme; or one that was asked for and the table doesn't allow.
        StorageError: the folder can't be written.
    """
    check_formats(formats)
    chosen = find_theme(theme)
    drawings = []
    for figure in registered() if slugs is None else dict.fromkeys(map(find, slugs)):
        try:
            drawings.append(Drawing(figure, figure.data(study)))
        except InputError as error:
            if slugs is not None:
                raise
            on_warning(f"figure {figure.slug} is left out: {error}")
    return write_drawings(drawings, folder, formats, chosen, on_progress, on_warning)


# What the figures share


@dataclass(frozen=True)
class Looks:
    """Styles by architecture, colours by scale or level."""

    theme: Theme
    archs: Sequence[str]
    names: Sequence[str] = field(default_factory=tuple)

    def arch(self, arch: str) -> Style:
        """The reference as the Baseline of every figure, the target's filled squares apart from it."""
        if arch == self.archs[0]:
            return Style(self.theme.baseline_colour, "circle-open", "dot")
        return Style(self.theme.visits[(self.archs.index(arch) - 1) % len(self.theme.visits)], "square", "solid")

    def colour(self, name: str) -> str:
        """Of a scale or level."""
        return self.theme.part(list(self.names).index(name) + 1).colour


def points(stat: StatArray, model: str, label: str, role: str = "observed", **extra: Any) -> dict[str, Any]:
    """A drawn series, with what else is drawn of each point (numbers or texts by name)."""
    return {**series(stat, model, role, label), **extra}


def hover(form: str, *columns: Sequence[Any]) -> list[str]:
    """One text a point for a hover label: `form` filled with its values; a minus sign, not a hyphen; "" where a value is missing."""
    return ["" if None in row else form.format(*row).replace("-", "−") for row in zip(*columns, strict=True)]


def numbers(values: Any) -> list[float | None]:
    """JSON-ready: None for what isn't finite."""
    return [float(v) if np.isfinite(v) else None for v in np.asarray(values, dtype=np.float64)]

"""Figure, one picture of a pair of models or a grid of them; the register, filled by the files of `probe/figures`; look-up by name. No torch."""

from __future__ import annotations

import difflib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal

import plotly.graph_objects as go

from visitlens import plugins
from visitlens.errors import InputError, RecordingError
from visitlens.probe.drawing.series import INTERVAL
from visitlens.probe.drawing.theme import Theme
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.pair_grid import Cell, PairGrid
from visitlens.probe.reading.recorded_run import RecordedRun

Over = Literal["cell", "row", "column", "grid"]
_RAGGED = (
    "Halting or routing leaves tokens out of visits: values are means over the tokens that were there, and their numbers differ "
    "(n in the table, visit_share)."
)


class Figure(ABC):
    """One file in `probe/figures` holds one figure; being there is being registered.

    `html` and `pdf` are the paper's two numberings (arXiv 2609.01343 v3), which clash; a figure that the paper doesn't have
    leaves them out. `question` is what the figure
    answers, in one sentence. `sides` are the models it draws: without the looped one there is no figure, without the
    Baseline the picture says so. `over` is what it draws of a grid: one cell, a row of scales, a column of sparsity levels,
    or all; a pair is a grid of one cell where `panels_of_a_pair` says so.

    Examples:
        >>> class Sinks(vl.Figure):
        ...     slug, title, question = "sinks", "Sinks", "How much attention rests on the segment start?"
        ...
        ...     def content(self, looped, pair):
        ...         return {"series": {}, "notes": [f"{looped.sink_mass().mean('head').mean('step').values:.0%}"]}
        ...
        ...     def draw(self, data, theme):
        ...         return go.Figure(layout_title_text=data["notes"][0])
        >>> registered = vl.register(Sinks)
        >>> vl.figure("sinks", vl.open("run.vlens")).layout.title.text
        '...%'
    """

    slug: ClassVar[str]
    html: ClassVar[str] = ""
    pdf: ClassVar[str] = ""
    title: ClassVar[str]
    question: ClassVar[str]
    sides: ClassVar[tuple[str, ...]] = ("looped",)
    over: ClassVar[Over] = "cell"
    panels_of_a_pair: ClassVar[bool] = False

    def data(self, source: Pair | PairGrid) -> dict[str, Any]:
        """JSON-ready: everything that is drawn, with intervals, counts, definitions and hashes.

        Of a grid that isn't drawn as one cell, `panels` hold a cell each: its place, the names of its series or why it is
        missing, and what `content` has besides.

        Raises:
            InputError: there is no looped recording.
            RecordingError: the looped recording doesn't hold a measure that the figure draws; of a grid, no cell does.
        """
        if isinstance(source, Pair):
            looped = source.need_looped(f"figure {self.slug!r}")
            if self.panels_of_a_pair:
                return self._panels([Cell("", "", source)], "")
            return _with_n({**self._head(), "models": source.describe(), **self.content(looped, source)})
        if self.over == "cell":
            cell = source.focus()
            assert cell.pair is not None
            found = self.data(cell.pair)
            where = f"Cell {cell.title} of the grid {source.name}."
            return {**found, "cell": cell.name, "notes": [where, *found["notes"]]}
        cells = {"row": source.row, "column": source.column, "grid": source.every_cell}[self.over]()
        return self._panels(cells, source.name)

    @abstractmethod
    def content(self, looped: RecordedRun, pair: Pair) -> dict[str, Any]:
        """`series` (name -> a drawn series), `notes` (sentences for the caption) and what else `draw` needs."""

    def panel(self, looped: RecordedRun, pair: Pair) -> dict[str, Any]:
        """As `content`, for one cell of a grid."""
        return self.content(looped, pair)

    @abstractmethod
    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        """The picture, from `data` alone: a saved JSON file can be drawn again."""

    def _head(self) -> dict[str, Any]:
        return {
            "slug": self.slug,
            "title": self.title,
            "question": self.question,
            "paper": {"source": "arXiv 2609.01343 v3", "html": self.html, "pdf": self.pdf},
            "interval": INTERVAL,
            "sides": list(self.sides),
        }

    def _panels(self, cells: Sequence[Cell], grid: str) -> dict[str, Any]:
        panels, drawn, models, notes = [], {}, {}, []
        errors: list[RecordingError | InputError] = []
        for cell in cells:
            where = {"scale": cell.scale, "level": cell.level, "title": cell.title if grid else ""}
            prefix = f"{cell.name}." if grid else ""
            missing = cell.missing
            if cell.pair is not None:
                try:
                    found = self.panel(cell.pair.need_looped(f"figure {self.slug!r}"), cell.pair)
                except (RecordingError, InputError) as error:  # InputError: layers with unequal numbers of visits
                    errors.append(error)
                    missing = str(error)
                else:
                    models |= {f"{prefix}{side}": model for side, model in cell.pair.describe().items()}
                    entries = {
                        f"{prefix}{name}": {**e, "model": f"{prefix}{e['model']}"}
                        for name, e in found.pop("series").items()
                    }
                    drawn |= entries
                    notes += [f"{cell.title}: {note}" if grid else note for note in found.pop("notes")]
                    names = {key.removeprefix(prefix): key for key in entries}
                    panels.append({**where, "absent": "", "series": names, "prefix": prefix, **found})
                    continue
            panels.append({**where, "absent": missing})
        if not drawn:
            raise errors[0] if errors else InputError(f"figure {self.slug!r}: grid {grid} has no recording there")
        gone = [f"Missing: {panel['title']} ({panel['absent']})." for panel in panels if panel["absent"]]
        sides = [key for key, model in models.items() if model is not None and key.split(".")[-1] in self.sides]
        notes = [*gone, *notes]
        found = {"panels": panels, "series": drawn, "models": models, "notes": notes}
        return _with_n({**self._head(), "sides": sides, "grid": grid, **found})


def _with_n(data: dict[str, Any]) -> dict[str, Any]:
    """Says so where the values are means over different tokens."""
    ragged = any("n" in entry for entry in data["series"].values())
    return {**data, "notes": [*data["notes"], _RAGGED]} if ragged else data


def panel_series(data: Mapping[str, Any], panel: Mapping[str, Any]) -> dict[str, Any]:
    """A panel's series by name; none where the cell is missing."""
    return {name: data["series"][key] for name, key in panel.get("series", {}).items()}


_FOLDER = "visitlens.probe.figures"


@plugins.once
def registered() -> tuple[Figure, ...]:
    """Every figure: those of `probe/figures` in the paper's order, then those that it doesn't have, then other packages'."""
    plugins.modules(_FOLDER)
    own = sorted(
        (_made(cls) for cls in Figure.__subclasses__() if cls.__module__.startswith(f"{_FOLDER}.")), key=_place
    )
    others = plugins.added("figures", _slug_of, [figure.slug for figure in own])
    return (*own, *(_made(cls) for cls in others.values()))


@cache
def _made(cls: type[Figure]) -> Figure:
    """One of each class, however often something is registered."""
    return cls()


def _place(figure: Figure) -> tuple[bool, int, str]:
    """Sorts by the paper's number, figures without one last."""
    return figure.html == "", int(re.sub(r"\D", "", figure.html) or 0), figure.slug


def _slug_of(name: str, cls: Any) -> list[str]:
    plugins.need(cls, Figure, "slug", "title", "question")
    return [cls.slug]


def numbers(figure: Figure) -> str:
    """Where the paper has it: `html:28, pdf:19a`; empty where it doesn't."""
    known = {"html": figure.html, "pdf": figure.pdf}
    return ", ".join(f"{numbering}:{number}" for numbering, number in known.items() if number)


def find(name: str) -> Figure:
    """By slug, `html:22` or `pdf:13`.

    Raises:
        InputError: a bare number, which means two figures; or no such figure.
    """
    figures = registered()
    for figure in figures:
        if name and name in (figure.slug, *numbers(figure).split(", ")):
            return figure
    slugs = [figure.slug for figure in figures]
    if re.fullmatch(r"\d+[a-z]?", name):
        raise InputError(
            f"figure {name!r} is ambiguous: the paper's HTML and PDF count figures differently; "
            f"write html:{name} or pdf:{name}, or one of {', '.join(slugs)}"
        )
    near = difflib.get_close_matches(name, slugs, 1)
    hint = f", did you mean {near[0]!r}?" if near else ";"
    known = ", ".join(f"{figure.slug} ({where})" if (where := numbers(figure)) else figure.slug for figure in figures)
    raise InputError(f"no figure {name!r}{hint} there are {known}")

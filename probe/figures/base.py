"""Figure, one picture of a pair of models; the register, filled by the files of this folder; look-up by name. No torch."""

from __future__ import annotations

import difflib
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import plotly.graph_objects as go

from visitlens.kernels.errors import InputError
from visitlens.probe import figures as _folder
from visitlens.probe.figures.pair import Pair
from visitlens.probe.figures.series import INTERVAL
from visitlens.probe.figures.theme import Theme
from visitlens.probe.opened import RecordedRun


class Figure(ABC):
    """One file in this folder holds one figure; being there is being registered.

    `html` and `pdf` are the paper's two numberings (arXiv 2609.01343 v3), which clash; `question` is what the figure
    answers, in one sentence. `sides` are the models it draws: without the looped one there is no figure, without the
    Baseline the picture says so.
    """

    slug: ClassVar[str]
    html: ClassVar[str]
    pdf: ClassVar[str]
    title: ClassVar[str]
    question: ClassVar[str]
    sides: ClassVar[tuple[str, ...]] = ("looped",)

    def data(self, pair: Pair) -> dict[str, Any]:
        """JSON-ready: everything that is drawn, with intervals, counts, definitions and hashes.

        Raises:
            InputError: there is no looped recording.
            RecordingError: the looped recording doesn't hold a measure that the figure draws.
        """
        looped = pair.need_looped(f"figure {self.slug!r}")
        return {
            "slug": self.slug,
            "title": self.title,
            "question": self.question,
            "paper": {"source": "arXiv 2609.01343 v3", "html": self.html, "pdf": self.pdf},
            "interval": INTERVAL,
            "sides": list(self.sides),
            "models": pair.describe(),
            **self.content(looped, pair),
        }

    @abstractmethod
    def content(self, looped: RecordedRun, pair: Pair) -> dict[str, Any]:
        """`series` (name -> a drawn series), `notes` (sentences for the caption) and what else `draw` needs."""

    @abstractmethod
    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure:
        """The picture, from `data` alone: a saved JSON file can be drawn again."""


@cache
def registered() -> tuple[Figure, ...]:
    """Every figure of this folder, in the paper's order."""
    for module in pkgutil.iter_modules(_folder.__path__):
        import_module(f"{_folder.__name__}.{module.name}")
    return tuple(
        sorted((cls() for cls in Figure.__subclasses__()), key=lambda figure: int(re.sub(r"\D", "", figure.html)))
    )


def find(name: str) -> Figure:
    """By slug, `html:22` or `pdf:13`.

    Raises:
        InputError: a bare number, which means two figures; or no such figure.
    """
    figures = registered()
    for figure in figures:
        if name in (figure.slug, f"html:{figure.html}", f"pdf:{figure.pdf}"):
            return figure
    slugs = [figure.slug for figure in figures]
    if re.fullmatch(r"\d+[a-z]?", name):
        raise InputError(
            f"figure {name!r} is ambiguous: the paper's HTML and PDF count figures differently; "
            f"write html:{name} or pdf:{name}, or one of {', '.join(slugs)}"
        )
    near = difflib.get_close_matches(name, slugs, 1)
    hint = f", did you mean {near[0]!r}?" if near else ";"
    numbers = ", ".join(f"{figure.slug} (html:{figure.html}, pdf:{figure.pdf})" for figure in figures)
    raise InputError(f"no figure {name!r}{hint} there are {numbers}")

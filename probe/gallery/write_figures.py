"""Writes figures to files: interactive HTML that works offline, pictures, the drawn data as JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Protocol

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from visitlens.errors import InputError, RecordingError, StorageError, UnavailableError
from visitlens.probe.drawing import page
from visitlens.probe.drawing.images import IMAGE_FORMATS, render
from visitlens.probe.drawing.series import csv_rows
from visitlens.probe.drawing.theme import Theme, find_theme
from visitlens.probe.gallery.figure import find, registered
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.pair_grid import PairGrid

FORMATS = ("html", *IMAGE_FORMATS, "json", "csv")
Progress = Callable[[int, int], None]
Warn = Callable[[str], None]


class Drawable(Protocol):
    """A registered figure: of recordings, or of a table of runs."""

    slug: ClassVar[str]
    title: ClassVar[str]
    question: ClassVar[str]

    def draw(self, data: Mapping[str, Any], theme: Theme) -> go.Figure: ...


@dataclass(frozen=True)
class Drawing:
    """A figure and the data that it draws; each theme's picture is drawn once, when it is needed."""

    figure: Drawable
    data: Mapping[str, Any]
    _plots: dict[str, go.Figure] = field(default_factory=dict, repr=False, compare=False)

    def plot(self, theme: Theme) -> go.Figure:
        if theme.name not in self._plots:
            self._plots[theme.name] = self.figure.draw(self.data, theme)
        return self._plots[theme.name]


def warn(message: str) -> None:
    """What `on_warning` does if the caller doesn't say."""
    warnings.warn(message, stacklevel=3)


def write_figures(
    source: Pair | PairGrid,
    folder: str | Path,
    slugs: Iterable[str] | None = None,
    formats: Sequence[str] = ("html", "png", "svg", "json", "csv"),
    *,
    theme: str = "light",
    on_progress: Progress = lambda done, total: None,
    on_warning: Warn = warn,
) -> list[Path]:
    """Writes `SLUG.FORMAT` for each figure; returns what was written.

    Args:
        slugs: figures to write, as `find` takes them; None writes all that the recordings allow.
        formats: among html, png, svg, pdf, json, csv. Without a Chromium the pictures are left out, with one warning.
        theme: light, dark, paper or paper-dark.
        on_progress: called with the number of files done and the number wanted.

    Raises:
        InputError: an unknown figure, format or theme, or no looped recording.
        RecordingError: a figure that was asked for needs a measure that isn't recorded.
        StorageError: the folder can't be written.

    Examples:
        >>> pair = vl.Pair(vl.open("run.vlens"))
        >>> [path.name for path in vl.write_figures(pair, "figures", ["sink-heads"], formats=["json", "csv"])]
        ['sink-heads.json', 'sink-heads.csv']
    """
    check_formats(formats)
    chosen = find_theme(theme)
    return write_drawings(prepare(source, slugs, on_warning), folder, formats, chosen, on_progress, on_warning)


def prepare(source: Pair | PairGrid, slugs: Iterable[str] | None, on_warning: Warn) -> list[Drawing]:
    """The figures and their data; those that the recordings don't allow are left out with a warning, unless asked for."""
    if isinstance(source, Pair):
        source.need_looped("every figure")
    if slugs is not None:
        return [Drawing(figure, figure.data(source)) for figure in dict.fromkeys(map(find, slugs))]
    drawings = []
    for figure in registered():
        try:
            drawings.append(Drawing(figure, figure.data(source)))
        except (RecordingError, InputError) as error:  # InputError: layers with unequal numbers of visits
            on_warning(f"figure {figure.slug} is left out: {error}")
    return drawings


def write_drawings(
    drawings: Sequence[Drawing],
    folder: str | Path,
    formats: Sequence[str],
    theme: Theme,
    on_progress: Progress,
    on_warning: Warn,
) -> list[Path]:
    """As `write_figures`, from prepared data."""
    folder = Path(folder)
    written, total = [], len(drawings) * len(formats)

    def put(name: str, content: str | bytes) -> None:
        written.append(write_file(folder / name, content))
        on_progress(len(written), total)

    if "html" in formats:
        write_plotly_js(folder)
    texts = [format_ for format_ in formats if format_ not in IMAGE_FORMATS]
    pictures = [format_ for format_ in formats if format_ in IMAGE_FORMATS]
    for drawing, format_ in product(drawings, texts):
        put(f"{drawing.figure.slug}.{format_}", _text(drawing, format_, theme))
    jobs = list(product(drawings, pictures))
    try:
        images = render([(drawing.plot(theme), format_) for drawing, format_ in jobs])
        for (drawing, format_), image in zip(jobs, images, strict=True):
            put(f"{drawing.figure.slug}.{format_}", image)
    except UnavailableError as error:
        on_warning(f"pictures are left out: {error}")
    return written


def check_formats(formats: Sequence[str]) -> None:
    """Raises InputError: an unknown format."""
    if unknown := [format_ for format_ in formats if format_ not in FORMATS]:
        raise InputError(f"expected formats among {', '.join(FORMATS)}, got {', '.join(map(repr, unknown))}")


def write_plotly_js(folder: Path) -> None:
    """One copy of plotly.js for all pages of a folder."""
    write_file(folder / page.PLOTLY_JS, get_plotlyjs())


def write_file(path: Path, content: str | bytes) -> Path:
    """Whole or not at all: written beside its place, then moved there.

    Raises:
        StorageError: no room or no permission.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StorageError(f"{path}: can't be written ({error})") from error
    return path


def json_text(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _text(drawing: Drawing, format_: str, theme: Theme) -> str:
    if format_ == "html":
        return page.single(drawing.data, drawing.plot(theme), theme.scheme)
    return json_text(drawing.data) if format_ == "json" else _csv(csv_rows(drawing.data))


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()

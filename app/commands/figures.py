"""`visitlens figures`: draw figures from recordings."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from visitlens.app.terminal.console import Theme, comma_separated, progress_shown, warnings_once
from visitlens.errors import InputError


def figures(
    recordings: Annotated[
        list[str] | None,
        typer.Argument(
            help="A folder with grid.json; or a looped model's recording and its Baseline's; or several of each; s3://... too."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the files.")] = Path("figures"),
    only: Annotated[str, typer.Option(help="Comma-separated slugs, html:N or pdf:N; all by default.")] = "",
    formats: Annotated[
        str, typer.Option(help="Comma-separated: html, png, svg, pdf, json, csv.")
    ] = "html,png,svg,json",
    scales: Annotated[str, typer.Option(help="Of a grid: comma-separated scales; all by default.")] = "",
    levels: Annotated[str, typer.Option(help="Of a grid: comma-separated sparsity levels; all by default.")] = "",
    theme: Annotated[Theme, typer.Option(help="Colours.")] = Theme.light,
    list_: Annotated[bool, typer.Option("--list", help="List the figures and where the paper has them.")] = False,
) -> None:
    """Draw figures from recordings: of a pair, or of a grid's row, column or all of it."""
    from visitlens.probe.gallery.figure import registered
    from visitlens.probe.gallery.write_figures import write_figures
    from visitlens.probe.reading.pair_grid import pair_grid

    if list_:
        for figure in registered():
            html, pdf = (f"{k}:{v}" if v else "" for k, v in (("html", figure.html), ("pdf", figure.pdf)))
            typer.echo(f"{figure.slug:<18} {html:<9} {pdf:<8} {figure.title}")
        return
    if not recordings:
        raise InputError("name a recording: visitlens figures LOOPED.vlens [BASELINE.vlens] --out FOLDER")
    source = pair_grid(recordings, scales=comma_separated(scales), levels=comma_separated(levels))
    with progress_shown() as show, warnings_once():
        written = write_figures(
            source,
            out,
            slugs=comma_separated(only) or None,
            formats=comma_separated(formats),
            theme=theme.value,
            on_progress=partial(show, "drawing"),
        )
    for file in written:
        typer.echo(file)

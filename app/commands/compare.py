"""`visitlens compare`: two recordings, the same statistics side by side."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from visitlens.app.terminal.console import Theme, comma_separated, plain


class By(StrEnum):
    mean = "mean"
    layer = "layer"
    step = "step"


def compare(
    a: Annotated[str, typer.Argument(help="A recording: a folder, or s3://... .")],
    b: Annotated[str, typer.Argument(help="Another; differences are this one minus the first.")],
    by: Annotated[
        By, typer.Option(help="One row a measure, a physical layer, or an execution step (layer·visit).")
    ] = By.mean,
    measures: Annotated[str, typer.Option(help="Comma-separated; all that both hold by default.")] = "",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    figure: Annotated[
        Path | None, typer.Option(help="Also draw it: a file ending in .html, .png, .svg or .pdf.")
    ] = None,
    theme: Annotated[Theme, typer.Option(help="Colours of the figure.")] = Theme.light,
) -> None:
    """Compare two recordings, with differences and their 95% intervals."""
    from visitlens.probe.drawing.series import aligned, digits
    from visitlens.probe.reading.recorded_run import open_recording
    from visitlens.probe.report.compare import compare as run
    from visitlens.probe.report.compare import comparison_data, write_comparison

    first, second = open_recording(a), open_recording(b)
    data = comparison_data(first, second, run(first, second, by.value, comma_separated(measures)), by.value)
    if figure is not None:
        write_comparison(data, figure, theme.value)
    if json_:
        typer.echo(json.dumps(data, indent=1, ensure_ascii=False))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("measure", "place", "unit", plain(first.name), plain(second.name), "difference", "95% interval"):
        table.add_column(name, justify="left" if name in ("measure", "place", "unit") else "right", no_wrap=True)
    for row in data["rows"]:
        a_, b_, difference = ("–" if row[key] is None else digits(row[key]) for key in ("a", "b", "difference"))
        interval = "–"
        if row["low"] is not None:
            difference, *bounds = aligned(row["difference"], row["low"], row["high"])
            interval = " to ".join(bounds)
        table.add_row(plain(row["measure"]), plain(row["place"]), row["unit"], a_, b_, difference, interval)
    Console(highlight=False, width=None if Console().is_terminal else 160).print(table)
    typer.echo(data["interval"])

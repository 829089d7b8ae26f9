"""`visitlens reproduce`: record a pair, draw the figures, write the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visitlens.app.console import Theme, console, loading, progress_bar, warnings_once
from visitlens.kernels.errors import InputError


def reproduce(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for recordings, figures and the report.")] = Path(
        "out"
    ),
    looped: Annotated[
        Path | None, typer.Option(help="Checkpoint of a looped model; the bundled one by default.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Checkpoint of its Baseline; the bundled one by default.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text; the bundled held-out sample by default.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Stop after the context in which this token falls.")] = None,
    theme: Annotated[Theme, typer.Option(help="Colours.")] = Theme.light,
) -> None:
    """Record a pair of models on the same text, draw the figures and write report.html."""
    from visitlens.probe.bundled import PAIR, SAMPLE, check_assets

    if looped is None and baseline is None:
        check_assets()
        checkpoints = PAIR
    elif looped is not None and baseline is not None:
        checkpoints = {"looped": looped, "baseline": baseline}
    else:
        raise InputError("give both --looped and --baseline, or neither")
    with loading("torch"):
        from visitlens.hooks.recorder import RecordingOptions
        from visitlens.probe.reproduce import record_all
        from visitlens.probe.run import RunRequest
    requests = {
        name: RunRequest(
            checkpoint=folder,
            text=text or SAMPLE,
            out=out / f"{name}.vlens",
            options=RecordingOptions(level="tokens"),
            max_tokens=max_tokens,
        )
        for name, folder in checkpoints.items()
    }
    with progress_bar() as progress, warnings_once():
        tasks = {name: progress.add_task(f"recording {name}", total=None) for name in requests}
        paths = record_all(
            requests, lambda name, done, total: progress.update(tasks[name], completed=done, total=total)
        )
        from visitlens.probe.figures.pair import Pair
        from visitlens.probe.opened import open as open_recording
        from visitlens.probe.report import write_report

        drawing = progress.add_task("drawing", total=None)
        report = write_report(
            Pair(open_recording(paths["looped"]), open_recording(paths["baseline"])),
            out / "report",
            formats=("html", "png", "svg", "json", "csv"),
            theme=theme.value,
            on_progress=lambda done, total: progress.update(drawing, completed=done, total=total),
        )
    console.print("\nDone. Open:", style="bold")
    typer.echo(f"{report}\n{paths['looped']}\n{paths['baseline']}")

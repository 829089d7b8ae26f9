"""`visitlens reproduce`: record a pair or a grid of pairs, ablate heads, draw the figures, write the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visitlens.app.terminal.console import Theme, comma_separated, console, plain, progress_shown, warnings_once
from visitlens.app.terminal.option_groups import TrustRemoteCode
from visitlens.errors import InputError


def reproduce(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for recordings, figures and the report.")] = Path(
        "out"
    ),
    grid: Annotated[
        Path | None, typer.Option(help="Folder with the grid.json of a grid of checkpoints (`visitlens ladder train`).")
    ] = None,
    looped: Annotated[
        Path | None, typer.Option(help="Checkpoint of a looped model; the bundled one by default.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Checkpoint of its Baseline; the bundled one by default.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text; the bundled held-out sample by default.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Stop after the context in which this token falls.")] = None,
    prompts: Annotated[int, typer.Option(min=0, help="Dyck prompts for head ablation; 0 leaves it out.")] = 32,
    scales: Annotated[str, typer.Option(help="Of a grid: comma-separated scales; all by default.")] = "",
    levels: Annotated[str, typer.Option(help="Of a grid: comma-separated sparsity levels; all by default.")] = "",
    trust_remote_code: TrustRemoteCode = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; as many as cores and memory allow by default.")
    ] = None,
    formats: Annotated[str, typer.Option(help="Files beside the report: html, png, svg, pdf, json, csv.")] = (
        "html,png,svg,json,csv"
    ),
    theme: Annotated[Theme, typer.Option(help="Colours.")] = Theme.light,
) -> None:
    """Record models on the same text, find what their heads are for, draw every figure and write report.html.

    What is done already isn't done again; what fails is told, and the rest goes on.
    """
    from visitlens.probe.model.bundled import PAIR, SAMPLE, check_assets
    from visitlens.probe.reading.grid import Grid, of_pair, selected
    from visitlens.probe.report.reproduce import ReproduceRequest
    from visitlens.probe.report.reproduce import reproduce as run

    if grid is not None and (looped is not None or baseline is not None):
        raise InputError("give --grid, or --looped and --baseline, not both")
    if grid is not None and out.resolve() == (grid if grid.is_dir() else grid.parent).resolve():
        raise InputError(f"{out} holds the grid of checkpoints: choose another --out")
    if (looped is None) != (baseline is None):
        raise InputError("give both --looped and --baseline, or neither")
    if grid is not None:
        checkpoints = selected(Grid.read(grid), comma_separated(scales), comma_separated(levels))
    elif looped is not None:
        checkpoints = of_pair(looped, baseline)
    else:
        check_assets()
        checkpoints = of_pair(PAIR["looped"], PAIR["baseline"])
    request = ReproduceRequest(
        grid=checkpoints,
        out=out,
        text=text or SAMPLE,
        max_tokens=max_tokens,
        prompts=prompts,
        theme=theme.value,
        formats=comma_separated(formats),
        workers=workers,
        trust_remote_code=trust_remote_code,
    )
    with progress_shown() as show, warnings_once():
        result = run(request, show)
    if not result.ran and not result.drawn:
        console.print("Nothing to do: all of it is there already.")
    for name in result.ran:
        failure = result.failures.get(name)
        told = f"[bold red]failed:[/] {plain(failure)}" if failure else f"{result.seconds[name]:.0f} CPU-seconds"
        console.print(f"{plain(name):<24} {told}")
    for name, note in result.notes.items():
        console.print(f"[yellow]note:[/] {plain(name)}: {plain(note)}")
    console.print("\nDone. Open:" if not result.failures else "\nDone, but not all. Open:", style="bold")
    typer.echo(result.report)
    for cell in result.recordings.cells:
        for path in (cell.looped, cell.baseline):
            if path is not None:
                typer.echo(path)
    console.print(f"The recordings in the browser: visitlens app {plain(str(out))}")
    if result.failures:
        raise typer.Exit(1)

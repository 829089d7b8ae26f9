"""`visitlens export`: a statistic or activations of a recording as Parquet, CSV, NPZ or safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    recording: Annotated[str, typer.Argument(help="A recording: a folder, or s3://... .")],
    what: Annotated[
        str,
        typer.Argument(
            help="A measure (visitlens info --measures), expert_overlap ..., tokens, experts, or a site: Q, resid ..."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="NAME.parquet, .csv, .npz or .safetensors.")],
    per_token: Annotated[bool, typer.Option("--per-token", help="A measure's value for each token.")] = False,
    layer: Annotated[int | None, typer.Option(help="0-based; for experts and sites.")] = None,
    visit: Annotated[int | None, typer.Option(help="1-based; for experts and sites.")] = None,
    head: Annotated[int | None, typer.Option(help="One head of a site.")] = None,
    tokens: Annotated[str, typer.Option(help="START:STOP, ordinals of tokens in the recording.")] = "",
) -> None:
    """Write a statistic with its intervals, per-token values, or activations to a file; its ending says which kind."""
    from visitlens.app.terminal.console import token_bounds
    from visitlens.probe.reading.recorded_run import open_recording
    from visitlens.probe.report.export import choose, write

    chosen = choose(
        open_recording(recording),
        what,
        per_token=per_token,
        layer=layer,
        visit=visit,
        head=head,
        tokens=token_bounds(tokens),
    )
    typer.echo(write(chosen, out))

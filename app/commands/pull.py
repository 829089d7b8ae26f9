"""`visitlens pull`: a recording from an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pull(
    url: Annotated[str, typer.Argument(help="s3://bucket/run.vlens, or what else fsspec reads.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The recording; its name there by default.")] = None,
) -> None:
    """Download a recording, checking everything in it; nothing appears unless all of it is right."""
    from visitlens.hooks.recording.maintain.pull import pull as download

    typer.echo(download(url, out or Path(url.rstrip("/").rpartition("/")[2])))

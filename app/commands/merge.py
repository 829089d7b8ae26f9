"""`visitlens merge`: recordings of the same model and options as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def merge(
    recordings: Annotated[
        list[str], typer.Argument(help="Two recordings or more, of one configuration: folders, or s3://... .")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The merged recording.")],
    allow_duplicates: Annotated[
        bool, typer.Option("--allow-duplicates", help="Count a document that several of them hold each time.")
    ] = False,
) -> None:
    """Merge recordings of one configuration: parts of one run, or runs over different text."""
    from visitlens.hooks.recording.maintain.merge import merge as join

    typer.echo(join(recordings, out, allow_duplicates=allow_duplicates))

"""`visitlens repair`: manifest and summary anew from the shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visitlens.app.terminal.console import console, counted, plain


def repair(
    path: Annotated[Path, typer.Argument(help="A recording.")],
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Rename damaged shards to NAME.damaged; recording again fills the gap.")
    ] = False,
) -> None:
    """Rebuild manifest and summary from the shards, which are the truth."""
    from visitlens.hooks.recording.format.untrusted import printable
    from visitlens.hooks.recording.maintain.validate import repair as rebuild

    report = rebuild(path, set_aside=set_aside)
    for note in report.notes:
        console.print(f"[cyan]note:[/] {plain(printable(note))}", soft_wrap=True)
    typer.echo(f"{path}: rebuilt from {counted(report.shards, 'shard')}, {counted(report.tokens, 'token')}")

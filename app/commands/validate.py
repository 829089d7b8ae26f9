"""`visitlens validate`: whether a recording is whole and safe to read."""

from __future__ import annotations

from typing import Annotated

import typer

from visitlens.app.terminal.console import console, counted, plain


def validate(
    path: Annotated[str, typer.Argument(help="A recording, a folder or s3://... ; or a single .h5 file of one.")],
    quick: Annotated[bool, typer.Option("--quick", help="Don't read every chunk: structure, hashes, counts.")] = False,
) -> None:
    """Check a recording: every file through the gate, checksums, counts, gaps, sums, provenance.

    Exit code 0: whole. 1: damaged, or refused. 2: a wrong command line. 3: sound but unfinished.
    """
    from visitlens.hooks.recording.format.untrusted import printable
    from visitlens.hooks.recording.maintain.validate import validate as check

    report = check(path, quick=quick)
    for colour, kind, found in (
        ("red", "damage", report.damage),
        ("yellow", "unfinished", report.unfinished),
        ("cyan", "note", report.notes),
    ):
        for what in found:
            console.print(f"[{colour}]{kind}:[/] {plain(printable(what))}", soft_wrap=True)
    state = {0: "whole", 1: "damaged or refused", 3: "sound, unfinished"}[report.exit_code]
    held = (
        f"{counted(report.shards, 'sound shard')}, {counted(report.tokens, 'token')}"
        if not report.one_file
        else "one file"
    )
    typer.echo(f"{path}: {state} ({held})")
    raise typer.Exit(report.exit_code)

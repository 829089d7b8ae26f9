"""`visitlens unpack`: a packed recording as a folder again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def unpack(
    file: Annotated[Path, typer.Argument(help="What `visitlens pack` wrote.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The recording; the file's name by default.")] = None,
) -> None:
    """Unpack a packed recording, checking everything in it; nothing appears unless all of it is right."""
    from visitlens.hooks.recording.maintain.pack import SUFFIXES
    from visitlens.hooks.recording.maintain.pack import unpack as read

    name = next((file.name.removesuffix(s) for s in SUFFIXES if file.name.endswith(s)), file.name + ".vlens")
    typer.echo(read(file, out or file.with_name(name)))

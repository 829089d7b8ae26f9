"""`visitlens pack`: a recording as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pack(
    recording: Annotated[Path, typer.Argument(help="A recording.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="NAME.tar.zst, .tar.gz or .tar; beside the recording by default.")
    ] = None,
) -> None:
    """Write a recording into one file, for sharing: .tar.zst where zstandard is installed, else .tar.gz."""
    from importlib.util import find_spec

    from visitlens.hooks.pack import pack as write
    from visitlens.hooks.shards import readable_bytes

    suffix = ".tar.zst" if find_spec("zstandard") else ".tar.gz"
    written = write(recording, out or recording.with_name(recording.name + suffix))
    typer.echo(f"{written}  ({readable_bytes(written.stat().st_size)})")

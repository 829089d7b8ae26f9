"""`visitlens pack`: a recording as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pack(
    recording: Annotated[str, typer.Argument(help="A recording: a folder, or s3://... .")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="NAME.tar.zst, .tar.gz or .tar; beside the recording, or here, by default."),
    ] = None,
) -> None:
    """Write a recording into one file, for sharing: .tar.zst where zstandard is installed, else .tar.gz."""
    from importlib.util import find_spec

    from visitlens.hooks.recording.maintain.pack import pack as write
    from visitlens.hooks.recording.store.commit import readable_bytes
    from visitlens.hooks.recording.store.object_store import is_url

    suffix = ".tar.zst" if find_spec("zstandard") else ".tar.gz"
    beside = Path(recording.rstrip("/").rpartition("/")[2] if is_url(recording) else recording)
    if beside.name in ("", ".."):  # the folder that one is in
        beside = beside.resolve()
    written = write(recording, out or beside.with_name(beside.name + suffix))
    typer.echo(f"{written}  ({readable_bytes(written.stat().st_size)})")

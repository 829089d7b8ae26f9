"""`visitlens fetched`: the copies of recordings that were read at their address."""

from __future__ import annotations

from typing import Annotated

import typer


def fetched(
    addresses: Annotated[list[str] | None, typer.Argument(help="Of these alone: s3://... .")] = None,
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Those alone that weren't opened for so many days.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Delete them, save what somebody reads just now.")] = False,
) -> None:
    """List the copies of recordings that were read at s3://... , and where they lie; --clear deletes them.

    What was deleted is fetched again when it is next read.
    """
    from datetime import datetime

    from visitlens.app.terminal.console import console, counted, plain
    from visitlens.hooks.recording.format.untrusted import printable
    from visitlens.hooks.recording.store.commit import readable_bytes
    from visitlens.hooks.recording.store.fetch_cache import chosen, empty, fetched_folder, total_bytes

    found = chosen(addresses or (), older_than)
    size = readable_bytes(total_bytes(found))
    kept = [copy for copy in found if clear and not empty(copy)]
    for copy in () if clear else found:
        shards, used = counted(copy.shards, "shard"), f"{datetime.fromtimestamp(copy.used):%Y-%m-%d %H:%M}"
        typer.echo(f"{printable(copy.address)}  {readable_bytes(copy.bytes)} in {shards}, last opened {used}")
    for copy in kept:
        console.print(f"[cyan]note:[/] {plain(printable(copy.address))}: in use, left alone", soft_wrap=True)
    number = f"{len(found) - len(kept)} {'copy' if len(found) - len(kept) == 1 else 'copies'}"
    typer.echo(f"{number} deleted from {fetched_folder()}" if clear else f"{number}, {size} in {fetched_folder()}")

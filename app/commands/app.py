"""`visitlens app`: the dashboard in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visitlens.app.terminal.console import console, plain
from visitlens.app.terminal.option_groups import ReadOptions, grouped
from visitlens.errors import InputError, UnavailableError


@grouped
def app(
    recordings: Annotated[
        list[str] | None, typer.Argument(help="Recordings, folders of them, or a grid folder; s3://... too.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Checkpoint folder or hub name: for the live probe, and for token text.")
    ] = "",
    read: ReadOptions = ReadOptions(),  # noqa: B008 (frozen)
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8050,
    host: Annotated[
        str, typer.Option(help="Address to listen on; another than this machine's own needs --token.")
    ] = "127.0.0.1",
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Don't open a browser.")] = False,
    demo: Annotated[
        bool, typer.Option("--demo", help="Record the bundled models on a short text and look at them.")
    ] = False,
    prefix: Annotated[str, typer.Option(help="Path behind a proxy, such as /visitlens/.")] = "/",
    token: Annotated[str, typer.Option(help="Secret to ask for; 'auto' makes one.")] = "",
    allow_host: Annotated[list[str] | None, typer.Option(help="A name by which a proxy calls this server.")] = None,
) -> None:
    """Look at recordings in the browser.

    The live probe reads --model by the options given, and what isn't given as its recordings say.
    """
    try:
        from visitlens.app.server.server import Access, build, make_token, serve
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("dash", "dash_ag_grid", "flask", "waitress"):
            raise
        raise UnavailableError("the dashboard needs Dash: pip install 'visitlens[app]'") from error
    from visitlens.app.view.registry import Registry
    from visitlens.app.view.view import Context, checkpoint_folder

    options = read.given()
    if options and not model:
        raise InputError(f"--{next(iter(options)).replace('_', '-')} says how a model is read: give --model too")
    checkpoint = checkpoint_folder(model) if model else None
    secret = make_token() if token == "auto" else token
    access = Access(host, secret, tuple(allow_host or ()))
    places: list[Path | str] = [*(recordings or [])]
    if demo:
        from visitlens.app.server.demo import demo_recordings
        from visitlens.probe.model.bundled import PAIR

        places += demo_recordings(lambda text: console.print(plain(text)))
        checkpoint = checkpoint or PAIR["looped"]
    context = Context(Registry(places), checkpoint, clean_prefix(prefix), model_options=options)

    def ready(port: int) -> None:
        name = f"[{host}]" if ":" in host else "127.0.0.1" if host == "0.0.0.0" else host
        address = f"http://{name}:{port}{context.prefix}" + (f"?access={secret}" if secret else "")
        typer.echo(address)
        if not no_browser:
            import webbrowser

            webbrowser.open(address)

    serve(build(context, access), context, host, port, ready)


def clean_prefix(text: str) -> str:
    """With a slash at both ends.

    Raises:
        InputError: it isn't a plain path.
    """
    import re

    stripped = text.strip("/")
    if not re.fullmatch(r"[\w./~-]*", stripped) or ".." in stripped:
        raise InputError(f"expected a prefix such as /visitlens/, got {text!r}")
    return f"/{stripped}/" if stripped else "/"

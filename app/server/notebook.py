"""The dashboard inside a notebook: a server in a thread of the kernel, shown in a frame. No torch."""

from __future__ import annotations

import html
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from visitlens.app.server.server import Access, behind_prefix, build
from visitlens.app.view.registry import Registry
from visitlens.app.view.view import Context, checkpoint_folder
from visitlens.errors import InputError
from visitlens.probe.reading.recorded_run import RecordedRun

_PATIENCE = 60  # seconds, for answers


@dataclass(frozen=True)
class Embedded:
    """A running dashboard. A notebook shows it as a frame; `url` opens it in a tab, `stop()` ends it."""

    url: str
    height: int
    _server: Any
    _thread: Thread

    def stop(self) -> None:
        """Ends it once the answers under way are given; its port is free then."""
        from waitress.wasyncore import close_all

        if self._thread.is_alive():
            self._server.task_dispatcher.shutdown(timeout=_PATIENCE)
            # By the thread that waits at these sockets: closed by another one, they stay open while it waits.
            self._server.trigger.pull_trigger(partial(close_all, self._server._map, ignore_all=True))
            self._thread.join()

    def _repr_html_(self) -> str:
        style = "width: 100%; border: 1px solid #b9c1c9; border-radius: 6px"
        return (
            f'<iframe src="{html.escape(self.url)}" title="visitlens" height="{self.height}" style="{style}"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Embedded({self.url})"


def dashboard(
    *runs: RecordedRun | str | Path,
    model: str | Path | None = None,
    height: int = 820,
    proxy: str = "",
    port: int = 0,
    **options: Any,
) -> Embedded:
    """Serves recordings (at URLs too), or folders of them, from this process.

    Args:
        model: checkpoint folder or hub name, for the live probe and for token text.
        proxy: on a remote Jupyter the path under which it forwards ports, with `{port}` in it:
            `/user/me/proxy/{port}/`.
        port: 0 takes a free one.
        options: how the model is read, as of `visitlens.load`, for example `steps=8`; what isn't said is as the
            model's recordings say.

    Raises:
        InputError: a path that doesn't exist; options without a model; the port is taken or none; a field in `proxy` other than
            `{port}`.
        CheckpointError: no such checkpoint.

    Examples:
        >>> shown = vl.dashboard("run.vlens")
        >>> shown.url
        'http://127.0.0.1:...'
        >>> shown.stop()
    """
    from waitress.server import create_server

    if options and model is None:
        raise InputError(f"{', '.join(options)}: say which model is read so (model=...)")
    folder = checkpoint_folder(model) if model else None
    registry = Registry([run.recording.place if isinstance(run, RecordedRun) else run for run in runs])
    with ExitStack() as undo:
        listening = undo.enter_context(
            _listening(port)
        )  # an error gives the port back: a notebook keeps what raised it
        port = listening.getsockname()[1]
        prefix = f"/{_behind(proxy, port).strip('/')}/" if proxy else "/"
        context = Context(registry, folder, prefix, model_options=options)
        application = behind_prefix(build(context, Access(framed=True)).server, prefix)
        server: Any = create_server(application, sockets=[listening], threads=4, clear_untrusted_proxy_headers=True)
        undo.pop_all()
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    return Embedded(prefix if proxy else f"http://127.0.0.1:{port}/", height, server, thread)


def _behind(proxy: str, port: int) -> str:
    try:
        return proxy.format(port=port)
    except (LookupError, ValueError) as error:
        raise InputError(f"expected a proxy path like '/user/me/proxy/{{port}}/', got {proxy!r}") from error


def _listening(port: int) -> socket.socket:
    """At the port from now on: a free one that is only looked up may be taken by the time it is used."""
    try:
        return socket.create_server(("127.0.0.1", port), backlog=1024)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"port {port} of 127.0.0.1 can't be used ({getattr(error, 'strerror', None) or error}); 0 takes a free one"
        ) from error

"""The dashboard's server: Dash behind a guard (host, access, content policy), one process with threads. No torch."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import plotly
from dash import ClientsideFunction, Dash, Input, Output, State, no_update
from dash.exceptions import DashException
from flask import Flask, Response, jsonify, redirect, request, send_file
from werkzeug.exceptions import HTTPException

from visitlens import __version__
from visitlens.app.pages import pages
from visitlens.app.server import export, layout
from visitlens.app.view.view import Context, view_of
from visitlens.errors import InputError
from visitlens.kernels.memory import share_arenas

_log = logging.getLogger(__name__)
_LOCAL = ("127.0.0.1", "localhost")
_ASSETS = Path(__file__).parents[1] / "assets"
_COOKIE = "visitlens_access"
_NOTEBOOKS = "http://localhost:* http://127.0.0.1:* vscode-webview:"
_MOST_BYTES = 2_000_000
_PLOTLY_JS = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
_GRID_JS = re.compile(r'<script src="([^"]*/dash_ag_grid/dash_ag_grid\.[^"]*)"></script>\n?')
_YEAR = 31_536_000
_THREADS = 8
_CONNECTIONS, _SECONDS_IDLE = 500, 15
_FREE_GUESSES, _SECONDS_BETWEEN = 5, 2.0
_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="same-origin">
<link rel="icon" href="data:,">
<meta name="plotly" content="PLOTLY_JS">
<meta name="grid" content="GRID_JS">
<title>visitlens</title>
{%css%}
</head>
<body>
<!--[if IE]><script></script><![endif]-->
{%app_entry%}
<dialog id="palette" aria-label="Go to"><input id="palette-query" type="search" role="combobox" aria-expanded="true"
 aria-controls="palette-list" aria-label="Search pages, recordings, layers and measures" placeholder="Page, recording, layer, measure …" autocomplete="off" spellcheck="false">
<ul id="palette-list" role="listbox" aria-label="Results"></ul></dialog>
<footer>
{%config%}
{%scripts%}
{%renderer%}
</footer>
</body>
</html>"""


@dataclass(frozen=True)
class Access:
    """Who may look. `token` is asked for once and kept in a cookie; `hosts` are Host headers beyond the loopback's.
    `framed`: a notebook on this machine may show it in a frame."""

    host: str = "127.0.0.1"
    token: str = ""
    hosts: Sequence[str] = ()
    framed: bool = False

    def __post_init__(self) -> None:
        if not self.local and not self.token:
            raise InputError(
                f"--host {self.host} lets other machines in: set --token SECRET (or --token auto), or stay on 127.0.0.1"
            )

    @property
    def local(self) -> bool:
        return self.host in _LOCAL

    @property
    def trusted(self) -> list[str]:
        names = [*_LOCAL, *self.hosts]
        if not self.local:
            names += [self.host, socket.gethostname(), socket.getfqdn()]
        return sorted({name for name in names if name not in ("0.0.0.0", "::")})


class _Dashboard(Dash):
    def interpolate_index(self, *args: str, **parts: str) -> str:  # Dash names all of them
        """Without AG Grid's script, a third of all: grid.js fetches it for a page that has such a table."""
        scripts = parts["scripts"]
        found = _GRID_JS.search(scripts)
        parts["scripts"] = _GRID_JS.sub("", scripts)
        return super().interpolate_index(*args, **parts).replace("GRID_JS", found[1] if found else "")


def build(context: Context, access: Access | None = None) -> Dash:
    """The Dash app, ready to serve; `app.server` is its Flask app."""
    access = access or Access()
    server = Flask("visitlens")
    server.config.update(TRUSTED_HOSTS=access.trusted, MAX_CONTENT_LENGTH=_MOST_BYTES)
    app = _Dashboard(
        "visitlens",
        server=server,  # type: ignore[arg-type]  (Dash's hint forgets Flask)
        title="visitlens",
        update_title="",
        assets_folder=str(_ASSETS),
        requests_pathname_prefix=context.prefix,
        routes_pathname_prefix="/",
        serve_locally=True,
        suppress_callback_exceptions=True,
        index_string=_INDEX.replace("PLOTLY_JS", f"{context.prefix}plotly.min.js?v={plotly.__version__}"),
        enable_mcp=False,
        eager_loading=False,
    )
    app.layout = layout.frame(context)
    _guard(app, server, access, context)
    _routes(server, context)
    _callbacks(app, context)
    for page in pages():
        if register := getattr(page, "callbacks", None):
            register(app, context)
    return app


def serve(
    app: Dash, context: Context, host: str, port: int, on_ready: Callable[[int], None] = lambda port: None
) -> None:
    """Serves until interrupted; port 0 takes a free one. One process with threads: models and files live in it.

    Raises:
        InputError: the port is taken.
    """
    from waitress.server import create_server

    share_arenas()
    try:
        server: Any = create_server(
            behind_prefix(app.server, context.prefix),
            host=host,
            port=port,
            threads=_THREADS,
            connection_limit=_CONNECTIONS,  # who sends half a request and waits takes up a place for as long as this:
            channel_timeout=_SECONDS_IDLE,
            cleanup_interval=_SECONDS_IDLE // 3,
            asyncore_use_poll=True,
            ident=None,
            clear_untrusted_proxy_headers=True,
        )
    except OSError as error:
        raise InputError(
            f"port {port} of {host} can't be used ({error.strerror or error}); choose another with --port, or 0 for any"
        ) from error
    on_ready(int(server.effective_port))
    try:
        server.run()
    finally:
        server.close()


def behind_prefix(application: Any, prefix: str) -> Callable[..., Any]:
    """The same application whether a proxy takes the prefix off a path or leaves it there."""
    stem = prefix.rstrip("/")

    def wrapped(environ: dict[str, Any], start_response: Any) -> Any:
        path = environ.get("PATH_INFO", "/")
        if stem and (path == stem or path.startswith(stem + "/")):
            environ["PATH_INFO"] = path[len(stem) :] or "/"
        return application(environ, start_response)

    return wrapped


def _guard(app: Dash, server: Flask, access: Access, context: Context) -> None:
    policy: list[str] = []
    guesses, secret = _Guesses(), secrets.token_bytes(32)

    def cookie() -> tuple[str, str]:
        """Its name and value here: a browser sends cookies to every port of a machine, so that others may read this one."""
        port = request.host.rpartition(":")[2] if ":" in request.host else ""
        value = hmac.new(secret, f"{access.token} {port}".encode(), "sha256").hexdigest()
        return f"{_COOKIE}_{port}" if port.isdecimal() else _COOKIE, value

    @server.before_request
    def _ask() -> Any:
        _ = request.host  # raises for a host that isn't trusted, before anything else is answered
        if not access.token or request.path == "/health":
            return None
        given = request.args.get("access") or (request.form.get("access") if request.method == "POST" else None)
        if given is not None:
            if wait := guesses.wait(request.remote_addr or ""):
                return _login(f"Too many wrong tokens: wait {wait:.0f} seconds.", 429)
            if not hmac.compare_digest(given.encode(errors="replace"), access.token.encode()):
                guesses.wrong(request.remote_addr or "")
                return _login("That is not it.")
            response = redirect(context.prefix)
            name, value = cookie()
            response.set_cookie(name, value, httponly=True, samesite="Strict", path=context.prefix)
            return response
        name, value = cookie()
        kept = request.cookies.get(name, "")
        return None if hmac.compare_digest(kept.encode(errors="replace"), value.encode()) else _login("")

    @server.errorhandler(Exception)
    def _failed(error: Exception) -> Any:
        """A callback is asked by the page that visitlens serves; values of other types come from somebody else."""
        if isinstance(error, HTTPException):
            return error
        if request.path.endswith("/_dash-update-component") and isinstance(error, _UNEXPECTED):
            _log.warning("a request that the page doesn't make: %s: %.200s", type(error).__name__, error)
            _log.debug("where it failed", exc_info=error)
            return Response("expected what the page sends, got other names or types\n", 400, mimetype="text/plain")
        raise error

    @server.after_request
    def _headers(response: Response) -> Response:
        if not policy:  # the renderer's inline script is known at the first request, not before
            policy.append(
                f"default-src 'none'; script-src 'self' {' '.join(app.csp_hashes())}; style-src 'self' 'unsafe-inline'; "
                "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; base-uri 'none'; "
                f"form-action 'self'; worker-src blob:; frame-ancestors 'self'{' ' + _NOTEBOOKS if access.framed else ''}"
            )
        response.headers.setdefault("Content-Security-Policy", policy[0])
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "same-origin"
        response.headers["Cross-Origin-Opener-Policy"] = "same-origin"
        return response


_UNEXPECTED = (TypeError, ValueError, KeyError, IndexError, AttributeError, DashException, RecursionError)


class _Guesses:
    """How long an address has to wait after wrong tokens: nothing for the first few, so that a person may mistype."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.last, self._lock = clock, OrderedDict[str, tuple[int, float]](), Lock()

    def wait(self, address: str) -> float:
        """In seconds; 0 where the next one is looked at."""
        with self._lock:
            count, at = self.last.get(address, (0, 0.0))
        return 0.0 if count < _FREE_GUESSES else max(0.0, at + _SECONDS_BETWEEN - self.clock())

    def wrong(self, address: str) -> None:
        with self._lock:
            self.last[address] = self.last.pop(address, (0, 0.0))[0] + 1, self.clock()
            while len(self.last) > 10_000:
                self.last.popitem(last=False)


def _login(said: str, status: int = 401) -> Response:
    """The page that asks for the token."""
    page = f"""<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>visitlens</title></head><body>
<main><h1>visitlens</h1><form method="post" action=""><p>{said}</p><label>Access token <input type="password" name="access"
 autocomplete="current-password" required autofocus></label> <button>Open</button></form></main></body></html>"""
    return Response(page, status=status, mimetype="text/html")


def _routes(server: Flask, context: Context) -> None:
    @server.get("/health")
    def _health() -> Response:
        return jsonify(status="ok", version=__version__, recordings=len(context.registry.ids()))

    @server.get("/plotly.min.js")
    def _plotly() -> Response:
        response = send_file(_PLOTLY_JS, mimetype="text/javascript", conditional=True)
        response.cache_control.max_age = _YEAR  # its address has the version
        response.cache_control.public = True
        return response

    @server.get("/export/<page>/<key>.<format_>")
    def _export(page: str, key: str, format_: str) -> Response:
        return export.panel_file(context, page, key, format_, request.query_string.decode("utf-8", "replace"))

    @server.get("/snapshot/<page>.html")
    def _snapshot(page: str) -> Response:
        return export.snapshot(context, page, request.query_string.decode("utf-8", "replace"))


def _callbacks(app: Dash, context: Context) -> None:
    # An answer that comes after the next question is thrown away: while one is awaited, the watch asks nothing.
    awaited: Any = [(Output("watch", "max_intervals"), 0, -1)]

    app.clientside_callback(
        ClientsideFunction("visitlens", "request"),
        Output("request", "data"),
        Input("moves", "data"),
        Input("theme", "n_clicks"),
        Input("seen", "data"),
    )
    app.clientside_callback(
        ClientsideFunction("visitlens", "shown"),
        Output("announce", "data-shown"),
        Input("main", "children"),
        State("title", "data"),
        State("palette-entries", "data"),
        State("page-links", "data"),
    )

    @app.callback(
        Output("page-links", "data"),
        Output("bar", "children"),
        Output("main", "children"),
        Output("palette-entries", "data"),
        Output("title", "data"),
        Output("watch", "disabled"),
        Output("main", "data-version"),
        Input("request", "data"),
        prevent_initial_call=True,
        running=awaited,
    )
    def _page(asked: dict[str, str]) -> tuple[Any, ...]:
        page = layout.render(context, str(asked.get("href", "")), str(asked.get("theme", "light")))
        return page.links, page.bar, page.content, page.palette, page.title, not page.growing, page.version

    @app.callback(
        Output("seen", "data"),
        Input("watch", "n_intervals"),
        State("request", "data"),
        State("main", "data-version"),
        prevent_initial_call=True,
        running=awaited,
    )
    def _watch(_: int, asked: dict[str, str] | None, shown: str | None) -> Any:
        if not asked:
            return no_update
        from urllib.parse import urlsplit

        now = layout.version(view_of(context, "/", urlsplit(asked["href"]).query))
        return no_update if now == shown else {"version": now}


def make_token() -> str:
    """For `--token auto`."""
    return secrets.token_urlsafe(18)

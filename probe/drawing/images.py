"""Pictures (PNG, SVG, PDF) of Plotly figures by one Chromium for a whole batch. Works offline."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from queue import Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from visitlens.errors import UnavailableError

if TYPE_CHECKING:
    import plotly.graph_objects as go

IMAGE_FORMATS = ("png", "svg", "pdf")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_SECONDS = 120.0
"""For the browser to start, and for each picture; a busy machine needs many."""
_PNG_SCALE = 2
_WHOLE_PAGE = "<style>@page { margin: 0 } img { display: block }</style>"
"""A PDF's page is the picture: Kaleido prints with a white margin, over which right and bottom of the picture fall off."""


def find_browser() -> str | None:
    """`BROWSER_PATH` if set, else the system's Chromium; None leaves the search to Kaleido (it can have fetched its own)."""
    return os.environ.get("BROWSER_PATH") or next(filter(None, map(shutil.which, _BROWSERS)), None)


def can_render() -> bool:
    """Whether Kaleido and a Chromium are there, as far as can be told without starting one."""
    browser = find_browser()
    return find_spec("kaleido") is not None and browser is not None and shutil.which(browser) is not None


def render(jobs: Sequence[tuple[go.Figure, str]]) -> Iterator[bytes]:
    """One picture a job (figure, format), in order; starting the browser costs seconds, so it is started once.

    Runs in its own thread: a notebook already has an event loop in this one.

    Raises:
        UnavailableError: Kaleido or a Chromium is missing, or the Chromium failed.
    """
    if not jobs:
        return
    results: Queue[bytes | Exception] = Queue()
    stop = Event()
    thread = Thread(target=lambda: asyncio.run(_render(jobs, results, stop)), daemon=True)
    thread.start()
    try:
        for _ in jobs:
            result = results.get()
            if isinstance(result, Exception):
                raise _unavailable(result) from result
            yield result
    finally:
        stop.set()
        thread.join()


async def _render(jobs: Sequence[tuple[go.Figure, str]], results: Queue[bytes | Exception], stop: Event) -> None:
    log = logging.getLogger("choreographer")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it logs the browser's good-bye as a broken message, with a traceback
    try:
        from kaleido import Kaleido, PageGenerator

        page = PageGenerator(mathjax=False)  # it would be loaded from a CDN, and our labels hold no TeX
        page.header += _WHOLE_PAGE
        browser = Kaleido(path=find_browser(), page_generator=page, timeout=_SECONDS)
        await asyncio.wait_for(browser.open(), _SECONDS)
        try:
            for figure, format_ in jobs:
                if stop.is_set():
                    return
                options: Any = {"format": format_, "scale": _PNG_SCALE if format_ == "png" else 1}
                results.put(await browser.calc_fig(figure, options))
        finally:
            await browser.close()
    except Exception as error:  # handed to the caller's thread
        results.put(error)
    finally:
        log.setLevel(level)


def _unavailable(error: Exception) -> UnavailableError:
    if isinstance(error, ImportError):
        return UnavailableError("PNG, SVG and PDF need Kaleido: pip install 'visitlens[images]'")
    browser = find_browser()
    if browser is None or not shutil.which(browser):
        wanted = (
            f"BROWSER_PATH is {browser!r}, which can't be run"
            if browser
            else f"none of {', '.join(_BROWSERS)} is installed"
        )
        return UnavailableError(
            f"PNG, SVG and PDF need a Chromium: {wanted}; install one or set BROWSER_PATH to its path, and run this again"
        )
    return UnavailableError(f"the Chromium at {browser} couldn't draw the pictures: {error or type(error).__name__}")

"""Progress of what runs in a notebook or a terminal: shown while it lasts, gone at the end."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SECONDS = 0.2
"""Between two updates."""


@contextmanager
def progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """A `<progress>` in a notebook, rich's bar on a terminal, nothing elsewhere; call it with (done, total)."""
    if _in_notebook():
        from IPython.display import HTML, display

        handle: Any = display(HTML(""), display_id=True)
        try:
            yield _now_and_then(
                lambda done, total: handle.update(
                    HTML(f"{html.escape(name)} <progress value='{done}' max='{total}'></progress>")
                )
            )
        finally:
            handle.update(HTML(""))
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=None)
            yield _now_and_then(lambda done, total: bar.update(task, completed=done, total=total))
    else:
        yield lambda done, total: None


def _now_and_then(update: Callable[[int, int], None]) -> Callable[[int, int], None]:
    last = 0.0

    def tick(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS:
            last = time.monotonic()
            update(done, total)

    return tick


def _in_notebook() -> bool:
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    return hasattr(get_ipython(), "kernel")

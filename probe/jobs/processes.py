"""Processes beside this one that begin with torch loaded: importing it takes each longer than a small model's whole job."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from typing import Any


def context() -> BaseContext:
    """On Linux processes are forked from a server that has imported what records and trains, and done nothing else: torch's
    threads, which don't survive a fork, start at the first computation. Elsewhere each starts afresh."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    forked = _Context()
    forked.set_forkserver_preload(["visitlens.probe.jobs.prepared_run"])
    return forked


class _Process(ForkServerProcess):
    """Has the environment of who asks for it; the server's is of when the server started (devices, credentials)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Context(ForkServerContext):
    Process = _Process


def orphaned() -> bool:
    """Whether the process that asked for this one has ended."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


def end_with_parent() -> None:
    """Ends this process with the one that asked for it, however that one ends."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

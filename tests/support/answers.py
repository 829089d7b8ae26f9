"""Answers: stands between a dashboard and its browser, and keeps answers of chosen callbacks back until told otherwise."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""What has come is drawn."""
MOST = 120.0
"""Seconds that anything is waited for; only a failure takes so long."""


class Answers:
    """A WSGI application around another. The server has done its work by the time that an answer is kept back."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._changed = threading.Condition()
        self._wanted: set[str] = set()
        self._kept: list[str] = []

    def keep(self, output: str) -> None:
        """From now on, answers of the callback with this output (`main.children`) stay here."""
        with self._changed:
            self._wanted.add(output)

    def come(self, output: str, number: int = 1) -> None:
        """Waits until so many of its answers are here."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._kept.count(output) >= number, MOST), f"no answer for {output}"

    def leave(self, output: str) -> None:
        """Those to come aren't kept; those that are, stay."""
        with self._changed:
            self._wanted.discard(output)

    def pass_on(self, *outputs: str) -> None:
        """Lets those answers go, all of them unless named, and keeps no more."""
        with self._changed:
            gone = set(outputs or (*self._wanted, *self._kept))
            self._wanted -= gone
            self._kept = [output for output in self._kept if output not in gone]
            self._changed.notify_all()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if not environ.get("PATH_INFO", "").endswith("/_dash-update-component"):
            return self._application(environ, start_response)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        answer = list(self._application(environ, start_response))
        asked = json.loads(body)["output"]
        with self._changed:
            output = next((name for name in self._wanted if name in asked), None)
            if output is not None:
                self._kept.append(output)
                self._changed.notify_all()
                self._changed.wait_for(lambda: output not in self._kept, MOST)
        return answer

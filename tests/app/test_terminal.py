"""What commands print while they work."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from visitlens.app.terminal import console as terminal
from visitlens.errors import InputError


def screen(monkeypatch: pytest.MonkeyPatch, done: int) -> str:
    """What a terminal was sent by a command that got as far as `done` of 5 and then failed."""
    written = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=written, force_terminal=True, width=100))
    with pytest.raises(InputError), terminal.progress_shown() as show:
        show("heads", done, 5)
        raise InputError("no such thing")
    return written.getvalue()


def test_an_early_error_stands_alone_and_a_later_one_keeps_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    erase_line = "\x1b[2K"
    assert screen(monkeypatch, 0).rpartition("0/5")[2].count(erase_line) >= 1
    assert erase_line not in screen(monkeypatch, 2).rpartition("2/5")[2]

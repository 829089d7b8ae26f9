"""What the commands share: the console, progress, lists in options. Progress and messages go to stderr, results to stdout."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from visitlens.errors import InputError, VisitlensError

console = Console(stderr=True, highlight=False)


class Theme(StrEnum):
    light = "light"
    dark = "dark"
    paper = "paper"


def plain(text: str) -> str:
    """Without rich markup."""
    return text.replace("[", r"\[")


def counted(number: int, what: str) -> str:
    """`1 document`, `2,000 documents`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def comma_separated(text: str) -> tuple[str, ...]:
    """The parts of `a, b,c`."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


class _Lines(logging.Handler):
    """What `hooks` logs, on the console."""

    def emit(self, record: logging.LogRecord) -> None:
        console.print(plain(self.format(record)), soft_wrap=True)


@contextmanager
def log_shown() -> Iterator[None]:
    """What takes time or matters, such as files that are fetched, is said."""
    logger, lines = logging.getLogger("visitlens.hooks"), _Lines(logging.INFO)
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(lines)


@contextmanager
def loading(what: str) -> Iterator[None]:
    """A line that says what is being waited for."""
    with console.status(f"loading {what} ..."):
        yield


def progress_bar() -> Progress:
    """Spinner, bar, count and time left, on stderr."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


@contextmanager
def progress_shown() -> Iterator[Callable[[str, int, int], None]]:
    """`show(name, done, total)`: a bar each on a terminal, elsewhere a line at each quarter. Nothing before its first call, so
    that an early error stands alone."""
    progress, tasks, told = progress_bar(), dict[str, TaskID](), dict[str, int]()

    def draw(name: str, done: int, total: int) -> None:
        if name not in tasks:
            progress.start()
            tasks[name] = progress.add_task(name)
        progress.update(tasks[name], completed=done, total=total)

    def tell(name: str, done: int, total: int) -> None:
        quarter = 4 * done // max(total, 1)
        if told.get(name) != quarter:
            told[name] = quarter
            console.print(f"{plain(name)}: {done:,} of {total:,}")

    try:
        yield draw if console.is_terminal else tell
    except VisitlensError:  # bars that never moved are erased: the error stands alone
        progress.live.transient = not any(task.completed for task in progress.tasks)
        raise
    finally:
        if tasks:
            progress.stop()


@contextmanager
def warnings_once() -> Iterator[None]:
    """Python warnings as plain lines, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", UserWarning)
        yield
    for message in dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)):
        console.print(f"[yellow]warning:[/] {plain(message)}")


def token_bounds(text: str) -> tuple[int, int] | None:
    """`START:STOP`, or None for nothing."""
    if not text:
        return None
    try:
        start, stop = (int(part) for part in text.split(":"))
    except ValueError:
        raise InputError(f"expected a token range START:STOP, for example 0:4096, got {text!r}") from None
    if not 0 <= start < stop:
        raise InputError(f"expected 0 <= START < STOP, got {text!r}")
    return start, stop

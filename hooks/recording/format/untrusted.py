"""Files that may have been made by anybody: opened once, as regular files only, and JSON of bounded size. No torch."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from visitlens.errors import RecordingError

MAX_JSON_BYTES = 16 * 2**20
MAX_JSON_NODES = 1_000_000  # a byte of JSON can become 30 of Python objects


@contextmanager
def held(path: Path) -> Iterator[int]:
    """A read-only descriptor of a regular file; what is checked through it is what is read through it.

    Raises:
        RecordingError: none there, a link, a folder, a pipe or a device.
    """
    try:  # without O_NONBLOCK a pipe would wait for its writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "a symbolic link: refused" if path.is_symlink() else f"can't be read ({error.strerror})"
        raise RecordingError(f"{path}: {why}; it is missing or damaged") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RecordingError(f"{path}: expected a regular file, got a folder, a pipe or a device")
        yield descriptor
    finally:
        os.close(descriptor)


def real_folder(path: Path) -> Path:
    """Raises RecordingError where a folder inside a recording is a link to elsewhere."""
    if path.is_symlink():
        raise RecordingError(f"{path}: a symbolic link to another folder: refused")
    return path


def read_json(path: Path) -> Any:
    """The value in a JSON file of at most 16 MB.

    Raises:
        RecordingError: no regular file, too large, not JSON.
    """
    with held(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > MAX_JSON_BYTES:
            raise RecordingError(f"{path}: {size} bytes; expected JSON of at most {MAX_JSON_BYTES}")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return parse_json(file.read(MAX_JSON_BYTES + 1), str(path))


def parse_json(data: bytes, where: str) -> Any:
    """JSON of bounded size and depth, without NaN and infinities.

    Raises:
        RecordingError: it isn't.
    """
    if len(data) > MAX_JSON_BYTES or sum(map(data.count, (b"[", b"{", b","))) > MAX_JSON_NODES:
        raise RecordingError(f"{where}: JSON with more than {MAX_JSON_NODES:,} values or {MAX_JSON_BYTES:,} bytes")
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # ValueError: JSON, UTF-8, integers of thousands of digits
        raise RecordingError(f"{where}: not readable JSON ({error!s:.200})") from error


def printable(text: object) -> str:
    """One line for a terminal: control and escape characters, with which a file could rewrite the screen, shown as codes."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(text))


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")

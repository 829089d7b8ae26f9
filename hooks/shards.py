"""Committing files so that nothing acknowledged is lost: build in memory, write aside, fsync, rename, fsync the folder.

The rename is the commit. Writing HDF5 straight to a full disk can crash the process, and HDF5 itself never syncs.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from visitlens.kernels.errors import StorageError

_SPARE_BYTES = 16 * 2**20  # room left for the manifest and the file system's own needs


def commit(path: Path, data: bytes | memoryview) -> str:
    """Writes `path` atomically and durably; returns the SHA-256 of its bytes.

    Raises:
        StorageError: no room or no permission; what was there before is untouched.
    """
    check_room(path.parent, len(data))
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")  # two attempts at a shard never share a file
    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(lambda: hashlib.sha256(data).hexdigest())  # while the disk is at work
        _write_aside(path, partial, data)
        return digest.result()


def _write_aside(path: Path, partial: Path, data: bytes | memoryview) -> None:
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with open(descriptor, "wb") as file:  # noqa: PTH123 (a descriptor, not a path)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise storage_error(error, path) from error


def commit_json(path: Path, value: Mapping[str, Any]) -> None:
    commit(path, (json.dumps(value, indent=1) + "\n").encode())


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_room(folder: Path, needed: int) -> None:
    """Raises StorageError unless the disk has `needed` bytes and some to spare."""
    free = shutil.disk_usage(folder).free
    if free < needed + _SPARE_BYTES:
        raise StorageError(
            errno.ENOSPC,
            f"{folder}: {readable_bytes(needed)} to write, {readable_bytes(free)} free. Free some space and run the same "
            "command again: it goes on where it stopped",
        )


@contextmanager
def sole_writer(folder: Path, name: str = "writer") -> Iterator[None]:
    """Holds a lock of the recording: `writer` for who plans and commits it, `wNN` for a worker process.

    Raises:
        StorageError: another process holds it, or the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"{name}.lock").open("w")
    except OSError as error:
        raise storage_error(error, folder) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(
                errno.EAGAIN, f"{folder}: another process is writing this recording; wait for it or choose another path"
            ) from error
        yield


def wait_for_workers(folder: Path, seconds: float = 60) -> None:
    """Until no worker of a run whose driver died holds its lock: it may be about to commit a shard.

    Raises:
        StorageError: one still does.
    """
    deadline = time.monotonic() + seconds
    for lock in sorted(folder.glob("w[0-9]*.lock")):
        while True:
            try:
                with sole_writer(folder, lock.stem):
                    break
            except StorageError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def storage_error(error: OSError, path: Path) -> StorageError:
    hint = (
        " Free some space and run the same command again: it goes on where it stopped"
        if error.errno == errno.ENOSPC
        else ""
    )
    return StorageError(error.errno, f"{path}: {error.strerror}.{hint}")


def readable_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"

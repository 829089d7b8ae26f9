"""Committing files so that nothing acknowledged is lost: write aside, fsync, rename, fsync the folder.

The rename is the commit. HDF5 writes through `Aside`: left to itself it never syncs, and a full disk can crash the process.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from visitlens.errors import StorageError

_log = logging.getLogger(__name__)
_SPARE_BYTES = 16 * 2**20  # room left for the manifest and the file system's own needs


class Aside:
    """The file that is to become `path`, written by HDF5 (`h5py.File(aside, "w")`) or by `write`.

    HDF5 can crash the process where a disk refuses its data. So the first error is kept and all writing after it dropped:
    HDF5 ends in peace, and `committing` raises then. `size` and `sha256` are known once it is committed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size, self.sha256 = 0, ""
        self.error: OSError | None = None
        self._position = 0
        self.partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")  # two attempts never share a file
        self._descriptor = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        at = self._position
        while len(view) and self.error is None:
            try:
                written = os.pwrite(self._descriptor, view, at)
                view, at = view[written:], at + written
            except OSError as error:
                self.error = error
        self._position += memoryview(data).nbytes
        self.size = max(self.size, self._position)
        return memoryview(data).nbytes

    def read(self, count: int) -> bytes:
        return os.pread(self._descriptor, count, self._position)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def truncate(self, size: int) -> None:
        self.size = size
        if self.error is None:
            try:
                os.ftruncate(self._descriptor, size)
            except OSError as error:
                self.error = error

    def flush(self) -> None:
        """Nothing waits here; `commit` syncs."""

    def commit(self) -> None:
        """The disk has it, under its name."""
        if self.error is not None:
            raise self.error
        with ThreadPoolExecutor(1) as pool:
            digest = pool.submit(self._digest)  # while the disk is at work
            os.fsync(self._descriptor)
            self.sha256 = digest.result()
        self.partial.rename(self.path)
        sync_folder(self.path.parent)

    def _digest(self) -> str:
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()

    def close(self) -> None:
        os.close(self._descriptor)
        self.partial.unlink(missing_ok=True)


@contextmanager
def committing(path: Path, about: int) -> Iterator[Aside]:
    """A file that is at `path`, whole and durable, once the block has ended; `about` how many bytes will be written.

    Raises:
        StorageError: no room or no permission; what was there before is untouched.
    """
    check_room(path.parent, about)
    try:
        aside = Aside(path)
    except OSError as error:
        raise storage_error(error, path) from error
    try:
        try:
            yield aside
        except Exception as error:
            raise aside.error or error from error  # what came of the disk's refusal isn't the reason
        aside.commit()
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, path) from error
    finally:
        aside.close()


def commit(path: Path, data: bytes | memoryview) -> str:
    """Writes `path` atomically and durably; returns the SHA-256 of its bytes.

    Raises:
        StorageError: no room or no permission; what was there before is untouched.
    """
    with committing(path, len(data)) as aside:
        aside.write(data)
    return aside.sha256


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
            "command again: a recording goes on where it stopped",
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
        except OSError as error:  # ENOLCK, EOPNOTSUPP: some network disks
            if name == "writer":
                _log.warning(
                    "%s: this disk has no file locks (%s). Recording goes on; make sure that no second process writes here",
                    *(folder, error.strerror),
                )
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
        " Free some space and run the same command again: a recording goes on where it stopped"
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

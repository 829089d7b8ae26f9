"""The objects under a URL: read, put, listed by name. No torch.

A PUT is atomic, and one that asks for it puts only where nothing is (`If-None-Match: *` on S3). Any file system that fsspec knows
will do, so long as it can create exclusively; credentials and endpoints are its own affair (`AWS_ENDPOINT_URL`,
`FSSPEC_S3_KEY`, ~/.config/fsspec).
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from visitlens.errors import InputError, StorageError, UnavailableError

PULL_FIRST = "expected a folder, got an address in an object store; `visitlens pull` it first"
_FINAL = {errno.EAGAIN, errno.EEXIST, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOSPC}
"""What doesn't get better by waiting."""
_LOOK = 0.1
"""Seconds between two looks at whether to stop waiting."""
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


def is_url(place: str | Path) -> bool:
    """Whether it names an object store rather than a folder."""
    return "://" in str(place)


def was_url(path: Path) -> bool:
    """Whether a path was made of a URL: pathlib makes one slash of two."""
    return re.match(r"[a-z][a-z0-9+.-]+:/", str(path)) is not None and not path.exists()


class ObjectStore:
    """The objects under a URL, by their names below it.

    Raises:
        UnavailableError: fsspec, or its package for this kind of URL, isn't installed.
        StorageError: from every call, whatever the store says.
    """

    patience = 60.0
    """Seconds for which `outlast` goes on trying."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            import fsspec

            self.files, self.root = fsspec.url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:
            raise UnavailableError(f"{url}: {error}; pip install 'visitlens[cloud]' has S3") from error
        except ValueError as error:
            raise InputError(f"{url}: {error}") from error

    def sizes(self) -> dict[str, int]:
        """Name -> bytes of every object."""
        found = self._try(lambda: self.files.find(self.root, detail=True), missing={})
        return {name[len(self.root) :].lstrip("/"): int(about["size"]) for name, about in found.items()}

    def get(self, name: str, most: int | None = None) -> bytes | None:
        """An object's bytes (no more than `most`); None where there is none."""
        return self._try(lambda: self.files.cat_file(f"{self.root}/{name}", end=most), missing=None)

    def put(self, name: str, data: bytes, *, new: bool = False) -> bool:
        """Whether it is there now; `new`: only where there was none of that name."""
        path, mode = f"{self.root}/{name}", "create" if new else "overwrite"
        try:
            self._try(lambda: self.files.pipe_file(path, data, mode=mode))
        except FileExistsError:
            return False
        return True

    def download(self, name: str, target: Path) -> None:
        """The object as a file, synced."""
        path = f"{self.root}/{name}"
        self._try(lambda: self.files.get_file(path, str(target)))
        with target.open("rb") as file:
            os.fsync(file.fileno())

    def delete(self, name: str) -> None:
        self._try(lambda: self.files.rm_file(f"{self.root}/{name}"), missing=None)

    def outlast(self, call: Callable[[], _Result], stopped: Callable[[], object] = lambda: False) -> _Result:
        """What a call gives that may be made again, tried for `patience` seconds while the store fails: a run of hours outlasts a
        short outage. Once `stopped` says so, it isn't waited for any more.

        Raises:
            StorageError: it failed for longer, or for a reason that waiting doesn't mend (another writer, no permission).
        """
        deadline, pause = time.monotonic() + self.patience, self.patience / 60
        while True:
            try:
                return call()
            except StorageError as error:
                if error.errno in _FINAL or stopped() or time.monotonic() + pause > deadline:
                    raise
                _log.info("%s; trying again in %.0f s", error.strerror, pause)
                again = time.monotonic() + pause
                while (left := again - time.monotonic()) > 0:
                    if stopped():
                        raise
                    time.sleep(min(left, _LOOK))
            pause = min(2 * pause, self.patience / 6)

    def _try(self, call: Callable[[], _Result], **otherwise: Any) -> _Result:
        """What the call gives; `missing` where there is no such object."""
        try:
            return call()
        except FileNotFoundError as error:
            if "missing" in otherwise:
                return otherwise["missing"]
            raise StorageError(errno.ENOENT, f"{self.url}: {error}") from error
        except FileExistsError:
            raise
        except PermissionError as error:  # s3fs' have no number
            raise StorageError(errno.EACCES, f"{self.url}: {error}") from error
        except Exception as error:  # each kind of store has its own
            raise StorageError(getattr(error, "errno", None) or errno.EIO, f"{self.url}: {error}") from error

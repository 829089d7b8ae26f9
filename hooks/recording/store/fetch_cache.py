"""The copies of recordings that were fetched from object stores: who uses one, what there is, and emptying it. No torch.

fetched/PLACE/STATE/NAME/   manifest, summary and shards of one state of the recording at an address (`fetched.py`)
fetched/PLACE/STATE/address the address; locked by who reads the copy, and as old as its last use

Emptying takes files of these names alone, of copies that nobody reads.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from visitlens.errors import InputError, StorageError
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.store.commit import storage_error

ADDRESS = "address"
_TRIES = 100
_HASH = re.compile(r"[0-9a-f]{16}")
_TEMPORARY = r"(\.[0-9a-f]{8}\.tmp){0,2}"
_HEAD = re.compile(rf"({re.escape(schema.MANIFEST)}|{re.escape(schema.SUMMARY)}){_TEMPORARY}")
_SHARD = re.compile(rf"w[0-9]{{2,4}}-[0-9]{{6,12}}\.h5{_TEMPORARY}")


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/visitlens`, by default below the home folder.

    Raises:
        StorageError: there is neither.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "visitlens"
    except RuntimeError:  # a container's user without a name
        raise StorageError(
            errno.ENOENT, "expected a home folder to keep copies in, found none; set XDG_CACHE_HOME to a folder"
        ) from None


def fetched_folder() -> Path:
    """Where the copies lie."""
    return cache_folder() / "fetched"


class InUse:
    """A copy (its folder STATE) is there and isn't emptied for as long as this lives.

    Raises:
        StorageError: the folder can't be made.
    """

    def __init__(self, state: Path, address: str) -> None:
        self.state, self.address = state, address
        tries_left = _TRIES
        while True:
            tries_left -= 1
            try:
                state.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(state / ADDRESS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            except OSError as error:
                if error.errno == errno.ENOENT and tries_left:
                    continue  # emptied in between
                if error.errno in (errno.EACCES, errno.EROFS) and state.is_dir():
                    return  # what can only be read isn't emptied either
                raise storage_error(error, state) from error
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_at(descriptor, state / ADDRESS) or not tries_left:
                break
            os.close(descriptor)
        weakref.finalize(self, os.close, descriptor)
        with suppress(OSError):
            os.pwrite(descriptor, address.encode(), 0)

    def __reduce__(self) -> tuple[type[InUse], tuple[Path, str]]:
        return type(self), (self.state, self.address)  # a copy in another process holds it itself


@dataclass(frozen=True)
class Copy:
    """One state of the recording at an address: its `bytes`, its shards here, and when it was last opened (seconds since 1970)."""

    address: str
    state: Path
    bytes: int
    shards: int
    used: float


def copies() -> list[Copy]:
    """What there is, the latest used last."""
    return sorted(filter(None, map(_copy, _states())), key=lambda copy: copy.used)


def chosen(addresses: Iterable[str] = (), older_than: float | None = None) -> list[Copy]:
    """The copies of these addresses (all, without any) that nobody opened for so many days.

    Raises:
        InputError: there is none of an address.
    """
    found, wanted = copies(), [address.rstrip("/") for address in addresses]
    if unknown := [address for address in wanted if all(copy.address != address for copy in found)]:
        raise InputError(f"{unknown[0]}: no copy of it is here; `visitlens fetched` lists them")
    now, days = time.time(), older_than or 0.0
    return [c for c in found if (not wanted or c.address in wanted) and now - c.used >= days * 86_400]


def empty(copy: Copy) -> bool:
    """Deletes a copy's files; whether it could: False, and nothing is touched, while somebody reads it.

    Raises:
        StorageError: a file can't be deleted.
    """
    try:
        descriptor = os.open(copy.state / ADDRESS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except FileNotFoundError:
        return True  # somebody else emptied it
    except OSError as error:
        raise storage_error(error, copy.state) from error
    try:
        if not _locked(descriptor):
            return False
        if _is_at(descriptor, copy.state / ADDRESS):
            inside = [*_folders(copy.state)]
            for file in (*(file for file, _ in _files(copy.state)), copy.state / ADDRESS):
                file.unlink(missing_ok=True)
            for folder in (*reversed(inside), copy.state, copy.state.parent):
                with suppress(OSError):  # what isn't ours is in it
                    folder.rmdir()
    except OSError as error:
        raise storage_error(error, copy.state) from error
    finally:
        os.close(descriptor)
    return True


def total_bytes(found: Iterable[Copy]) -> int:
    """On the disk: states of a recording share the shards that they have in common."""
    return sum({(s.st_dev, s.st_ino): s.st_size for copy in found for _, s in _files(copy.state)}.values())


def _states() -> Iterator[Path]:
    for place in _below(fetched_folder()):
        if _HASH.fullmatch(place.name):
            yield from (state for state in _below(place) if _HASH.fullmatch(state.name))


def _copy(state: Path) -> Copy | None:
    """None where there is none any longer."""
    try:
        address = (state / ADDRESS).read_text(encoding="utf-8", errors="replace")
        files, used = [*_files(state)], (state / ADDRESS).stat().st_mtime
        shards = sum(file.parent.name == schema.SHARDS for file, _ in files)
        return Copy(address, state, sum(about.st_size for _, about in files), shards, used)
    except OSError:
        return None


def _folders(state: Path) -> Iterator[Path]:
    """NAME, and its shards."""
    for folder in _below(state):
        yield folder
        yield from (inner for inner in _below(folder) if inner.name == schema.SHARDS)


def _files(state: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Those that are visitlens' own, by name and kind; no link is followed."""
    for folder in _folders(state):
        pattern = _HEAD if folder.parent == state else _SHARD
        for file in _listed(folder):
            if file.is_file(follow_symlinks=False) and pattern.fullmatch(file.name):
                with suppress(FileNotFoundError):  # a download that has just got its name
                    yield Path(file.path), file.stat(follow_symlinks=False)


def _below(folder: Path) -> list[Path]:
    """Real folders in a folder; none where it is gone."""
    return [Path(entry.path) for entry in _listed(folder) if entry.is_dir(follow_symlinks=False)]


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False


def _locked(descriptor: int) -> bool:
    """Whether nobody else has the copy now, and nobody gets it until the descriptor is closed."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False

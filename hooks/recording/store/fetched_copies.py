"""A recording in an object store, read: manifest and summary are fetched when it is opened, a shard when it is first read. No torch.

What is fetched lies in `$XDG_CACHE_HOME/visitlens/fetched`, by the URL and by the manifest's hash, so a copy never mixes two states of
a recording; `fetch_cache.py` says what there is and empties it. Every file has the bytes that the manifest says, and passes the gate as any other.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from visitlens.errors import RecordingError
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.format.gate import MAX_UNPACKED, passed
from visitlens.hooks.recording.format.untrusted import MAX_JSON_BYTES, parse_json
from visitlens.hooks.recording.store.commit import check_room, commit, readable_bytes, storage_error
from visitlens.hooks.recording.store.fetch_cache import InUse, fetched_folder
from visitlens.hooks.recording.store.object_store import ObjectStore

_TRIES = 3  # while a writer replaces summary and manifest
_log = logging.getLogger(__name__)


class Fetched:
    """The local copy of the recording at a URL: `folder`, with manifest and summary now and each shard once it is asked for.

    Raises:
        RecordingError: no recording there.
        StorageError: what the store or the disk says.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        manifest = self._fetch_head()
        for _ in range(_TRIES):
            if self._of_one_moment(manifest):
                break
            time.sleep(0.2)
            manifest = self._fetch_head(again=True)  # in the end as it is: its writer died between the two

    @cached_property
    def store(self) -> ObjectStore:
        return ObjectStore(self.url)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Name -> bytes of each object, when first asked for."""
        return self.store.sizes()

    def size(self, name: str) -> int | None:
        """A shard's bytes in the store; None where it is missing."""
        return self.sizes.get(f"{schema.SHARDS}/{name}")

    def has(self, name: str) -> bool:
        """Whether a shard is here."""
        return (self.folder / schema.SHARDS / name).is_file()

    def fetch(self, shard: Mapping[str, Any]) -> None:
        """The shard of a manifest's entry is here now: what is here already, in a copy of an earlier state too, isn't fetched.

        Raises:
            RecordingError: it is missing in the store, or isn't what the manifest says.
        """
        name, target = shard["name"], self.folder / schema.SHARDS / shard["name"]
        if target.is_file():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        for state in self.folder.parents[1].iterdir():
            with suppress(OSError):  # not there, or a file system without links
                other = state / self.folder.name / schema.SHARDS / name
                if other.stat().st_size == shard["bytes"] and _sha256(other) == shard["sha256"]:
                    os.link(other, target)
                    return
        check_room(target.parent, shard["bytes"])
        download(self.store, shard, target, self.sizes)
        _log.info("%s/%s/%s: %s fetched", self.url, schema.SHARDS, name, readable_bytes(shard["bytes"]))

    def _fetch_head(self, *, again: bool = False) -> dict[str, Any]:
        """Manifest and summary, those that are here already only `again`; sets `folder`."""
        data = self.store.get(schema.MANIFEST, MAX_JSON_BYTES + 1)
        if data is None:
            raise RecordingError(f"{self.url}: no recording there; expected {schema.MANIFEST}")
        manifest = parse_json(data, f"{self.url}/{schema.MANIFEST}")
        place, state = (hashlib.sha256(part).hexdigest()[:16] for part in (self.url.encode(), data))
        name = self.url.rpartition("/")[2]
        self.folder = fetched_folder() / place / state / (name if name.strip(".") else "run")
        self.in_use = InUse(self.folder.parent, self.url)
        if (self.folder / schema.MANIFEST).is_file() and not again:
            return manifest
        try:
            (self.folder / schema.SHARDS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(error, self.folder) from error
        summary = self.store.get(schema.SUMMARY, MAX_UNPACKED)
        for file, content in ((schema.SUMMARY, summary), (schema.MANIFEST, data)):
            if content is not None and again:
                commit(self.folder / file, content)
            elif content is not None:
                commit(partial := _beside(self.folder / file), content)
                _put_first(partial, self.folder / file)
        size = readable_bytes(len(data) + len(summary or b""))
        _log.info(
            "%s: %s of manifest and summary fetched into %s; shards follow when read", self.url, size, self.folder
        )
        return manifest

    def _of_one_moment(self, manifest: dict[str, Any]) -> bool:
        """Whether manifest and summary count the same; so too where one can't be read, which the reader will say."""
        try:
            shards = manifest["shards"]
            counted = (sum(shard["token_count"] for shard in shards), len(shards))
            with passed(self.folder / schema.SUMMARY) as gated:
                numbers = schema.read_numbers(gated.file, schema.SUMMARY_NUMBERS, gated.where)
        except (RecordingError, KeyError, TypeError):
            return True
        return (numbers["token_count"], numbers["shard_count"]) == counted


def download_head(store: ObjectStore, folder: Path, sizes: Mapping[str, int]) -> None:
    """Manifest and summary, as far as they are among the store's objects, which have `sizes`, into a folder.

    Raises:
        RecordingError: one is larger than a reader takes.
    """
    for name, most in ((schema.MANIFEST, MAX_JSON_BYTES), (schema.SUMMARY, MAX_UNPACKED)):
        if (size := sizes.get(name)) is None:
            continue
        if size > most:
            raise RecordingError(f"{store.url}/{name}: {size:,} bytes; expected at most {most:,}")
        check_room(folder, size)
        store.download(name, folder / name)


def download(store: ObjectStore, shard: Mapping[str, Any], target: Path, sizes: Mapping[str, int]) -> None:
    """A manifest's shard as a file; nothing is at `target` unless it is what the manifest says.

    Raises:
        RecordingError: it isn't, or is missing in the store, whose objects have `sizes`.
    """
    size = sizes.get(f"{schema.SHARDS}/{shard['name']}")
    if size != shard["bytes"]:
        raise RecordingError(
            f"{store.url}/{schema.SHARDS}/{shard['name']}: {size or 'no'} bytes, the manifest says {shard['bytes']}: missing or damaged"
        )
    partial = _beside(target)
    try:
        store.download(f"{schema.SHARDS}/{shard['name']}", partial)
        if _sha256(partial) != shard["sha256"]:
            raise RecordingError(
                f"{store.url}/{schema.SHARDS}/{shard['name']}: has another hash than its manifest says: damaged"
            )
        _put_first(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _beside(target: Path) -> Path:
    """A name of its own for what is to become `target`."""
    return target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")


def _put_first(partial: Path, target: Path) -> None:
    """Gives a file its name, unless somebody else's is there already: HDF5 doesn't open a file that is replaced meanwhile."""
    try:
        os.link(partial, target)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        partial.rename(target)
    partial.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""A recording in an object store: the same files under a URL, put there whole, with a lease instead of a lock. No torch.

A PUT is atomic, so it is the commit. Shards are built in a scratch folder of whoever computes them and put under their names
only where nothing is yet (`If-None-Match: *` on S3): nobody overwrites a shard. Summary and manifest follow, as on a disk. Any
file system that fsspec knows will do, so long as it can create exclusively; credentials and endpoints are its own
affair (`AWS_ENDPOINT_URL`, `FSSPEC_S3_KEY`, ~/.config/fsspec).
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np

from visitlens.hooks import schema
from visitlens.hooks.gate import passed
from visitlens.hooks.ledger import Ledger, Shard, check_hashes, read_shard
from visitlens.hooks.recording import SHARD_NAME, Recording, read_manifest
from visitlens.hooks.shards import check_room, sync_folder
from visitlens.hooks.untrusted import MAX_JSON_BYTES
from visitlens.kernels.errors import InputError, RecordingError, StorageError, UnavailableError

LEASE = "writer.lease"
_Result = TypeVar("_Result")


def is_url(place: str | Path) -> bool:
    """Whether it names an object store rather than a folder."""
    return "://" in str(place)


class ObjectStore:
    """The objects under a URL, by their names below it.

    Raises:
        UnavailableError: fsspec, or its package for this kind of URL, isn't installed.
        StorageError: from every call, whatever the store says.
    """

    beat = 20.0
    """Seconds between two signs of life of a writer; one that gives none for four of them is taken for dead."""

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

    def put_shard(self, file: Path, shard: Shard) -> Shard:
        """Commits a shard's file; where one of its name is there already (an attempt that was thought lost), that one.

        Raises:
            StorageError: what is there is of another run or of other tokens.
        """
        name = f"{schema.SHARDS}/{file.name}"
        if self.put(name, file.read_bytes(), new=True):
            return shard
        with TemporaryDirectory(prefix="visitlens-") as folder:
            self.download(name, Path(folder) / file.name)
            there = read_shard(Path(folder) / file.name)
        same = ("token_start", "token_count", "context_start", "context_count")
        if there.run["run_uuid"] != shard.run["run_uuid"] or any(there.entry[k] != shard.entry[k] for k in same):
            raise StorageError(errno.EEXIST, f"{self.url}/{name}: another writer has put it there")
        return there

    @contextmanager
    def lease(self) -> Iterator[Callable[[], None]]:
        """Sole writer for as long as the block lasts; the callable raises StorageError once that is no longer so."""
        owner, lost, ended = secrets.token_hex(8), threading.Event(), threading.Event()

        def sign(beat: int) -> bytes:
            return json.dumps({"owner": owner, "host": socket.gethostname(), "beat": beat}).encode()

        if not self.put(LEASE, sign(0), new=True):
            self._wait_for_the_dead(owner, sign(0))

        def go_on() -> None:
            beat = 0
            while not ended.wait(self.beat):
                beat += 1
                with suppress(StorageError):  # the next one may get through
                    if self._owner() != owner:
                        lost.set()
                        return
                    self.put(LEASE, sign(beat))

        def check() -> None:
            if lost.is_set():
                raise StorageError(errno.EAGAIN, f"{self.url}: another process has taken this recording over")

        thread = threading.Thread(target=go_on, daemon=True, name="visitlens-lease")
        thread.start()
        try:
            yield check
        finally:
            ended.set()
            thread.join()
            if not lost.is_set() and self._owner() == owner:
                self.delete(LEASE)

    def _wait_for_the_dead(self, owner: str, sign: bytes) -> None:
        """Takes over a lease that shows no life; clocks are never compared."""
        before, deadline = self.get(LEASE), time.monotonic() + 4 * self.beat
        while time.monotonic() < deadline:
            time.sleep(self.beat / 4)
            now = self.get(LEASE)
            if now is None and self.put(LEASE, sign, new=True):
                return
            if now != before:
                raise StorageError(
                    errno.EAGAIN,
                    f"{self.url}: another process is writing this recording ({(now or b'').decode()[:200]})",
                )
        self.put(LEASE, sign)
        time.sleep(self.beat / 4)  # of several that took it over, the last one has it
        if self._owner() != owner:
            raise StorageError(errno.EAGAIN, f"{self.url}: another process is writing this recording")

    def _owner(self) -> str | None:
        data = self.get(LEASE)
        with suppress(ValueError):
            return json.loads(data or b"{}").get("owner")
        return None

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
        except Exception as error:  # each kind of store has its own
            raise StorageError(getattr(error, "errno", None) or errno.EIO, f"{self.url}: {error}") from error


class RemoteLedger(Ledger):
    """The state of a recording in an object store; `path` is a scratch folder, where no shard stays."""

    def __init__(self, store: ObjectStore, check_lease: Callable[[], None], *state: Any) -> None:
        super().__init__(*state)
        self.store, self.check_lease = store, check_lease

    def refuse_foreign(self) -> None:
        """Raises RecordingError where the URL holds something else."""
        for name in self.store.sizes():
            shard = name.startswith(f"{schema.SHARDS}/") and SHARD_NAME.fullmatch(name.split("/", 1)[1])
            if not shard and name not in (schema.MANIFEST, schema.SUMMARY, LEASE):
                raise RecordingError(f"{self.store.url}: no recording (holds {name[:80]}); choose another place")

    def resume(self) -> None:
        """Takes over what is committed: shards that the manifest lists by it and the summary, which hold their hashes and sums;
        those that it doesn't know yet are read."""
        (self.path / schema.SHARDS).mkdir(exist_ok=True)
        prefix = f"{schema.SHARDS}/"
        sizes = {n.removeprefix(prefix): size for n, size in self.store.sizes().items() if n.startswith(prefix)}
        listed = self._from_caches(sizes)
        for name in sorted(sizes.keys() - listed):
            file = self.path / schema.SHARDS / name
            self.store.download(f"{prefix}{name}", file)
            shard = read_shard(file)
            file.unlink()
            self._same_run(shard.run)
            self.take(shard)
        if self.shards and sizes.keys() != listed:
            self.commit()

    def _from_caches(self, sizes: dict[str, int]) -> set[str]:
        """The names of shards that manifest and summary speak for."""
        for name in (schema.MANIFEST, schema.SUMMARY):
            data = self.store.get(name, MAX_JSON_BYTES + 1 if name == schema.MANIFEST else None)
            if data is None:
                return set()
            (self.path / name).write_bytes(data)
        manifest = read_manifest(self.path)
        for entry in manifest["shards"]:
            if sizes.get(entry["name"]) != entry["bytes"]:
                raise RecordingError(
                    f"{self.store.url}/{schema.SHARDS}/{entry['name']}: expected {entry['bytes']} bytes, got {sizes.get(entry['name'])}; "
                    "restore it, or pull the recording and repair it"
                )
        with passed(self.path / schema.SUMMARY) as gated:
            numbers = schema.read_numbers(gated.file, schema.SUMMARY_NUMBERS, gated.where)
            totals, documents = schema.read_totals(gated), schema.read_documents(gated)
        tokens = sum(entry["token_count"] for entry in manifest["shards"])
        if (numbers["shard_count"], numbers["token_count"]) != (len(manifest["shards"]), tokens):
            return set()  # its writer died between the two: the shards say
        self._same_run(manifest["run"])
        for entry in manifest["shards"]:
            self.take(Shard(entry, manifest["run"], {}, np.empty(0, np.uint64)))
        self.totals, self.documents = totals, documents
        return {entry["name"] for entry in manifest["shards"]}

    def commit(self) -> None:
        """Summary, then manifest, if this is still the sole writer."""
        self.check_lease()
        super().commit()
        for name in (schema.SUMMARY, schema.MANIFEST):
            self.store.put(name, (self.path / name).read_bytes())


def pull(url: str, out: Path) -> Path:
    """Downloads a recording; nothing appears at `out` unless all of it passes the gate and has its hashes.

    Raises:
        RecordingError: no recording there, or damaged.
        InputError: `out` exists.
        StorageError: what the store says, or no room.
    """
    if out.exists():
        raise InputError(f"{out}: exists; choose another path")
    store = ObjectStore(url)
    sizes = store.sizes()
    if schema.MANIFEST not in sizes:
        raise RecordingError(f"{url}: no recording there; expected {schema.MANIFEST}")
    partial = out.with_name(out.name + ".pulling")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / schema.SHARDS).mkdir(parents=True)
        store.download(schema.MANIFEST, partial / schema.MANIFEST)
        names = [f"{schema.SHARDS}/{shard['name']}" for shard in read_manifest(partial)["shards"]]
        check_room(partial, sum(sizes.get(name, 0) for name in names))
        for name in (schema.SUMMARY, *names):
            store.download(name, partial / name)
        recording = Recording(partial)
        _ = recording.totals
        recording.each_shard(lambda gated, shard: None)
        check_hashes(recording.path, recording.shards)
        partial.rename(out)
        sync_folder(out.absolute().parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out

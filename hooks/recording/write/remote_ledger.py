"""A recording that is written into an object store: the same files under a URL, put there whole. No torch.

Shards are built in a scratch folder of whoever computes them, and put under their names only where nothing is yet: nobody
overwrites a shard. Summary and manifest follow, as on a disk.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from visitlens.errors import RecordingError, StorageError
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.format.gate import passed
from visitlens.hooks.recording.format.totals import read_totals
from visitlens.hooks.recording.format.untrusted import MAX_JSON_BYTES
from visitlens.hooks.recording.read.recording import SHARD_NAME, read_manifest
from visitlens.hooks.recording.store.lease import LEASE, Lease
from visitlens.hooks.recording.store.object_store import ObjectStore
from visitlens.hooks.recording.write.ledger import Ledger, Shard, in_groups_of, read_shard


def put_shard(store: ObjectStore, file: Path, shard: Shard) -> Shard:
    """Commits a shard's file; where one of its name is there already (an attempt that was thought lost), that one.

    Raises:
        StorageError: what is there is of another run or of other tokens.
    """
    name = f"{schema.SHARDS}/{file.name}"
    if store.put(name, file.read_bytes(), new=True):
        return shard
    with TemporaryDirectory(prefix="visitlens-") as folder:
        store.download(name, Path(folder) / file.name)
        there = read_shard(Path(folder) / file.name)
    same = ("token_start", "token_count", "context_start", "context_count")
    if there.run["run_uuid"] != shard.run["run_uuid"] or any(there.entry[k] != shard.entry[k] for k in same):
        raise StorageError(errno.EEXIST, f"{store.url}/{name}: another writer has put it there")
    return there


class RemoteLedger(Ledger):
    """The state of a recording in an object store; `path` is a scratch folder, where no shard stays."""

    def __init__(self, store: ObjectStore, lease: Lease, *state: Any) -> None:
        super().__init__(*state)
        self.store, self.lease = store, lease

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
            totals, documents = read_totals(gated), schema.read_documents(gated)
        tokens = sum(entry["token_count"] for entry in manifest["shards"])
        if (numbers["shard_count"], numbers["token_count"]) != (len(manifest["shards"]), tokens):
            return set()  # its writer died between the two: the shards say
        self._same_run(manifest["run"])
        for entry in manifest["shards"]:
            self.take(Shard(entry, manifest["run"], {}, np.empty(0, np.uint64)))
        self.totals, self.documents = in_groups_of(self.run, manifest["run"], totals), documents
        return {entry["name"] for entry in manifest["shards"]}

    def commit(self) -> None:
        """Summary, then manifest, if this is still the sole writer."""
        super().commit()
        self.store.outlast(self._put_caches, self.stopped)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Where the store fails for good, or until Ctrl-C, the error also says what is kept."""
        try:
            yield
        except StorageError as error:
            if error.errno in (
                errno.EAGAIN,
                errno.EEXIST,
                errno.ENOSPC,
            ):  # another writer is there, or the disk here is full
                raise
            kept = f"{self.tokens:,} tokens are committed there and stay; the same command goes on from them"
            if self.stopped():
                raise KeyboardInterrupt(f"stopped while the store failed ({error.strerror}). {kept}") from error
            raise StorageError(error.errno, f"{error.strerror}. {kept}") from error

    def _put_caches(self) -> None:
        self.lease.check()
        for name in (schema.SUMMARY, schema.MANIFEST):
            self.store.put(name, (self.path / name).read_bytes())

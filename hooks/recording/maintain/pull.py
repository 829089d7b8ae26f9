"""A recording out of an object store, whole, as a folder. No torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from visitlens.errors import InputError, RecordingError, StorageError
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.read.recording import Recording, read_manifest
from visitlens.hooks.recording.store.commit import check_room, storage_error, sync_folder
from visitlens.hooks.recording.store.fetched_copies import download, download_head
from visitlens.hooks.recording.store.object_store import ObjectStore


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
        download_head(store, partial, sizes)
        shards = read_manifest(partial)["shards"]
        check_room(partial, sum(shard["bytes"] for shard in shards))
        for shard in shards:
            download(store, shard, partial / schema.SHARDS / shard["name"], sizes)
        recording = Recording(partial)
        _ = recording.totals
        recording.each_shard(lambda gated, shard: None)
        partial.rename(out)
        sync_folder(out.absolute().parent)
    except OSError as error:
        raise error if isinstance(error, StorageError) else storage_error(error, out) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out

"""Recordings of one configuration as one: parts of the same run, or runs of one model over different text. No torch."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visitlens.errors import InputError, RecordingError
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.format.gate import passed
from visitlens.hooks.recording.format.totals import GroupTotals, add_totals, read_totals, write_totals
from visitlens.hooks.recording.read.recording import Recording, check_entry, first_overlap
from visitlens.hooks.recording.store.commit import check_room, committing, sole_writer
from visitlens.hooks.recording.write.ledger import all_documents, check_whole, in_groups_of, read_shard, write_caches

import h5py  # isort: skip (after HDF5_PLUGIN_PRELOAD is set)
import numpy as np


def merge(places: Sequence[str | Path], out: Path, *, allow_duplicates: bool = False) -> Path:
    """Writes the recordings at these places (folders or URLs), in this order, as one at `out`.

    Parts of one run (copied from several machines) keep their tokens' places and may share shards. Runs over different
    text follow one another: tokens, contexts and segments are renumbered, documents added, and grouped as one run over all of
    the text would group them. A document that two of them hold would count twice: refused, unless `allow_duplicates`.

    Raises:
        InputError: fewer than two, or `out` exists.
        RecordingError: a part is damaged; another model, dtype, options or measures; parts that overlap, or share documents.
    """
    if len(places) < 2 or out.exists():
        raise InputError(f"{out}: exists; choose another path" if out.exists() else "expected two recordings or more")
    parts = [Recording(place) for place in places]
    for part in parts[1:]:
        _same_configuration(parts[0], part)
    for part in parts:
        check_whole(part.bring(), part.shards)
    check_room(out.absolute().parent, sum(shard["bytes"] for part in parts for shard in part.shards))
    partial = out.with_name(out.name + ".merging")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with sole_writer(partial):
            (partial / schema.SHARDS).mkdir()
            one_run = len({part.run["config_sha256"] for part in parts}) == 1
            if one_run:
                _union(parts, partial)
            else:
                _sequence(parts, partial, allow_duplicates)
        (partial / "writer.lock").unlink()
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _same_configuration(one: Recording, two: Recording) -> None:
    differ = [
        key
        for key in sorted(one.run["config"].keys() | two.run["config"].keys())
        if key != "data_sha256" and one.run["config"].get(key) != two.run["config"].get(key)
    ]
    if differ:
        raise RecordingError(f"{one.place} and {two.place} are of another configuration: {', '.join(differ)} differ")


@dataclass(frozen=True)
class _Job:
    """A shard of `part`, its entry there and in the merged recording, and the group there of each of that part's document
    groups (None: the same)."""

    part: Recording
    old: dict[str, Any]
    new: dict[str, Any]
    groups: np.ndarray | None = None


def _union(parts: list[Recording], out: Path) -> None:
    """Shards of one text, each where it is; the same range twice counts once."""
    places: dict[tuple[int, int], tuple[Recording, dict[str, Any]]] = {}
    for part in parts:
        for entry in part.shards:
            places.setdefault((entry["context_start"], entry["context_count"]), (part, entry))
    chosen = [places[key] for key in sorted(places)]
    if overlap := first_overlap([entry for _, entry in chosen]):
        raise RecordingError(f"{overlap[0]} and {overlap[1]} overlap without being the same: they can't be merged")
    jobs = [_Job(part, entry, _renamed(entry, seq)) for seq, (part, entry) in enumerate(chosen)]
    _write(out, parts[0].run, jobs)


def _sequence(parts: list[Recording], out: Path, allow_duplicates: bool) -> None:
    """One text after another."""
    for part in parts:
        if not part.complete:
            raise RecordingError(f"{part.place}: unfinished; finish it before it is merged with other text")
    hashes = [part.document_hashes for part in parts]
    shared = _shared(hashes)
    if len(shared) and not allow_duplicates:
        raise RecordingError(
            f"{len(shared):,} {'document is' if len(shared) == 1 else 'documents are'} in more than one of these recordings "
            f"(the first has the hash {int(shared[0]):016x}) and would count twice; --allow-duplicates merges them so"
        )
    run = _joined_run(parts, hashes, len(shared))
    places, groups = _group_places(parts, hashes, run["config"]["options"]["groups"])
    run["groups"] = groups
    grouped = {name for part in parts for name, t in part.totals.items() if t.total.shape[0] > 1} or set(
        parts[0].totals
    )
    jobs: list[_Job] = []
    token = context = 0
    for part, place in zip(parts, places, strict=True):
        for old in part.shards:
            new = _renamed(old, len(jobs))
            new |= {"token_start": token + old["token_start"], "context_start": context + old["context_start"]}
            jobs.append(_Job(part, old, new, place))
        token += part.run["tokens"]
        context += sum(entry["context_count"] for entry in part.shards)
    _write(out, run, jobs, dict.fromkeys(grouped, groups), renumber=True)


def _shared(hashes: list[np.ndarray | None]) -> np.ndarray:
    """Documents that more than one part is known to hold."""
    known = [part for part in hashes if part is not None]
    values, times = np.unique(np.concatenate([*known, np.empty(0, np.uint64)]), return_counts=True)
    return values[times > 1]


def _group_places(
    parts: list[Recording], hashes: list[np.ndarray | None], most: int
) -> tuple[list[np.ndarray | None], int]:
    """For each part the merged recording's group of each of its groups; how many there are. By the documents' hashes, as
    one run over all of the text would; where they aren't known, groups by hash stay and others line up."""
    sizes = [max(totals.total.shape[0] for totals in part.totals.values()) for part in parts]
    union = all_documents(hashes)
    if union is None:
        if all(part.documents > most for part in parts):
            return [None] * len(parts), max(sizes)
        starts = np.cumsum([0, *sizes])
        return [np.arange(a, b) for a, b in itertools.pairwise(starts)], int(starts[-1])
    places: list[np.ndarray | None] = []
    for part, own, size in zip(parts, hashes, sizes, strict=True):
        documents = np.empty(0, np.uint64) if own is None else own
        if len(documents) > most:
            places.append(np.arange(size))
        elif len(documents) != size:
            raise RecordingError(
                f"{part.place}: {size} document groups of {len(documents)} documents; it can't be merged"
            )
        elif len(union) > most:
            places.append((documents % np.uint64(most)).astype(np.int64))
        else:
            places.append(np.searchsorted(union, documents))
    return places, 1 + max(int(place.max()) for place in places if place is not None)


def _joined_run(parts: list[Recording], known: list[np.ndarray | None], shared: int) -> dict[str, Any]:
    first = parts[0]
    hashes = "".join(part.run["config"]["data_sha256"] for part in parts)
    config = dict(first.run["config"], data_sha256=hashlib.sha256(hashes.encode()).hexdigest())
    warnings = dict.fromkeys(str(warning) for part in parts for warning in part.provenance.get("warnings", ()))
    texts = Counter(str(part.provenance.get("text")) for part in parts)
    if shared:
        warnings[f"{shared:,} documents of the merged parts count more than once"] = None
    unknown = Counter(str(part.provenance.get("text")) for part, own in zip(parts, known, strict=True) if own is None)
    for text in (text for text in unknown if texts[text] > 1):
        warnings[f"merged parts name the same text ({text}): a document that two of them hold counts twice"] = None
    provenance = {
        **first.provenance,
        "text": ", ".join(texts),
        "merged": [part.run["run_uuid"] for part in parts],
        "warnings": list(warnings),
    }
    return {
        **{key: value for key, value in first.run.items() if key not in ("extends", "regrouped")},
        "run_uuid": str(uuid.uuid4()),
        "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "config": config,
        "tokens": sum(part.run["tokens"] for part in parts),
        "documents": sum(part.documents for part in parts),
        "provenance": provenance,
    }


def _renamed(entry: dict[str, Any], seq: int) -> dict[str, Any]:
    return dict(entry, name=f"w00-{seq:06d}.h5", worker=0, seq=seq)


def _write(
    out: Path, run: dict[str, Any], jobs: list[_Job], groups: dict[str, int] | None = None, renumber: bool = False
) -> None:
    """`groups`: how many a measure gets; `renumber`: segments go on from recording to recording."""
    entries: list[dict[str, Any]] = []
    totals: dict[str, GroupTotals] = {}
    documents: list[np.ndarray | None] = []
    first_segment, last_segment, before = 0, -1, jobs[0].part
    for job in jobs:
        if renumber and job.part is not before:
            first_segment, before = last_segment + 1, job.part
        last_segment = max(last_segment, _copy(job, run, out, first_segment, groups or {}))
        shard = read_shard(out / schema.SHARDS / job.new["name"])
        entries.append(shard.entry)
        documents.append(shard.documents)
        add_totals(totals, shard.totals)
    write_caches(out, run, entries, totals, all_documents(documents))


def _copy(job: _Job, run: dict[str, Any], out: Path, first_segment: int, groups: dict[str, int]) -> int:
    """Commits a shard under its new numbers; returns the last segment in it."""
    old, new, last = job.old, job.new, -1
    with (
        passed(job.part.path / schema.SHARDS / old["name"]) as gated,
        committing(out / schema.SHARDS / new["name"], old["bytes"]) as aside,
        h5py.File(aside, "w", libver=schema.LIBVER) as file,
    ):
        check_entry(gated, job.part.run, old)
        for name, array in gated.arrays.items():
            if name.startswith("summary/"):
                continue
            if name == "tokens/segment":
                segments = gated.read(name) + np.uint32(first_segment)
                last = int(segments.max(initial=0))
                file.create_dataset(name, data=segments, chunks=array.chunk, **schema.TEXT_FILTERS)
                continue
            folder, _, leaf = name.rpartition("/")
            gated.file.copy(gated.file[name], file.require_group(folder), leaf)
            if "token_start" in gated.attributes(name):
                moved = int(gated.attributes(name)["token_start"]) + new["token_start"] - old["token_start"]
                file[name].attrs["token_start"] = np.int64(moved)
        made_in = schema.read_header(gated.file, gated.where)
        totals = in_groups_of(job.part.run, made_in, read_totals(gated)).items()
        write_totals(file, {name: _placed(t, job.groups, groups.get(name)) for name, t in totals})
        numbers = {name: new[name] for name in schema.SHARD_NUMBERS if name != "complete"}
        schema.write_header(file, run, {**numbers, "complete": 1})
    return last


def _placed(totals: GroupTotals, places: np.ndarray | None, groups: int | None) -> GroupTotals:
    return totals if places is None or groups is None else totals.regrouped(places, groups)

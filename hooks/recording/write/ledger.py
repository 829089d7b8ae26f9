"""What is committed of a recording that is being written, and what is left of it. No torch.

The shards are the truth; manifest and summary are caches that this writes after each shard. Who computes a shard (this
process, another, another machine) is not its business: it hands out `ShardTask`s and takes in finished ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from visitlens.errors import RecordingError
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.format.gate import passed
from visitlens.hooks.recording.format.totals import GroupTotals, add_totals, read_totals, write_totals
from visitlens.hooks.recording.format.untrusted import held
from visitlens.hooks.recording.read.recording import committed_shards, first_overlap, read_manifest
from visitlens.hooks.recording.store.commit import commit_json, committing
from visitlens.hooks.text.packed_tokens import PackedTokens


@dataclass(frozen=True)
class ShardTask:
    """One shard to be made: contexts `[start, stop)`, whose first token has the ordinal `token_start`."""

    worker: int
    seq: int
    start: int
    stop: int
    token_start: int

    @property
    def name(self) -> str:
        return f"w{self.worker:02d}-{self.seq:06d}.h5"


@dataclass(frozen=True)
class Shard:
    """One that is committed: the manifest's entry, the run in its header, its totals, and its documents' hashes."""

    entry: dict[str, Any]
    run: dict[str, Any]
    totals: dict[str, GroupTotals]
    documents: np.ndarray | None = None


def read_shard(path: Path) -> Shard:
    """A committed shard's description and totals, with the hash of its bytes. All of the gate stands before it, whoever wrote
    the file: what lies in the folder needn't be what was put there.

    Raises:
        RecordingError: it doesn't pass the gate.
    """
    with held(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
    with passed(path) as gated:
        run = schema.read_header(gated.file, gated.where)
        numbers = schema.read_numbers(gated.file, schema.SHARD_NUMBERS, gated.where)
        totals, documents = read_totals(gated), schema.read_documents(gated)
    numbers.pop("complete")
    return Shard({"name": path.name, "bytes": size, "sha256": digest, **numbers}, run, totals, documents)


def check_hashes(path: Path, shards: Iterable[Mapping[str, Any]]) -> None:
    """Raises RecordingError where a shard's bytes aren't those of its manifest entry."""
    for shard in shards:
        with held(path / schema.SHARDS / shard["name"]) as descriptor, open(descriptor, "rb", closefd=False) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard["sha256"]:
                raise RecordingError(f"{shard['name']} has another hash than its manifest says: damaged")


def check_whole(path: Path, shards: Iterable[Mapping[str, Any]]) -> None:
    """Before shards become part of another file: each has the hash of its manifest entry, and all of its chunks can be read.

    Raises:
        RecordingError: one is damaged.
    """
    for shard in shards:
        check_hashes(path, [shard])
        with passed(path / schema.SHARDS / shard["name"]) as gated:
            gated.check_data()


def in_groups_of(
    run: Mapping[str, Any], made_in: Mapping[str, Any], totals: dict[str, GroupTotals]
) -> dict[str, GroupTotals]:
    """Totals in the document groups of `run`: a shorter run that it goes on from (`made_in`) may have had others.

    Raises:
        RecordingError: groups that the run's description doesn't know of.
    """
    places = run.get("regrouped", {}).get(made_in.get("config_sha256"))
    if places is None:
        return totals
    fixed = set(run.get("ungrouped", ()))
    moved = {}
    for name, of_measure in totals.items():
        if name.rpartition(".")[2] in fixed:  # of generated texts, `decode.MEASURE` too
            moved[name] = of_measure
        elif len(of_measure.total) != len(places):
            raise RecordingError(
                f"{name} has {len(of_measure.total)} document groups, not the {len(places)} of its run"
            )
        else:
            moved[name] = of_measure.regrouped(np.array(places), run["groups"])
    return moved


def all_documents(parts: Iterable[np.ndarray | None]) -> np.ndarray | None:
    """Hashes of the documents in any part, each once and rising; None where one part's aren't known."""
    known = [np.empty(0, np.uint64)]
    for part in parts:
        if part is None:
            return None
        known.append(part)
    return np.unique(np.concatenate(known))


class Ledger:
    """The state of one recording while it is written. Use under `sole_writer`.

    `real_tokens [context]` counts what isn't padding; `batch` contexts go through the model together, so that every
    shard begins at a multiple of it. With the contexts themselves, a recording of the first of them is gone on with.
    """

    def __init__(
        self,
        path: Path,
        run: Mapping[str, Any],
        real_tokens: np.ndarray,
        batch: int,
        contexts: PackedTokens | None = None,
    ) -> None:
        self.path, self.run, self.batch, self.contexts = path, dict(run), batch, contexts
        self.documents: np.ndarray | None = np.empty(0, np.uint64)
        self.first_token = np.concatenate([[0], np.cumsum(real_tokens)])
        self.shards: list[dict[str, Any]] = []
        self.totals: dict[str, GroupTotals] = {}
        self.stopped: Callable[[], object] = lambda: False
        """Whether someone pressed Ctrl-C: nothing that fails is waited for then."""

    @property
    def tokens(self) -> int:
        """Committed."""
        return sum(shard["token_count"] for shard in self.shards)

    def refuse_foreign(self) -> None:
        """Before anything is written there: raises RecordingError where the path is a file or holds something else."""
        if self.path.exists() and not self.path.is_dir():
            raise RecordingError(f"{self.path}: a file, not a recording; choose another path")
        ours = (schema.MANIFEST, schema.SUMMARY, schema.SHARDS, schema.ANALYSES)
        names = [p.name for p in self.path.iterdir()] if self.path.exists() else []
        partial = tuple(f"{name}." for name in ours)
        foreign = [
            n
            for n in names
            if n not in ours and not n.endswith(".lock") and not (n.startswith(partial) and n.endswith(".tmp"))
        ]
        if foreign:
            raise RecordingError(
                f"{self.path}: not an empty folder nor a recording (holds {foreign[0]}); choose another path"
            )

    def resume(self) -> None:
        """Takes over what is committed at the path, and its run's identity.

        Raises:
            RecordingError: another configuration; a shard that is damaged, has changed, is missing, or overlaps another.
        """
        folder = self.path / schema.SHARDS
        folder.mkdir(exist_ok=True)
        for stale in (*self.path.glob("*.tmp"), *folder.glob("*.tmp")):
            stale.unlink()
        listed = {s["name"]: s for s in read_manifest(self.path)["shards"]} if self._has(schema.MANIFEST) else {}
        for path in committed_shards(self.path):
            shard = read_shard(path)
            self._same_run(shard.run)
            if listed.get(path.name, shard.entry)["sha256"] != shard.entry["sha256"]:
                raise RecordingError(f"{path}: has changed since it was written; restore it")
            self.take(shard)
        missing = sorted(set(listed) - {shard["name"] for shard in self.shards})
        if missing:
            raise RecordingError(
                f"{folder / missing[0]}: in the manifest and not on disk. Restore it, or run `visitlens repair {self.path}`: "
                "recording again then fills the gap"
            )
        # The process may have died between a shard and its entry in summary and manifest.
        stale = len(listed) != len(self.shards) or not self._has(schema.SUMMARY)
        if self.shards and (stale or read_manifest(self.path)["run"] != self.run):
            self.commit()

    def tasks(self, shard_tokens: int, workers: int = 1) -> Iterator[ShardTask]:
        """What is left, in order, in shards of at least `shard_tokens` where there are as many; names go round the workers."""
        next_seq = [1 + max((s["seq"] for s in self.shards if s["worker"] == w), default=-1) for w in range(workers)]
        count = 0
        for start, stop in list(self.gaps()):
            while start < stop:
                end = start
                while end < stop and self.first_token[end] - self.first_token[start] < shard_tokens:
                    end = min(end + self.batch, stop)
                worker = count % workers
                yield ShardTask(worker, next_seq[worker], start, end, int(self.first_token[start]))
                next_seq[worker] += 1
                count += 1
                start = end

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Ranges of contexts that no shard holds."""
        at = 0
        for shard in self.shards:
            if at < shard["context_start"]:
                yield at, shard["context_start"]
            at = shard["context_start"] + shard["context_count"]
        if at < len(self.first_token) - 1:
            yield at, len(self.first_token) - 1

    def take(self, shard: Shard) -> None:
        """Counts a shard in; `commit` makes it known."""
        entry, first = shard.entry, self.first_token
        start, stop = entry["context_start"], entry["context_start"] + entry["context_count"]
        span = (entry["token_start"], entry["token_start"] + entry["token_count"])
        if start % self.batch or stop >= len(first) or span != (int(first[start]), int(first[stop])):
            raise RecordingError(
                f"{self.path / schema.SHARDS / entry['name']}: holds other tokens than its contexts have"
            )
        self.shards = sorted([*self.shards, entry], key=lambda shard: shard["context_start"])
        if overlap := first_overlap(self.shards):
            raise RecordingError(
                f"{self.path / schema.SHARDS}: {overlap[0]} and {overlap[1]} hold the same tokens: one of them is of an attempt that "
                f"was thought lost. Remove {entry['name']} and run the same command again"
            )
        add_totals(self.totals, in_groups_of(self.run, shard.run, shard.totals))
        self.documents = all_documents([self.documents, shard.documents])

    def commit(self) -> None:
        """Writes summary and manifest."""
        write_caches(self.path, self.run, self.shards, self.totals, self.documents)

    def _same_run(self, run: dict[str, Any]) -> None:
        if self.shards and run["run_uuid"] != self.run["run_uuid"]:
            raise RecordingError(f"{self.path}: holds shards of two runs; `visitlens validate` names them")
        if run["config_sha256"] == self.run["config_sha256"]:
            self.run = run
        elif run["config_sha256"] not in (known := self.run.get("extends", [])):
            places, older = self._places_of(run), [*run.get("extends", []), run["config_sha256"]]
            moved = dict(self.run.get("regrouped", {}))
            for sha in older:
                there = run.get("regrouped", {}).get(sha)  # its groups among those of `run`, which are at `places` here
                if now := there if places is None else [places[at] for at in there] if there else places:
                    moved[sha] = now
            self.run = {**self.run, "run_uuid": run["run_uuid"], "extends": list(dict.fromkeys([*known, *older]))}
            if moved:
                self.run["regrouped"] = moved

    def _places_of(self, run: dict[str, Any]) -> list[int] | None:
        """The group here of each document group of `run`; None where they are the same.

        Raises:
            RecordingError: it isn't of the first contexts of this text, or not alike in all else.
        """
        theirs, ours, contexts = run["config"], self.run["config"], self.contexts
        part = None
        if contexts is not None and {**theirs, "data_sha256": ""} == {**ours, "data_sha256": ""}:
            part = contexts.first_contexts(min(max(run["tokens"], 1), contexts.num_tokens))
        if contexts is None or part is None or part.sha256 != theirs["data_sha256"]:
            raise RecordingError(
                f"{self.path}: holds a recording with another configuration ({_difference(theirs, ours)}). "
                "Choose another path, or remove it"
            )
        before, after = (each.document_groups(ours["options"]["groups"]) for each in (part, contexts))
        if len(part.tokens) % self.batch:
            raise RecordingError(
                f"{self.path}: holds the first {run['tokens']:,} tokens of this text and can't be gone on with: its last batch has "
                f"{len(part.tokens) % self.batch} contexts, not {self.batch}. Choose another path, or remove it"
            )
        if np.array_equal(before, after[: len(before)]) and before.max() == after.max():
            return None
        places = np.zeros(1 + before.max(), np.int64)
        places[before] = after[: len(before)]
        return places.tolist()

    def _has(self, name: str) -> bool:
        return (self.path / name).is_file()


def write_caches(
    path: Path,
    run: Mapping[str, Any],
    shards: list[dict[str, Any]],
    totals: Mapping[str, GroupTotals],
    documents: np.ndarray | None,
) -> None:
    """Summary, then manifest, each atomically."""
    about = sum(array.nbytes for measure in totals.values() for array in (measure.total, measure.count))
    with committing(path / schema.SUMMARY, about) as aside, h5py.File(aside, "w", libver=schema.LIBVER) as file:
        tokens = sum(shard["token_count"] for shard in shards)
        schema.write_header(file, run, {"token_count": tokens, "shard_count": len(shards)})
        write_totals(file, totals)
        schema.write_documents(file, documents)
    manifest = {"format": schema.FORMAT, "schema_version": schema.SCHEMA_VERSION, "run": run, "shards": shards}
    commit_json(path / schema.MANIFEST, manifest)


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """The first fields that differ, for a message; of the model's, which."""
    fields = _unequal(theirs, ours)
    if "model" in fields and (inside := _unequal(theirs["model"], ours["model"])):
        said = [name for name in inside if name not in ("notes", "missing")] or inside  # those are words about the rest
        fields[fields.index("model")] = f"model ({', '.join(said[:3])})"
    fields = [_SAID.get(field, field) for field in fields]
    return ", ".join(f"{field} differs" for field in fields) or "written by another version"


_SAID = {"code_sha256": "the code in the model's folder (*.py, config.json)"}


def _unequal(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    return [key for key in ours if theirs.get(key) != ours[key]]

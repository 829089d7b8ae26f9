"""Whether a recording is whole: every file through the gate and read, hashes, counts, gaps, sums. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from visitlens.errors import InputError, RecordingError
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.format.gate import passed
from visitlens.hooks.recording.format.totals import TOTALS, GroupTotals, add_totals, read_totals
from visitlens.hooks.recording.format.untrusted import read_json
from visitlens.hooks.recording.read.recording import (
    SHARD_NAME,
    Recording,
    committed_shards,
    first_overlap,
    read_manifest,
)
from visitlens.hooks.recording.store.commit import check_room, sole_writer, sync_folder, wait_for_workers
from visitlens.hooks.recording.store.fetched_copies import download_head
from visitlens.hooks.recording.store.lease import LEASE
from visitlens.hooks.recording.store.object_store import PULL_FIRST, ObjectStore, is_url, was_url
from visitlens.hooks.recording.write.ledger import Shard, all_documents, in_groups_of, read_shard, write_caches

PROVENANCE = ("weights_sha256", "command", "created", "versions")


@dataclass
class Report:
    """What was found. `damage`: something is wrong; `unfinished`: what is there is right, more was meant to come;
    `notes`: worth knowing. `shards`, `tokens` count what is sound."""

    path: Path | str
    damage: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shards: int = 0
    tokens: int = 0
    one_file: bool = False

    @property
    def exit_code(self) -> int:
        """0 whole, 1 damaged or refused, 3 sound but unfinished (2 is a wrong command line)."""
        return 1 if self.damage else 3 if self.unfinished else 0


def validate(path: str | Path, *, quick: bool = False) -> Report:
    """Checks a recording, or a single `.h5` of one. `quick` leaves out reading every chunk. Of a URL every shard is fetched into a
    scratch folder, one at a time.

    Raises:
        InputError: nothing there.
        StorageError: what an object store says.
    """
    if is_url(path):
        return _at_url(ObjectStore(str(path)), quick)
    path = Path(path)
    report = Report(path)
    if not path.exists():
        raise InputError(f"{path}: nothing there; expected a recording (a folder) or an .h5 file of one")
    if path.is_dir():
        _folder(report, quick, _Files(path))
        return report
    report.one_file = True
    try:
        check_file(path, quick=quick)
        report.shards = 1
    except RecordingError as error:
        report.damage.append(str(error))
    return report


def check_file(path: Path, *, quick: bool = False) -> None:
    """The gate, every chunk and the totals of one HDF5 file.

    Raises:
        RecordingError: refused; the message says why.
    """
    with passed(path) as gated:
        read_totals(gated)
        if not quick:
            gated.check_data()


def repair(path: Path, *, set_aside: bool = False) -> Report:
    """Writes manifest and summary anew from the shards. `set_aside` renames damaged shards to `NAME.damaged`, so that
    recording again fills the gap.

    Raises:
        RecordingError: no shard is sound, some are damaged (without `set_aside`), of two runs, or overlap.
        StorageError: a writer is at work.
    """
    report = Report(Path(path))
    if not (path / schema.SHARDS).is_dir():
        if was_url(path):
            raise RecordingError(f"{path}: {PULL_FIRST}")
        raise RecordingError(f"{path}: no recording there; expected a folder with {schema.SHARDS}/")
    with sole_writer(path):
        wait_for_workers(path)
        sound = _shards(report, _Files(path), quick=False)
        if report.damage and not set_aside:
            raise RecordingError(
                f"{report.damage[0]}. Restore that shard, or `visitlens repair --set-aside` moves it out of the way"
            )
        folder = path / schema.SHARDS
        for name in {p.name for p in committed_shards(path)} - {shard.entry["name"] for shard in sound}:
            (folder / name).rename(folder / f"{name}.damaged")
            report.notes.append(f"{name} is set aside as {name}.damaged")
        sync_folder(folder)
        if not sound:
            raise RecordingError(f"{path}: no sound shard to rebuild from")
        report.notes += _lost(path, {shard.entry["name"] for shard in sound})
        entries = [shard.entry for shard in sound]
        problem = _one_run(sound) or _overlap(entries)
        if problem:
            raise RecordingError(f"{path}: {problem}")
        documents = all_documents(shard.documents for shard in sound)
        write_caches(path, _newest(sound), entries, sum_totals(sound, _newest(sound)), documents)
        for stale in (*path.glob("*.tmp"), *folder.glob("*.tmp")):
            stale.unlink()
        report.damage.clear()
        report.shards, report.tokens = len(sound), sum(entry["token_count"] for entry in entries)
    return report


def _lost(path: Path, there: set[str]) -> list[str]:
    """What the manifest names beside those shards, also where it is refused for what it says of them."""
    try:
        listed = [shard["name"] for shard in read_json(path / schema.MANIFEST)["shards"]]
        names = {name for name in listed if SHARD_NAME.fullmatch(name)} - there
    except (RecordingError, OSError, KeyError, TypeError):
        return []
    return [f"{name} is gone: recording again fills the gap" for name in sorted(names)]


def sum_totals(shards: list[Shard], run: Mapping[str, Any]) -> dict[str, GroupTotals]:
    """Over shards, in the document groups of `run`; the first one's arrays are given away."""
    totals: dict[str, GroupTotals] = {}
    for shard in shards:
        add_totals(totals, in_groups_of(run, shard.run, shard.totals))
    return totals


def _at_url(store: ObjectStore, quick: bool) -> Report:
    report = Report(store.url)
    with TemporaryDirectory(prefix="visitlens-") as scratch:
        files = _Stored(store, Path(scratch))
        _folder(report, quick, files)
    for found in (report.damage, report.unfinished, report.notes):
        found[:] = [text.replace(scratch, store.url) for text in found]
    if LEASE in files.sizes:
        report.notes.append(f"{LEASE} is there: a process writes this recording, or died while it did")
    return report


class _Files:
    """The folder of a recording and its shards, whatever a manifest says of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [path.name for path in committed_shards(folder)]

    def shards(self) -> Iterator[Path]:
        for name in self.names:
            yield self.folder / schema.SHARDS / name


class _Stored(_Files):
    """Of a recording in an object store: a scratch folder with manifest and summary, and each shard while it is looked at.

    Raises:
        InputError: nothing there.
    """

    def __init__(self, store: ObjectStore, scratch: Path) -> None:
        self.store, self.folder, self.sizes = store, scratch, store.sizes()
        if not self.sizes:
            raise InputError(f"{store.url}: nothing there; expected a recording")
        prefix = f"{schema.SHARDS}/"
        names = (name.removeprefix(prefix) for name in self.sizes if name.startswith(prefix))
        self.names = sorted(name for name in names if SHARD_NAME.fullmatch(name))
        (scratch / schema.SHARDS).mkdir()
        download_head(store, scratch, self.sizes)

    def shards(self) -> Iterator[Path]:
        for name, path in zip(self.names, super().shards(), strict=True):
            check_room(path.parent, self.sizes[f"{schema.SHARDS}/{name}"])
            self.store.download(f"{schema.SHARDS}/{name}", path)
            yield path
            path.unlink()


def _folder(report: Report, quick: bool, files: _Files) -> None:
    path, refused = files.folder, ""
    manifest: dict[str, Any] | None = None
    try:
        manifest = read_manifest(path)
    except RecordingError as error:
        refused = str(error)
    sound = _shards(report, files, quick)
    entries = [shard.entry for shard in sound]
    report.shards, report.tokens = len(sound), sum(entry["token_count"] for entry in entries)
    report.damage += [problem for problem in (_one_run(sound), _overlap(entries)) if problem]
    if manifest is None:
        never_written = (
            sound and not report.damage and not (path / schema.MANIFEST).exists() and _stopped_early(path, sound)
        )
        (report.unfinished if never_written else report.damage).append(refused)
        return
    run = manifest["run"]
    listed = {shard["name"]: shard for shard in manifest["shards"]}
    there = set(files.names)
    report.damage += [f"{name}: in the manifest and not on disk" for name in sorted(set(listed) - there)]
    for entry in entries:
        known = listed.get(entry["name"])
        if known is None:
            report.unfinished.append(
                f"{entry['name']}: committed and not yet in the manifest; recording on adds it, or `visitlens repair`"
            )
        elif wrong := [key for key, value in entry.items() if known[key] != value]:
            report.damage.append(f"{entry['name']}: {', '.join(wrong)} differ from the manifest's")
    if sound and sound[0].run["run_uuid"] != run["run_uuid"]:
        report.damage.append("the manifest is of another run than the shards")
    digest = hashlib.sha256(json.dumps(run["config"], sort_keys=True).encode()).hexdigest()
    if digest != run["config_sha256"]:
        report.damage.append("the configuration isn't the one that was hashed (config_sha256)")
    if report.tokens < run["tokens"]:
        report.unfinished.append(
            f"{report.tokens:,} of {run['tokens']:,} tokens are there; {_gaps(entries, run['tokens'])}"
        )
    if absent := [key for key in PROVENANCE if key not in run["provenance"]]:
        report.notes.append(f"provenance lacks {', '.join(absent)}")
    if stale := [p.name for p in (*path.glob("*.tmp"), *(path / schema.SHARDS).glob("*.tmp"))]:
        report.notes.append(f"left behind by a writer that died: {', '.join(stale[:4])}; resuming removes it")
    _summary(report, path, sound)


def _stopped_early(path: Path, sound: list[Shard]) -> bool:
    """Whether a run without a manifest may have been stopped between its first shards and its first manifest."""
    tokens = sum(shard.entry["token_count"] for shard in sound)
    return len(sound) == 1 or tokens < _newest(sound)["tokens"] or not (path / schema.SUMMARY).exists()


def _shards(report: Report, files: _Files, quick: bool) -> list[Shard]:
    """The sound ones in order of tokens; what is wrong with the others goes into the report."""
    sound, sizes = [], dict[str, tuple[str, int]]()
    for path in files.shards():
        try:
            shard = read_shard(path)
            with passed(path) as gated:
                schema.check_alike(sizes, gated)
                if not quick:
                    gated.check_data()
            sound.append(shard)
        except RecordingError as error:
            report.damage.append(str(error))
    return sorted(sound, key=lambda shard: shard.entry["context_start"])


def _summary(report: Report, path: Path, sound: list[Shard]) -> None:
    """The summary against the sum of the shards, and what else the folder holds."""
    try:
        recording = Recording(path)
        totals = recording.totals
        with passed(path / schema.SUMMARY) as gated:
            gated.check_data()
        report.notes += [warning for warning in recording.warnings if not warning.startswith(("unfinished", "damaged"))]
        for name in recording.analyses:
            recording.analysis(name)
    except RecordingError as error:
        report.damage.append(str(error))
        return
    if not sound or report.damage or len(sound) != len(recording.shards):
        return  # there is nothing whole to compare it with
    expected = sum_totals(sound, recording.run)
    for name in sorted(expected.keys() | totals.keys()):
        if name not in expected or name not in totals or not _same(expected[name], totals[name]):
            report.damage.append(
                f"{schema.SUMMARY}: {name} isn't the sum over the shards; `visitlens repair` rebuilds it"
            )


def _same(one: GroupTotals, two: GroupTotals) -> bool:
    return one.attributes == two.attributes and all(
        getattr(one, key).shape == getattr(two, key).shape
        and np.allclose(getattr(one, key), getattr(two, key), rtol=1e-9, atol=1e-9, equal_nan=True)
        for key in TOTALS
    )


def _one_run(shards: list[Shard]) -> str:
    if not shards:
        return ""
    newest = _newest(shards)
    known = {(newest["run_uuid"], sha) for sha in (newest["config_sha256"], *newest.get("extends", ()))}
    strange = {(shard.run["run_uuid"], shard.run["config_sha256"]) for shard in shards} - known
    return f"shards of {len(strange) + 1} runs or configurations lie together" if strange else ""


def _newest(shards: list[Shard]) -> dict[str, Any]:
    """A recording that was gone on with over more text has shards of the shorter runs; the longest one describes all."""
    return max((shard.run for shard in shards), key=lambda run: run["tokens"])


def _overlap(entries: list[dict[str, Any]]) -> str:
    overlap = first_overlap(entries)
    return f"{overlap[0]} and {overlap[1]} hold the same tokens" if overlap else ""


def _gaps(entries: list[dict[str, Any]], tokens: int) -> str:
    spans, at = [], 0
    for entry in entries:
        if at < entry["token_start"]:
            spans.append(f"{at:,}-{entry['token_start'] - 1:,}")
        at = entry["token_start"] + entry["token_count"]
    if at < tokens:
        spans.append(f"{at:,}-{tokens - 1:,}")
    return f"missing are tokens {', '.join(spans[:4])}{' ...' if len(spans) > 4 else ''}"

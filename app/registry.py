"""The recordings that a dashboard shows, by short id: opened at the first look, read again when they grow. No torch.

A URL names a recording by its id alone, never by a path. What can't be read is an entry with an error.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock

from visitlens.hooks.schema import MANIFEST, SUMMARY
from visitlens.kernels.errors import InputError, RecordingError
from visitlens.probe.figures.pair import Pair
from visitlens.probe.grid import Grid
from visitlens.probe.opened import RecordedRun
from visitlens.probe.opened import open as open_recording

_MOST_READ = 40
"""Recordings whose totals are kept in memory; of the one longest unused they are let go."""


@dataclass(frozen=True)
class Entry:
    """One recording: `run`, or `error` saying why there is none. `version` changes when the files do."""

    id: str
    path: Path
    run: RecordedRun | None
    error: str
    version: str

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(".vlens")


class Registry:
    """`paths` are recordings, folders of recordings (looked through again at each `ids()`), or a folder with grid.json."""

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        self._lock = RLock()
        self._ids: dict[Path, str] = {}
        self._known: dict[str, Entry] = {}
        self._read: OrderedDict[str, None] = OrderedDict()
        self._sources: list[Path] = []
        self.grid: Grid | None = None
        for path in map(Path, paths):
            if not path.exists():
                raise InputError(f"{path}: no such file or folder; make a recording with `visitlens record`")
            if path.name == "grid.json" or (path / "grid.json").is_file():
                self.grid = Grid.read(path)
                self._sources += [p for cell in self.grid.cells for p in (cell.looped, cell.baseline) if p]
            else:
                self._sources.append(path)

    def ids(self) -> tuple[str, ...]:
        """Of all recordings there are now, in the order given."""
        with self._lock:
            for source in self._sources:
                for path in _recordings(source):
                    if path not in self._ids:
                        self._ids[path] = _unique(path, set(self._ids.values()))
            return tuple(self._ids.values())

    def entries(self) -> tuple[Entry, ...]:
        """All of them, as they are on disk now."""
        with self._lock:
            self.ids()
            return tuple(self._entry(path, id_) for path, id_ in self._ids.items())  # listing isn't using

    def __contains__(self, id_: object) -> bool:
        return id_ in self.ids()

    def __getitem__(self, id_: str) -> Entry:
        """The recording as it is on disk now: opened again if it changed.

        Raises:
            KeyError: no such id.
        """
        with self._lock:
            if id_ not in self._ids.values():
                self.ids()
            path = next((path for path, known in self._ids.items() if known == id_), None)
            if path is None:
                raise KeyError(id_)
            if (known := self._known.get(id_)) and known.run is None:
                del self._known[id_]  # perhaps it was locked, or half copied
            entry = self._entry(path, id_)
            self._used(id_)
            return entry

    def _entry(self, path: Path, id_: str) -> Entry:
        version = _version(path)
        entry = self._known.get(id_)
        if entry is None or entry.version != version:
            entry = self._known[id_] = _opened(id_, path, version)
            self._used(id_)
        return entry

    def _used(self, id_: str) -> None:
        self._read[id_] = None
        self._read.move_to_end(id_)
        while len(self._read) > _MOST_READ:
            oldest, _ = self._read.popitem(last=False)
            entry = self._known.pop(oldest)
            with suppress(RecordingError):  # it changed: the next look opens it
                self._known[oldest] = replace(entry, run=entry.run and open_recording(entry.path))

    def id_of(self, path: Path | None) -> str | None:
        """The id under which a path is known."""
        return None if path is None else self._ids.get(path)

    def partner(self, id_: str) -> Entry | None:
        """The recording to compare with: the same grid cell's, else one of the same documents, looped where this isn't."""
        run = self[id_].run
        if run is None:
            return None
        if self.grid is not None:
            for cell in self.grid.cells:
                sides = (self.id_of(cell.looped), self.id_of(cell.baseline))
                if id_ in sides:
                    other = sides[1 - sides.index(id_)]
                    return self[other] if other else None
        for entry in self.entries():
            other = entry.run
            if (
                other
                and other.looped != run.looped
                and other.provenance["data_sha256"] == run.provenance["data_sha256"]
            ):
                return self[entry.id]
        return None

    def pair(self, id_: str, other: str = "") -> Pair:
        """The run and what it is compared with, each on its side.

        Raises:
            RecordingError: the recording can't be read.
        """
        entry = self[id_]
        if entry.run is None:
            raise RecordingError(entry.error)
        mate = self[other] if other and other in self else self.partner(id_)
        partner = mate.run if mate and mate.run and mate.run.looped != entry.run.looped else None
        return Pair(entry.run, partner) if entry.run.looped else Pair(partner, entry.run)


def _recordings(source: Path) -> Sequence[Path]:
    """A recording itself, or those in a folder, by name."""
    if (source / MANIFEST).is_file() or source.suffix == ".vlens" or not source.is_dir():
        return [source]
    return sorted(p for p in source.iterdir() if p.suffix == ".vlens" or (p / MANIFEST).is_file())


def _unique(path: Path, taken: set[str]) -> str:
    name = re.sub(r"[^a-z0-9._-]+", "-", path.name.removesuffix(".vlens").lower()).strip("-._")[:40] or "run"
    number = 1
    while (id_ := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return id_


def _version(path: Path) -> str:
    """Both files are replaced whole, so size, time and inode tell a new one."""
    parts = []
    for name in (MANIFEST, SUMMARY):
        try:
            stat = (path / name).stat()
            parts.append(f"{stat.st_mtime_ns}.{stat.st_size}.{stat.st_ino}")
        except OSError:
            parts.append("none")
    return "-".join(parts)


def _opened(id_: str, path: Path, version: str) -> Entry:
    try:
        run = open_recording(path)
        if run.recording.shards:
            _ = run.recording.totals  # the summary, once: what is damaged shows here
    except (RecordingError, OSError, ValueError, KeyError, TypeError) as error:
        return Entry(id_, path, None, str(error).replace(str(path.parent) + "/", ""), version)
    if not run.recording.shards:
        return Entry(id_, path, None, f"{path.name}: being recorded; its first shard isn't written yet", version)
    return Entry(id_, path, run, "", version)

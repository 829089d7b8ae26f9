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

from visitlens.errors import InputError, RecordingError, StorageError
from visitlens.hooks.recording.format.schema import MANIFEST, SUMMARY
from visitlens.hooks.recording.store.fetch_cache import fetched_folder
from visitlens.hooks.recording.store.object_store import is_url
from visitlens.probe.reading.grid import Grid
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.recorded_run import RecordedRun, open_recording

Place = Path | str
"""Of a recording: a path, or the URL of one in an object store."""
_MOST_READ = 40
"""Recordings whose totals are kept in memory; of the one longest unused they are let go."""


@dataclass(frozen=True)
class Entry:
    """One recording: `run`, or `error` saying why there is none. `version` changes when the files do."""

    id: str
    place: Place
    run: RecordedRun | None
    error: str
    version: str

    @property
    def name(self) -> str:
        return _name(self.place).removesuffix(".vlens")


class Registry:
    """`places` are recordings, folders of recordings (looked through again at each `ids()`), a folder with grid.json, or URLs of
    recordings, each of which is shown as it was at its first look."""

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self._lock = RLock()
        self._ids: dict[Place, str] = {}
        self._known: dict[str, Entry] = {}
        self._read: OrderedDict[str, None] = OrderedDict()
        self._sources: list[Place] = []
        self.grid: Grid | None = None
        for place in places:
            if is_url(place):
                open_recording(place)  # fetches it; what is wrong is said now
                self._sources.append(str(place))
                continue
            path = Path(place)
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
                for place in _recordings(source):
                    if place not in self._ids:
                        self._ids[place] = _unique(place, set(self._ids.values()))
            return tuple(self._ids.values())

    def entries(self) -> tuple[Entry, ...]:
        """All of them, as they are on disk now."""
        with self._lock:
            self.ids()
            return tuple(self._entry(place, id_) for place, id_ in self._ids.items())  # listing isn't using

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
            place = next((place for place, known in self._ids.items() if known == id_), None)
            if place is None:
                raise KeyError(id_)
            if (known := self._known.get(id_)) and known.run is None:
                del self._known[id_]  # perhaps it was locked, or half copied
            entry = self._entry(place, id_)
            self._used(id_)
            return entry

    def _entry(self, place: Place, id_: str) -> Entry:
        version = _version(place)
        entry = self._known.get(id_)
        if entry is None or entry.version != version:
            entry = self._known[id_] = _opened(id_, place, version)
            self._used(id_)
        return entry

    def _used(self, id_: str) -> None:
        self._read[id_] = None
        self._read.move_to_end(id_)
        while len(self._read) > _MOST_READ:
            oldest, _ = self._read.popitem(last=False)
            entry = self._known.pop(oldest)
            with suppress(RecordingError, OSError):  # it changed, or can't be had now: the next look opens it
                self._known[oldest] = replace(entry, run=entry.run and open_recording(entry.place))

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


def _recordings(source: Place) -> Sequence[Place]:
    """A recording itself, or those in a folder, by name."""
    if isinstance(source, str):
        return [source]
    if (source / MANIFEST).is_file() or source.suffix == ".vlens" or not source.is_dir():
        return [source]
    return sorted(p for p in source.iterdir() if p.suffix == ".vlens" or (p / MANIFEST).is_file())


def _name(place: Place) -> str:
    return Path(place).name


def _unique(place: Place, taken: set[str]) -> str:
    name = re.sub(r"[^a-z0-9._-]+", "-", _name(place).removesuffix(".vlens").lower()).strip("-._")[:40] or "run"
    number = 1
    while (id_ := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return id_


def _version(place: Place) -> str:
    """Both files are replaced whole, so size, time and inode tell a new one."""
    if isinstance(place, str):
        return ""
    parts = []
    for name in (MANIFEST, SUMMARY):
        try:
            stat = (place / name).stat()
            parts.append(f"{stat.st_mtime_ns}.{stat.st_size}.{stat.st_ino}")
        except OSError:
            parts.append("none")
    return "-".join(parts)


def _opened(id_: str, place: Place, version: str) -> Entry:
    try:
        run = open_recording(place)
        if run.recording.shards:
            _ = run.recording.totals  # the summary, once: what is damaged shows here
    except (RecordingError, OSError, ValueError, KeyError, TypeError) as error:
        return Entry(id_, place, None, without_folder(str(error), place), version)
    if not run.recording.shards:
        return Entry(id_, place, None, f"{_name(place)}: being recorded; its first shard isn't written yet", version)
    return Entry(id_, place, run, "", version)


def without_folder(message: str, place: Place) -> str:
    """A message about a recording without the folder it lies in: who looks may be on another machine."""
    if folder := str(place).rpartition("/")[0]:
        message = message.replace(f"{folder}/", "")
    with suppress(StorageError):  # no home, so no copies
        message = re.sub(rf"{re.escape(str(fetched_folder()))}/\w+/\w+/", "", message)
    return message

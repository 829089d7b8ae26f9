"""The gate: what an HDF5 file must be before a byte of its data is read, whoever made it. No torch.

HDF5 by itself follows external storage, external links and virtual datasets into other files, loads filter plugins,
returns uninitialised memory for short chunks, and can be made to recurse or to allocate without end. A recording needs none
of that, so a file that has any of it is refused, with the reason. `trusted=True` leaves out the costly part, the walk over
every chunk, and lets HDF5 decode.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visitlens.hooks.recording.format import schema

import h5py  # isort: skip
import numpy as np
from h5py import h5a, h5d, h5f, h5l, h5o, h5pl, h5s, h5t  # pyright: ignore (its stubs leave most of them out)
from h5py._objects import phil

from visitlens.errors import RecordingError
from visitlens.hooks.recording.format.chunks import (
    DEFLATE,
    FLETCHER32,
    SHUFFLE,
    Selection,
    StoredArray,
    check_chunks,
    filters_of,
    read_exactly,
)
from visitlens.hooks.recording.format.structures import Held, Structures
from visitlens.hooks.recording.format.untrusted import held

MAX_DEPTH, MAX_OBJECTS, MAX_ATTRIBUTES = 4, 4096, 32
MAX_ATTRIBUTE_BYTES = 2**20
MAX_CHUNK_BYTES = 64 * 2**20
MAX_UNPACKED, MAX_EXPANSION = 2**29, 32  # a file's arrays: at most the larger of 512 MB and 32 times its size
_FIRST_BYTE = 48  # behind the superblock
_DEFLATE_RATIO = 1040  # no deflate stream expands more than 1032 times
_NAME = re.compile(rb"[A-Za-z0-9_.\-]{1,64}")
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_NUMBERS = {f"{c}{n}": getattr(h5t, f"STD_{c.upper()}{8 * n}LE") for c in "iu" for n in (1, 2, 4, 8)}
_NUMBERS |= {f"f{n}": getattr(h5t, f"IEEE_F{8 * n}LE") for n in (2, 4, 8)}


class Gated:
    """A file that has passed: root attributes by `file.attrs`, arrays by `read`. `arrays` are all of them by name."""

    def __init__(self, file: h5py.File, where: str, arrays: dict[str, StoredArray], trusted: bool) -> None:
        self.file, self.where, self.arrays, self.trusted = file, where, arrays, trusted

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def array(self, name: str) -> StoredArray:
        """Raises RecordingError where there is none of that name."""
        if name not in self.arrays:
            raise RecordingError(f"{self.where}: holds no dataset {name}")
        return self.arrays[name]

    def read(self, name: str, selection: Selection = ()) -> np.ndarray:
        """An array, or the part of it that integers and slices of step 1 select.

        Raises:
            RecordingError: no dataset of that name, or damaged data.
        """
        array = self.array(name)
        try:
            return array.read(selection) if self.trusted else read_exactly(array, self.where, selection)
        except (OSError, RuntimeError) as error:
            raise RecordingError(f"{self.where}: {name} can't be read ({error}); the file is damaged") from error

    def attributes(self, name: str) -> dict[str, Any]:
        """Of a dataset or group: numbers, and text as `str`."""
        try:
            found = self.file[name].attrs
            return {
                key: schema.get_text(found, key) if isinstance(value, bytes | str) else value
                for key, value in found.items()
            }
        except UnicodeDecodeError as error:
            raise RecordingError(f"{self.where}: {name}: an attribute that isn't UTF-8 text") from error
        except (
            RuntimeError,
            OSError,
            KeyError,
            ValueError,
            TypeError,
        ) as error:  # what h5py raises for damaged metadata
            raise RecordingError(f"{self.where}: {name}: its attributes can't be read ({error}); damaged") from error

    def check_data(self) -> None:
        """Reads every chunk of every array.

        Raises:
            RecordingError: one is damaged.
        """
        for name, array in self.arrays.items():
            try:
                check_chunks(array, self.where)
            except (OSError, RuntimeError) as error:
                raise RecordingError(f"{self.where}: {name} can't be read ({error}); the file is damaged") from error

    def close(self) -> None:
        """Raises RecordingError where HDF5 can't: the file was damaged meanwhile."""
        self.arrays.clear()
        try:
            self.file.close()
        except (RuntimeError, OSError) as error:
            raise RecordingError(f"{self.where}: can't be closed ({error}); the file is damaged") from error


@contextmanager
def passed(path: Path, *, trusted: bool = False) -> Iterator[Gated]:
    """The file, for as long as the block lasts."""
    gated = open_gated(path, trusted=trusted)
    try:
        yield gated
    finally:
        gated.close()


def open_gated(path: Path, *, trusted: bool = False, expected_bytes: int | None = None) -> Gated:
    """Opens a file and checks it on one descriptor; the caller closes it. `expected_bytes`: what a manifest says.

    Raises:
        RecordingError: refused; the message says why.
    """
    with held(path) as descriptor:
        if os.pread(descriptor, 8, 0) != _SIGNATURE:
            raise RecordingError(f"{path}: not an HDF5 file, or damaged: expected its signature at the first byte")
        size = os.fstat(descriptor).st_size
        if expected_bytes is not None and size != expected_bytes:
            raise RecordingError(f"{path}: {size} bytes, the manifest says {expected_bytes}: damaged")
        structures = Structures(descriptor, size, str(path))
        held_by_root = structures.check(root := structures.root(), b"")  # HDF5 opens the root group with the file
        try:  # the same inode, whatever lies at the path by now; HDF5 keeps a descriptor of its own
            with _no_plugins():
                opened = h5f.open(f"/dev/fd/{descriptor}".encode(), h5f.ACC_RDONLY)
        except (OSError, RuntimeError) as error:
            if "unable to lock" in str(error):
                raise RecordingError(f"{path}: locked by another program: close it there, or copy the file") from error
            raise RecordingError(f"{path}: not a readable HDF5 file ({error}); it is damaged") from error
        file = h5py.File(opened)
        try:
            check = _Check(str(path), size, trusted, structures)
            check.file(opened, root, held_by_root)
            schema.check_layouts(file, check.arrays, str(path))
        except RecordingError:
            _close(file)
            raise
        except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:  # h5py's, for damaged metadata
            _close(file)
            raise RecordingError(f"{path}: refused: unreadable structure ({error}); the file is damaged") from error
    return Gated(file, str(path), check.arrays, trusted)


def _close(file: h5py.File) -> None:
    """Of a file that is refused already: what HDF5 says on top of that helps nobody."""
    with suppress(RuntimeError, OSError):
        file.close()


@contextmanager
def _no_plugins() -> Iterator[None]:
    """HDF5 loads every library in its plugin path in search of one that opens a file it can't open itself, even with
    HDF5_PLUGIN_PRELOAD="::": here that path is empty for as long as it opens a file."""
    with phil:  # no other thread is in HDF5 meanwhile
        paths = [h5pl.get(index) for index in range(h5pl.size())]
        for _ in paths:
            h5pl.remove(0)
        try:
            yield
        finally:
            for path in paths:
                h5pl.append(path)


@dataclass
class _Check:
    where: str
    size: int
    trusted: bool
    structures: Structures
    seen: set[int] = field(default_factory=set)
    unpacked: int = 0
    arrays: dict[str, StoredArray] = field(default_factory=dict)
    extents: list[tuple[int, int]] = field(default_factory=list)

    def refuse(self, name: bytes, why: str) -> RecordingError:
        shown = repr(name.decode("utf-8", "backslashreplace")[:80])
        return RecordingError(f"{self.where}: refused: {shown} {why}")

    def file(self, opened: h5f.FileID, address: int, held_by_root: Held) -> None:
        created = opened.get_create_plist()
        if created.get_version()[0] != 3 or created.get_userblock():
            raise RecordingError(f"{self.where}: an HDF5 file, but not of a visitlens recording (another HDF5 version)")
        self.seen.add(address)
        self._group(h5o.open(opened, b"/"), b"", held_by_root, depth=1)
        self._no_overlap()

    def _group(self, group: h5py.h5g.GroupID, path: bytes, about: Held, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self.refuse(path, f"lies deeper than {MAX_DEPTH} groups")
        self._attributes(group, path, about.attributes)
        links = self._links(group, path)
        if len(links) != about.links:
            raise self.refuse(path, f"has {about.links} links, of which HDF5 finds {len(links)}")
        for name, address in links:
            full = path + b"/" + name
            inside = self.structures.check(address, full)  # before HDF5 looks at it
            item = h5o.open(group, name)
            if isinstance(item, h5py.h5g.GroupID):
                self._group(item, full, inside, depth + 1)
            elif isinstance(item, h5d.DatasetID):
                self._dataset(item, full)
                self._attributes(item, full, inside.attributes)
            else:
                raise self.refuse(full, "is neither a group nor a dataset")

    def _links(self, group: h5py.h5g.GroupID, path: bytes) -> list[tuple[bytes, int]]:
        """(name, address) of each."""
        links: list[tuple[bytes, int]] = []
        refusal: list[RecordingError] = []

        def look(name: bytes, info: h5l.LinkInfo) -> bool | None:
            why = self._link(name, info)
            if why:
                refusal.append(self.refuse(path + b"/" + name, why))
                return True  # ends the iteration; an exception through HDF5 would arrive as another
            links.append((name, info.u))
            return None

        group.links.iterate(look, info=True)
        if refusal:
            raise refusal[0]
        return links

    def _link(self, name: bytes, info: h5l.LinkInfo) -> str:
        """Why it is refused, or nothing."""
        if not _NAME.fullmatch(name):
            return "has a name with other characters than letters, digits, _ . -"
        if info.type != h5l.TYPE_HARD:
            return "is a soft or external link"
        if info.u in self.seen:
            return "is linked twice, or in a cycle"
        self.seen.add(info.u)
        return f"makes more than {MAX_OBJECTS} objects" if len(self.seen) > MAX_OBJECTS else ""

    def _attributes(self, item: h5py.h5g.GroupID | h5d.DatasetID, path: bytes, expected: int) -> None:
        if not expected:  # nothing in its header leads to one
            return
        count = h5a.get_num_attrs(item)
        if count != expected:
            raise self.refuse(path, f"has {expected} attributes, of which HDF5 finds {count}")
        if count > MAX_ATTRIBUTES:
            raise self.refuse(path, f"has more than {MAX_ATTRIBUTES} attributes")
        for index in range(count):
            attribute = h5a.open(item, index=index)
            name = path + b"@" + attribute.name
            if not _NAME.fullmatch(attribute.name):
                raise self.refuse(name, "has a name with other characters than letters, digits, _ . -")
            kind, space = attribute.get_type(), attribute.get_space()
            text = kind.get_class() == h5t.STRING and not kind.is_variable_str()
            if not text and not _number(kind):
                raise self.refuse(name, "is of another type than numbers and fixed-length text")
            if space.get_simple_extent_type() != h5s.SCALAR or kind.get_size() > MAX_ATTRIBUTE_BYTES:
                raise self.refuse(name, f"isn't one value of at most {MAX_ATTRIBUTE_BYTES} bytes")

    def _dataset(self, dataset: h5d.DatasetID, path: bytes) -> None:
        created = dataset.get_create_plist()
        layout = created.get_layout()
        # Before its space is asked for: that alone can open the files of a virtual dataset.
        if layout not in (h5d.CONTIGUOUS, h5d.CHUNKED):
            raise self.refuse(path, "is a virtual dataset or of another layout than contiguous and chunked")
        if created.get_external_count():
            raise self.refuse(path, "keeps its data in another file (external storage)")
        kind, space = dataset.get_type(), dataset.get_space()
        if not (number := _number(kind)):
            raise self.refuse(path, "is of another type than plain little-endian numbers")
        if space.get_simple_extent_type() == h5s.NULL:
            raise self.refuse(path, "has no shape")
        shape, item = space.get_simple_extent_dims(), kind.get_size()
        chunk, filters = (created.get_chunk() if layout == h5d.CHUNKED else None), filters_of(created)
        name = path[1:].decode()
        self.arrays[name] = StoredArray(dataset, name, shape, number, chunk, filters)
        total = math.prod(shape) * item
        self.unpacked += total
        limit = max(MAX_UNPACKED, MAX_EXPANSION * self.size)
        if self.unpacked > limit:
            raise self.refuse(path, f"makes more than {limit} bytes of arrays in a file of {self.size}")
        if chunk is None:
            if filters or (total and dataset.get_storage_size() != total):
                raise self.refuse(path, f"doesn't hold the {total} bytes that its shape says")
            if total:
                offset = dataset.get_offset()
                if offset is None:
                    raise self.refuse(path, "has no data")
                self._keep(path, [(offset, total)])
            return
        self._chunked(self.arrays[name], path, item)

    def _chunked(self, array: StoredArray, path: bytes, item: int) -> None:
        filters, shape, chunk = array.filters, array.shape, array.chunk or ()
        if filters != tuple(f for f in (SHUFFLE, DEFLATE, FLETCHER32) if f in filters):
            raise self.refuse(
                path, f"has filters {filters}; expected shuffle, gzip, Fletcher32 in this order, each once"
            )
        size = math.prod(chunk) * item
        if size > MAX_CHUNK_BYTES:
            raise self.refuse(path, f"has chunks of {size} bytes; at most {MAX_CHUNK_BYTES} are read")
        counts = [-(-n // c) for n, c in zip(shape, chunk, strict=True)]
        expected = math.prod(counts)
        if expected > self.size:
            raise self.refuse(path, f"has {expected} chunks in a file of {self.size} bytes")
        if self.trusted or not expected:
            return
        places: list[tuple[int, ...]] = []
        extents: list[tuple[int, int]] = []
        skipped: list[int] = []

        def look(found: h5d.StoreInfo) -> bool | None:
            place, mask, offset, stored = found
            places.append(place)
            extents.append((offset, stored))
            if mask:
                skipped.append(mask)
            return True if len(extents) > expected else None

        array.id.chunk_iter(look)
        if len(extents) != expected:
            more = "or more " if len(extents) > expected else ""
            raise self.refuse(path, f"stores {len(extents)} {more}of its {expected} chunks")
        if skipped:
            raise self.refuse(path, "has chunks that skip a filter (filter_mask)")
        if not self._fill(places, shape, chunk, expected):
            raise self.refuse(path, "stores a chunk twice or outside its shape")
        self._sizes(path, {stored for _, stored in extents}, size, filters)
        self._keep(path, extents)

    @staticmethod
    def _fill(places: list[tuple[int, ...]], shape: tuple[int, ...], chunk: tuple[int, ...], expected: int) -> bool:
        """Whether the chunks' places are the grid of the shape, each once."""
        if expected == 1:
            return not any(places[0])
        at = np.array(places, np.int64)
        return len(set(places)) == expected and not (at % chunk).any() and bool((at < shape).all())

    def _sizes(self, path: bytes, found: set[int], size: int, filters: tuple[int, ...]) -> None:
        """A chunk is stored in exactly its bytes, or compressed in what deflate can make of them."""
        checksum = 4 if FLETCHER32 in filters else 0
        low, high = size, size
        if DEFLATE in filters:
            low, high = -(-size // _DEFLATE_RATIO), size + size // 1000 + 64
        for stored in found:
            if not low <= stored - checksum <= high:
                raise self.refuse(path, f"has a chunk of {stored} stored bytes, which can't be its {size} bytes")

    def _keep(self, path: bytes, extents: list[tuple[int, int]]) -> None:
        if any(start < _FIRST_BYTE or start + length > self.size for start, length in extents):
            raise self.refuse(path, "has data outside the file")
        self.extents += extents

    def _no_overlap(self) -> None:
        self.extents.sort()
        for (start, length), (after, _) in itertools.pairwise(self.extents):
            if start + length > after:
                raise self.refuse(b"/", "has chunks that overlap")


def _number(kind: h5t.TypeID) -> str:
    """`u2`, `f8` ... of a plain little-endian number; empty for every other type."""
    family, size = kind.get_class(), kind.get_size()
    letter = {h5t.INTEGER: "i" if family == h5t.INTEGER and kind.get_sign() == h5t.SGN_2 else "u", h5t.FLOAT: "f"}
    name = f"{letter.get(family, '')}{size}"
    return name if name in _NUMBERS and kind.equal(_NUMBERS[name]) else ""

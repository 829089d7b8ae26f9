"""The gate: what an HDF5 file must be before a byte of its data is read, whoever made it. No torch.

HDF5 by itself follows external storage, external links and virtual datasets into other files, loads filter plugins,
returns uninitialised memory for short chunks, and can be made to recurse or to allocate without end. A recording needs none
of that, so a file that has any of it is refused, with the reason. `trusted=True` leaves out the costly part, the walk over
every chunk, and lets HDF5 decode.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from visitlens.hooks import schema  # sets HDF5_PLUGIN_PRELOAD: before h5py

import h5py  # isort: skip
import numpy as np
from h5py import h5a, h5d, h5f, h5o, h5p, h5s, h5t

from visitlens.hooks.chunks import DEFLATE, FLETCHER32, SHUFFLE, Selection, filters_of, read_exactly
from visitlens.hooks.untrusted import held
from visitlens.kernels.errors import RecordingError

MAX_DEPTH, MAX_OBJECTS, MAX_ATTRIBUTES = 4, 4096, 32
MAX_ATTRIBUTE_BYTES = 2**20
MAX_CHUNK_BYTES = 64 * 2**20
MAX_UNPACKED, MAX_EXPANSION = 2**29, 32  # a file's arrays: at most the larger of 512 MB and 32 times its size
_DEFLATE_RATIO = 1040  # no deflate stream expands more than 1032 times
_NAME = re.compile(rb"[A-Za-z0-9_.\-]{1,64}")
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SYMBOL_TABLE, _EXTERNAL_FILES = 1 << 0x11, 1 << 0x07  # header messages of old-style groups and of external storage
_INTEGERS = {
    (size, signed): getattr(h5t, f"STD_{'I' if signed else 'U'}{8 * size}LE")
    for size in (1, 2, 4, 8)
    for signed in (False, True)
}
_FLOATS = {2: h5t.IEEE_F16LE, 4: h5t.IEEE_F32LE, 8: h5t.IEEE_F64LE}


class Gated:
    """A file that has passed: root attributes by `file.attrs`, arrays by `read`."""

    def __init__(self, file: h5py.File, where: str, trusted: bool) -> None:
        self.file, self.where, self.trusted = file, where, trusted

    def __contains__(self, name: str) -> bool:
        return name in self.file

    def read(self, name: str, selection: Selection = ()) -> np.ndarray:
        """An array, or the part of it that integers and slices of step 1 select.

        Raises:
            RecordingError: no dataset of that name, or damaged data.
        """
        dataset = self.dataset(name)
        try:
            return np.asarray(dataset[selection]) if self.trusted else read_exactly(dataset, self.where, selection)
        except OSError as error:
            raise RecordingError(f"{self.where}: {name} can't be read ({error}); the file is damaged") from error

    def dataset(self, name: str) -> h5py.Dataset:
        found = self.file.get(name)
        if not isinstance(found, h5py.Dataset):
            raise RecordingError(f"{self.where}: holds no dataset {name}")
        return found

    def datasets(self) -> dict[str, h5py.Dataset]:
        """All of them, by full name without the leading slash."""
        found: dict[str, h5py.Dataset] = {}
        self.file.visititems(lambda name, item: found.update({name: item}) if isinstance(item, h5py.Dataset) else None)
        return found

    def close(self) -> None:
        self.file.close()


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
        access = h5p.create(h5p.FILE_ACCESS)
        access.set_fclose_degree(h5f.CLOSE_STRONG)
        try:  # the same inode, whatever lies at the path by now; HDF5 keeps a descriptor of its own
            opened = h5f.open(f"/dev/fd/{descriptor}".encode(), h5f.ACC_RDONLY, fapl=access)
        except (OSError, RuntimeError) as error:
            raise RecordingError(f"{path}: not a readable HDF5 file ({error}); it is damaged") from error
    file = h5py.File(opened)
    try:
        check = _Check(str(path), size, trusted)
        check.file(opened)
        schema.check_layouts(file, check.arrays, str(path))
    except RecordingError:
        file.close()
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:  # what h5py raises for damaged metadata
        file.close()
        raise RecordingError(f"{path}: refused: unreadable structure ({error}); the file is damaged") from error
    return Gated(file, str(path), trusted)


@dataclass
class _Check:
    where: str
    size: int
    trusted: bool
    seen: set[int] = field(default_factory=set)
    unpacked: int = 0
    arrays: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    extents: list[np.ndarray] = field(default_factory=list)

    def refuse(self, name: bytes, why: str) -> RecordingError:
        shown = repr(name.decode("utf-8", "backslashreplace")[:80])
        return RecordingError(f"{self.where}: refused: {shown} {why}")

    def file(self, opened: h5f.FileID) -> None:
        created = opened.get_create_plist()
        if created.get_version()[0] != 3 or created.get_userblock():
            raise RecordingError(f"{self.where}: an HDF5 file, but not of a visitlens recording (another HDF5 version)")
        self._object(h5o.get_info(opened), b"/")
        root = h5o.open(opened, b"/")
        self._attributes(root, b"/")
        self._group(root, b"", depth=1)
        self._no_overlap()

    def _group(self, group: h5py.h5g.GroupID, path: bytes, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self.refuse(path, f"lies deeper than {MAX_DEPTH} groups")
        for name in self._links(group, path):
            full = path + b"/" + name
            info = h5o.get_info(group, name)
            self._object(info, full)
            if info.type not in (h5o.TYPE_GROUP, h5o.TYPE_DATASET):
                raise self.refuse(full, "is neither a group nor a dataset")
            item = h5o.open(group, name)
            self._attributes(item, full)
            if info.type == h5o.TYPE_GROUP:
                self._group(item, full, depth + 1)
            else:
                self._dataset(item, full)

    def _links(self, group: h5py.h5g.GroupID, path: bytes) -> list[bytes]:
        names: list[bytes] = []

        def look(name: bytes, info: h5py.h5l.LinkInfo) -> None:
            if not _NAME.fullmatch(name):
                raise self.refuse(path + b"/" + name, "has a name with other characters than letters, digits, _ . -")
            if info.type != h5py.h5l.TYPE_HARD:
                raise self.refuse(path + b"/" + name, "is a soft or external link")
            names.append(name)
            if len(names) + len(self.seen) > MAX_OBJECTS:
                raise self.refuse(path, f"makes more than {MAX_OBJECTS} objects")

        group.links.iterate(look, info=True)
        return names

    def _object(self, info: h5o.ObjInfo, path: bytes) -> None:
        if info.addr in self.seen:
            raise self.refuse(path, "is linked twice, or in a cycle")
        self.seen.add(info.addr)
        if info.hdr.version != 2 or info.hdr.mesg.present & _SYMBOL_TABLE or info.hdr.mesg.shared:
            raise self.refuse(path, "is an old-style object or shares its header")
        if info.hdr.mesg.present & _EXTERNAL_FILES:
            raise self.refuse(path, "keeps its data in another file (external storage)")
        if info.num_attrs > MAX_ATTRIBUTES:
            raise self.refuse(path, f"has more than {MAX_ATTRIBUTES} attributes")

    def _attributes(self, item: h5py.h5g.GroupID | h5d.DatasetID, path: bytes) -> None:
        for index in range(h5a.get_num_attrs(item)):
            attribute = h5a.open(item, index=index)
            name = path + b"@" + attribute.name
            if not _NAME.fullmatch(attribute.name):
                raise self.refuse(name, "has a name with other characters than letters, digits, _ . -")
            kind, space = attribute.get_type(), attribute.get_space()
            text = kind.get_class() == h5t.STRING and not kind.is_variable_str()
            if not text and not _is_number(kind):
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
        if not _is_number(kind):
            raise self.refuse(path, "is of another type than plain little-endian numbers")
        if space.get_simple_extent_type() == h5s.NULL:
            raise self.refuse(path, "has no shape")
        shape, item = space.get_simple_extent_dims(), kind.get_size()
        self.arrays[path[1:].decode()] = shape, kind.dtype.str[1:]
        total = item
        for length in shape:
            total *= int(length)
        self.unpacked += total
        limit = max(MAX_UNPACKED, MAX_EXPANSION * self.size)
        if self.unpacked > limit:
            raise self.refuse(path, f"makes more than {limit} bytes of arrays in a file of {self.size}")
        if layout == h5d.CONTIGUOUS:
            if created.get_nfilters() or (total and dataset.get_storage_size() != total):
                raise self.refuse(path, f"doesn't hold the {total} bytes that its shape says")
            if total:
                offset = dataset.get_offset()
                if offset is None:
                    raise self.refuse(path, "has no data")
                self._keep(path, np.array([[offset, total]], np.int64))
            return
        self._chunked(dataset, path, shape, created.get_chunk(), item)

    def _chunked(
        self, dataset: h5d.DatasetID, path: bytes, shape: tuple[int, ...], chunk: tuple[int, ...], item: int
    ) -> None:
        filters = filters_of(dataset)
        if any(f not in (SHUFFLE, DEFLATE, FLETCHER32) for f in filters) or len(set(filters)) < len(filters):
            raise self.refuse(path, f"has filters {filters}; allowed are shuffle, gzip and Fletcher32, each once")
        if filters != tuple(f for f in (SHUFFLE, DEFLATE, FLETCHER32) if f in filters):
            raise self.refuse(path, f"has its filters in the order {filters}; expected shuffle, gzip, Fletcher32")
        size = item
        for length in chunk:
            size *= int(length)
        if size > MAX_CHUNK_BYTES:
            raise self.refuse(path, f"has chunks of {size} bytes; at most {MAX_CHUNK_BYTES} are read")
        counts = [-(-n // c) for n, c in zip(shape, chunk, strict=True)]
        expected = int(np.prod(counts, dtype=object))
        if expected > self.size:
            raise self.refuse(path, f"has {expected} chunks in a file of {self.size} bytes")
        if self.trusted:
            return
        places: list[tuple[int, ...]] = []
        stored: list[tuple[int, int, int]] = []

        def look(found: h5d.StoreInfo) -> None:
            places.append(found.chunk_offset)
            stored.append((found.byte_offset, found.size, found.filter_mask))
            if len(stored) > expected:
                raise self.refuse(path, f"stores more chunks than the {expected} of its shape")

        if expected:
            dataset.chunk_iter(look)
        if len(stored) != expected:
            raise self.refuse(path, f"stores {len(stored)} of its {expected} chunks")
        if not expected:
            return
        at, table = np.array(places, np.int64), np.array(stored, np.int64)
        index = np.zeros(expected, np.int64)
        for axis, (count, length) in enumerate(zip(counts, chunk, strict=True)):
            if (at[:, axis] % length).any() or (at[:, axis] // length >= count).any():
                raise self.refuse(path, "stores a chunk outside its shape")
            index = index * count + at[:, axis] // length
        if len(np.unique(index)) != expected:
            raise self.refuse(path, "stores a chunk twice")
        if table[:, 2].any():
            raise self.refuse(path, "has chunks that skip a filter (filter_mask)")
        self._sizes(path, table[:, 1], size, filters)
        self._keep(path, table[:, :2])

    def _sizes(self, path: bytes, stored: np.ndarray, size: int, filters: tuple[int, ...]) -> None:
        checksum = 4 if FLETCHER32 in filters else 0
        if DEFLATE not in filters:
            wrong = stored != size + checksum
        else:
            payload = stored - checksum
            wrong = (payload * _DEFLATE_RATIO < size) | (payload > size + size // 1000 + 64)
        if wrong.any():
            got = int(stored[wrong][0])
            raise self.refuse(path, f"has a chunk of {got} stored bytes, which can't be its {size} bytes")

    def _keep(self, path: bytes, extents: np.ndarray) -> None:
        start, length = extents[:, 0], extents[:, 1]
        if (start < 48).any() or (length < 0).any() or (start > self.size - length).any():
            raise self.refuse(path, "has data outside the file")
        self.extents.append(extents)

    def _no_overlap(self) -> None:
        if not self.extents:
            return
        extents = np.concatenate(self.extents)
        extents = extents[extents[:, 0].argsort()]
        if (extents[1:, 0] < extents[:-1].sum(1)).any():
            raise self.refuse(b"/", "has chunks that overlap")


def _is_number(kind: h5t.TypeID) -> bool:
    family, size = kind.get_class(), kind.get_size()
    if family == h5t.INTEGER:
        wanted = _INTEGERS.get((size, kind.get_sign() == h5t.SGN_2))
    else:
        wanted = _FLOATS.get(size) if family == h5t.FLOAT else None
    return wanted is not None and bool(kind.equal(wanted))

"""Compressed chunks of a file that nobody vouches for, decoded by us to their exact length or refused. No torch.

HDF5's own inflate filter allocates whatever a chunk unpacks to, and hands out uninitialised memory where it unpacks to
less than the chunk. Here a chunk is read as stored, its Fletcher32 sum checked, and inflated into exactly the bytes its
shape says.
"""

from __future__ import annotations

import itertools
import math
import zlib
from dataclasses import dataclass

import h5py
import numpy as np

from visitlens.errors import RecordingError

SHUFFLE, FLETCHER32, DEFLATE = h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32, h5py.h5z.FILTER_DEFLATE
_BLOCK = 65_536  # words: the products below stay far from 2**63

Selection = tuple[int | slice, ...]


@dataclass(frozen=True)
class StoredArray:
    """A dataset and what was checked of it. `kind` is `u2`, `f4` ...; `chunk` None: contiguous; filters as applied."""

    id: h5py.h5d.DatasetID
    name: str
    shape: tuple[int, ...]
    kind: str
    chunk: tuple[int, ...] | None
    filters: tuple[int, ...]

    def read(self, selection: Selection = ()) -> np.ndarray:
        """By HDF5."""
        return np.asarray(h5py.Dataset(self.id)[selection])


def filters_of(created: h5py.h5p.PropDCID) -> tuple[int, ...]:
    """Filter codes in the order in which they were applied."""
    return tuple(created.get_filter(i)[0] for i in range(created.get_nfilters()))


def read_exactly(array: StoredArray, where: str, selection: Selection = ()) -> np.ndarray:
    """`array[selection]` for integers and slices of step 1 on the leading axes.

    Raises:
        RecordingError: a chunk that doesn't decode to its exact length, or whose checksum is wrong.
    """
    if array.chunk is None or DEFLATE not in array.filters:
        return array.read(selection)
    full = (*selection, *(slice(None),) * (len(array.shape) - len(selection)))
    bounds = []
    for index, size in zip(full, array.shape, strict=True):
        start, stop, _ = index.indices(size) if isinstance(index, slice) else slice(index, index + 1).indices(size)
        bounds.append((start, max(start, stop)))
    result = np.empty([stop - start for start, stop in bounds], array.kind)
    if result.size:
        spans = [range(start // c * c, stop, c) for (start, stop), c in zip(bounds, array.chunk, strict=True)]
        for origin in itertools.product(*spans):
            block = _decode(array, where, origin)
            into, part = [], []
            for (start, stop), first, size in zip(bounds, origin, array.chunk, strict=True):
                low, high = max(start, first), min(stop, first + size)
                into.append(slice(low - start, high - start))
                part.append(slice(low - first, high - first))
            result[tuple(into)] = block[tuple(part)]
    return result[tuple(0 if isinstance(index, int) else slice(None) for index in full)]


def check_chunks(array: StoredArray, where: str) -> None:
    """Reads every chunk, one at a time.

    Raises:
        RecordingError: one is damaged.
        OSError: HDF5's checksum of one that isn't compressed is wrong.
    """
    if array.chunk is None:
        array.read()
        return
    for origin in itertools.product(*(range(0, n, c) for n, c in zip(array.shape, array.chunk, strict=True))):
        if DEFLATE in array.filters:
            _decode(array, where, origin)
        else:
            array.read(tuple(slice(o, o + c) for o, c in zip(origin, array.chunk, strict=True)))


def _decode(array: StoredArray, where: str, origin: tuple[int, ...]) -> np.ndarray:
    where = f"{where}: {array.name}, chunk {origin}"
    _, data = array.id.read_direct_chunk(origin)
    item, chunk = np.dtype(array.kind).itemsize, array.chunk or ()
    wanted = math.prod(chunk) * item
    for code in reversed(array.filters):
        if code == FLETCHER32:
            data, stored = data[:-4], data[-4:]
            if fletcher32(data) != int.from_bytes(stored, "little"):
                raise RecordingError(f"{where}: wrong checksum; the file is damaged")
        elif code == DEFLATE:
            data = _inflate(data, wanted, where)
        elif code == SHUFFLE:
            data = np.frombuffer(data, np.uint8).reshape(item, -1).T.tobytes()
    return np.frombuffer(data, array.kind).reshape(chunk)


def _inflate(data: bytes, wanted: int, where: str) -> bytes:
    stream = zlib.decompressobj()
    try:
        decoded = stream.decompress(data, wanted + 1)
    except zlib.error as error:
        raise RecordingError(f"{where}: {error}; the file is damaged") from error
    if len(decoded) != wanted or not stream.eof or stream.unused_data:
        more = "more" if len(decoded) > wanted else "other"
        raise RecordingError(f"{where}: expected {wanted} bytes, its compressed data hold {more}; the file is damaged")
    return decoded


def fletcher32(data: bytes) -> int:
    """As HDF5 computes it: sums of big-endian 16-bit words modulo 65535, with 65535 itself kept for a non-zero sum."""
    words = np.frombuffer(data + b"\0" * (len(data) % 2), ">u2")
    first = second = 0
    for at in range(0, len(words), _BLOCK):
        block = words[at : at + _BLOCK].astype(np.int64)
        second += len(block) * first + int(block @ np.arange(len(block), 0, -1))
        first += int(block.sum())
    folded = ((value - 1) % 65_535 + 1 if value else 0 for value in (first, second))
    low, high = folded
    return high << 16 | low

"""HDF5's own structures, to write what its library wouldn't."""

from __future__ import annotations

import io
import struct

import h5py

from visitlens.hooks.recording.format.structures import lookup3


def in_memory(data: bytearray) -> h5py.File:
    return h5py.File(io.BytesIO(bytes(data)), "r")


def chunk_of(data: bytearray, name: str) -> int:
    with in_memory(data) as file:
        return file[name].id.get_chunk_info(0).byte_offset


def header_of(data: bytearray, name: str) -> int:
    with in_memory(data) as file:
        return h5py.h5o.get_info(file[name].id).addr


def moved_data(data: bytearray, name: str, where: str | int) -> bytes:
    """The dataset's header says that its data lie elsewhere, under a right checksum."""
    with in_memory(data) as file:
        dataset = file[name].id
        chunked = file[name].chunks is not None
        old = dataset.get_chunk_info(0).byte_offset if chunked else dataset.get_offset()
    new = chunk_of(data, where) if isinstance(where, str) else where
    at = header_of(data, name)
    flags = data[at + 5]
    start = at + 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
    width = 1 << (flags & 3)
    end = start + width + int.from_bytes(data[start : start + width], "little")
    place = data.index(struct.pack("<Q", old), start, end)
    data[place : place + 8] = struct.pack("<Q", new)
    data[end : end + 4] = struct.pack("<I", lookup3(bytes(data[at:end])))
    return data

"""HDF5's own structures, to write what its library wouldn't."""

from __future__ import annotations

import io
import struct

import h5py


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


def lookup3(key: bytes) -> int:
    """Bob Jenkins' hash, HDF5's checksum of metadata."""
    mask = 0xFFFFFFFF

    def rotate(value: int, by: int) -> int:
        return (value << by | value >> (32 - by)) & mask

    a = b = c = (0xDEADBEEF + len(key)) & mask
    while len(key) > 12:
        x, y, z = struct.unpack("<III", key[:12])
        a, b, c, key = (a + x) & mask, (b + y) & mask, (c + z) & mask, key[12:]
        for by in (4, 6, 8, 16, 19, 4):
            a, c = ((a - c) & mask) ^ rotate(c, by), (c + b) & mask
            a, b, c = b, c, a  # each takes its turn as the first
    if key:
        x, y, z = struct.unpack("<III", key.ljust(12, b"\0"))
        a, b, c = (a + x) & mask, (b + y) & mask, (c + z) & mask
        for by in (14, 11, 25, 16, 4, 14, 24):
            c = ((c ^ b) - rotate(b, by)) & mask
            a, b, c = b, c, a
        return b
    return c

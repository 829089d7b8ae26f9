"""Bytes that were lost, changed, or written to where HDF5's library wouldn't."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
from tests.hooks.hostile.making import HOSTILE, hostile_bytes
from tests.hooks.hostile.structures import chunk_of, header_of, moved_data


@hostile_bytes("not a readable HDF5 file")
def truncated(data: bytearray) -> bytes:
    return data[: len(data) // 2]


@hostile_bytes("expected its signature")
def empty(data: bytearray) -> bytes:
    return b""


@hostile_bytes("expected its signature")
def garbage(data: bytearray) -> bytes:
    return np.random.default_rng(0).bytes(20_000)


@hostile_bytes("expected its signature")
def user_block(data: bytearray) -> bytes:
    return bytes(512) + data


@hostile_bytes("not a readable HDF5 file")
def flip_in_the_superblock(data: bytearray) -> bytes:
    data[20] ^= 1
    return data


@hostile_bytes("refused|not a readable HDF5 file")
def flip_in_the_root_group(data: bytearray) -> bytes:
    at = data.index(b"OHDR")
    data[at + 30] ^= 1
    return data


@hostile_bytes("unreadable structure|not a readable HDF5 file")
def flip_in_a_dataset_header(data: bytearray) -> bytes:
    at = header_of(data, "tokens/id")
    data[at + 40] ^= 1
    return data


@hostile_bytes("wrong checksum")
def flip_in_compressed_data(data: bytearray) -> bytes:
    data[chunk_of(data, "tokens/id") + 12] ^= 1
    return data


@hostile_bytes("can't be read")
def flip_in_vectors(data: bytearray) -> bytes:
    data[chunk_of(data, "vec/q") + 12] ^= 1
    return data


@hostile_bytes("wrong checksum")
def compressed_data_zeroed(data: bytearray) -> bytes:
    at = chunk_of(data, "routing/ids")
    data[at : at + 40] = bytes(40)
    return data


def old_format(path: Path) -> None:
    with h5py.File(path, "w", libver="earliest") as file:
        file["x"] = np.arange(3)


HOSTILE["old_format"] = old_format, "not of a visitlens recording"


@hostile_bytes("overlap")
def overlapping_chunks(data: bytearray) -> bytes:
    return moved_data(data, "tokens/pos", "tokens/segment")


@hostile_bytes("outside the file")
def chunk_beyond_the_end(data: bytearray) -> bytes:
    return moved_data(data, "tokens/pos", len(data) - 2)


@hostile_bytes("unreadable structure")
def data_beyond_the_end(data: bytearray) -> bytes:
    return moved_data(data, "axes/visit", len(data) - 2)


@hostile_bytes("outside the file")
def data_in_the_superblock(data: bytearray) -> bytes:
    return moved_data(data, "axes/visit", 8)

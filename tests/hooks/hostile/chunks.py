"""Chunks and filters: what unpacks to too much or too little, is missing, or goes through other filters."""

from __future__ import annotations

import zlib

import h5py
import numpy as np
from tests.hooks.hostile.making import hostile, low_level, replaced


@hostile("has chunks of 268435456 bytes")
def chunk_of_256_megabytes(file: h5py.File) -> None:
    stored = zlib.compress(bytes(2**20))
    data = file.create_dataset("tokens/extra", (2**26,), "u4", chunks=(2**26,), compression="gzip")
    data.id.write_direct_chunk((0,), stored)


@hostile("which can't be its 33554432 bytes")
def chunk_that_no_deflate_can_fill(file: h5py.File) -> None:
    data = file.create_dataset("tokens/extra", (2**23,), "u4", chunks=(2**23,), compression="gzip")
    data.id.write_direct_chunk((0,), zlib.compress(b"x"))


@hostile("bytes of arrays in a file of")
def many_chunks_of_zeros(file: h5py.File) -> None:
    data = file.create_dataset("tokens/extra", (2**28,), "u4", chunks=(2**24,), compression="gzip")
    stored = zlib.compress(bytes(2**26))
    for at in range(0, 2**28, 2**24):
        data.id.write_direct_chunk((at,), stored)


@hostile("its compressed data hold more")
def chunk_that_unpacks_to_more(file: h5py.File) -> None:
    data = file.create_dataset("tokens/extra", (1000,), "u4", chunks=(1000,), compression="gzip")
    data.id.write_direct_chunk((0,), zlib.compress(bytes(2**21)))


@hostile("its compressed data hold other")
def chunk_that_unpacks_to_less(file: h5py.File) -> None:
    data = file.create_dataset("tokens/extra", (1000,), "u4", chunks=(1000,), compression="gzip")
    data.id.write_direct_chunk((0,), zlib.compress(bytes(3996)))


@hostile("its compressed data hold other")
def stream_with_a_tail(file: h5py.File) -> None:
    data = file.create_dataset("tokens/extra", (1000,), "u4", chunks=(1000,), compression="gzip")
    data.id.write_direct_chunk((0,), zlib.compress(bytes(4000)) + b"tail")


@hostile("its compressed data hold other")
def stream_cut_short(file: h5py.File) -> None:
    data = file.create_dataset("tokens/extra", (1000,), "u4", chunks=(1000,), compression="gzip")
    data.id.write_direct_chunk((0,), zlib.compress(np.random.default_rng(0).bytes(4000))[:-9])


@hostile("which can't be its 4000 bytes")
def short_chunk(file: h5py.File) -> None:
    data = file.create_dataset("tokens/extra", (1000,), "u4", chunks=(1000,), fletcher32=True)
    data.id.write_direct_chunk((0,), bytes(100))


@hostile("stores 1 of its 2 chunks")
def missing_chunk(file: h5py.File) -> None:
    data = file.create_dataset("tokens/extra", (2000,), "u4", chunks=(1000,), fletcher32=True)
    data.id.write_direct_chunk((0,), bytes(4004))


@hostile("filter_mask")
def skipped_filter(file: h5py.File) -> None:
    data = file.create_dataset("tokens/extra", (1000,), "u4", chunks=(1000,), compression="gzip")
    data.id.write_direct_chunk((0,), bytes(4000), filter_mask=1)


@hostile("has filters")
def two_compressors(file: h5py.File) -> None:
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_chunk((8,))
    for _ in range(2):
        created.set_filter(h5py.h5z.FILTER_DEFLATE, 0, (1,))
    low_level(file, "tokens/extra", created, (8,)).write_direct_chunk((0,), zlib.compress(zlib.compress(bytes(32))))


@hostile("has filters")
def other_compressor(file: h5py.File) -> None:
    replaced(file, "tokens/id", compression="lzf")


@hostile("has filters")
def filter_of_hdf5_itself(file: h5py.File) -> None:
    replaced(file, "tokens/id", scaleoffset=4)


@hostile("has filters")
def filters_in_another_order(file: h5py.File) -> None:
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_chunk((8,))
    created.set_fletcher32()
    created.set_deflate(1)
    low_level(file, "tokens/extra", created, (8,)).write_direct_chunk((0,), zlib.compress(bytes(36)))

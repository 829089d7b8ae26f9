"""Files that a reader must refuse: each builder damages one copy of a valid shard, or puts something else in its place."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

LIBVER = ("v110", "v110")
HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {}
"""Name -> how it is made of a valid shard, and what the refusal says."""


def hostile(says: str, *, libver: tuple[str, str] = LIBVER) -> Callable:
    """Registers a builder that edits the shard as an open h5py.File."""

    def register(build: Callable[[h5py.File], None]) -> Callable[[h5py.File], None]:
        def edit(path: Path) -> None:
            with h5py.File(path, "r+", libver=libver) as file:
                build(file)

        HOSTILE[build.__name__] = edit, says
        return build

    return register


def hostile_path(says: str) -> Callable:
    """Registers a builder that works on the path."""

    def register(build: Callable[[Path], None]) -> Callable[[Path], None]:
        HOSTILE[build.__name__] = build, says
        return build

    return register


def hostile_bytes(says: str) -> Callable:
    """Registers a builder from bytes to bytes."""

    def register(build: Callable[[bytearray], bytes]) -> Callable[[bytearray], bytes]:
        HOSTILE[build.__name__] = lambda path: path.write_bytes(build(bytearray(path.read_bytes()))) and None, says
        return build

    return register


def elsewhere(file: h5py.File) -> Path:
    """A pipe that nobody writes to: whoever opens it hangs, and is found out."""
    pipe = Path(file.filename).with_name("another-file")
    if not pipe.exists():
        os.mkfifo(pipe)
    return pipe


def replaced(file: h5py.File, name: str, **options: object) -> h5py.Dataset:
    """A dataset of the same name, shape and type, made otherwise."""
    old = file[name]
    shape, dtype = old.shape, old.dtype
    del file[name]
    return file.create_dataset(name, **{"shape": shape, "dtype": dtype, **options})


def low_level(file: h5py.File, name: str, created: h5py.h5p.PropDCID, shape: tuple[int, ...], kind=h5py.h5t.STD_U32LE):
    space = h5py.h5s.create_simple(shape)
    if name in file:
        del file[name]
    return h5py.h5d.create(file.id, name.encode(), kind, space, created)


# Other files


@hostile("external storage")
def external_storage(file: h5py.File) -> None:
    replaced(file, "tokens/id", external=[(str(elsewhere(file)), 0, h5py.h5f.UNLIMITED)])


@hostile("soft or external link")
def external_link(file: h5py.File) -> None:
    file["tokens/extra"] = h5py.ExternalLink(str(elsewhere(file)), "/x")


@hostile("soft or external link")
def soft_link(file: h5py.File) -> None:
    file["tokens/extra"] = h5py.SoftLink("/tokens/id")


@hostile("soft or external link")
def soft_link_in_a_circle(file: h5py.File) -> None:
    file["a"] = h5py.SoftLink("/b")
    file["b"] = h5py.SoftLink("/a")


@hostile("virtual dataset")
def virtual_dataset(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((8,), "u4")
    layout[:] = h5py.VirtualSource(str(elsewhere(file)), "x", (8,), "u4")
    file.create_virtual_dataset("tokens/extra", layout)


@hostile("virtual dataset")
def virtual_dataset_of_itself(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((8,), "u4")
    layout[:] = h5py.VirtualSource(".", "tokens/extra", (8,), "u4")
    file.create_virtual_dataset("tokens/extra", layout)


@hostile("virtual dataset")
def virtual_dataset_without_end(file: h5py.File) -> None:
    """Its shape alone makes HDF5 look for files."""
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    space, source = h5py.h5s.create_simple((8,), (h5py.h5s.UNLIMITED,)), h5py.h5s.create_simple((8,))
    space.select_hyperslab((0,), (h5py.h5s.UNLIMITED,), (8,), (8,))
    created.set_virtual(space, f"{elsewhere(file)}%b".encode(), b"x", source)
    shape = h5py.h5s.create_simple((8,), (h5py.h5s.UNLIMITED,))
    h5py.h5d.create(file["tokens"].id, b"extra", h5py.h5t.STD_U32LE, shape, created)


@hostile_path("symbolic link")
def link_to_another_file(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


@hostile_path("regular file")
def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@hostile_path("regular file")
def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


PLUGIN = 424
"""A filter number that no library has: HDF5 goes through every library in its plugin path for it."""


@hostile("has filters")
def unknown_filter(file: h5py.File) -> None:
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_chunk((8,))
    created.set_filter(PLUGIN, h5py.h5z.FLAG_OPTIONAL, (1,))
    low_level(file, "tokens/extra", created, (8,)).write_direct_chunk((0,), bytes(32))


# Chunks


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


# Shapes and types


@hostile("bytes of arrays in a file of")
def huge_shape(file: h5py.File) -> None:
    file.create_dataset("tokens/extra", (2**50,), "u4")


@hostile("bytes of arrays in a file of")
def huge_shape_in_chunks(file: h5py.File) -> None:
    file.create_dataset("tokens/extra", (2**40, 2**20), "u4", chunks=(1, 1024), compression="gzip")


@hostile("chunks in a file of")
def millions_of_chunks(file: h5py.File) -> None:
    file.create_dataset("tokens/extra", (2**26,), "u1", chunks=(1,))


@hostile("doesn't hold the 4000 bytes")
def array_without_data(file: h5py.File) -> None:
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    low_level(file, "tokens/extra", created, (1000,))


@hostile("has no shape")
def no_shape(file: h5py.File) -> None:
    file.create_dataset("tokens/extra", dtype="u4", data=h5py.Empty("u4"))


@hostile("layout")
def compact_layout(file: h5py.File) -> None:
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_layout(h5py.h5d.COMPACT)
    low_level(file, "tokens/extra", created, (8,))


TYPES = {
    "references": h5py.ref_dtype,
    "region_references": h5py.regionref_dtype,
    "variable_length": h5py.vlen_dtype("u4"),
    "variable_text": h5py.string_dtype(),
    "fixed_text": "S8",
    "compound": [("a", "u4"), ("b", "f4")],
    "big_endian": ">u4",
    "enumeration": h5py.enum_dtype({"a": 1}, "u4"),
    "complex_numbers": "c8",
    "opaque": "V8",
    "arrays": np.dtype(("u4", (4,))),
}
for _name, _kind in TYPES.items():

    def _of_type(file: h5py.File, kind: object = _kind) -> None:
        file.create_dataset("tokens/extra", (8,), kind)

    _of_type.__name__ = f"dataset_of_{_name}"
    hostile("of another type than plain little-endian numbers")(_of_type)


@hostile("tokens/id: expected")
def right_name_of_the_wrong_type(file: h5py.File) -> None:
    replaced(file, "tokens/id", dtype="f8", data=file["tokens/id"][()].astype("f8"))


@hostile("tokens/id: shape")
def fewer_tokens_than_the_header_says(file: h5py.File) -> None:
    replaced(file, "tokens/id", shape=None, data=file["tokens/id"][:-1])


@hostile("routing/ids: expected")
def one_axis_too_few(file: h5py.File) -> None:
    replaced(file, "routing/ids", shape=None, data=file["routing/ids"][0])


@hostile("doesn't fit the file's .* along 'k'")
def gates_for_other_experts(file: h5py.File) -> None:
    replaced(file, "routing/gate", shape=None, data=file["routing/gate"][..., :1])


@hostile("don't fit its")
def totals_that_do_not_fit_each_other(file: h5py.File) -> None:
    data = file["summary/resid_rms/count"][()]
    replaced(file, "summary/resid_rms/count", shape=None, data=data[:-1] if len(data) > 1 else data[:, :-1])


@hostile("100000 groups; at most")
def more_groups_than_a_bootstrap_can_take(file: h5py.File) -> None:
    for key in ("total", "count"):
        values = np.zeros((100_000, *file[f"summary/resid_rms/{key}"].shape[1:]))
        replaced(file, f"summary/resid_rms/{key}", shape=None, data=values, compression="gzip")


# Groups, names, attributes


@hostile("deeper than")
def deep_groups(file: h5py.File) -> None:
    file.create_group("/".join(["deep"] * 2000))


@hostile("linked twice, or in a cycle")
def groups_in_a_circle(file: h5py.File) -> None:
    file["tokens/again"] = file["tokens"]


@hostile("linked twice, or in a cycle")
def root_in_itself(file: h5py.File) -> None:
    file["root"] = file["/"]


@hostile("linked twice, or in a cycle")
def dataset_under_two_names(file: h5py.File) -> None:
    file["tokens/again"] = file["tokens/id"]


@hostile("more than 4096 objects")
def too_many_objects(file: h5py.File) -> None:
    for index in range(4200):
        file.create_group(f"many/g{index}")


@hostile("neither a group nor a dataset")
def named_type(file: h5py.File) -> None:
    file["tokens/type"] = np.dtype("u4")


@hostile("has a name with other characters")
def name_with_markup(file: h5py.File) -> None:
    file["tokens/<script>alert(1)<"] = np.arange(3)


@hostile("has a name with other characters")
def name_that_clears_the_terminal(file: h5py.File) -> None:
    file["tokens/\x1b[2J"] = np.arange(3)


@hostile("another type than numbers and fixed-length text")
def attribute_of_variable_length(file: h5py.File) -> None:
    file.attrs["extra"] = "text"


@hostile("another type than numbers and fixed-length text")
def attribute_that_refers(file: h5py.File) -> None:
    file["tokens"].attrs["extra"] = file.ref


@hostile("isn't one value")
def attribute_with_a_shape(file: h5py.File) -> None:
    file.attrs["extra"] = np.arange(5)


@hostile("isn't one value")
def attribute_of_megabytes(file: h5py.File) -> None:
    file.attrs.create("extra", np.array(b"x" * (3 * 2**20)))


@hostile("more than 32 attributes")
def too_many_attributes(file: h5py.File) -> None:
    for index in range(40):
        file["tokens"].attrs[f"a{index}"] = index


# Descriptions


def run_text(file: h5py.File, text: bytes) -> None:
    file.attrs.create("run", np.array(text, dtype=h5py.string_dtype("utf-8", len(text))))


@hostile("not readable JSON")
def description_nested_without_end(file: h5py.File) -> None:
    run_text(file, b"[" * 400_000)


@hostile("lacks a field")
def description_of_a_million_lists(file: h5py.File) -> None:
    run_text(file, b"[" + b"[]," * 349_000 + b"[]]")


@hostile("not readable JSON")
def description_with_an_endless_number(file: h5py.File) -> None:
    run_text(file, b'{"tokens": ' + b"9" * 100_000 + b"}")


@hostile("lacks a field")
def description_without_fields(file: h5py.File) -> None:
    run_text(file, b'{"run_uuid": "x"}')


@hostile("isn't text")
def description_that_is_not_text(file: h5py.File) -> None:
    run_text(file, b"\xff\xfe{}")


@hostile("schema version 2.0.0 needs another visitlens")
def another_major_version(file: h5py.File) -> None:
    file.attrs["schema_version"] = np.bytes_("2.0.0")


@hostile("never completed")
def never_completed(file: h5py.File) -> None:
    file.attrs["complete"] = np.int64(0)


@hostile("no count token_count")
def negative_count(file: h5py.File) -> None:
    file.attrs["token_count"] = np.int64(-1)


@hostile("not of a visitlens recording")
def another_program_s_file(file: h5py.File) -> None:
    del file.attrs["format"]


@hostile("lacks its definition")
def measure_without_definition(file: h5py.File) -> None:
    del file["summary/resid_rms"].attrs["definition"]


# Damage


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


# HDF5's own structures, to write what its library wouldn't


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


def compiled_plugin(folder: Path) -> Path | None:
    """A library that says so when HDF5 loads it; None without a compiler."""
    source = folder / "plugin.c"
    source.write_text(
        "#include <stdio.h>\n__attribute__((constructor)) void loaded(void)"
        f'{{ FILE* f = fopen("{folder}/loaded", "w"); if (f) fclose(f); }}\n'
    )
    library = folder / "libplugin.so"
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return library

"""How a hostile file is made of a valid shard: a builder's name says what it is, its decorator what the refusal says."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import h5py

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

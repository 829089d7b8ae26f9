"""A shard that leads a reader to other files: external data, links, virtual datasets, pipes, plugins."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import h5py
from tests.hooks.hostile.making import elsewhere, hostile, hostile_path, low_level, replaced


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

"""Shapes and types that aren't a recording's, or don't fit each other."""

from __future__ import annotations

import h5py
import numpy as np
from tests.hooks.hostile.making import hostile, low_level, replaced


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

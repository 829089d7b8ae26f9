"""Groups, names and attributes."""

from __future__ import annotations

import h5py
import numpy as np
from tests.hooks.hostile.making import hostile


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

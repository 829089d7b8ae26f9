"""GroupTotals: the sums of one measure by group of documents, as shards and summary hold them under `/summary/NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import h5py
import numpy as np

from visitlens.errors import RecordingError
from visitlens.hooks.recording.format.schema import MAX_GROUPS, TEXT_FILTERS, chunk_shape, set_text

if TYPE_CHECKING:
    from visitlens.hooks.recording.format.gate import Gated

TOTALS, KINDS = ("total", "count", "left_out", "non_finite"), ["f8", "f8", "i8", "i8"]


@dataclass
class GroupTotals:
    """Sums of one measure: `total`, `count` [group, *shape] f8; `left_out`, `non_finite` [*shape]: tokens that the
    definition leaves out, and tokens whose value was NaN or infinite (never averaged in)."""

    attributes: dict[str, str]
    total: np.ndarray
    count: np.ndarray
    left_out: np.ndarray
    non_finite: np.ndarray

    def add(self, other: GroupTotals) -> None:
        """In place.

        Raises:
            RecordingError: another definition or shape.
        """
        if self.attributes != other.attributes or self.total.shape != other.total.shape:
            raise RecordingError(
                f"can't add totals of different measures: {self.attributes.get('title')!r} {self.total.shape} and "
                f"{other.attributes.get('title')!r} {other.total.shape}"
            )
        for name in TOTALS:
            getattr(self, name).__iadd__(getattr(other, name))

    def regrouped(self, places: np.ndarray, groups: int) -> GroupTotals:
        """Group i counted to group `places[i]` of `groups`."""
        total, count = (np.zeros((groups, *array.shape[1:])) for array in (self.total, self.count))
        np.add.at(total, places, self.total)
        np.add.at(count, places, self.count)
        return GroupTotals(self.attributes, total, count, self.left_out, self.non_finite)


def add_totals(totals: dict[str, GroupTotals], part: Mapping[str, GroupTotals]) -> None:
    """Adds the measures of a shard to those of the recording, in place; `part` is given away."""
    for name, value in part.items():
        if name in totals:
            totals[name].add(value)
        else:
            totals[name] = value


def write_totals(file: h5py.File, totals: Mapping[str, GroupTotals]) -> None:
    for name, measure in totals.items():
        group = file.create_group(f"summary/{name}")
        for key, text in measure.attributes.items():
            set_text(group.attrs, key, text)
        for key in TOTALS:
            array = getattr(measure, key)
            if array.size and array.ndim:
                chunks = chunk_shape(array.shape, array.itemsize)
                group.create_dataset(key, data=array, chunks=chunks, **TEXT_FILTERS)
            else:
                group.create_dataset(key, data=array)


def read_totals(gated: Gated) -> dict[str, GroupTotals]:
    """Measure -> sums, from a summary or a shard.

    Raises:
        RecordingError: there are none, or one's arrays don't fit each other.
    """
    names = {name.split("/")[1]: None for name in gated.arrays if name.startswith("summary/")}  # in order, once
    if not names:
        raise RecordingError(f"{gated.where}: holds no /summary")
    result = {}
    for name in names:
        attributes = {key: str(value) for key, value in gated.attributes(f"summary/{name}").items()}
        if not {"title", "axes", "unit", "definition", "paper"} <= attributes.keys():
            raise RecordingError(f"{gated.where}: summary/{name}: lacks its definition")
        arrays = [gated.array(f"summary/{name}/{key}") for key in TOTALS]
        shapes, kinds = [array.shape for array in arrays], [array.kind for array in arrays]
        axes = sum(1 for axis in attributes["axes"].split(",") if axis)
        if shapes[0] and shapes[0][0] > MAX_GROUPS:
            raise RecordingError(f"{gated.where}: summary/{name}: {shapes[0][0]} groups; at most {MAX_GROUPS} are read")
        if shapes[0] != shapes[1] or len(shapes[0]) != axes + 1 or {shapes[0][1:]} != {*shapes[2:]} or kinds != KINDS:
            raise RecordingError(f"{gated.where}: summary/{name}: arrays {shapes} of {kinds} don't fit its {axes} axes")
        result[name] = GroupTotals(attributes, *(gated.read(array.name) for array in arrays))
    return result

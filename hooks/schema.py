"""The HDF5 layout of a recording, version 1: names, attributes, and the per-measure totals that shards and summary hold.

run.vlens/
  manifest.json        a cache over the shards
  summary.h5           `/summary/NAME/{total,count,left_out,non_finite}` summed over all shards
  shards/wNN-SSSSSS.h5 `/axes`, `/tokens`, `/routing`, `/stats`, `/resid`, `/vec`, `/attn`, `/summary` of a token range
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HDF5_PLUGIN_PRELOAD", "::")  # no filter plugin is ever loaded from disk; before h5py is imported

import h5py
import numpy as np

from visitlens.kernels.errors import RecordingError

FORMAT = "visitlens-recording"
SCHEMA_VERSION = "1.0.0"
LEVELS = ("summary", "tokens", "activations", "maps")
MANIFEST, SUMMARY, SHARDS = "manifest.json", "summary.h5", "shards"
MAX_MAP_CONTEXT = 256
LIBVER = ("v110", "v110")
TEXT_FILTERS = {"shuffle": True, "compression": "gzip", "compression_opts": 1, "fletcher32": True}
VECTOR_FILTERS = {"fletcher32": True}


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
        for name in ("total", "count", "left_out", "non_finite"):
            getattr(self, name).__iadd__(getattr(other, name))


def add_totals(totals: dict[str, GroupTotals], part: Mapping[str, GroupTotals]) -> None:
    """Adds the measures of a shard to those of the recording, in place; `part` is given away."""
    for name, value in part.items():
        if name in totals:
            totals[name].add(value)
        else:
            totals[name] = value


def set_text(attributes: h5py.AttributeManager, name: str, text: str) -> None:
    """A fixed-length UTF-8 attribute: variable-length ones are refused in untrusted files."""
    data = text.encode()
    attributes.create(name, np.array(data, dtype=h5py.string_dtype("utf-8", max(len(data), 1))))


def get_text(attributes: h5py.AttributeManager, name: str) -> str:
    value = attributes[name]
    return value.decode() if isinstance(value, bytes) else str(value)


def write_header(file: h5py.File, run: Mapping[str, Any], numbers: Mapping[str, int]) -> None:
    """Root attributes: what the file is, the run's description as JSON, and counts."""
    set_text(file.attrs, "format", FORMAT)
    set_text(file.attrs, "schema_version", SCHEMA_VERSION)
    set_text(file.attrs, "run", json.dumps(run, sort_keys=True))
    for name, value in numbers.items():
        file.attrs[name] = np.int64(value)


def read_header(file: h5py.File, where: str) -> dict[str, Any]:
    """The run's description.

    Raises:
        RecordingError: not a recording, or of an unknown major version.
    """
    try:
        kind, version = get_text(file.attrs, "format"), get_text(file.attrs, "schema_version")
        run = json.loads(get_text(file.attrs, "run"))
    except (KeyError, json.JSONDecodeError) as error:
        raise RecordingError(f"{where}: an HDF5 file, but not of a visitlens recording ({error})") from error
    check_version(kind, version, where)
    return run


def check_version(kind: Any, version: Any, where: str) -> None:
    """Raises RecordingError unless format and major version are ours."""
    if kind != FORMAT:
        raise RecordingError(f"{where}: expected format {FORMAT!r}, got {kind!r}")
    if str(version).split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        raise RecordingError(
            f"{where}: schema version {version} needs another visitlens; this one reads {SCHEMA_VERSION}"
        )


def write_totals(file: h5py.File, totals: Mapping[str, GroupTotals]) -> None:
    for name, measure in totals.items():
        group = file.create_group(f"summary/{name}")
        for key, text in measure.attributes.items():
            set_text(group.attrs, key, text)
        for key in ("total", "count", "left_out", "non_finite"):
            array = getattr(measure, key)
            if array.ndim:
                group.create_dataset(key, data=array, chunks=_small_chunks(array), **TEXT_FILTERS)
            else:
                group.create_dataset(key, data=array)


def read_totals(file: h5py.File, where: str) -> dict[str, GroupTotals]:
    summary = file.get("summary")
    if not isinstance(summary, h5py.Group):
        raise RecordingError(f"{where}: holds no /summary")
    result = {}
    for name, group in summary.items():
        attributes = {key: get_text(group.attrs, key) for key in group.attrs}
        arrays = (dataset(group, key, where)[()] for key in ("total", "count", "left_out", "non_finite"))
        result[name] = GroupTotals(attributes, *arrays)
    return result


def dataset(group: h5py.Group, name: str, where: str) -> h5py.Dataset:
    """Raises RecordingError where there is none of that name."""
    found = group.get(name)
    if not isinstance(found, h5py.Dataset):
        raise RecordingError(f"{where}: holds no dataset {name}")
    return found


def _small_chunks(array: np.ndarray) -> tuple[int, ...]:
    """Whole rows up to about 1 MB."""
    row = max(array[:1].nbytes, 1)
    return (max(1, min(len(array), 2**20 // row)), *array.shape[1:])

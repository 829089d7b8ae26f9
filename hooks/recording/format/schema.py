"""The HDF5 layout of a recording, version 1: datasets, attributes, and the per-measure totals that shards and summary hold.

run.vlens/
  manifest.json        a cache over the shards
  summary.h5           `/summary/NAME/{total,count,left_out,non_finite}` summed over all shards, `/documents/hash` of all
  shards/wNN-SSSSSS.h5 the datasets of `LAYOUTS` for a token range, and `/summary` over it
  analyses/*.json      results that other tools keep beside the recording
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HDF5_PLUGIN_PRELOAD", "::")  # no filter plugin is ever loaded from disk; before h5py is imported

import h5py
import numpy as np

from visitlens.errors import RecordingError
from visitlens.hooks.recording.format.untrusted import parse_json

if TYPE_CHECKING:
    from visitlens.hooks.recording.format.chunks import StoredArray
    from visitlens.hooks.recording.format.gate import Gated

FORMAT = "visitlens-recording"
SCHEMA_VERSION = "1.2.0"
LEVELS = ("summary", "tokens", "activations", "maps")
MANIFEST, SUMMARY, SHARDS, ANALYSES = "manifest.json", "summary.h5", "shards", "analyses"
DOCUMENTS = "documents/hash"
MAX_MAP_CONTEXT = 256
MAX_STEPS, MAX_PAIRS, MAX_GROUPS = 4096, 200_000, 16_384  # readers make objects, and replicates, of each
LIBVER = ("v110", "v110")
TEXT_FILTERS = {"shuffle": True, "compression": "gzip", "compression_opts": 1, "fletcher32": True}
VECTOR_FILTERS = {"fletcher32": True}
TOTALS, KINDS = ("total", "count", "left_out", "non_finite"), ["f8", "f8", "i8", "i8"]


@dataclass(frozen=True)
class Layout:
    """One dataset of a shard. `axes` by name (`*`: one or two more, those of the measure); `kinds` of its numbers."""

    name: str
    axes: tuple[str, ...]
    kinds: tuple[str, ...]
    level: str
    text: str


_MODEL_KINDS = ("f4", "f8", "f2", "u2")
LAYOUTS = (
    Layout("axes/layer", ("step",), ("u2",), "all", "physical layer of each step, 0-based"),
    Layout("axes/visit", ("step",), ("u2",), "all", "visit of each step, 1-based"),
    Layout("axes/step", ("step",), ("u2",), "all", "execution index"),
    Layout(
        DOCUMENTS,
        ("document",),
        ("u8",),
        "all",
        "of its documents, each once and rising: the first 8 bytes of the SHA-256 of their token ids (since 1.1)",
    ),
    Layout("tokens/id", ("token",), ("u4",), "tokens", "token ids"),
    Layout("tokens/segment", ("token",), ("u4",), "tokens", "segment, rising over the whole recording"),
    Layout("tokens/pos", ("token",), ("u4",), "tokens", "position in the segment"),
    Layout(
        "tokens/generated",
        ("token",),
        ("u4",),
        "tokens",
        "0 in a prompt (prefill), n at the n-th token generated after it (decode); of generated texts",
    ),
    Layout("routing/ids", ("step", "token", "k"), ("u2",), "tokens", "experts used (S)"),
    Layout("routing/gate", ("step", "token", "k"), ("f2",), "tokens", "their gates (g)"),
    Layout(
        "routing/visited",
        ("step", "token"),
        ("u1",),
        "tokens",
        "1 where a token is really at a step; of models whose visits leave tokens out",
    ),
    Layout("stats/MEASURE", ("*", "token", "*"), ("f4",), "tokens", "a measure's value for each token"),
    Layout(
        "resid/full", ("step", "range", "hidden"), _MODEL_KINDS, "activations", "residual stream at the step's input"
    ),
    Layout(
        "resid/x", ("step", "range", "hidden"), _MODEL_KINDS, "activations", "RMSNorm output that attention reads (X)"
    ),
    Layout(
        "resid/attn", ("step", "range", "hidden"), _MODEL_KINDS, "activations", "attention write, after the 1/r scale"
    ),
    Layout("resid/moe", ("step", "range", "hidden"), _MODEL_KINDS, "activations", "MoE write, after the 1/r scale"),
    Layout("vec/q", ("step", "range", "head", "d"), _MODEL_KINDS, "activations", "queries (Q)"),
    Layout("vec/k", ("step", "range", "kv_head", "d"), _MODEL_KINDS, "activations", "keys (K)"),
    Layout("vec/v", ("step", "range", "kv_head", "d"), _MODEL_KINDS, "activations", "values (V)"),
    Layout("vec/pv", ("step", "range", "head", "d"), _MODEL_KINDS, "activations", "attended context (PV)"),
    Layout("attn/p", ("context", "step", "head", "query", "query"), ("f2",), "maps", "attention pattern (P)"),
)
_BY_NAME = {layout.name: layout for layout in LAYOUTS}
SHARD_NUMBERS = {
    "worker": "which writer made it",
    "seq": "that writer's count of shards",
    "token_start": "ordinal of its first token",
    "token_count": "its tokens, padding not counted",
    "context_start": "ordinal of its first context",
    "context_count": "its contexts",
    "complete": "1: the last thing set before the file is committed",
}
SUMMARY_NUMBERS = {"token_count": "tokens summed", "shard_count": "shards summed"}


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


def set_text(attributes: h5py.AttributeManager, name: str, text: str) -> None:
    """A fixed-length UTF-8 attribute: variable-length ones are refused in untrusted files."""
    data = text.encode()
    attributes.create(name, np.array(data, dtype=h5py.string_dtype("utf-8", max(len(data), 1))))


def get_text(attributes: h5py.AttributeManager, name: str) -> str:
    value = attributes[name]
    return value.decode() if isinstance(value, bytes) else str(value)


def write_header(file: h5py.File, run: Mapping[str, Any], numbers: Mapping[str, int]) -> None:
    """Root attributes: what the file is, the run's description as JSON, its hash, and counts."""
    set_text(file.attrs, "format", FORMAT)
    set_text(file.attrs, "schema_version", SCHEMA_VERSION)
    set_text(file.attrs, "run_uuid", run["run_uuid"])
    set_text(file.attrs, "config_sha256", run["config_sha256"])
    set_text(file.attrs, "run", json.dumps(run, sort_keys=True))
    for name, value in numbers.items():
        file.attrs[name] = np.int64(value)


def read_header(file: h5py.File, where: str) -> dict[str, Any]:
    """The run's description.

    Raises:
        RecordingError: not a recording, or of an unknown major version.
    """
    try:
        kind, version, text = (get_text(file.attrs, name) for name in ("format", "schema_version", "run"))
    except UnicodeDecodeError as error:
        raise RecordingError(f"{where}: the run's description isn't text ({error})") from error
    except KeyError as error:
        raise RecordingError(f"{where}: an HDF5 file, but not of a visitlens recording ({error})") from error
    check_version(kind, version, where)
    return check_run(parse_json(text.encode(), where), where)


def read_numbers(file: h5py.File, names: Mapping[str, str], where: str) -> dict[str, int]:
    """Counts among the root attributes, none negative.

    Raises:
        RecordingError: one is missing.
    """
    numbers: dict[str, int] = {}
    for name in names:
        value = file.attrs.get(name)
        if not isinstance(value, np.integer) or value < 0:
            raise RecordingError(f"{where}: no count {name} among its attributes")
        numbers[name] = int(value)
    return numbers


def check_run(run: Any, where: str) -> dict[str, Any]:
    """Raises RecordingError unless the description of a run has the fields that readers use."""
    try:
        texts = [run["run_uuid"], run["config_sha256"], run["config"]["data_sha256"], run["config"]["dtype"]]
        counts = [run["tokens"], run["documents"], run["config"]["options"]["groups"], *run["layers"]]
        others = (run["config"]["model"], run["provenance"], run["config"]["measures"])
        level, sites = run["config"]["options"]["level"], run["config"]["options"]["sites"]
        texts += [*run.get("extends", []), *run.get("ungrouped", [])]
        groups, places = run.get("groups", 1), [at for moved in run.get("regrouped", {}).values() for at in moved]
        counts += [groups, *places]
        right = (
            all(isinstance(text, str) for text in texts)
            and all(type(count) is int and 0 <= count < 2**62 for count in counts)
            and isinstance(run["layers"], list)
            and 0 < len(run["layers"]) <= MAX_STEPS
            and sum(n * (n - 1) // 2 for n in Counter(run["layers"]).values()) <= MAX_PAIRS
            and isinstance(sites, list)
            and groups <= MAX_GROUPS
            and max(places, default=-1) < groups
            and ("groups" in run or not places)
            and isinstance(run.get("left_out", {}), dict)
            and isinstance(run["config"]["model"].get("notes", []), list)
            and all(map(isinstance, others, (dict, dict, list)))
            and level in LEVELS
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise RecordingError(f"{where}: the run's description lacks a field ({error!r:.200})") from error
    if not right:
        raise RecordingError(f"{where}: the run's description has a field of the wrong type or value")
    return run


def check_layouts(file: h5py.File, arrays: Mapping[str, StoredArray], where: str) -> None:
    """Raises RecordingError where an array has another type, rank or length than its layout and the
    file's counts say. Arrays of other names (a newer minor version may have some) are left alone: nothing reads them.
    """
    run = read_header(file, where)
    if "seq" not in file.attrs:
        read_numbers(file, SUMMARY_NUMBERS, where)
        return
    numbers = read_numbers(file, SHARD_NUMBERS, where)
    if numbers["complete"] != 1:
        raise RecordingError(f"{where}: a shard that was never completed")
    sizes = {"step": len(run["layers"]), "token": numbers["token_count"], "context": numbers["context_count"]}
    for name, array in arrays.items():
        shape, kind = array.shape, array.kind
        layout = _BY_NAME.get("stats/MEASURE" if name.startswith("stats/") else name)
        if layout is None:
            continue
        free = layout.axes[-1] == "*"
        axes = layout.axes[:-1] if free else layout.axes
        if kind not in layout.kinds or (len(shape) < len(axes) if free else len(shape) != len(axes)):
            raise RecordingError(
                f"{where}: {name}: expected {layout.axes} of {' or '.join(layout.kinds)}, got shape {shape} of {kind}"
            )
        for axis, length in zip(axes, shape, strict=False):
            if axis == "range":
                right = length <= sizes["token"]
            else:
                right = axis == "*" or sizes.setdefault(axis, length) == length
            if not right:
                raise RecordingError(f"{where}: {name}: shape {shape} doesn't fit the file's {sizes} along {axis!r}")


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
        for key in TOTALS:
            array = getattr(measure, key)
            if array.size and array.ndim:
                chunks = chunk_shape(array.shape, array.itemsize)
                group.create_dataset(key, data=array, chunks=chunks, **TEXT_FILTERS)
            else:
                group.create_dataset(key, data=array)


def write_documents(file: h5py.File, hashes: np.ndarray | None) -> None:
    """Nothing for None: they aren't known."""
    if hashes is not None and len(hashes):
        file.create_dataset(DOCUMENTS, data=hashes, chunks=(min(len(hashes), 65_536),), **TEXT_FILTERS)


def read_documents(gated: Gated) -> np.ndarray | None:
    """[document] hashes, each once and rising; None where a file of version 1.0 doesn't have them."""
    return np.unique(gated.read(DOCUMENTS)) if DOCUMENTS in gated else None


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


def chunk_shape(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    """Chunks of at most about 1 MB, whole along the last axes."""
    chunk, room = [], 2**20 // item
    for length in reversed(shape):
        chunk.append(max(1, min(length, room)))
        room //= chunk[-1]
    return tuple(reversed(chunk))

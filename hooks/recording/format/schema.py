"""The HDF5 layout of a recording, version 1: datasets and attributes; the totals are in `totals`.

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
from visitlens.hooks.core.sites import ACTIVATION_SITES, SITES
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


@dataclass(frozen=True)
class Layout:
    """One dataset of a shard. `axes` by name (`*`: one or two more, those of the measure); `kinds` of its numbers."""

    name: str
    axes: tuple[str, ...]
    kinds: tuple[str, ...]
    level: str
    text: str

    @property
    def concat_axis(self) -> int:
        """Along which the arrays of several contexts are joined."""
        return next((at for at, axis in enumerate(self.axes) if axis in ("token", "range", "context", "document")), 0)

    @property
    def filters(self) -> dict[str, Any]:
        """Of vectors, whose bits don't compress, a checksum alone."""
        return VECTOR_FILTERS if "range" in self.axes else TEXT_FILTERS

    def chunks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What is read at once: some tokens of one step, a context's map at one step."""
        if "context" in self.axes:
            return (1, 1, *shape[2:])
        if self.concat_axis == 0:
            return (min(shape[0], 65_536), *shape[1:])
        return (1, min(shape[1], 256 if "range" in self.axes else 16_384), *shape[2:])


_MODEL_KINDS = ("f4", "f8", "f2", "u2")


def _of_site(name: str) -> Layout:
    site = SITES[name]
    return Layout(
        str(site.dataset), ("step", "range", *site.axes), _MODEL_KINDS, "activations", f"{site.title} ({site.name})"
    )


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
    *map(_of_site, ACTIVATION_SITES),
    Layout("attn/p", ("context", "step", "head", "query", "query"), ("f2",), "maps", "attention pattern (P)"),
)
_BY_NAME = {layout.name: layout for layout in LAYOUTS}


def layout_of(name: str) -> Layout | None:
    """That of a dataset by name; None for one of a newer minor version."""
    return _BY_NAME.get("stats/MEASURE" if name.startswith("stats/") else name)


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
        layout = layout_of(name)
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
        _check_place(file, name, layout, shape, numbers, where)


def _check_place(
    file: h5py.File, name: str, layout: Layout, shape: tuple[int, ...], numbers: Mapping[str, int], where: str
) -> None:
    """The attributes that say which tokens an array is of, and how its bits are read."""
    about = file[name].attrs
    first, kind = about.get("token_start"), about.get("logical_dtype")
    if "range" not in layout.axes:
        if first is not None or kind is not None:
            raise RecordingError(f"{where}: {name}: says which tokens it is of or how it is read; expected every token")
        return
    start, stop = numbers["token_start"], numbers["token_start"] + numbers["token_count"]
    length = shape[layout.axes.index("range")]
    if first is not None and (not isinstance(first, np.integer) or not start <= int(first) <= stop - length):
        raise RecordingError(
            f"{where}: {name}: its {length} tokens begin at {first}; expected them inside the shard's, {start} to {stop - 1}"
        )
    if kind is not None and (kind if isinstance(kind, str) else bytes(kind).decode("utf-8", "replace")) != "bfloat16":
        raise RecordingError(f"{where}: {name}: of another logical_dtype than bfloat16")


def check_alike(known: dict[str, tuple[str, int]], gated: Gated) -> None:
    """Raises RecordingError where an axis that isn't of tokens has another length than in the shards seen before, or an array
    another kind. `known` gathers them."""
    for name, array in gated.arrays.items():
        layout = _BY_NAME.get(name)
        if layout is None or name == DOCUMENTS:
            continue
        for axis, length in zip(layout.axes, array.shape, strict=False):
            if axis in ("token", "range", "context", "*"):
                continue
            before, kept = known.setdefault(axis, (gated.where, length))
            if kept != length:
                raise RecordingError(
                    f"{gated.where}: {name}: {length} along {axis!r}, where {before} has {kept}: they aren't of one recording"
                )


def check_version(kind: Any, version: Any, where: str) -> None:
    """Raises RecordingError unless format and major version are ours."""
    if kind != FORMAT:
        raise RecordingError(f"{where}: expected format {FORMAT!r}, got {kind!r}")
    if str(version).split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        raise RecordingError(
            f"{where}: schema version {version} needs another visitlens; this one reads {SCHEMA_VERSION}"
        )


def write_documents(file: h5py.File, hashes: np.ndarray | None) -> None:
    """Nothing for None: they aren't known."""
    if hashes is not None and len(hashes):
        file.create_dataset(DOCUMENTS, data=hashes, chunks=(min(len(hashes), 65_536),), **TEXT_FILTERS)


def read_documents(gated: Gated) -> np.ndarray | None:
    """[document] hashes, each once and rising; None where a file of version 1.0 doesn't have them."""
    return np.unique(gated.read(DOCUMENTS)) if DOCUMENTS in gated else None


def chunk_shape(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    """Chunks of at most about 1 MB, whole along the last axes."""
    chunk, room = [], 2**20 // item
    for length in reversed(shape):
        chunk.append(max(1, min(length, room)))
        room //= chunk[-1]
    return tuple(reversed(chunk))

"""Any statistic, per-token value or activation of a recording as a file: Parquet, CSV, NPZ or safetensors. No torch."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from visitlens.errors import InputError, UnavailableError
from visitlens.hooks.core.sites import ACTIVATION_SITES, SITES
from visitlens.hooks.recording.store.commit import storage_error
from visitlens.probe.measures import derived
from visitlens.probe.reading.recorded_run import RecordedRun, step_label

FORMATS = (".parquet", ".csv", ".npz", ".safetensors")
_SAFETENSORS = {"f2": "F16", "f4": "F32", "f8": "F64", "u1": "U8", "u2": "U16", "u4": "U32", "i4": "I32", "i8": "I64"}


@dataclass(frozen=True)
class Export:
    """`arrays` by name, the first the main one; `labels` name the elements along the main one's `axes`."""

    name: str
    arrays: dict[str, np.ndarray]
    axes: tuple[str, ...]
    labels: dict[str, list[str]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    bfloat16: bool = False


def choose(
    run: RecordedRun,
    what: str,
    *,
    per_token: bool = False,
    layer: int | None = None,
    visit: int | None = None,
    head: int | None = None,
    tokens: tuple[int, int] | None = None,
) -> Export:
    """What to export: a measure or derived statistic with its interval; `per_token`, a measure's value for each token;
    `tokens` (ids, segments, positions); `experts` (with gates) or an activation site, at one layer and visit.

    Raises:
        InputError: no such name, a layer and visit are missing, or what was chosen of doesn't have it.
        RecordingError: the recording doesn't hold it.
    """
    recording = run.recording
    about = {"what": what, **run.provenance, "tokens": list(tokens) if tokens else None}
    first = tokens[0] if tokens else 0
    one_step, by_token = what == "experts" or what in ACTIVATION_SITES, what == "tokens" or per_token
    given = {"layer": None if one_step else layer, "visit": None if one_step else visit}
    given |= {"head": None if what in ACTIVATION_SITES else head, "tokens": None if one_step or by_token else tokens}
    if unused := [f"--{name}" for name, value in given.items() if value is not None]:
        hint = "; --per-token has a measure's value for each token" if "--tokens" in unused else ""
        raise InputError(f"{what} isn't chosen from by {', '.join(unused)}{hint}")
    if what == "tokens":
        table = recording.token_table(tokens)
        return Export(what, table, ("token",), _numbered(first, len(table["id"])), about)
    if one_step:
        if layer is None or visit is None:
            raise InputError(f"{what}: name a layer and a visit, for example --layer 3 --visit 2")
        about |= {"layer": layer, "visit": visit, "head": head}
        if what == "experts":
            ids, gates = recording.experts(layer, visit, tokens)
            return Export(what, {"experts": ids, "gates": gates}, ("token", "k"), _numbered(first, len(ids)), about)
        values = recording.activation(what, layer, visit, tokens=tokens, head=head)
        axes = ("token", *(SITES[what].axes if head is None else SITES[what].axes[1:]))
        start = first if tokens else (recording.run["config"]["options"].get("activation_tokens") or [0])[0]
        packed = recording.run["config"]["dtype"] == "bfloat16"
        return Export(what, {what: values}, axes, _numbered(start, len(values)), about, packed)
    if per_token:
        measure = run.stat(what).measure
        values = recording.token_stat(what, tokens)
        axes = (measure.axes[0], "token", *measure.axes[1:])
        labels = {axis: _texts(items) for axis, items in run.stat(what).labels.items()}
        return Export(what, {what: values}, axes, labels | _numbered(first, values.shape[1]), about)
    what = {"norm_ratio": "norm_ratio_update"}.get(what, what)  # its name in version 0.1
    if what not in (
        *run.measures,
        *derived.registered(),
        *recording.run.get("left_out", ()),
    ):  # of which `stat` says why
        raise InputError(
            f"nothing of the name {what!r}; there are tokens, experts, {', '.join((*ACTIVATION_SITES, *derived.registered(), *run.measures))}"
        )
    stat = run.derived(what) if what in derived.registered() else run.stat(what)
    low, high = stat.interval()
    about |= {"measure": stat.measure.to_attributes(), "documents": stat.documents, "aggregation": stat.aggregation}
    labels = {axis: _texts(stat.labels[axis]) for axis in stat.axes}
    counts = {} if stat.counts is None else {"n": stat.counts}
    return Export(what, {"value": stat.values, "low": low, "high": high, **counts}, stat.axes, labels, about)


def write(export: Export, out: Path) -> Path:
    """By the ending of `out`.

    Raises:
        InputError: another ending.
        UnavailableError: Parquet without pyarrow.
        StorageError: no room, no permission, or no such place.
    """
    writers = {".parquet": _parquet, ".csv": _csv, ".npz": _npz, ".safetensors": _safetensors}
    if out.suffix not in writers:
        raise InputError(f"{out}: expected a name that ends in {', '.join(FORMATS)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        writers[out.suffix](export, out)
    except OSError as error:
        raise storage_error(error, out) from error
    return out


def _texts(items: Sequence[Any]) -> list[str]:
    return [step_label(item) if hasattr(item, "visit") else str(item) for item in items]


def _numbered(first: int, count: int) -> dict[str, list[str]]:
    return {"token": [str(index) for index in range(first, first + count)]}


def _columns(export: Export) -> dict[str, np.ndarray]:
    """One row an element of the main array; vectors of an activation keep their last axis as columns `0, 1 ...`."""
    main = next(iter(export.arrays.values()))
    wide = export.axes[-1] in ("hidden", "d", "k")
    axes = export.axes[:-1] if wide else export.axes
    shape = main.shape[: len(axes)]
    rows = np.indices(shape).reshape(len(axes), -1) if axes else np.zeros((0, 1), int)
    columns: dict[str, np.ndarray] = {}
    for axis, index in zip(axes, rows, strict=True):
        labels = export.labels.get(axis) or [str(i) for i in range(main.shape[export.axes.index(axis)])]
        whole = all(label.isdigit() for label in labels)
        columns[axis] = np.array([int(v) for v in labels] if whole else labels)[index]
    for name, array in export.arrays.items():
        if wide:
            flat = array.reshape(-1, array.shape[-1])
            columns |= {f"{name}_{i}": flat[:, i] for i in range(flat.shape[1])}
        else:
            columns[name] = array.reshape(-1)
    return columns


def _parquet(export: Export, out: Path) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UnavailableError(f"{out}: Parquet needs pyarrow: pip install pyarrow, or use .csv or .npz") from error
    table = pa.table(_columns(export))
    pq.write_table(table.replace_schema_metadata({"visitlens": json.dumps(export.about)}), out)


def _csv(export: Export, out: Path) -> None:
    columns = _columns(export)
    with out.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(columns)
        rows.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))


def _npz(export: Export, out: Path) -> None:
    labels = {f"axis_{axis}": np.array(items) for axis, items in export.labels.items()}
    axes, about = np.array(export.axes), np.array(json.dumps(export.about))
    arrays: dict[str, Any] = {**export.arrays, **labels, "axes": axes, "about": about}
    np.savez_compressed(out, **arrays)


def _safetensors(export: Export, out: Path) -> None:
    """The format's own layout (a JSON header, then the bytes), written here: its NumPy interface has no bfloat16."""
    header: dict[str, Any] = {
        "__metadata__": {
            "axes": ",".join(export.axes),
            "about": json.dumps(export.about),
            "labels": json.dumps(export.labels),
        }
    }
    parts, at = [], 0
    for name, array in export.arrays.items():
        kind = _SAFETENSORS[array.dtype.str[1:]]
        data = np.ascontiguousarray(array)
        if export.bfloat16:  # widened without loss when it was read
            kind, data = "BF16", (data.view(np.uint32) >> 16).astype(np.uint16)
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + data.nbytes]}
        parts.append(data.tobytes())
        at += data.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with out.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(parts)

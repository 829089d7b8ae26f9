"""Reads a recording: summary totals at once, shard arrays lazily. No torch.

Every file is opened read-only and checked against the manifest's size; no virtual datasets, no links are followed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from visitlens.hooks import schema  # sets HDF5_PLUGIN_PRELOAD: before h5py

import h5py  # isort: skip
import numpy as np

from visitlens.hooks.loop_plan import ExecutionPlan
from visitlens.hooks.schema import GroupTotals
from visitlens.hooks.sites import SITES, check_sites
from visitlens.kernels.errors import InputError, RecordingError

_SHARD_NAME = re.compile(r"w\d{2,}-\d{6,}\.h5")
_Read = TypeVar("_Read")
Tokens = tuple[int, int] | None
"""Ordinals of tokens in the recording, from and up to; None = all."""


def read_manifest(path: Path) -> dict[str, Any]:
    """Raises RecordingError: none there, damaged, or another version."""
    file = path / schema.MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        schema.check_version(manifest["format"], manifest["schema_version"], str(file))
        names = [shard["name"] for shard in manifest["shards"]]
        if not all(_SHARD_NAME.fullmatch(name) for name in names) or "run" not in manifest:
            raise KeyError("run or shard names")
    except FileNotFoundError as error:
        hint = (
            "make one with `visitlens record`"
            if not path.exists()
            else "a recording is a folder with manifest.json and shards/"
        )
        raise RecordingError(f"{path}: no recording there; {hint}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, OSError) as error:
        raise RecordingError(f"{file}: not a readable manifest ({error!r})") from error
    return manifest


def shard_names(path: Path) -> list[str]:
    """Committed shards, in order."""
    return sorted(p.name for p in (path / schema.SHARDS).glob("w*-*.h5"))


class Recording:
    """A recording on disk. `plan`, `config`, `provenance` describe the run; `totals` are the summary's sums."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        manifest = read_manifest(self.path)
        self.run: dict[str, Any] = manifest["run"]
        self.shards: list[dict[str, Any]] = manifest["shards"]
        self.plan = ExecutionPlan.from_layers(self.run["layers"])

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration."""
        return self.run["config"]["model"]

    @property
    def level(self) -> str:
        return self.run["config"]["options"]["level"]

    @property
    def provenance(self) -> dict[str, Any]:
        return self.run["provenance"]

    @property
    def tokens(self) -> int:
        """Recorded so far."""
        return sum(shard["token_count"] for shard in self.shards)

    @property
    def complete(self) -> bool:
        return self.tokens == self.run["tokens"]

    @property
    def documents(self) -> int:
        return self.run["documents"]

    @cached_property
    def totals(self) -> dict[str, GroupTotals]:
        """Measure -> sums over all shards."""
        file = self.path / schema.SUMMARY
        try:
            with h5py.File(file, "r") as opened:
                run = schema.read_header(opened, str(file))
                if run["run_uuid"] != self.run["run_uuid"]:
                    raise RecordingError(f"{file}: belongs to another run than the manifest")
                return schema.read_totals(opened, str(file))
        except (OSError, KeyError) as error:
            raise RecordingError(f"{file}: not a readable summary ({error})") from error

    def token_table(self, tokens: Tokens = None) -> dict[str, np.ndarray]:
        """`id`, `segment`, `pos`, each [token]."""
        self._needs("tokens")
        return {name: self._concatenate(f"tokens/{name}", axis=0, tokens=tokens) for name in ("id", "segment", "pos")}

    def experts(self, layer: int, visit: int, tokens: Tokens = None) -> tuple[np.ndarray, np.ndarray]:
        """Expert ids u2 and gates f2 of one step, [token, k]."""
        self._needs("tokens")
        step = self.plan.step(layer, visit).index
        ids = self._concatenate("routing/ids", axis=0, index=step, tokens=tokens)
        return ids, self._concatenate("routing/gate", axis=0, index=step, tokens=tokens)

    def token_stat(self, name: str, tokens: Tokens = None) -> np.ndarray:
        """Per-token scalars of a measure, [step or pair, token, ...] f4; NaN where the definition leaves a token out."""
        self._needs("tokens")
        return self._concatenate(f"stats/{name}", axis=1, tokens=tokens)

    def activation(self, site: str, layer: int, visit: int) -> np.ndarray:
        """One step of a site, [token, ...]: float32 or float64; bfloat16 is widened without loss."""
        check_sites([site])
        if site not in self.run["config"]["options"]["sites"]:
            raise RecordingError(
                f"{self.path}: site {site!r} wasn't recorded (level {self.level}); record again with --level activations --sites {site}"
            )
        step = self.plan.step(layer, visit).index
        return self._concatenate(str(SITES[site].dataset), axis=0, index=step)

    def attention_maps(self, layer: int, visit: int, context: int | None = None) -> np.ndarray:
        """P of one step, [context, head, query, key] f2; of one packed context alone, [head, query, key]."""
        if self.level != "maps":
            raise RecordingError(
                f"{self.path}: holds no attention maps (level {self.level}); record again with --level maps"
            )
        step = self.plan.step(layer, visit).index
        if context is None:
            return np.concatenate(self._each(lambda file: schema.dataset(file, "attn/p", file.filename)[:, step]))
        for shard in self.shards:
            at = context - shard["context_start"]
            if 0 <= at < shard["context_count"]:
                return self._from_shard(
                    shard, lambda file, at=at: schema.dataset(file, "attn/p", file.filename)[at, step]
                )
        raise InputError(f"{self.path}: no context {context}; it has {self.contexts}")

    @property
    def contexts(self) -> int:
        """Packed contexts recorded so far."""
        return sum(shard["context_count"] for shard in self.shards)

    def _needs(self, what: str) -> None:
        if self.level == "summary":
            raise RecordingError(
                f"{self.path}: {what} aren't kept at level 'summary'; record again with --level tokens"
            )

    def _each(self, read: Callable[[h5py.File], _Read]) -> list[_Read]:
        """What `read` takes from each shard, in order."""
        return [self._from_shard(shard, read) for shard in self.shards]

    def _slices(self, tokens: Tokens) -> list[tuple[dict[str, Any], slice]]:
        """The shards that hold some of these tokens, and which of theirs they are."""
        start, stop = tokens or (0, self.run["tokens"])
        parts = []
        for shard in self.shards:
            low, high = max(start - shard["token_start"], 0), min(stop - shard["token_start"], shard["token_count"])
            if low < high:
                parts.append((shard, slice(low, high)))
        return parts

    def _from_shard(self, shard: dict[str, Any], read: Callable[[h5py.File], _Read]) -> _Read:
        path = self.path / schema.SHARDS / shard["name"]
        try:
            if path.stat().st_size != shard["bytes"]:
                raise RecordingError(
                    f"{path}: {path.stat().st_size} bytes, the manifest says {shard['bytes']}: damaged"
                )
            with h5py.File(path, "r") as file:
                return read(file)
        except OSError as error:
            raise RecordingError(f"{path}: can't be read ({error}); it is missing or damaged") from error

    def _concatenate(self, name: str, axis: int, index: int | None = None, tokens: Tokens = None) -> np.ndarray:
        def read(file: h5py.File, part: slice = slice(None)) -> np.ndarray | None:
            if name not in file:
                return None
            dataset = schema.dataset(file, name, file.filename)
            lead = (index,) if index is not None else (slice(None),) * axis
            part = dataset[(*lead, part)]
            if dataset.attrs.get("logical_dtype", b"") in (b"bfloat16", "bfloat16"):
                part = (part.astype(np.uint32) << 16).view(np.float32)
            return part

        if tokens is None:
            parts = self._each(read)
        else:
            parts = [self._from_shard(s, lambda file, at=at: read(file, at)) for s, at in self._slices(tokens)]
        parts = [part for part in parts if part is not None]
        if not parts:
            raise InputError(f"{self.path}: no dataset {name}")
        return np.concatenate(parts, axis=axis)

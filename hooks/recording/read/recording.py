"""Reads a recording: summary totals at once, shard arrays lazily. No torch.

Every file goes through the gate (`gate.py`, `untrusted.py`) before its data are read, whoever made the recording;
`trusted=True` leaves out the gate's costly part.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from visitlens.errors import InputError, RecordingError
from visitlens.hooks.core.loop_plan import ExecutionPlan
from visitlens.hooks.core.sites import SITES, check_sites
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.format.gate import Gated, open_gated, passed
from visitlens.hooks.recording.format.totals import GroupTotals, read_totals
from visitlens.hooks.recording.format.untrusted import read_json, real_folder
from visitlens.hooks.recording.store.fetched_copies import Fetched
from visitlens.hooks.recording.store.object_store import PULL_FIRST, is_url, was_url

SHARD_NAME = re.compile(r"w[0-9]{2,4}-[0-9]{6,12}\.h5")
_ANALYSIS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}\.json")
_OPEN_FILES = 16
_ENTRY_NUMBERS = ("bytes", *(name for name in schema.SHARD_NUMBERS if name != "complete"))
_Read = TypeVar("_Read")
Tokens = tuple[int, int] | None
"""Ordinals of tokens in the recording, from and up to; None = all."""


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, its shards in the order of their tokens.

    Raises:
        RecordingError: none there, damaged, or another version.
    """
    file = path / schema.MANIFEST
    if was_url(path):
        raise RecordingError(f"{path}: {PULL_FIRST}")
    if not path.is_dir():
        kind = "a file: a recording is a folder; a packed one is opened by `visitlens unpack` first"
        raise RecordingError(
            f"{path}: {kind if path.exists() else 'no recording there; make one with `visitlens record`'}"
        )
    if not file.is_symlink() and not file.exists():
        rebuilt = (
            "; `visitlens repair` rebuilds it from the shards, as recording on does"
            if (path / schema.SHARDS).is_dir()
            else ""
        )
        raise RecordingError(
            f"{path}: no recording there; a recording is a folder with manifest.json and shards/{rebuilt}"
        )
    manifest = read_json(file)
    try:
        schema.check_version(manifest["format"], manifest["schema_version"], str(file))
        schema.check_run(manifest["run"], str(file))
        shards = manifest["shards"]
        for shard in shards:
            numbers = [shard[name] for name in _ENTRY_NUMBERS]
            if not SHARD_NAME.fullmatch(shard["name"]) or not isinstance(shard["sha256"], str):
                raise KeyError("name or sha256")
            if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
                raise KeyError("numbers")
        shards.sort(key=lambda shard: (shard["context_start"], shard["name"]))
        if len({shard["name"] for shard in shards}) < len(shards):
            raise KeyError("two shards of one name")
        overlap = first_overlap(shards)
        if shards and shards[-1]["token_start"] + shards[-1]["token_count"] > manifest["run"]["tokens"]:
            raise KeyError("more tokens than the run has")
    except (KeyError, TypeError, AttributeError) as error:
        raise RecordingError(f"{file}: not a readable manifest ({error!r:.200})") from error
    if overlap:
        raise RecordingError(f"{file}: shards {overlap[0]} and {overlap[1]} hold the same tokens")
    return manifest


def first_overlap(shards: list[dict[str, Any]]) -> tuple[str, str] | None:
    """The names of two neighbours, of shards in order, that hold some tokens or contexts twice."""
    for before, after in itertools.pairwise(shards):
        for unit in ("token", "context"):
            if before[f"{unit}_start"] + before[f"{unit}_count"] > after[f"{unit}_start"]:
                return before["name"], after["name"]
    return None


class Recording:
    """A recording: a folder, or the URL of one in an object store, of which `path` is then the local copy (`fetched.py`).

    `plan`, `config`, `provenance` describe the run; `totals` are the summary's sums. `trusted=True` is for recordings of your
    own: it spares the walk over every chunk, never the rest of the gate.
    """

    def __init__(self, path: str | Path, *, trusted: bool = False) -> None:
        self.place, self.trusted = str(path), trusted
        self.fetched = Fetched(self.place) if is_url(path) else None
        self.path = Path(path) if self.fetched is None else self.fetched.folder
        manifest = read_manifest(self.path)
        self.run: dict[str, Any] = manifest["run"]
        self.shards: list[dict[str, Any]] = manifest["shards"]
        self.plan = ExecutionPlan.from_layers(self.run["layers"])
        self._files = _OpenFiles(trusted)

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
    def generated(self) -> bool:
        """Whether the model wrote its texts, behind prompts."""
        return bool(self.run["config"].get("generated"))

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
        """Measure -> sums over all shards; while it is written, of what is there when they are first read."""
        file = self.path / schema.SUMMARY
        try:
            with passed(file, trusted=self.trusted) as gated:
                if schema.read_header(gated.file, str(file))["run_uuid"] != self.run["run_uuid"]:
                    raise RecordingError(f"{file}: belongs to another run than the manifest")
                return read_totals(gated)
        except RecordingError as error:
            raise RecordingError(f"{error}{self._repairable()}") from error

    def _repairable(self) -> str:
        """What to try where the summary can't be read."""
        return "" if self.fetched or self.damaged else "; `visitlens repair` rebuilds it from the shards"

    @cached_property
    def document_hashes(self) -> np.ndarray | None:
        """[document] u8, each once and rising; None where an older version left them out."""
        with passed(self.path / schema.SUMMARY, trusted=self.trusted) as gated:
            return schema.read_documents(gated)

    @cached_property
    def damaged(self) -> tuple[str, ...]:
        """Shards that are missing or not of the size that the manifest says; by `stat` alone (`visitlens validate` reads)."""
        found = list[str]()
        for shard in self.shards:
            size = self._size(shard["name"])
            if size != shard["bytes"]:
                found.append(
                    f"{shard['name']}: {'missing' if size is None else f'{size:,} bytes'}, not {shard['bytes']:,}"
                )
        return tuple(found)

    def _size(self, shard: str) -> int | None:
        if self.fetched is not None:
            return self.fetched.size(shard)
        file = real_folder(self.path / schema.SHARDS) / shard
        return file.stat().st_size if file.is_file() else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of its numbers should know, one sentence each."""
        found = list(map(str, self.provenance.get("warnings", ())))
        if self.damaged:
            first, *others = self.damaged
            more = f" and {len(others)} more" if others else ""
            found.append(f"damaged: {first}{more}; `visitlens validate` says more")
        if not self.complete:
            found.append(f"unfinished: {self.tokens:,} of {self.run['tokens']:,} tokens are recorded")
        bad = {name: int(t.non_finite.sum()) for name, t in self.totals.items() if t.non_finite.any()}
        if bad:
            counts = ", ".join(f"{name} {count:,}" for name, count in bad.items())
            found.append(f"values that were NaN or infinite, left out of every mean: {counts}")
        if "visit_share" in self.totals:
            total, count = (getattr(self.totals["visit_share"], name).sum(0) for name in ("total", "count"))
            few, many = (f"{share:.0%}" for share in ((total / count).min(), (total / count).max()))
            found.append(
                f"halting or routing leaves tokens out: a visit has {few} to {many} of them (visit_share), and each value's n is "
                "the number of tokens that were there"
            )
        return tuple(found)

    @property
    def analyses(self) -> tuple[str, ...]:
        """Names of the JSON results kept beside the recording."""
        folder = real_folder(self.path / schema.ANALYSES)
        return tuple(sorted(p.name for p in folder.glob("*.json") if _ANALYSIS_NAME.fullmatch(p.name)))

    def analysis(self, name: str) -> Any:
        """One of them: JSON of at most 16 MB."""
        if name not in self.analyses:
            raise InputError(f"{self.place}: no analysis {name!r}; it has {', '.join(self.analyses) or 'none'}")
        return read_json(self.path / schema.ANALYSES / name)

    def contents(self, *, fetch: bool = False) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """What is inside, from the first shard: dataset -> kind of number, shape there, stored bytes over all shards
        (in proportion to tokens). Sums are left out. Of a recording at a URL nothing, until that shard was read, or with `fetch`."""
        if not self.shards or not (fetch or self.fetched is None or self.fetched.has(self.shards[0]["name"])):
            return {}
        first = self.shards[0]

        def look(gated: Gated, shard: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], int]]:
            part = self.tokens / max(shard["token_count"], 1)
            return {
                name: (array.kind, array.shape, round(array.id.get_storage_size() * part))
                for name, array in gated.arrays.items()
                if not name.startswith(("summary/", "axes/"))
            }

        return self._files.use(self, first, look)

    def token_table(self, tokens: Tokens = None, names: Sequence[str] = ()) -> dict[str, np.ndarray]:
        """`id`, `segment`, `pos`, each [token]; of generated texts also `generated`, 0 in the prompt and n at the n-th token
        after it: with a step's visit, the label (generated token, visit). `names` reads those alone."""
        self._needs("tokens")
        names = names or ("id", "segment", "pos", *(("generated",) if self.generated else ()))
        return {name: self._over_tokens(f"tokens/{name}", tokens) for name in names}

    def experts(self, layer: int, visit: int, tokens: Tokens = None) -> tuple[np.ndarray, np.ndarray]:
        """Expert ids u2 and gates f2 of one step, [token, k]."""
        self._needs("tokens")
        step = self.plan.step(layer, visit).index
        ids = self._over_tokens("routing/ids", tokens, step)
        return ids, self._over_tokens("routing/gate", tokens, step)

    def visited(self, layer: int, visit: int, tokens: Tokens = None) -> np.ndarray:
        """Whether a token is really at a visit, bool [token]: halting or routing leaves some out in some models."""
        self._needs("tokens")
        step = self.plan.step(layer, visit).index
        if not self.config.get("ragged"):
            return np.ones(len(self._over_tokens("tokens/id", tokens)), dtype=bool)
        return self._over_tokens("routing/visited", tokens, step).astype(bool)

    def token_stat(self, name: str, tokens: Tokens = None, at: int | None = None) -> np.ndarray:
        """Per-token scalars of a measure, [step or pair, token, ...] f4; NaN where the definition leaves a token out.
        `at` reads one step or pair alone, [token, ...]."""
        self._needs("tokens")
        return self._over_tokens(f"stats/{name}", tokens, slice(None) if at is None else at)

    def activation(
        self, site: str, layer: int, visit: int, *, tokens: Tokens = None, head: int | None = None
    ) -> np.ndarray:
        """One step of a site, [token, ...]: float32 or float64; bfloat16 is widened without loss. `tokens` and `head`
        read that part alone."""
        check_sites([site])
        if site not in self.run["config"]["options"]["sites"]:
            raise RecordingError(
                f"{self.place}: site {site!r} wasn't recorded (level {self.level}); record again with --level activations --sites {site}"
            )
        axes = SITES[site].axes
        if head is not None and axes[0] not in ("head", "kv_head"):
            raise InputError(f"site {site!r} has no heads; its axes are {axes}")
        count = 0 if head is None else self.config["num_heads" if axes[0] == "head" else "num_kv_heads"]
        if head is not None and not 0 <= head < count:
            raise InputError(f"expected a head of {site} in 0..{count - 1}, got {head}")
        rest = () if head is None else (head,)
        return self._over_tokens(str(SITES[site].dataset), tokens, self.plan.step(layer, visit).index, rest)

    def attention_maps(self, layer: int, visit: int, context: int | None = None) -> np.ndarray:
        """P of one step, [context, head, query, key] f2; of one packed context alone, [head, query, key]."""
        if self.level != "maps":
            raise RecordingError(
                f"{self.place}: holds no attention maps (level {self.level}); record again with --level maps"
            )
        step = self.plan.step(layer, visit).index
        if context is None:
            return np.concatenate(self.each_shard(lambda gated, shard: gated.read("attn/p", (slice(None), step))))
        for shard in self.shards:
            at = context - shard["context_start"]
            if 0 <= at < shard["context_count"]:
                return self._files.use(self, shard, lambda gated, shard, at=at: gated.read("attn/p", (at, step)))
        raise InputError(f"{self.place}: no context {context}; it has {self.contexts}")

    @property
    def contexts(self) -> int:
        """Packed contexts recorded so far."""
        return sum(shard["context_count"] for shard in self.shards)

    def each_shard(self, read: Callable[[Gated, dict[str, Any]], _Read]) -> list[_Read]:
        """What `read` takes from each shard, in order of tokens."""
        return [self._files.use(self, shard, read) for shard in self.shards]

    def bring(self) -> Path:
        """Its folder, all of its shards in it: of a recording at a URL they are fetched now; raises what `Fetched.fetch` raises."""
        for shard in self.shards:
            if self.fetched is not None:
                self.fetched.fetch(shard)
        return self.path

    def _needs(self, what: str) -> None:
        if self.level == "summary":
            raise RecordingError(
                f"{self.place}: {what} aren't kept at level 'summary'; record again with --level tokens"
            )

    def _over_tokens(
        self, name: str, tokens: Tokens, lead: int | slice | None = None, rest: tuple[int, ...] = ()
    ) -> np.ndarray:
        """`dataset[lead, the tokens, *rest]` over all shards; opens only those that hold some of the tokens."""
        start, stop = tokens or (0, self.run["tokens"])
        if not 0 <= start < max(stop, 1):
            raise InputError(f"expected tokens (start, stop) with 0 <= start < stop, got {tokens}")
        leading = () if lead is None else (lead,)
        parts = []
        for shard in self.shards:
            first = shard["token_start"]
            if first < stop and start < first + shard["token_count"]:

                def read(gated: Gated, shard: dict[str, Any]) -> np.ndarray | None:
                    if name not in gated:
                        return None
                    about = gated.attributes(name)
                    origin = int(about.get("token_start", shard["token_start"]))
                    low, high = max(start - origin, 0), min(stop - origin, gated.array(name).shape[len(leading)])
                    if low >= high:
                        return None
                    part = gated.read(name, (*leading, slice(low, high), *rest))
                    if about.get("logical_dtype") == "bfloat16":
                        part = (part.astype(np.uint32) << 16).view(np.float32)
                    return part

                parts.append(self._files.use(self, shard, read))
        parts = [part for part in parts if part is not None]
        if not parts:
            where = "" if tokens is None else f" for tokens {start}:{stop}; it has {self.tokens:,} tokens"
            raise InputError(f"{self.place}: no dataset {name}{where}")
        return np.concatenate(parts, axis=1 if isinstance(lead, slice) else 0)


class _OpenFiles:
    """The shards used last, open: each is checked once. One thread at a time, as HDF5 itself is."""

    def __init__(self, trusted: bool) -> None:
        self.trusted = trusted
        self._open: OrderedDict[Path, Gated] = OrderedDict()
        self._sizes: dict[str, tuple[str, int]] = {}
        self._lock = threading.RLock()

    def use(self, recording: Recording, shard: dict[str, Any], read: Callable[[Gated, dict[str, Any]], _Read]) -> _Read:
        folder = real_folder(recording.path / schema.SHARDS)
        with self._lock:
            gated = self._get(folder / shard["name"], recording, shard)
            try:
                return read(gated, shard)
            except OSError as error:
                raise RecordingError(f"{gated.where}: can't be read ({error}); it is missing or damaged") from error

    def _get(self, path: Path, recording: Recording, shard: dict[str, Any]) -> Gated:
        if path not in self._open:
            if recording.fetched is not None:
                recording.fetched.fetch(shard)
            gated = open_gated(path, trusted=self.trusted, expected_bytes=shard["bytes"])
            try:
                check_entry(gated, recording.run, shard)
                schema.check_alike(self._sizes, gated)
            except RecordingError:
                gated.close()
                raise
            self._open[path] = gated
            while len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(path)
        return self._open[path]

    def __reduce__(self) -> tuple[type[_OpenFiles], tuple[bool]]:
        return type(self), (self.trusted,)  # a copy in another process opens its own


def check_entry(gated: Gated, run: dict[str, Any], shard: dict[str, Any]) -> None:
    """Raises RecordingError where a shard isn't the one that the manifest lists."""
    theirs = schema.read_header(gated.file, gated.where)
    numbers = schema.read_numbers(gated.file, schema.SHARD_NUMBERS, gated.where)
    wrong = [name for name, value in numbers.items() if name != "complete" and shard[name] != value]
    if theirs["run_uuid"] != run["run_uuid"] or wrong:
        raise RecordingError(
            f"{gated.where}: not the shard that the manifest lists ({', '.join(wrong) or 'run_uuid'} differs)"
        )


def committed_shards(path: Path) -> Iterator[Path]:
    """Shard files by name, whatever a manifest says."""
    folder = real_folder(path / schema.SHARDS)
    yield from sorted(p for p in folder.glob("w*-*.h5") if SHARD_NAME.fullmatch(p.name))

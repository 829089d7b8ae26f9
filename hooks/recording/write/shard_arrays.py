"""Arrays of a shard while it is made: gathered context by context, then written at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import h5py
import numpy as np
import torch

from visitlens.hooks.recording.format import schema

if TYPE_CHECKING:
    from visitlens.hooks.recording.format.schema import GroupTotals
    from visitlens.hooks.recording.write.ledger import ShardTask


class ShardArrays:
    """Arrays of a token range, gathered context by context."""

    def __init__(self, task: ShardTask) -> None:
        self.task = task
        self.tokens = self.contexts = 0
        self.totals: dict[str, GroupTotals] = {}
        self._parts: dict[str, list[np.ndarray]] = {}
        self._token_starts: dict[str, int] = {}

    @property
    def rows(self) -> slice:
        """Its contexts so far."""
        return slice(self.task.start, self.task.start + self.contexts)

    @property
    def nbytes(self) -> int:
        """Before compression."""
        return sum(part.nbytes for parts in self._parts.values() for part in parts)

    def keep(self, name: str, part: np.ndarray, token_start: int | None = None) -> None:
        self._parts.setdefault(name, []).append(part)
        if token_start is not None:
            self._token_starts.setdefault(name, token_start)

    def write(self, file: h5py.File, dtype: torch.dtype) -> None:
        for name in list(self._parts):
            parts = self._parts.pop(name)
            vector = name.startswith(("resid/", "vec/"))
            array = np.concatenate(parts, axis=0 if name.startswith(("tokens/", "attn/")) else 1)
            if name.startswith("tokens/"):
                chunks = (min(len(array), 65_536),)
            elif name.startswith("attn/"):
                chunks = (1, 1, *array.shape[2:])
            else:
                chunks = (1, min(array.shape[1], 256 if vector else 16_384), *array.shape[2:])
            filters = schema.VECTOR_FILTERS if vector else schema.TEXT_FILTERS
            dataset = file.create_dataset(name, data=array, chunks=chunks, **filters)
            if name in self._token_starts:
                dataset.attrs["token_start"] = np.int64(self._token_starts[name])
                if dtype == torch.bfloat16:
                    schema.set_text(dataset.attrs, "logical_dtype", "bfloat16")

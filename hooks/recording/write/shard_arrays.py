"""Arrays of a shard while it is made: gathered context by context, then written at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import h5py
import numpy as np
import torch

from visitlens.hooks.recording.format import schema

if TYPE_CHECKING:
    from visitlens.hooks.recording.format.totals import GroupTotals
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
            parts, layout = self._parts.pop(name), schema.layout_of(name)
            assert layout is not None, name  # what is written is in the table
            array = np.concatenate(parts, axis=layout.concat_axis)
            dataset = file.create_dataset(name, data=array, chunks=layout.chunks(array.shape), **layout.filters)
            if name in self._token_starts:
                dataset.attrs["token_start"] = np.int64(self._token_starts[name])
                if dtype == torch.bfloat16:
                    schema.set_text(dataset.attrs, "logical_dtype", "bfloat16")

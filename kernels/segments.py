"""Document boundaries along a packed token axis: the form in which every kernel takes its mask.

A batch [context, position] is flattened to one token axis; attention is causal within a segment and
never crosses one. A segment is a run of tokens `[start, end)`, so no mask tensor is ever needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Segments:
    """Cumulative segment boundaries: segment i is tokens `[bounds[i], bounds[i + 1])`."""

    bounds: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.bounds[-1]

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.bounds[:-1], self.bounds[1:], strict=True))

    def starts(self) -> torch.Tensor:
        """[token] index of each token's segment start."""
        import torch

        bounds = torch.tensor(self.bounds)
        return torch.repeat_interleave(bounds[:-1], bounds.diff())

    def positions(self) -> torch.Tensor:
        """[token] position within its segment, 0 at the segment start."""
        import torch

        return torch.arange(self.num_tokens) - self.starts()

    @classmethod
    def from_ids(cls, ids: torch.Tensor) -> Segments:
        """From segment ids [context, position]: a new segment starts where the id changes or a context begins."""
        context_length = ids.shape[1]
        flat = ids.reshape(-1)
        new = flat[1:] != flat[:-1]
        new[context_length - 1 :: context_length] = True
        inner = (new.nonzero().squeeze(1) + 1).tolist()
        return cls((0, *inner, flat.numel()))

    @classmethod
    def whole_contexts(cls, contexts: int, length: int) -> Segments:
        """Every context is one document."""
        return cls(tuple(range(0, contexts * length + 1, length)))

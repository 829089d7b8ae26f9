"""One forward as interventions see it: its tokens, its documents, and the values that later visits take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from visitlens.errors import InputError
from visitlens.hooks.capture.capture import VISITED
from visitlens.hooks.core.loop_plan import ExecutionPlan, Step
from visitlens.kernels.segments import Segments


@dataclass(frozen=True)
class Generated:
    """Tokens that a model wrote after a prompt, counted from 0; None: all of them. Made by `generated`."""

    numbers: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return f"generated({', '.join(map(str, self.numbers or ()))})"


TokenChoice = int | Iterable[int] | str | Callable[[Tensor], Tensor] | Tensor | Generated | None
"""Which tokens: positions in the context (below 0 from the end of its text; of one that a model writes, from the end of the prompt),
"start" (of each segment), a boolean mask [context, position], a function from token ids [context, position] to such a mask, or
`generated(...)`."""


class SiteValues(Protocol):
    """Whatever keeps site values of a run: `Captured`, a notebook's run."""

    def at(self, site: str, step: int) -> Tensor: ...


@dataclass
class Forward:
    """`tokens`, `segment_ids` [context, position]; `behind` a KV cache, how many tokens came before."""

    tokens: Tensor
    segment_ids: Tensor | None = None
    behind: int | None = None
    prompt: int | None = None
    """Where generated tokens begin."""
    reference: SiteValues | None = None
    """The same tokens through the same model without these interventions, where one of them needs it."""
    earlier: SiteValues | None = None
    """Values of steps before the first one that runs."""
    values: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """(site, step) -> the value there in this forward, after its interventions."""
    there: dict[int, Tensor | None] = field(default_factory=dict)
    """Step -> [context, position] which tokens were at it; None for all."""
    in_parts: bool = False
    """Whether the documents run in several parts, so that a value holds some documents alone."""

    @property
    def offset(self) -> int:
        """The position of the first token."""
        return self.behind or 0

    def here(self, whole: Tensor) -> Tensor:
        """The tokens at work, of a value [context, position, ...] of the whole text."""
        last = self.offset + self.tokens.shape[1]
        if self.behind is None or whole.ndim < 2:
            return whole
        if self.offset and whole.shape[1] < last:
            raise InputError(f"expected values of at least {last} tokens, of the whole text, got {whole.shape[1]}")
        return whole[:, self.offset : last]

    def value(self, site: str, step: Step) -> Tensor:
        """What a step that has run had at a site.

        Raises:
            InputError: it didn't run here, and nobody kept its value.
        """
        if (site, step.index) in self.values:
            return self.values[site, step.index]
        if self.earlier is None:
            raise InputError(f"{step} doesn't run here: pass its values as intervene(..., earlier=captured)")
        return self.earlier.at(site, step.index)

    @cached_property
    def segments(self) -> Segments:
        if self.segment_ids is None:
            return Segments.whole_contexts(*self.tokens.shape)
        return Segments.from_ids(self.segment_ids)

    @cached_property
    def real(self) -> Tensor:
        """[context, position] False for padding."""
        if self.segment_ids is None:
            return torch.ones_like(self.tokens, dtype=torch.bool)
        return self.segment_ids >= 0

    @cached_property
    def start_keys(self) -> Tensor:
        """[context, position] position in the context of each token's segment start."""
        contexts, length = self.tokens.shape
        starts = self.segments.starts().view(contexts, length) - torch.arange(contexts).unsqueeze(1) * length
        return starts.to(self.tokens.device)

    @property
    def ends(self) -> Tensor:
        """[context, 1] where each context's text ends: behind its last real token; of a text that a model writes, behind the prompt."""
        if self.prompt is not None:
            return torch.full((len(self.tokens), 1), self.prompt, device=self.tokens.device)
        length = self.tokens.shape[1]
        places = torch.arange(1, length + 1, device=self.tokens.device)
        last = torch.where(self.real.to(places.device), places, 0).amax(1, keepdim=True)
        return last + self.offset

    def chosen(self, choice: TokenChoice) -> Tensor:
        """[context, position] bool."""
        contexts, length = self.tokens.shape
        positions = torch.arange(length, device=self.tokens.device) + self.offset
        if isinstance(choice, str):
            if choice != "start":
                raise InputError(
                    f"expected token positions, 'start', a mask or a function of token ids, got {choice!r}"
                )
            return self.start_keys == positions
        if isinstance(choice, Generated):
            if self.prompt is None:
                raise InputError(
                    "no token was generated here: run the model with a cache (visitlens.hooks.capture.generation.generate), or say where "
                    "the prompt ends, intervene(..., prompt=5)"
                )
            if choice.numbers is None:
                return (positions >= self.prompt).expand(contexts, length)
            choice = [self.prompt + number for number in choice.numbers]
        if callable(choice) and not isinstance(choice, Tensor):
            if bool((self.tokens < 0).any()):
                raise InputError("run_steps knows no token ids to choose by: choose positions, or call the model")
            choice = choice(self.tokens)
        if hasattr(choice, "dtype"):
            choice = torch.as_tensor(choice)
            choice = choice if choice.dtype == torch.bool else choice.tolist()  # positions, else
        if isinstance(choice, Tensor):
            beyond = self.offset + length - choice.shape[-1]
            if self.prompt is not None and choice.ndim == 2 and beyond > 0:
                choice = F.pad(choice, (0, beyond))  # a mask of the prompt chooses nothing after it
            choice = self.here(choice)
            if choice.shape != self.tokens.shape or choice.dtype != torch.bool:
                raise InputError(
                    f"expected a boolean mask of tokens {tuple(self.tokens.shape)}, got {choice.dtype} {tuple(choice.shape)}"
                )
            return choice.to(self.tokens.device)
        wanted = torch.tensor(numbers(choice) or (), dtype=torch.long, device=positions.device)
        found = torch.isin(positions, wanted[wanted >= 0]).expand(contexts, length)
        if not bool((wanted < 0).any()):
            return found
        return found | torch.isin(positions - self.ends, wanted[wanted < 0])  # -1 is the last one

    def other_documents(self, seed: int, there: Tensor | None = None) -> Tensor:
        """[context * position] for each token the flat index of a real token (of those `there`) of another segment, drawn
        uniformly."""
        generator = torch.Generator().manual_seed(seed)
        real = (self.real if there is None else self.real & there.to(self.real.device)).flatten().cpu()
        pool = real.nonzero().squeeze(1)
        before = torch.cat([torch.zeros(1, dtype=torch.long), real.long().cumsum(0)])  # real tokens before each index
        bounds = torch.tensor(self.segments.bounds)
        lengths = bounds.diff()
        first = torch.repeat_interleave(before[bounds[:-1]], lengths)
        own = torch.repeat_interleave(before[bounds[1:]] - before[bounds[:-1]], lengths)
        others = len(pool) - own
        if bool((others[real] == 0).any()):
            raise InputError(
                "resampling takes values from another document, but this batch holds one alone: pack several"
            )
        drawn = (torch.rand(len(real), generator=generator) * others).long()
        drawn = drawn + own * (drawn >= first)
        return pool[drawn.clamp(max=len(pool) - 1)].to(self.tokens.device)


def tokens_at(values: SiteValues, step: int) -> Tensor | None:
    """[context, position] which tokens a run had at a step; None for all."""
    held = getattr(values, "held", None)
    return None if held is None else held(VISITED, step)


@dataclass(frozen=True)
class At:
    """Where an operation is applied now."""

    site: str
    step: Step
    plan: ExecutionPlan
    forward: Forward

    @property
    def there(self) -> Tensor | None:
        """[context, position] which tokens are at this step, of the documents at work; None for all."""
        return self.forward.there.get(self.step.index)

    @property
    def real(self) -> Tensor:
        """[context, position] the real tokens that are at this step, of the whole batch where that is known."""
        values = self.forward.reference
        there = self.there if values is None else tokens_at(values, self.step.index)
        return self.forward.real if there is None else self.forward.real & there.to(self.forward.real.device)

    @property
    def experts(self) -> Tensor:
        """[context, position, k] experts used at this step."""
        return self.forward.values["experts", self.step.index]

    def batch(self, value: Tensor, site: str | None = None) -> Tensor:
        """The whole batch's value here: `value`, or, in a model that runs documents in parts, that of the run without
        these interventions. Of another site by name."""
        if self.forward.in_parts and self.forward.reference is not None:
            return self.forward.reference.at(site or self.site, self.step.index)
        return value if site is None else self.forward.values[site, self.step.index]


def _whole(number: Any) -> int:
    if isinstance(number, bool):
        raise TypeError
    return index(number)


def numbers(choice: Any) -> tuple[int, ...] | None:
    """An int or several as a tuple; None stays None (all).

    Raises:
        InputError: something else, or an empty choice.
    """
    if choice is None:
        return None
    try:
        chosen = (_whole(choice),) if hasattr(choice, "__index__") and not getattr(choice, "shape", ()) else None
        chosen = tuple(map(_whole, choice)) if chosen is None else chosen
    except TypeError:
        raise InputError(f"expected an integer, several, or None for all, got {choice!r:.80}") from None
    if not chosen:
        raise InputError("an empty choice matches nothing; leave it out for all")
    return chosen

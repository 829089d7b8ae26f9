"""Hops through a permutation that only the context gives: `a c b a c b  2 a b`, "two hops from a lead to b". No torch.

A context is BOS, the edges `x f(x)` of a permutation of n symbols in random order, then queries `k x z` with
z = f applied k times to x. Only z is scored. Permutations are one cycle through all n symbols, so that f^k(x) is never
x for k < n: a model that answers with the symbol it was asked about is always wrong.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

import numpy as np

from visitlens.errors import InputError
from visitlens.probe.tasks.batch import SPECIAL, TaskBatch, word_level
from visitlens.probe.tasks.task_file import Example

MAX_HOPS = 4
FIRST_HOP = len(SPECIAL)
FIRST_SYMBOL = FIRST_HOP + MAX_HOPS


@dataclass(frozen=True)
class Hops:
    """Queries of 1 to `hops` hops through cycles of one of `sizes` symbols, out of an alphabet of `symbols` letters.

    Stage s asks for at most s hops. Each context asks `queries` different (k, x), or all there are if fewer.
    """

    hops: int = 3
    sizes: tuple[int, ...] = (6, 7, 8)
    symbols: int = 12
    queries: int = 12

    def __post_init__(self) -> None:
        if not 1 <= self.hops <= MAX_HOPS:
            raise InputError(f"hops: expected 1 to {MAX_HOPS} hops, got {self.hops}")
        if not self.sizes or min(self.sizes) <= self.hops or max(self.sizes) > self.symbols or self.symbols > 26:
            raise InputError(
                f"hops: expected cycles longer than {self.hops} hops of at most {min(self.symbols, 26)} symbols, "
                f"got {self.sizes} of {self.symbols}"
            )

    @property
    def stages(self) -> int:
        return self.hops

    @property
    def vocab_size(self) -> int:
        return FIRST_SYMBOL + self.symbols

    def tokenizer_json(self) -> dict[str, Any]:
        digits = tuple(str(k) for k in range(1, MAX_HOPS + 1))
        return word_level((*digits, *string.ascii_lowercase[: self.symbols]))

    def batch(self, rng: np.random.Generator, contexts: int, stage: int) -> TaskBatch:
        """Contexts of one size, drawn for the batch; facets `k` and `query` (its place in the context, from 0)."""
        n = int(rng.choice(self.sizes))
        hops = min(stage, self.hops)
        symbols = rng.permuted(np.tile(np.arange(self.symbols), (contexts, 1)), axis=1)[:, :n]  # in cycle order
        order = rng.permuted(np.tile(np.arange(n), (contexts, 1)), axis=1)
        pairs = rng.permuted(np.tile(np.arange(n * hops), (contexts, 1)), axis=1)[:, : self.queries]
        k, start = pairs // n + 1, pairs % n

        def at(index: np.ndarray) -> np.ndarray:
            return np.take_along_axis(symbols, index % n, axis=1) + FIRST_SYMBOL

        edges = np.stack([at(order), at(order + 1)], axis=-1).reshape(contexts, -1)
        asked = np.stack([k + FIRST_HOP - 1, at(start), at(start + k)], axis=-1).reshape(contexts, -1)
        tokens = np.concatenate([np.zeros((contexts, 1), np.int64), edges, asked], axis=1)
        scored = np.zeros(tokens.shape, bool)
        answers = 1 + 2 * n + 2 + 3 * np.arange(k.shape[1])
        scored[:, answers] = True
        facets = {name: np.zeros(tokens.shape, np.int64) for name in ("k", "query")}
        facets["k"][:, answers], facets["query"][:, answers] = k, np.arange(k.shape[1])
        return TaskBatch(tokens, scored, facets)

    def examples(self, rng: np.random.Generator, count: int) -> list[Example]:
        """`count` prompts of one query for each number of hops; facets `k` and `symbols`.

        Roles are `edge 1` to `edge k`, the edges that the answer goes through in their order, `other edges`, `hops` and
        `symbol`. The corrupted twin has another permutation (the same symbols, in the same places before the arrow) that
        answers differently; which edges the answer goes through is said of the intact text.
        """
        return [self._example(rng, k) for k in range(1, self.hops + 1) for _ in range(count)]

    def _example(self, rng: np.random.Generator, k: int) -> Example:
        n = int(rng.choice(self.sizes))
        cycle = rng.permutation(self.symbols)[:n]
        order, start = rng.permutation(n), int(rng.integers(n))
        follows = dict(zip(cycle.tolist(), np.roll(cycle, -1).tolist(), strict=True))
        asked = int(cycle[start])
        answer = _hop(follows, asked, k)
        other = follows
        while _hop(other, asked, k) == answer:
            drawn = rng.permutation(cycle)
            other = dict(zip(drawn.tolist(), np.roll(drawn, -1).tolist(), strict=True))
        letters = string.ascii_lowercase
        sources = [int(cycle[i]) for i in order]

        def prompt(f: dict[int, int]) -> str:
            edges = " ".join(f"{letters[x]} {letters[f[x]]}" for x in sources)
            return f"{edges} {k} {letters[asked]}"

        path = [_hop(follows, asked, hop) for hop in range(k)]
        spans = {x: (4 * i, 4 * i + 3) for i, x in enumerate(sources)}
        roles: dict[str, tuple[tuple[int, int], ...]] = {f"edge {hop}": (spans[x],) for hop, x in enumerate(path, 1)}
        roles["other edges"] = tuple(span for x, span in spans.items() if x not in path)
        roles |= {"hops": ((4 * n, 4 * n + 1),), "symbol": ((4 * n + 2, 4 * n + 3),)}
        facets = {"k": f"{k} hop{'s' if k > 1 else ''}", "symbols": f"{n} symbols"}
        return Example.of_answer(
            prompt(follows), f" {letters[answer]}", corrupted=prompt(other), facets=facets, roles=roles
        )


def _hop(follows: dict[int, int], symbol: int, hops: int) -> int:
    for _ in range(hops):
        symbol = follows[symbol]
    return symbol

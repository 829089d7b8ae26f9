"""Closing brackets whose pairs are drawn for each prompt: only earlier shots tell which closer belongs to which. No torch.

A context is BOS and shots `Input: ( { Output: > ]`: openers, then their closers, the last opened first. Openers and closers
are two fixed sets; which closer belongs to which opener is drawn anew for each context. Every closer is scored; facets are
`k` (shots before this one), `shown` (whether an earlier shot has shown the pair) and `place` (of the closer in its answer).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from visitlens.errors import InputError
from visitlens.probe.tasks.batch import SPECIAL, TaskBatch, word_level
from visitlens.probe.tasks.task_file import Example, Span

OPENERS = ("(", "[", "{", "<", "⟨", "⟦", "⟪", "«")
CLOSERS = (")", "]", "}", ">", "⟩", "⟧", "⟫", "»")
INPUT, OUTPUT = len(SPECIAL), len(SPECIAL) + 1
FIRST_OPENER = len(SPECIAL) + 2
FIRST_CLOSER = FIRST_OPENER + len(OPENERS)
TARGETS = 3


@dataclass(frozen=True)
class Brackets:
    """`shots` demonstrations and a query; a context uses `kinds` of the eight openers and any of the eight closers.

    Stage 1 opens one bracket a shot (a lookup), stage s up to s of them, all different within a shot.
    """

    kinds: int = 4
    depth: int = 4
    shots: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= self.kinds <= len(OPENERS) or self.shots < 0:
            raise InputError(
                f"brackets: expected a depth of at most `kinds` and those at most {len(OPENERS)}, at least 0 shots, "
                f"got depth {self.depth}, {self.kinds} kinds, {self.shots} shots"
            )

    @property
    def stages(self) -> int:
        return self.depth

    @property
    def vocab_size(self) -> int:
        return FIRST_CLOSER + len(CLOSERS)

    def tokenizer_json(self) -> dict[str, Any]:
        return word_level(("Input:", "Output:", *OPENERS, *CLOSERS))

    def batch(self, rng: np.random.Generator, contexts: int, stage: int) -> TaskBatch:
        """Contexts of one length: the number of brackets in each shot is drawn for the batch."""
        depth = min(stage, self.depth)
        depths = rng.integers(max(depth - 2, 1), depth, endpoint=True, size=self.shots + 1)
        opener_of = rng.permuted(np.tile(np.arange(len(OPENERS)), (contexts, 1)), axis=1)[:, : self.kinds]
        closer_of = rng.permuted(np.tile(np.arange(len(CLOSERS)), (contexts, 1)), axis=1)[:, : self.kinds]
        parts = [np.zeros((contexts, 1), np.int64)]
        marks = [np.zeros((4, contexts, 1), np.int64)]  # scored, k, shown, place
        seen = np.zeros((contexts, self.kinds), bool)
        for k, opened in enumerate(depths):
            kinds = rng.permuted(np.tile(np.arange(self.kinds), (contexts, 1)), axis=1)[:, :opened]
            closing = kinds[:, ::-1]
            fill = np.ones((contexts, 1), np.int64)
            parts += [INPUT * fill, np.take_along_axis(opener_of, kinds, 1) + FIRST_OPENER]
            parts += [OUTPUT * fill, np.take_along_axis(closer_of, closing, 1) + FIRST_CLOSER]
            shown = np.take_along_axis(seen, closing, 1)
            place = np.broadcast_to(np.arange(opened), shown.shape)
            marks += [np.zeros((4, contexts, opened + 2), np.int64)]
            marks += [np.stack([np.ones_like(place), np.full_like(place, k), shown, place])]
            np.put_along_axis(seen, kinds, True, axis=1)
        scored, at, shown, place = np.concatenate(marks, axis=2)
        return TaskBatch(np.concatenate(parts, axis=1), scored.astype(bool), {"k": at, "shown": shown, "place": place})

    def examples(self, rng: np.random.Generator, count: int, shots: tuple[int, ...] = (0, 1, 2, 4, 8)) -> list[Example]:
        """`count` prompts for each number of shots, of the same queries: more shots are put before those nearest to it.

        The first three closers of the query (all, if fewer) are scored; the nearest shot shows the pairs of all three.
        Facet `shots`. The corrupted twin has another pairing in the shots, the query's openers as they are.
        """
        made: dict[int, list[Example]] = {k: [] for k in shots}
        for _ in range(count):
            openers, closers = (rng.permutation(len(OPENERS))[: self.kinds] for _ in range(2))
            other = closers
            while (other == closers).any():
                other = rng.permutation(closers)
            drawn = [rng.permutation(self.kinds)[: self._depth(rng)] for _ in range(max(shots) + 1)]
            query = drawn[0]
            asked = query[::-1][:TARGETS]
            rest = rng.permutation([kind for kind in range(self.kinds) if kind not in asked])
            if len(drawn) > 1:
                drawn[1] = rng.permutation([*asked, *rest[: len(drawn[1]) - len(asked)]])
            for k in shots:
                made[k].append(self._example(openers, closers, other, drawn[: k + 1][::-1]))
        return [example for k in shots for example in made[k]]

    def _depth(self, rng: np.random.Generator) -> int:
        return int(rng.integers(max(self.depth - 1, 1), self.depth, endpoint=True))

    def _example(self, openers: np.ndarray, closers: np.ndarray, other: np.ndarray, drawn: list[np.ndarray]) -> Example:
        def written(pairing: np.ndarray, kinds: np.ndarray) -> tuple[str, str]:
            before = " ".join(["Input:", *(OPENERS[openers[kind]] for kind in kinds), "Output:"])
            return before, " ".join(CLOSERS[pairing[kind]] for kind in kinds[::-1])

        *demonstrations, query = drawn
        texts = []
        roles: dict[str, list[Span]] = {"demonstration inputs": [], "demonstration answers": []}
        at = 0
        for kinds in demonstrations:
            before, after = written(closers, kinds)
            roles["demonstration inputs"].append((at, at + len(before)))
            roles["demonstration answers"].append((at + len(before) + 1, at + len(before) + 1 + len(after)))
            texts += [before, after]
            at += len(before) + len(after) + 2
        before, answer = written(closers, query)
        text = " ".join([*texts, before, answer])
        start = at + len(before) + 1
        roles |= {"last input": [(at, at + len(before))], "last answer": [(start, len(text))]}
        twin = [part for kinds in demonstrations for part in written(other, kinds)]
        k = len(demonstrations)
        return Example(
            text,
            tuple((start + 2 * i, start + 2 * i + 1) for i in range(min(TARGETS, len(query)))),
            " ".join([*twin, before, answer]) if demonstrations else None,
            {"shots": f"{k} shot{'' if k == 1 else 's'}"},
            {name: tuple(spans) for name, spans in roles.items() if spans},
        )

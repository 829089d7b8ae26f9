"""Batches of a task for a trainer, in stages; resumable anywhere. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from visitlens.probe.tasks.batch import Generator, TaskBatch

TRAINING, HELD_OUT = 1, 2  # first word of a seed: the two never meet


class TaskStream:
    """`next_batch()` without end. Batch i is drawn from (seed, i), so where a run stands is two numbers: i and the stage."""

    def __init__(self, task: Generator, batch: int, seed: int) -> None:
        self.task, self.stage = task, 1
        self.drawn = 0
        self._batch, self._seed = batch, seed
        self.decays_from: int | None = None
        """Tokens seen when the rate began to fall: it is kept here because a stream's place is what a trainer saves."""

    def next_batch(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, segment ids (each context is one document) and which tokens are scored, [context, position]."""
        rng = np.random.default_rng((TRAINING, self._seed, self.drawn))
        self.drawn += 1
        drawn = self.task.batch(rng, self._batch, self.stage)
        return drawn.tokens, np.zeros_like(drawn.tokens) + np.arange(len(drawn.tokens))[:, None], drawn.scored

    def state(self) -> dict[str, Any]:
        return {"next": self.drawn, "stage": self.stage, "decays_from": self.decays_from}

    def restore(self, state: dict[str, Any]) -> None:
        self.drawn, self.stage, self.decays_from = state["next"], state["stage"], state.get("decays_from")


def held_out(task: Generator, contexts: int, stage: int | None = None, part: int = 0) -> TaskBatch:
    """Contexts that no training run draws; another `part` is another sample."""
    rng = np.random.default_rng((HELD_OUT, part))
    return task.batch(rng, contexts, task.stages if stage is None else stage)

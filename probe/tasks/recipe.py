"""How a model is trained on a task, as data. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskRecipe:
    """What decides what is learnt, beside the model and the task.

    A stage is done when held-out accuracy on all of its facet values is at least `pass_at`; the last one when it is at
    least `ready_at`. `tokens` is the most that the constant rate gets.
    """

    tokens: int
    decay_tokens: int
    facet: str = "k"
    pass_at: float = 0.9
    ready_at: float = 0.97
    warmup_tokens: int = 300_000
    batch: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    seed: int = 0
    look_updates: int = 50
    held_out: int = 64
    """Contexts of a look."""
    loop_counts: tuple[int, ...] = ()
    """Loop counts of which one is drawn for each update; a batch then goes no further than the stage of its loop count's
    number. Empty: always the configuration's. Writes in the span keep the configuration's scale whatever the count."""
    loop_counts_from: int = 1
    """The stage from which loop counts are drawn: the task's number of stages + 1 is a stage of its own, after the others."""

"""Training a small model on a task, in stages of rising difficulty; stopped and resumed anywhere.

    run/run.json                the configuration, the recipe and the task: another one is refused
    run/state.safetensors       the exact state at the last checkpoint
    run/metrics.jsonl           accuracy and loss on held-out contexts at every look
    run/model/                  the finished model: a checkpoint folder with training.json

The rate is constant after the warm-up until the model has what it is trained for (or half of the tokens are spent), and
then falls along a cosine, so that a run that learns early ends early.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visitlens.errors import InputError
from visitlens.hooks.models.checkpoint import save_weights
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.probe.ladder.trainer import Recipe, Trainer
from visitlens.probe.tasks.batch import Generator, TaskBatch
from visitlens.probe.tasks.stream import TaskStream, held_out

LOOP_COUNTS = 3  # first word of the seeds by which loop counts are drawn
Progress = Callable[[dict[str, Any]], None]


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
    """Loop counts of which one is drawn for each update; a batch then asks for no more hops (stages) than its loop count.
    Empty: always the configuration's. Writes in the span keep the configuration's scale whatever the count."""

    def rate(self, decays_from: int | None) -> tuple[Recipe, int | None]:
        """The trainer's recipe and its horizon."""
        horizon = None if decays_from is None else decays_from + self.decay_tokens
        recipe = Recipe(
            horizons=(horizon or self.tokens + self.decay_tokens,),
            decay_tokens=self.decay_tokens,
            warmup_tokens=self.warmup_tokens,
            batch=self.batch,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            seed=self.seed,
        )
        return recipe, horizon


@torch.no_grad()
def accuracy(model: LoopedMoE, drawn: TaskBatch, facet: str) -> dict[int, float]:
    """Share of scored tokens that are the most likely one, by the facet's values."""
    tokens, scored = torch.from_numpy(drawn.tokens), torch.from_numpy(drawn.scored[:, 1:])
    logits = model(tokens)
    assert logits is not None
    right = (logits[:, :-1].argmax(-1) == tokens[:, 1:])[scored].numpy()
    values = drawn.facets[facet][drawn.scored]
    return {int(value): float(right[values == value].mean()) for value in sorted(set(values.tolist()))}


def train_task(
    config: LoopedMoEConfig,
    task: Generator,
    recipe: TaskRecipe,
    out: Path,
    on_look: Progress = lambda row: None,
) -> Path:
    """Trains until the task is learnt or its tokens are spent; the checkpoint folder.

    Raises:
        InputError: `out` holds a run of another model, task or recipe.
        VisitlensError: the loss is no longer finite; the last checkpoint is kept.
    """
    return _Run(config, task, recipe, out, on_look).finish()


class _Run:
    def __init__(
        self, config: LoopedMoEConfig, task: Generator, recipe: TaskRecipe, out: Path, on_look: Progress
    ) -> None:
        self.config, self.task, self.recipe, self.out, self.on_look = config, task, recipe, out, on_look
        self.stream = TaskStream(task, recipe.batch, recipe.seed)
        self._claim()
        self.trainer = Trainer(config, recipe.rate(None)[0], self.stream)
        self.state = out / "state.safetensors"
        if self.state.is_file():
            self.trainer.restore(self.state)
            self._forget_later_looks()

    def finish(self) -> Path:
        folder = self.out / "model"
        if (folder / "training.json").is_file():
            return folder
        row: dict[str, Any] = {}
        update = 0
        while not self._done():
            self.trainer.recipe, horizon = self.recipe.rate(self.stream.decays_from)
            step = self._step(horizon)
            update += 1
            if update % self.recipe.look_updates == 0:
                row = self._look(step)
        return self._finish(folder, row)

    def _step(self, horizon: int | None) -> dict[str, float]:
        counts = self.recipe.loop_counts
        if not counts:
            return self.trainer.step(horizon)
        model, stage, whole = self.trainer.model, self.stream.stage, self.trainer.model.plan
        rng = np.random.default_rng((LOOP_COUNTS, self.recipe.seed, self.stream.drawn))
        count = int(rng.choice(counts))
        model.plan = replace(self.config.loop_spec, visits=count).plan()
        self.stream.stage = min(stage, count)
        try:
            return self.trainer.step(horizon)
        finally:
            model.plan, self.stream.stage = whole, stage

    def _done(self) -> bool:
        return (
            self.stream.decays_from is not None
            and self.trainer.seen >= self.stream.decays_from + self.recipe.decay_tokens
        )

    def _look(self, step: dict[str, float]) -> dict[str, Any]:
        stream, recipe, seen = self.stream, self.recipe, self.trainer.seen
        drawn = held_out(self.task, recipe.held_out, stream.stage)
        reached = accuracy(self.trainer.model, drawn, recipe.facet)
        row = {"tokens": seen, "seconds": round(self.trainer.seconds), "stage": stream.stage, "loss": step["loss"]}
        row |= {"learning_rate": step["learning_rate"], "accuracy": reached}
        last = stream.stage == self.task.stages
        worst = min(reached.values())
        if not last and worst >= recipe.pass_at:
            stream.stage += 1
        elif stream.decays_from is None and ((last and worst >= recipe.ready_at) or seen >= recipe.tokens):
            stream.decays_from = seen
        with (self.out / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.trainer.save(self.state)
        self.on_look(row)
        return row

    def _forget_later_looks(self) -> None:
        """Drops a look that was written before a stop kept its state from being saved: it will be made again."""
        file = self.out / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
        whole = [line for line in lines if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["tokens"] <= self.trainer.seen]
        file.write_text("".join(kept), encoding="utf-8")

    def _claim(self) -> None:
        identity = {
            "config": self.config.to_dict(),
            "task": {"name": type(self.task).__name__, **asdict(self.task)},  # type: ignore[call-overload]
            "recipe": asdict(self.recipe),
        }
        file = self.out / "run.json"
        text = json.dumps(identity, indent=1) + "\n"
        if file.is_file() and file.read_text(encoding="utf-8") != text:
            raise InputError(f"{self.out} holds a run of another model, task or recipe; choose another folder")
        self.out.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def _finish(self, folder: Path, row: dict[str, Any]) -> Path:
        save_weights(self.config, self.trainer.weights(), folder)
        (folder / "tokenizer.json").write_text(
            json.dumps(self.task.tokenizer_json(), indent=1) + "\n", encoding="utf-8"
        )
        report = {"tokens": self.trainer.seen, "core_seconds": round(self.trainer.seconds), "last_look": row}
        (folder / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return folder

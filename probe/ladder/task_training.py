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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from visitlens.errors import InputError
from visitlens.hooks.models.checkpoint import save_weights
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.probe.ladder.trainer import Recipe, Trainer
from visitlens.probe.tasks.batch import Generator, TaskBatch
from visitlens.probe.tasks.recipe import TaskRecipe
from visitlens.probe.tasks.stream import TaskStream, held_out

LOOP_COUNTS = 3  # first word of the seeds by which loop counts are drawn
Progress = Callable[[dict[str, Any]], None]


def _rate(recipe: TaskRecipe, decays_from: int | None) -> tuple[Recipe, int | None]:
    """The trainer's recipe and its horizon."""
    horizon = None if decays_from is None else decays_from + recipe.decay_tokens
    trainers = Recipe(
        horizons=(horizon or recipe.tokens + recipe.decay_tokens,),
        decay_tokens=recipe.decay_tokens,
        warmup_tokens=recipe.warmup_tokens,
        batch=recipe.batch,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        seed=recipe.seed,
    )
    return trainers, horizon


@torch.no_grad()
def accuracy(model: LoopedMoE, drawn: TaskBatch, facet: str) -> dict[str, float]:
    """Share of scored tokens that are the most likely one, by the facet's values."""
    tokens, scored = torch.from_numpy(drawn.tokens), torch.from_numpy(drawn.scored[:, 1:])
    logits = model(tokens)
    assert logits is not None
    right = (logits[:, :-1].argmax(-1) == tokens[:, 1:])[scored].numpy()
    values = drawn.facets[facet][drawn.scored]
    return {str(value): float(right[values == value].mean()) for value in sorted(set(values.tolist()))}


def train_task(
    config: LoopedMoEConfig,
    task: Generator,
    recipe: TaskRecipe,
    out: Path,
    on_look: Progress = lambda row: None,
    *,
    start: Path | None = None,
) -> Path:
    """Trains until the task is learnt or its tokens are spent; the checkpoint folder.

    Args:
        start: the folder of a finished run of the same model and task, whose weights at its last look this one begins with,
            at its last stage.

    Raises:
        InputError: `out` holds a run of another model, task or recipe, or `start` holds none of this model.
        VisitlensError: the loss is no longer finite; the last checkpoint is kept.
    """
    run = _Run(config, task, recipe, out, on_look)
    if start is not None:
        run.begin_with(start)
    return run.finish()


class _Run:
    def __init__(
        self, config: LoopedMoEConfig, task: Generator, recipe: TaskRecipe, out: Path, on_look: Progress
    ) -> None:
        self.config, self.task, self.recipe, self.out, self.on_look = config, task, recipe, out, on_look
        self.stream = TaskStream(task, recipe.batch, recipe.seed)
        self._claim()
        self.trainer = Trainer(config, _rate(recipe, None)[0], self.stream)
        self.state = out / "state.safetensors"
        if self.state.is_file():
            self.trainer.restore(self.state)
            self._forget_later_looks()

    @torch.no_grad()
    def begin_with(self, start: Path) -> None:
        """The weights of another run, if this one has none of its own yet."""
        if self.trainer.seen:
            return
        try:
            weights = load_file(start / "state.safetensors")
            for name, parameter in self.trainer.model.named_parameters():
                parameter.copy_(weights[f"weight.{name}"])
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:  # no file, or another model's
            raise InputError(f"{start} holds no run of this model to begin with ({error})") from error
        self.stream.stage = self.stages

    def finish(self) -> Path:
        folder = self.out / "model"
        if (folder / "training.json").is_file():
            return folder
        row: dict[str, Any] = {}
        update = 0
        while not self._done():
            self.trainer.recipe, horizon = _rate(self.recipe, self.stream.decays_from)
            step = self._step(horizon)
            update += 1
            if update % self.recipe.look_updates == 0:
                row = self._look(step)
        return self._finish(folder, row)

    def _step(self, horizon: int | None) -> dict[str, float]:
        counts = self.recipe.loop_counts
        if not counts or self.stream.stage < self.recipe.loop_counts_from:
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
        reached = self._reached()
        row = {"tokens": seen, "seconds": round(self.trainer.seconds), "stage": stream.stage, "loss": step["loss"]}
        row |= {"learning_rate": step["learning_rate"], "accuracy": reached}
        last = stream.stage >= self.stages
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

    @property
    def stages(self) -> int:
        """The task's, and one more where loop counts are drawn after them."""
        return max(self.task.stages, self.recipe.loop_counts_from if self.recipe.loop_counts else 1)

    def _reached(self) -> dict[str, float]:
        """Held-out accuracy by facet value; past the task's own stages by loop count too, as far as each was asked to go."""
        model, recipe, stage = self.trainer.model, self.recipe, self.stream.stage
        if stage <= self.task.stages:
            return accuracy(model, held_out(self.task, recipe.held_out, stage), recipe.facet)
        found, whole = {}, model.plan
        try:
            for count in recipe.loop_counts:
                model.plan = replace(self.config.loop_spec, visits=count).plan()
                drawn = held_out(self.task, recipe.held_out, min(count, self.task.stages))
                found |= {
                    f"{value} at {count} loops": share for value, share in accuracy(model, drawn, recipe.facet).items()
                }
        finally:
            model.plan = whole
        return found

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

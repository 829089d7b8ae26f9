"""Specimens: small models trained on a task, in which there is something to see. Each is made again by its recipe here.

`visitlens specimens` lists them, `visitlens specimens NAME --out FOLDER` trains one. Their cards say what was measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from visitlens.errors import InputError
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.probe.model.bundled import SPECIMENS as BUNDLED
from visitlens.probe.tasks.hops import Hops
from visitlens.probe.tasks.recipe import TaskRecipe
from visitlens.probe.tasks.stream import HELD_OUT
from visitlens.probe.tasks.task_file import Example, write_task

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = 100
"""Held-out examples for each number of hops, in the bundled task file."""
_HELD_OUT_FILE = 1_000  # beside the parts that looks during training draw


@dataclass(frozen=True)
class Specimen:
    """A model to be trained on a task, and what it is for in one line."""

    name: str
    purpose: str
    config: LoopedMoEConfig
    task: Hops
    recipe: TaskRecipe
    continues: str = ""
    """The specimen whose weights training begins with."""

    @property
    def folder(self) -> Path | None:
        """Of the bundled checkpoint, None where it isn't bundled."""
        folder = BUNDLED.get(self.name)
        return folder if folder is not None and (folder / "model.safetensors").is_file() else None

    def tokens_before(self, folder: Path) -> int:
        """Tokens of the run that this one began with: of the state that it took, in `folder`'s run or as bundled."""
        before = SPECIMENS[self.continues]
        run = folder.parent / before.name / "model"
        found = run if run.is_dir() else before.folder
        if found is None:
            raise InputError(f"{before.name}, with which {self.name} began, is neither in {folder.parent} nor bundled")
        report = json.loads((found / "training.json").read_text(encoding="utf-8"))
        return int(report["last_look"]["tokens"])

    def report(self) -> dict[str, Any]:
        """What `training.json` of the bundled checkpoint says; empty where it isn't bundled."""
        return {} if self.folder is None else json.loads((self.folder / "training.json").read_text(encoding="utf-8"))


_HOPS = Hops(hops=3, sizes=(6, 7, 8), symbols=12, queries=12)
_LOOPED = LoopedMoEConfig(
    vocab_size=_HOPS.vocab_size,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    num_experts=16,
    expert_dim=32,
    experts_per_token=4,
    loop_start=1,
    loop_stop=2,
    visits=3,
    context_length=128,
)
_BASELINE = replace(_LOOPED, num_layers=4, num_experts=7, loop_start=0, loop_stop=0, visits=1)
"""As deep as the looped model's three visits, with its budgets: FLOPs and KV cache equal, parameters 1.03 of its."""
_FIXED = TaskRecipe(tokens=16_000_000, decay_tokens=4_000_000)
_DRAWN = TaskRecipe(
    tokens=3_000_000,
    decay_tokens=600_000,
    warmup_tokens=50_000,
    batch=32,
    learning_rate=1e-3,
    look_updates=25,
    loop_counts=(1, 2, 3),
    loop_counts_from=4,
)
_TWO_HOPS = replace(_HOPS, hops=2)
_QUICK = TaskRecipe(
    tokens=10_000_000,
    decay_tokens=200_000,
    warmup_tokens=100_000,
    batch=32,
    pass_at=0.85,
    ready_at=0.96,
    loop_counts=(1, 2, 3),
    loop_counts_from=3,
)


def _specimens() -> dict[str, Specimen]:
    drawn = "up to three hops in as many visits of one layer"
    unlooped = replace(_QUICK, loop_counts=(), loop_counts_from=1)
    found = [
        Specimen("hops", drawn, _LOOPED, _HOPS, _DRAWN, continues="hops-fixed"),
        Specimen("hops-fixed", "hops before its loop count was drawn in training", _LOOPED, _HOPS, _FIXED),
        *(
            Specimen(f"hops-seed{seed}", "the shape of hops, two hops, another seed", _LOOPED, _TWO_HOPS, recipe)
            for seed, recipe in ((1, replace(_QUICK, seed=1)), (2, replace(_QUICK, seed=2)))
        ),
        Specimen("hops-baseline", "four layers without a loop, of the same budgets", _BASELINE, _HOPS, unlooped),
        Specimen(
            "hops-unlooped",
            "a control: the two layers of hops without the loop",
            replace(_LOOPED, loop_start=0, loop_stop=0, visits=1),
            _HOPS,
            unlooped,
        ),
    ]
    return {specimen.name: specimen for specimen in found}


SPECIMENS = _specimens()


def specimen(name: str) -> Specimen:
    """Raises InputError: no specimen of that name."""
    if name not in SPECIMENS:
        raise InputError(f"no specimen {name!r}; there are {', '.join(SPECIMENS)}")
    return SPECIMENS[name]


def held_out_examples(task: Hops) -> list[Example]:
    """The examples of the bundled task file: one query each, never drawn in training."""
    return task.examples(np.random.default_rng((HELD_OUT, _HELD_OUT_FILE)), EXAMPLES)


def write_held_out(task: Hops, file: Path) -> None:
    """The bundled task file, made again."""
    write_task(file, held_out_examples(task))


def build(chosen: Specimen, out: Path, on_look: Callable[[dict[str, Any]], None] = lambda row: None) -> Path:
    """Trains a specimen in a folder (it goes on where it was stopped); the checkpoint folder, with its card.

    Raises:
        InputError: the folder holds another run.
    """
    from visitlens.probe.ladder.specimen_card import finish
    from visitlens.probe.ladder.task_training import train_task

    start = None
    if chosen.continues and not (out / "state.safetensors").is_file():
        first = specimen(chosen.continues)
        start = out / first.name
        train_task(first.config, first.task, first.recipe, start, on_look)
    folder = train_task(chosen.config, chosen.task, chosen.recipe, out, on_look, start=start)
    finish(chosen, folder)
    return folder

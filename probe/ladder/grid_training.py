"""Trains a grid of matched pairs into a folder, cell by cell; what is finished is skipped, what is not goes on.

out/corpus/                     the prepared text
out/44K-S85/looped/tokens-N/    checkpoint folders (and each run's state and metrics beside)
out/grid.json                   the cells so far, as `visitlens.probe.reading.grid.Grid`
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from visitlens.errors import InputError
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.probe.jobs.processes import context
from visitlens.probe.ladder.corpus import Corpus
from visitlens.probe.ladder.mini_grid import CellPlan, GridPlan
from visitlens.probe.ladder.train import Cadence, Recipe, train
from visitlens.probe.reading.grid import SIDES, Grid, GridCell

CHECKPOINT_FILES = ("config.json", "model.safetensors", "tokenizer.json", "training.json")
JobProgress = Callable[[str, int, int, float], None]
"""Called with a model's name, tokens done, tokens in all, the last loss."""


@dataclass(frozen=True)
class Job:
    """One model of one cell."""

    name: str
    config: LoopedMoEConfig
    recipe: Recipe
    corpus: Path
    out: Path
    cadence: Cadence

    def run(self, on_progress: JobProgress = lambda name, done, total, loss: None) -> None:
        import torch

        from visitlens.kernels.memory import keep_freed_memory

        torch.set_num_threads(1)  # several processes of one thread beat one process of several at these sizes
        keep_freed_memory()
        train(
            self.config,
            self.recipe,
            Corpus.open(self.corpus),
            self.out,
            cadence=self.cadence,
            on_progress=lambda done, total, loss: on_progress(self.name, done, total, loss),
        )


def jobs_of(
    plan: GridPlan,
    corpus: Corpus,
    out: Path,
    *,
    cells: Sequence[str] = (),
    tokens: int | None = None,
    horizons: int | None = None,
    seed: int = 0,
) -> list[Job]:
    """Baseline and looped model of each cell in the plan's order, once per horizon: the shortest of all cells first, so that
    a grid stopped early is whole. `tokens` (the longest horizon) and `horizons` replace the plan's own.

    Raises:
        InputError: a cell that the plan doesn't have.
    """
    cadence = Cadence(dyck_prompts=plan.dyck_prompts)
    jobs = []
    for round_ in range(horizons or plan.horizons):
        for cell in chosen_cells(plan, cells):
            recipe = Recipe.of(
                tokens or cell.scale.tokens,
                horizons=horizons or plan.horizons,
                seed=seed,
                batch=plan.batch,
                learning_rate=plan.learning_rate,
            )
            recipe = replace(recipe, horizons=recipe.horizons[: round_ + 1])
            for side in ("baseline", "looped"):
                config = adapted(getattr(cell, side), corpus)
                name = f"{cell.name} {side}"
                jobs.append(Job(name, config, recipe, corpus.folder, out / cell.name / side, cadence))
    return jobs


def chosen_cells(plan: GridPlan, names: Sequence[str]) -> list[CellPlan]:
    """The cells named, or all; a scale's or a level's name (`44K`, `S85`) stands for its row or column."""
    cells = plan.cells
    unknown = [n for n in names if not any(_named(c, n) for c in cells)]
    if unknown:
        raise InputError(
            f"grid {plan.name} has no {', '.join(unknown)}; its cells are {', '.join(c.name for c in cells)}"
        )
    return [c for c in cells if not names or any(_named(c, n) for n in names)]


def _named(cell: CellPlan, name: str) -> bool:
    return name in (cell.name, cell.scale.name, f"S{cell.level}")


def adapted(config: LoopedMoEConfig, corpus: Corpus) -> LoopedMoEConfig:
    """With the vocabulary and special tokens of the corpus's tokenizer."""
    from visitlens.hooks.models.checkpoint import load_tokenizer

    special = {f"{name}_token_id": value for name, value in vars(corpus.special).items()}
    return replace(config, vocab_size=load_tokenizer(corpus.tokenizer_file).get_vocab_size(), **special)


def train_grid(
    jobs: Iterable[Job], plan: GridPlan, out: Path, *, workers: int = 1, on_progress: JobProgress = lambda *_: None
) -> Grid:
    """Runs the jobs and writes `grid.json` after each. Several workers are processes, which report when a model is done.

    Raises:
        VisitlensError: the first job that failed; those in progress go on to their end, no other is begun.
    """
    # A run's next horizon waits for the one before, so one round at a time.
    for _, round_ in groupby(jobs, key=lambda job: len(job.recipe.horizons)):
        if workers == 1:
            for job in round_:
                job.run(on_progress)
                write_grid(plan, out)
            continue
        with ProcessPoolExecutor(workers, mp_context=context(), max_tasks_per_child=1) as pool:
            running = {pool.submit(job.run): job for job in round_}
            try:
                for future in as_completed(running):
                    future.result()
                    last = running[future].recipe.horizons[-1]
                    on_progress(running[future].name, last, last, float("nan"))
                    write_grid(plan, out)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    return write_grid(plan, out)


def write_grid(plan: GridPlan, out: Path) -> Grid:
    """`grid.json` with the cells of which both models are finished, each pair at its longest common horizon."""
    cells = []
    for cell in plan.cells:
        runs = {side: out / cell.name / side for side in SIDES}
        if common := set.intersection(*(finished_horizons(run) for run in runs.values())):
            last = f"tokens-{max(common)}"
            cells.append(GridCell(cell.scale.name, cell.level, **{side: run / last for side, run in runs.items()}))
    grid = Grid(plan.name, tuple(s.name for s in plan.scales), plan.levels, tuple(cells))
    grid.write(out)
    return grid


def finished_horizons(run: Path) -> set[int]:
    """Tokens at which a run's finished branches end."""
    return {int(file.parent.name.removeprefix("tokens-")) for file in run.glob("tokens-*/training.json")}


def export_grid(folder: Path, out: Path) -> Grid:
    """Copies a grid's checkpoints (`out/44K-S85/looped/`) and its `grid.json`, without runs' states and metrics.

    Raises:
        InputError: no grid in `folder`, or `out` is not empty.
    """
    grid = Grid.read(folder)
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty; choose another folder")
    cells = []
    for cell in grid.cells:
        copies = {side: out / cell.name / side for side in SIDES}
        for side, copy in copies.items():
            if (source := getattr(cell, side)) is None:
                raise InputError(f"{folder}: the {side} model of cell {cell.name} is gone; train it again")
            copy.mkdir(parents=True)
            for name in CHECKPOINT_FILES:
                shutil.copyfile(source / name, copy / name)
        cells.append(replace(cell, **copies))
    exported = replace(grid, cells=tuple(cells))
    exported.write(out)
    return exported

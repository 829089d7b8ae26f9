"""`visitlens ladder`: train a grid of budget-matched pairs, and tabulate it."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from visitlens.app.console import comma_separated, console, loading, progress_bar

ladder = typer.Typer(no_args_is_help=True, help="Train a grid of budget-matched pairs, and tabulate it.")


class GridName(StrEnum):
    mini = "mini"
    nano = "nano"


@ladder.command()
def train(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the grid. What is finished there is skipped.")],
    grid: Annotated[GridName, typer.Option(help="mini: 4 x 4; nano: 2 x 2, about two minutes.")] = GridName.nano,
    corpus: Annotated[
        Path | None,
        typer.Option(
            help="Text (what `record` reads), or CATEGORY.train.* and CATEGORY.validation.* files in a folder; the bundled sample by default."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A Hugging Face tokenizer.json; the bundled one by default.")
    ] = None,
    cells: Annotated[str, typer.Option(help="Cells, rows or columns: 44K-S85,263K,S97. All by default.")] = "",
    tokens: Annotated[float | None, typer.Option(help="Tokens per model; each scale's own count by default.")] = None,
    horizons: Annotated[
        int | None, typer.Option(help="Decay branches forked from each stable run; the grid's own number by default.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Models trained at a time, one core each.")] = 1,
    seed: Annotated[int, typer.Option(help="Of initial weights, order of text and prompts.")] = 0,
) -> None:
    """Train both models of each cell on identical sequences; resumable."""
    with loading("torch"):
        from visitlens.probe.bundled import PAIR, SAMPLE, check_assets
        from visitlens.probe.ladder.corpus import prepare
        from visitlens.probe.ladder.grid_training import jobs_of, train_grid
        from visitlens.probe.ladder.mini_grid import plan_named
    if corpus is None or tokenizer is None:
        check_assets()
    plan = plan_named(grid.value)
    with loading("and tokenising the text"):
        prepared = prepare(corpus or SAMPLE, tokenizer or PAIR["looped"] / "tokenizer.json", out / "corpus")
    jobs = jobs_of(
        plan,
        prepared,
        out,
        cells=comma_separated(cells),
        tokens=None if tokens is None else int(tokens),
        horizons=horizons,
        seed=seed,
    )
    console.print(f"{len(jobs)} models, {prepared.train.num_tokens:,} tokens of text to train on")
    if console.is_terminal:
        with progress_bar() as progress:
            tasks: dict[str, int] = {}

            def show(name: str, done: int, total: int, loss: float) -> None:
                if name not in tasks:
                    tasks[name] = progress.add_task(name, total=total)
                progress.update(tasks[name], completed=min(done, total), description=f"{name} {loss:.3f}")

            train_grid(jobs, plan, out, workers=workers, on_progress=show)
    else:
        began: dict[str, tuple[float, int]] = {}

        def tell(name: str, done: int, total: int, loss: float) -> None:
            now = time.monotonic()
            start, first = began.setdefault(name, (now, done))
            left = (total - done) * (now - start) / (done - first) if done > first else float("nan")
            console.print(f"{name}: {done:,} of {total:,} tokens, loss {loss:.3f}, {left / 60:.1f} min left")

        train_grid(jobs, plan, out, workers=workers, on_progress=tell)
    typer.echo(out / "grid.json")

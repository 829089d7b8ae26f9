"""`visitlens ladder`: prepare text, train a configuration or a grid of budget-matched pairs, tabulate it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import TaskID

from visitlens.app.terminal.console import comma_separated, console, loading, plain, progress_bar
from visitlens.errors import InputError

if TYPE_CHECKING:
    from visitlens.probe.ladder.corpus import Corpus

ladder = typer.Typer(no_args_is_help=True, help="Train budget-matched pairs of looped models and Baselines.")

Out = Annotated[Path, typer.Option("--out", "-o", help="Folder. What is finished there is skipped, the rest goes on.")]
Text = Annotated[
    str | None,
    typer.Option(
        "--corpus",
        help="Text: .jsonl (.gz, .xz, .zst), .parquet, .txt, .md, a folder of them (NAME.train.* and NAME.validation.* "
        "keep their split), or hf:NAME[:CONFIG][@SPLIT]. The bundled sample by default.",
    ),
]
TokenizerFile = Annotated[
    Path | None, typer.Option("--tokenizer", help="A Hugging Face tokenizer.json; the bundled one by default.")
]
Horizons = Annotated[int | None, typer.Option(help="Decay branches forked from each stable run.")]
Seed = Annotated[int, typer.Option(help="Of initial weights, order of text and prompts.")]


class GridName(StrEnum):
    mini = "mini"
    nano = "nano"


@ladder.command()
def train(
    out: Out,
    grid: Annotated[GridName, typer.Option(help="mini: 4 x 4; nano: 2 x 2, about two minutes.")] = GridName.nano,
    corpus: Text = None,
    tokenizer: TokenizerFile = None,
    cells: Annotated[str, typer.Option(help="Cells, rows or columns: 44K-S85,263K,S97. All by default.")] = "",
    tokens: Annotated[float | None, typer.Option(help="Tokens per model; each scale's own count by default.")] = None,
    horizons: Horizons = None,
    workers: Annotated[int, typer.Option(help="Models trained at a time, one core each.")] = 1,
    seed: Seed = 0,
) -> None:
    """Train both models of each cell of a grid on identical sequences; resumable."""
    with loading("torch"):
        from visitlens.probe.ladder.grid_training import jobs_of, train_grid
        from visitlens.probe.ladder.mini_grid import plan_named
    plan = plan_named(grid.value)
    prepared = _prepared(out / "corpus", corpus, tokenizer)
    jobs = jobs_of(
        plan,
        prepared,
        out,
        cells=comma_separated(cells),
        tokens=None if tokens is None else int(tokens),
        horizons=horizons,
        seed=seed,
    )
    with _progress() as show:
        train_grid(jobs, plan, out, workers=workers, on_progress=show)
    typer.echo(out / "grid.json")


@ladder.command()
def run(
    config: Annotated[Path, typer.Argument(help="A config.json, or a checkpoint folder that has one.")],
    out: Out,
    tokens: Annotated[
        float | None, typer.Option(help="Tokens at the longest horizon, Dyck prompts included; or give --forks.")
    ] = None,
    corpus: Text = None,
    tokenizer: TokenizerFile = None,
    horizons: Horizons = 1,
    decay_share: Annotated[float, typer.Option(help="Share of the first horizon over which each branch decays.")] = 0.2,
    forks: Annotated[
        str,
        typer.Option(help="Comma-separated updates at which decay branches fork, instead of --tokens and --horizons."),
    ] = "",
    decay_tokens: Annotated[float | None, typer.Option(help="Tokens of each branch's decay, with --forks.")] = None,
    decay_text: Annotated[
        float, typer.Option(help="Share of documents kept for decay branches, which the stable run never reads.")
    ] = 0.0,
    warmup: Annotated[int | None, typer.Option(help="Tokens of warm-up; a tenth, 150,000 at most, by default.")] = None,
    batch: Annotated[int, typer.Option(help="Contexts per update, over all processes.")] = 4,
    learning_rate: Annotated[float, typer.Option(help="Peak rate.")] = 5e-3,
    dyck_share: Annotated[float, typer.Option(help="Share of tokens that are Dyck prompts.")] = 0.25,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 with float32 weights in the optimiser.")] = "float32",
    device: Annotated[
        str, typer.Option(help="cpu or cuda; with torchrun each process takes a device of its own.")
    ] = "cpu",
    sharded: Annotated[
        bool, typer.Option(help="With torchrun: divide weights and optimiser over the processes (FSDP2).")
    ] = False,
    checkpoint_updates: Annotated[int, typer.Option(help="Updates between checkpoints.")] = 100,
    dyck_prompts: Annotated[int, typer.Option(help="Dyck prompts per number of shots in the evaluation.")] = 200,
    max_epochs: Annotated[float, typer.Option(help="How often the text may be read.")] = 4.0,
    seed: Seed = 0,
) -> None:
    """Train one configuration; with `torchrun --nproc-per-node N -m visitlens ladder run` in N processes."""
    with loading("torch"):
        from visitlens.probe.ladder.grid_training import adapted
        from visitlens.probe.ladder.processes import processes
        from visitlens.probe.ladder.tables import read_config
        from visitlens.probe.ladder.train import Cadence
        from visitlens.probe.ladder.train import train as train_one
        from visitlens.probe.ladder.trainer import Recipe
    options = {"batch": batch, "learning_rate": learning_rate, "dyck_share": dyck_share, "dtype": dtype, "seed": seed}
    if warmup is not None:
        options["warmup_tokens"] = warmup
    options["decay_text"] = decay_text
    if (tokens is None) == (not forks) or (decay_tokens is None) == bool(forks):
        raise InputError("give --tokens, or --forks with --decay-tokens")
    if decay_tokens is not None:
        context = read_config(config).context_length
        recipe = Recipe.forked(_integers(forks, ","), int(decay_tokens), context=context, **options)
    else:
        recipe = Recipe.of(int(tokens or 0), horizons=horizons or 1, decay_share=decay_share, **options)
    with processes(device) as (rank, own_device, first):
        with first():
            prepared = _prepared(out / "corpus", corpus, tokenizer, quiet=rank > 0)
        with _progress(quiet=rank > 0) as show:
            folders = train_one(
                adapted(read_config(config), prepared),
                recipe,
                prepared,
                out,
                device=own_device,
                sharded=sharded,
                cadence=Cadence(checkpoint_updates=checkpoint_updates, dyck_prompts=dyck_prompts),
                max_epochs=max_epochs,
                on_progress=lambda done, total, loss: show(out.name, done, total, loss),
            )
    if rank == 0:
        for folder in folders:
            typer.echo(folder)


@ladder.command()
def corpus(
    text: Annotated[str, typer.Argument(help="What `train --corpus` takes.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the prepared corpus.")],
    tokenizer: TokenizerFile = None,
    field: Annotated[str, typer.Option(help="Name of the text's field or column.")] = "text",
    bos: Annotated[str | None, typer.Option(help="Token that leads a document, where it has an unusual name.")] = None,
    eos: Annotated[str | None, typer.Option(help="Token that ends a document, likewise.")] = None,
    validation_share: Annotated[float, typer.Option(help="Of documents, where files don't say.")] = 0.05,
    max_tokens: Annotated[float | None, typer.Option(help="Stop reading a file after so many tokens.")] = None,
) -> None:
    """Tokenise text once, so that runs read it in place; `--corpus` takes the folder."""
    import json

    from visitlens.probe.ladder.corpus import prepare
    from visitlens.probe.model.bundled import PAIR

    limit = None if max_tokens is None else int(max_tokens)
    with loading("and tokenising the text"):
        prepared = prepare(
            text,
            tokenizer or PAIR["looped"] / "tokenizer.json",
            out,
            field=field,
            bos=bos,
            eos=eos,
            validation_share=validation_share,
            max_tokens=limit,
        )
    typer.echo(json.dumps({"documents": prepared.report["documents"], "skipped": prepared.report["skipped"]}, indent=1))


@ladder.command()
def table(
    folders: Annotated[list[Path], typer.Argument(help="A grid's folder; several of the same grid are seeds.")],
) -> None:
    """Tabulate losses, budgets and ratios of a trained grid, as Markdown."""
    from visitlens.probe.ladder.results import results_tables

    typer.echo(results_tables(folders))


@ladder.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A grid's folder, with grid.json.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="An empty or new folder.")],
) -> None:
    """Copy a grid's checkpoints and grid.json, without the runs' states: what one passes on."""
    from visitlens.probe.ladder.grid_training import export_grid

    grid = export_grid(folder, out)
    typer.echo(f"{len(grid.cells)} pairs in {out}")


@ladder.command()
def match(
    baseline: Annotated[Path, typer.Argument(help="A Baseline's config.json or checkpoint folder.")],
    span: Annotated[str, typer.Option(help="START:STOP, the layers to loop, 0-based.")],
    visits: Annotated[int, typer.Option(help="How often they run.")] = 2,
    experts: Annotated[str, typer.Option(help="Expert counts to try; solved for by default.")] = "",
    mean_document: Annotated[float, typer.Option(help="Tokens; the paper's by default.")] = 780,
    steps: Annotated[str, typer.Option(help="Multiples for hidden size, head dim, expert dim, experts.")] = "8,2,8,8",
    full_width: Annotated[
        bool, typer.Option(help="Query width = hidden size only, as the paper's sparse rows.")
    ] = False,
    limit: Annotated[int, typer.Option(help="Candidates to print.")] = 10,
    write: Annotated[Path | None, typer.Option(help="Write the first one's config.json here.")] = None,
) -> None:
    """Find looped configurations with a Baseline's FLOPs, parameters and KV cache."""
    import json

    from visitlens.probe.ladder import tables
    from visitlens.probe.ladder.match import Steps
    from visitlens.probe.ladder.match import match as solve

    found = solve(
        tables.read_config(baseline),
        loop_start=_integers(span, ":", 2)[0],
        loop_stop=_integers(span, ":", 2)[1],
        visits=visits,
        mean_document=mean_document,
        steps=Steps(*_integers(steps, ",", 4)),
        experts=_integers(experts, ",") or None,
        full_width=full_width,
        limit=limit,
    )
    typer.echo(tables.candidates_table(found))
    if write is not None:
        write.write_text(json.dumps(found[0].config.to_dict(), indent=2) + "\n", encoding="utf-8")


@ladder.command()
def sweep(
    baseline: Annotated[Path, typer.Argument(help="A Baseline's config.json or checkpoint folder.")],
    axis: Annotated[str, typer.Option(help="span: layers that loop; count: visits; depth: physical layers.")],
    values: Annotated[str, typer.Option(help="Comma-separated values of the axis; the paper's kind by default.")] = "",
    mean_document: Annotated[float, typer.Option(help="Tokens; the paper's by default.")] = 780,
    steps: Annotated[str, typer.Option(help="Multiples for hidden size, head dim, expert dim, experts.")] = "8,2,8,8",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write each point's config.json into a folder here; train them with `run`."),
    ] = None,
) -> None:
    """Configurations along one axis of a loop's design, each matched to the Baseline, hidden size narrowing with depth."""
    from visitlens.probe.ladder import tables
    from visitlens.probe.ladder.match import Steps
    from visitlens.probe.ladder.sweep import sweep as points_of
    from visitlens.probe.ladder.sweep import sweep_rows, write_sweep

    with loading("and matching"):
        points = points_of(
            tables.read_config(baseline),
            axis,
            _integers(values, ","),
            mean_document=mean_document,
            steps=Steps(*_integers(steps, ",", 4)),
        )
    rows = sweep_rows(points, mean_document)
    shown = [
        [
            f"{v:.3f}" if k.endswith("ratio") else tables.short(v) if k == "flops_per_token" else v
            for k, v in row.items()
        ]
        for row in rows
    ]
    typer.echo(tables.table(list(rows[0]), shown))
    typer.echo("\nOne seed a point can't rank neighbours: their differences are as small as those between seeds.")
    if out is not None:
        write_sweep(points, out, mean_document)
        typer.echo(
            f"\nTrain each point with `visitlens ladder run {out}/NAME/config.json --out {out}/NAME`, then draw them with "
            f"`visitlens scaling figures {out} --only sweeps`."
        )


def _integers(text: str, separator: str, count: int | None = None) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(separator) if part.strip()]
    except ValueError:
        numbers = []
    if (text and not numbers) or (count is not None and len(numbers) != count):
        raise InputError(f"expected {count or ''} whole numbers with {separator!r} between, got {text!r}")
    return numbers


def _prepared(folder: Path, text: str | None, tokenizer: Path | None, quiet: bool = False) -> Corpus:
    """The corpus named, if it is a prepared one; else prepared in `folder`."""
    from visitlens.probe.ladder.corpus import Corpus, prepare
    from visitlens.probe.model.bundled import PAIR, SAMPLE, check_assets

    if text is None or tokenizer is None:
        check_assets()
    if text is not None and (Path(text) / "corpus.json").is_file():
        prepared = Corpus.open(Path(text))
    else:
        with loading("and tokenising the text"):
            prepared = prepare(text or SAMPLE, tokenizer or PAIR["looped"] / "tokenizer.json", folder)
    if not quiet:
        skipped = ", ".join(f"{n} {reason}" for reason, n in prepared.report["skipped"].items())
        console.print(
            plain(
                f"{prepared.train.num_tokens:,} tokens of text to train on{f'; skipped: {skipped}' if skipped else ''}"
            )
        )
    return prepared


@contextmanager
def _progress(quiet: bool = False) -> Iterator[Callable[[str, int, int, float], None]]:
    """Shows models in training: a bar each on a terminal, else lines, with the time left."""
    if quiet:
        yield lambda name, done, total, loss: None
    elif console.is_terminal:
        with progress_bar() as progress:
            tasks: dict[str, TaskID] = {}

            def draw(name: str, done: int, total: int, loss: float) -> None:
                if name not in tasks:
                    tasks[name] = progress.add_task(name, total=total)
                progress.update(tasks[name], completed=min(done, total), total=total, description=f"{name} {loss:.3f}")

            yield draw
    else:
        began: dict[str, tuple[float, int]] = {}

        def tell(name: str, done: int, total: int, loss: float) -> None:
            now = time.monotonic()
            start, first = began.setdefault(name, (now, done))
            left = f", {(total - done) * (now - start) / (done - first) / 60:.1f} min left" if done > first else ""
            console.print(f"{name}: {done:,} of {total:,} tokens, loss {loss:.3f}{left}")

        yield tell

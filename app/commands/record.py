"""`visitlens record`: run a model over text and record what each visit does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from visitlens.app.terminal.console import comma_separated, console, loading, plain, progress_shown, token_bounds
from visitlens.app.terminal.option_groups import (
    DeviceOptions,
    GenerateOptions,
    ReadOptions,
    TextOptions,
    choice,
    grouped,
)
from visitlens.hooks.recording.format.schema import LEVELS
from visitlens.probe.jobs.engines import ENGINES

if TYPE_CHECKING:
    from visitlens.probe.jobs.request import RunRequest


Level, Engine = choice("Level", LEVELS), choice("Engine", ENGINES)


@grouped
def record(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder, hub name, or bundled: smelt, baseline, hops.")],
    text: Annotated[
        Path, typer.Argument(help="Text: .txt, .md (one document each), .jsonl (also .gz, .xz) or a folder of them.")
    ],
    out: Annotated[
        str, typer.Option("--out", "-o", help="The recording: a folder, or s3://... . An unfinished one is continued.")
    ],
    level: Annotated[Level, typer.Option(help="What is kept beside the statistics.")] = Level.summary,  # pyright: ignore[reportInvalidTypeForm]  # made of a table
    sites: Annotated[str, typer.Option(help="For level activations: comma-separated, e.g. Q,K,attn_write.")] = "",
    token_range: Annotated[str, typer.Option(help="For level activations: START:STOP, in tokens.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Stop after the context in which this token falls.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens per context; the model's own length by default.")] = None,
    run_on: DeviceOptions = DeviceOptions(),  # noqa: B008 (frozen)
    batch: Annotated[int, typer.Option(help="Contexts per forward.")] = 1,
    groups: Annotated[
        int | None,
        typer.Option(
            help="Groups of documents that are kept apart, for intervals: each document its own where there are no more. By default 1,024, or fewer "
            "(128 at least) where their sums would take more than 256 MB."
        ),
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens per shard: what a crash can cost.")] = 131_072,
    read: ReadOptions = ReadOptions(),  # noqa: B008 (frozen)
    reading: TextOptions = TextOptions(),  # noqa: B008 (frozen)
    threads: Annotated[int | None, typer.Option(help="CPU threads; 1 for narrow models by default.")] = None,
    workers: Annotated[int, typer.Option(help="Processes (or Ray tasks) that record shards side by side.")] = 1,
    engine: Annotated[Engine, typer.Option(help="process: on this machine. ray: on a Ray cluster.")] = Engine.process,  # pyright: ignore[reportInvalidTypeForm]  # made of a table
    ray_address: Annotated[str | None, typer.Option(help="The cluster, e.g. auto or ray://HOST:10001.")] = None,
    writing: GenerateOptions = GenerateOptions(),  # noqa: B008 (frozen)
    checks: Annotated[bool, typer.Option(help="Before recording, run the guards of a model of transformers.")] = True,
    synthetic: Annotated[
        str, typer.Option(help="Words for a recording of unreal weights or text; kept as a warning.")
    ] = "",
) -> None:
    """Run a model over text and record what each visit does.

    A native model that is too large for one device: `torchrun --nproc-per-node N -m visitlens record ... --device cuda`.
    """
    from visitlens.probe.model import load as loaded

    folder = loaded.checkpoint(checkpoint)  # a mistyped path is told before torch is imported
    loaded.check_text(text)
    with loading("torch"):
        from visitlens.hooks.recording.store.object_store import is_url
        from visitlens.probe.jobs.request import RunRequest
        from visitlens.probe.jobs.torchrun import ranks

    request = RunRequest.of(
        folder,
        text,
        out,
        level=level.value,
        sites=comma_separated(sites),
        activation_tokens=token_bounds(token_range),
        groups=groups,
        batch=batch,
        shard_tokens=shard_tokens,
        context_length=context,
        max_tokens=max_tokens,
        threads=threads,
        workers=workers,
        engine=engine.value,
        ray_address=ray_address,
        synthetic=synthetic,
        checks=checks,
        model_options=read.given(),
        **vars(run_on),
        **reading.given(),
        **vars(writing),
    )
    with ranks(request) as request, TemporaryDirectory(prefix="visitlens-") as scratch:
        if request is not None:  # else another rank has done the work
            _record(replace(request, out=Path(scratch), url=out) if is_url(out) else request)


def _record(request: RunRequest) -> None:
    from visitlens.probe.jobs.prepared_run import PreparedRun

    with loading("the model and the text"):
        run = PreparedRun(request)
        if request.workers == 1 and request.engine == "process":
            _ = run.model  # says now what is wrong with it; workers load their own
    console.print(str(run))
    console.print(plain(f"documents: {run.encoder}"), soft_wrap=True)
    for note in run.notes:
        console.print(f"[yellow]note:[/] {plain(note)}", soft_wrap=True)
    for warning in run.warnings:
        console.print(f"[yellow]warning:[/] {plain(warning)}", soft_wrap=True)
    with progress_shown() as show:
        run.record(partial(show, "recording"))
    typer.echo(request.url or request.out)

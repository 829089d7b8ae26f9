"""`visitlens record`: run a model over text and record what each visit does."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from visitlens.app.terminal.console import comma_separated, console, loading, plain, progress_shown, token_bounds
from visitlens.app.terminal.model_options import (
    FamilyName,
    LeadingToken,
    StateSeed,
    Steps,
    TieCopies,
    TrustRemoteCode,
    model_options,
)

if TYPE_CHECKING:
    from visitlens.probe.jobs.prepared_run import RunRequest


class Level(StrEnum):
    summary = "summary"
    tokens = "tokens"
    activations = "activations"
    maps = "maps"


class Engine(StrEnum):
    process = "process"
    ray = "ray"


def record(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder, hub name, or bundled: smelt, baseline.")],
    text: Annotated[
        Path, typer.Argument(help="Text: .txt, .md (one document each), .jsonl (also .gz, .xz) or a folder of them.")
    ],
    out: Annotated[
        str, typer.Option("--out", "-o", help="The recording: a folder, or s3://... . An unfinished one is continued.")
    ],
    level: Annotated[Level, typer.Option(help="What is kept beside the statistics.")] = Level.summary,
    sites: Annotated[str, typer.Option(help="For level activations: comma-separated, e.g. Q,K,attn_write.")] = "",
    token_range: Annotated[str, typer.Option(help="For level activations: START:STOP, in tokens.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Stop after the context in which this token falls.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens per context; the model's own length by default.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    batch: Annotated[int, typer.Option(help="Contexts per forward.")] = 1,
    groups: Annotated[
        int | None,
        typer.Option(
            help="Groups of documents that are kept apart, for intervals: each document its own where there are no more. By default 1,024, or fewer "
            "(128 at least) where their sums would take more than 256 MB."
        ),
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens per shard: what a crash can cost.")] = 131_072,
    steps: Steps = None,
    state_seed: StateSeed = None,
    trust_remote_code: TrustRemoteCode = False,
    family: FamilyName = "",
    tie_copies: TieCopies = False,
    bos: LeadingToken = "",
    special_as_text: Annotated[
        bool, typer.Option("--special-as-text", help="Special tokens written out in the text, such as <eos>, are text.")
    ] = False,
    by_line: Annotated[
        bool,
        typer.Option("--by-line", help="Each line of a .txt or .md file is a document; with --generate, a prompt."),
    ] = False,
    threads: Annotated[int | None, typer.Option(help="CPU threads; 1 for narrow models by default.")] = None,
    workers: Annotated[int, typer.Option(help="Processes (or Ray tasks) that record shards side by side.")] = 1,
    engine: Annotated[Engine, typer.Option(help="process: on this machine. ray: on a Ray cluster.")] = Engine.process,
    ray_address: Annotated[str | None, typer.Option(help="The cluster, e.g. auto or ray://HOST:10001.")] = None,
    generate: Annotated[
        int, typer.Option(help="Take each document as a prompt, and record what the model writes: tokens a prompt.")
    ] = 0,
    temperature: Annotated[
        float, typer.Option(min=0, help="Of --generate: 0 takes the likeliest token, above 0 tokens are drawn.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw among the fewest tokens whose probabilities sum to this.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the tokens drawn; kept in the recording.")] = 0,
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
        from visitlens.hooks.recording.write.record import RecordingOptions
        from visitlens.probe.jobs.prepared_run import RunRequest
        from visitlens.probe.jobs.torchrun import ranks

    options = RecordingOptions(
        level=level.value,
        sites=comma_separated(sites),
        activation_tokens=token_bounds(token_range),
        groups=groups,
        batch=batch,
        shard_tokens=shard_tokens,
    )
    request = RunRequest(
        checkpoint=folder,
        text=text,
        out=Path(out),
        options=options,
        dtype=dtype,
        device=device,
        context_length=context,
        max_tokens=max_tokens,
        threads=threads,
        workers=workers,
        engine=engine.value,
        ray_address=ray_address,
        synthetic=synthetic,
        generate=generate,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        checks=checks,
        bos=bos or None,
        special_as_text=special_as_text,
        by_line=by_line,
        model_options=model_options(steps, state_seed, trust_remote_code, family, tie_copies),
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

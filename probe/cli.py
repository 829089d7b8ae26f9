"""`visitlens` on the command line: record, info, figures, reproduce. Thin: every command calls one function."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from visitlens import __version__
from visitlens.kernels.errors import InputError, VisitlensError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(stderr=True, highlight=False)


class Level(StrEnum):
    summary = "summary"
    tokens = "tokens"
    activations = "activations"
    maps = "maps"


class Theme(StrEnum):
    light = "light"
    dark = "dark"
    paper = "paper"


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """What each visit of a looped Mixture-of-Experts transformer does: record it, measure it, draw it."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def record(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with config.json, model.safetensors and tokenizer.json.")],
    text: Annotated[Path, typer.Argument(help="Text: .txt, .md, .jsonl (also .gz, .xz) or a folder of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The recording (a folder). An unfinished one is continued.")],
    level: Annotated[Level, typer.Option(help="What is kept beside the statistics.")] = Level.summary,
    sites: Annotated[str, typer.Option(help="For level activations: comma-separated, e.g. Q,K,attn_write.")] = "",
    token_range: Annotated[str, typer.Option(help="For level activations: START:STOP, in tokens.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Stop after the context in which this token falls.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens per context; the model's own length by default.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    batch: Annotated[int, typer.Option(help="Contexts per forward.")] = 1,
    groups: Annotated[int, typer.Option(help="Document groups for the bootstrap.")] = 128,
    shard_tokens: Annotated[int, typer.Option(help="Tokens per shard: what a crash can cost.")] = 131_072,
    threads: Annotated[int | None, typer.Option(help="CPU threads; 1 for narrow models by default.")] = None,
) -> None:
    """Run a model over text and record what each visit does."""
    with _loading("torch and the model"):
        from visitlens.hooks.recorder import RecordingOptions
        from visitlens.hooks.shards import readable_bytes
        from visitlens.probe.run import PreparedRun, RunRequest

        options = RecordingOptions(
            level=level.value,
            sites=tuple(s.strip() for s in sites.split(",") if s.strip()),
            activation_tokens=_range(token_range),
            groups=groups,
            batch=batch,
            shard_tokens=shard_tokens,
        )
        request = RunRequest(
            checkpoint=checkpoint,
            text=text,
            out=out,
            options=options,
            dtype=dtype,
            device=device,
            context_length=context,
            max_tokens=max_tokens,
            threads=threads,
        )
        run = PreparedRun(request)
    size = f"about {readable_bytes(run.bytes_needed)} and a summary" if run.bytes_needed else "a summary of a few MB"
    console.print(
        f"{run.contexts.num_tokens:,} tokens, {len(run.contexts.document_hash)} documents; writes {size} to {out}"
    )
    with _progress() as progress:
        task = progress.add_task("recording", total=None)
        run.record(lambda done, total: progress.update(task, completed=done, total=total))
    typer.echo(out)


@app.command()
def info(
    recording: Annotated[Path, typer.Argument(help="A recording.")],
    measures: Annotated[bool, typer.Option("--measures", help="List every measure with its definition.")] = False,
) -> None:
    """Say what a recording holds and where it comes from."""
    from visitlens.hooks.shards import readable_bytes
    from visitlens.probe.opened import open as open_recording

    rec = open_recording(recording)
    stored, config, run = rec.recording, rec.recording.config, rec.recording.run
    rows = {
        "recording": f"{recording}  ({'complete' if stored.complete else 'unfinished'})",
        "model": f"{stored.provenance.get('checkpoint')}, {config['num_layers']} layers, hidden size {config['hidden_size']}, "
        f"{config['num_heads']} heads, {config['num_experts']} experts of which {config['experts_per_token']} are used",
        "loop": f"layers {min(rec.plan.looped_layers)}-{max(rec.plan.looped_layers)} run {max(rec.plan.visits.values())} times, {len(rec.plan)} steps"
        if rec.looped
        else "none (unlooped)",
        "text": f"{stored.tokens:,} of {run['tokens']:,} tokens, {stored.documents} documents in {rec.groups} groups, from {stored.provenance.get('text')}",
        "level": f"{stored.level}, {run['config']['dtype']}",
        "size": f"{readable_bytes(sum(s['bytes'] for s in stored.shards))} in {len(stored.shards)} shards",
        "made": f"{stored.provenance.get('created')} by `{stored.provenance.get('command')}`",
        "hashes": f"config {run['config_sha256'][:12]}  weights {str(run['config']['weights_sha256'])[:12]}  data {run['config']['data_sha256'][:12]}",
    }
    for name, value in rows.items():
        typer.echo(f"{name:<10} {value}")
    bad = {name: int(t.non_finite.sum()) for name, t in stored.totals.items() if t.non_finite.any()}
    if bad:
        typer.echo(f"warning    values that were NaN or infinite, left out of every mean: {bad}")
    if not measures:
        typer.echo(f"measures   {len(rec.measures)} (list them with --measures)")
        return
    for name in rec.measures:
        measure = rec.stat(name).measure
        typer.echo(f"\n{name} [{', '.join(measure.axes)}] in {measure.unit}\n  {measure.definition}  ({measure.paper})")


@app.command()
def figures(
    looped: Annotated[Path | None, typer.Argument(help="Recording of the looped model.")] = None,
    baseline: Annotated[Path | None, typer.Argument(help="Recording of its unlooped Baseline.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the files.")] = Path("figures"),
    only: Annotated[str, typer.Option(help="Comma-separated slugs, html:N or pdf:N; all by default.")] = "",
    formats: Annotated[
        str, typer.Option(help="Comma-separated: html, png, svg, pdf, json, csv.")
    ] = "html,png,svg,json",
    theme: Annotated[Theme, typer.Option(help="Colours.")] = Theme.light,
    list_: Annotated[bool, typer.Option("--list", help="List the figures and where the paper has them.")] = False,
) -> None:
    """Draw figures from recordings."""
    from visitlens.probe.figures.base import registered
    from visitlens.probe.figures.export import write_figures
    from visitlens.probe.figures.pair import Pair
    from visitlens.probe.opened import open as open_recording

    if list_:
        for figure in registered():
            typer.echo(f"{figure.slug:<18} html:{figure.html:<4} pdf:{figure.pdf:<4} {figure.title}")
        return
    if looped is None:
        raise InputError("name a recording: visitlens figures LOOPED.vlens [BASELINE.vlens] --out FOLDER")
    with _progress() as progress, _warnings_once():
        task = progress.add_task("drawing", total=None)
        written = write_figures(
            Pair(open_recording(looped), open_recording(baseline) if baseline else None),
            out,
            slugs=_names(only) or None,
            formats=_names(formats),
            theme=theme.value,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    for file in written:
        typer.echo(file)


@app.command()
def reproduce(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for recordings, figures and the report.")] = Path(
        "out"
    ),
    looped: Annotated[
        Path | None, typer.Option(help="Checkpoint of a looped model; the bundled one by default.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Checkpoint of its Baseline; the bundled one by default.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text; the bundled held-out sample by default.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Stop after the context in which this token falls.")] = None,
    theme: Annotated[Theme, typer.Option(help="Colours.")] = Theme.light,
) -> None:
    """Record a pair of models on the same text, draw the figures and write report.html."""
    from visitlens.probe.bundled import PAIR, SAMPLE, check_assets

    if looped is None and baseline is None:
        check_assets()
        checkpoints = PAIR
    elif looped is not None and baseline is not None:
        checkpoints = {"looped": looped, "baseline": baseline}
    else:
        raise InputError("give both --looped and --baseline, or neither")
    with _loading("torch"):
        from visitlens.hooks.recorder import RecordingOptions
        from visitlens.probe.reproduce import record_all
        from visitlens.probe.run import RunRequest
    requests = {
        name: RunRequest(
            checkpoint=folder,
            text=text or SAMPLE,
            out=out / f"{name}.vlens",
            options=RecordingOptions(level="tokens"),
            max_tokens=max_tokens,
        )
        for name, folder in checkpoints.items()
    }
    with _progress() as progress, _warnings_once():
        tasks = {name: progress.add_task(f"recording {name}", total=None) for name in requests}
        paths = record_all(
            requests, lambda name, done, total: progress.update(tasks[name], completed=done, total=total)
        )
        from visitlens.probe.figures.pair import Pair
        from visitlens.probe.opened import open as open_recording
        from visitlens.probe.report import write_report

        drawing = progress.add_task("drawing", total=None)
        report = write_report(
            Pair(open_recording(paths["looped"]), open_recording(paths["baseline"])),
            out / "report",
            formats=("html", "png", "svg", "json", "csv"),
            theme=theme.value,
            on_progress=lambda done, total: progress.update(drawing, completed=done, total=total),
        )
    console.print("\nDone. Open:", style="bold")
    typer.echo(f"{report}\n{paths['looped']}\n{paths['baseline']}")


def main() -> None:
    """Runs the command line; every error on purpose is one line and a non-zero exit."""
    try:
        app(standalone_mode=True)
    except VisitlensError as error:
        message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        console.print(f"[bold red]error:[/] {_plain(message)}")
        sys.exit(1)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("torch", "transformer_lens", "safetensors", "tokenizers"):
            raise
        console.print(
            f"[bold red]error:[/] this command runs a model and needs {error.name}: pip install 'visitlens[model]'"
        )
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("stopped; what is recorded is kept, and the same command goes on from there")
        sys.exit(130)


def _plain(text: str) -> str:
    """Without rich markup."""
    return text.replace("[", r"\[")


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _range(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    try:
        start, stop = (int(part) for part in text.split(":"))
    except ValueError:
        raise InputError(f"expected a token range START:STOP, for example 0:4096, got {text!r}") from None
    if not 0 <= start < stop:
        raise InputError(f"expected 0 <= START < STOP, got {text!r}")
    return start, stop


@contextmanager
def _loading(what: str) -> Iterator[None]:
    with console.status(f"loading {what} ..."):
        yield


def _progress() -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


@contextmanager
def _warnings_once() -> Iterator[None]:
    """Python warnings as plain lines, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", UserWarning)
        yield
    for message in dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)):
        console.print(f"[yellow]warning:[/] {_plain(message)}")

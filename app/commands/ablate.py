"""`visitlens ablate`: what each head is for, by taking it away."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from visitlens.app.terminal.console import comma_separated, loading, progress_shown
from visitlens.app.terminal.option_groups import ReadOptions, choice, grouped
from visitlens.errors import InputError
from visitlens.probe.analyses.results.modes import MODES

Mode = choice("Mode", MODES)


class Style(StrEnum):
    fixed = "fixed"
    drawn = "drawn"


@grouped
def ablate(
    recording: Annotated[Path, typer.Argument(help="Recording of the model; the result is kept in it.")],
    model: Annotated[str, typer.Option("--model", "-m", help="The checkpoint that was recorded: folder or hub name.")],
    metric: Annotated[
        str,
        typer.Option(
            help="Loss on Dyck targets (dyck), on text (text), or on a task: a bundled one (hops) or a file of JSON lines. By "
            "default dyck, or text where the tokenizer has no brackets.",
            show_default=False,
        ),
    ] = "",
    where: Annotated[str, typer.Option(help="With a task: only examples with this label, for example `2 hops`.")] = "",
    mode: Annotated[Mode, typer.Option(help="What the head's output becomes.")] = Mode.zero,  # pyright: ignore[reportInvalidTypeForm]  # made of a table
    prompts: Annotated[int, typer.Option(min=1, help="Dyck prompts.")] = 32,
    shots: Annotated[int, typer.Option(min=1, help="Demonstrations in each Dyck prompt.")] = 4,
    style: Annotated[
        Style, typer.Option(help="Answers written `Output: ) ]`, or in a style drawn per prompt.")
    ] = Style.fixed,
    text: Annotated[Path | None, typer.Option(help="For --metric text; the bundled sample by default.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="For --metric text: stop after this token's context.")] = 4096,
    seed: Annotated[int, typer.Option(help="Of the prompts and of resampling.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    layers: Annotated[str, typer.Option(help="Comma-separated; those of the loop by default.")] = "",
    read: ReadOptions = ReadOptions(),  # noqa: B008 (frozen)
    again: Annotated[bool, typer.Option("--again", help="Compute anew what is there already.")] = False,
) -> None:
    """Ablate every head of the looped block, one at a time, and keep the result in the recording.

    The model is read as it was recorded (--steps, --state-seed, --family, --tie-copies); only --trust-remote-code is said again.
    """
    from visitlens.hooks.recording.read.recording import Recording
    from visitlens.probe.model.load import check_text, checkpoint

    Recording(recording)  # says what is wrong with it, and of the checkpoint, before torch is imported
    folder = checkpoint(model)
    if text is not None:
        check_text(text)
    task = None
    if metric not in ("", "dyck", "text"):
        from visitlens.probe.model.bundled import task_file

        task = task_file(metric)
    elif where:
        raise InputError("--where chooses examples of a task: give --metric a task")
    with loading("torch"):
        from visitlens.probe.analyses.ablation.ablate_recording import AblationRequest, ablate_recording, with_metric
        from visitlens.probe.analyses.ablation.dyck_study import DyckSettings
        from visitlens.probe.model.bundled import SAMPLE
        from visitlens.probe.reading.recorded_run import open_recording
        from visitlens.probe.samples.dyck_prompts import AnswerStyle

    answers = AnswerStyle() if style is Style.fixed else None
    request = AblationRequest(
        recording=recording,
        checkpoint=folder,
        metric=metric if task is None else "task",
        task=task,
        where=where,
        mode=mode.value,
        dyck=DyckSettings(prompts=prompts, shots=shots, seed=seed, style=answers),
        text=text or SAMPLE,
        max_tokens=max_tokens,
        seed=seed,
        device=device,
        layers=_layers(layers),
        model_options=read.given(),
        replace=again,
    )
    request, note = with_metric(request)
    if note:
        typer.echo(note, err=True)
    with progress_shown() as show:
        files = ablate_recording(request, partial(show, "ablating"))
    for file in files:
        typer.echo(file)
    typer.echo(open_recording(recording).ablations()[request.name].note())


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in comma_separated(text))
    except ValueError:
        raise InputError(f"expected --layers as numbers such as 2,3, got {text!r}") from None

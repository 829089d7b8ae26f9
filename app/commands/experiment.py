"""`visitlens experiment`: intervene on a model and say what each part of each visit is worth."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from visitlens.app.terminal.console import comma_separated, loading, progress_shown, warnings_once
from visitlens.app.terminal.option_groups import DeviceOptions, ReadOptions, grouped
from visitlens.errors import InputError


@grouped
def experiment(
    name: Annotated[str, typer.Argument(help="Which experiment; see --list.")] = "",
    model: Annotated[
        str,
        typer.Option(
            help="Checkpoint folder (native or of transformers), hub name, or bundled: smelt, baseline, hops."
        ),
    ] = "smelt",
    text: Annotated[Path | None, typer.Option(help="Text; the bundled held-out sample by default.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Stop after the context in which this token falls.")] = 8192,
    dyck: Annotated[int, typer.Option(help="Instead of text: so many Dyck prompts for each number of shots.")] = 0,
    shots: Annotated[str, typer.Option(help="With --dyck: comma-separated numbers of shots.")] = "0,1,2,4,8",
    task: Annotated[str, typer.Option(help="Instead of text: a task file (JSON lines), or a bundled task: hops.")] = "",
    examples: Annotated[
        int | None, typer.Option(min=1, help="With --task: so many examples, spread over the file.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="An option of the experiment, as name=value.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Everything as JSON on stdout.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the JSON to this file.")] = None,
    run_on: DeviceOptions = DeviceOptions(),  # noqa: B008 (frozen)
    read: ReadOptions = ReadOptions(),  # noqa: B008 (frozen)
    list_: Annotated[bool, typer.Option("--list", help="List the experiments and their options.")] = False,
) -> None:
    """Intervene on a model: what each part of each visit is worth."""
    from visitlens.probe.model.load import check_text, checkpoint, load

    folder = checkpoint(model)
    if text is not None:
        check_text(text)
    with loading("torch"):
        from visitlens.probe import experiments
        from visitlens.probe.measures.tables import as_text
    if list_:
        for known in experiments.registered():
            takes = ", ".join(experiments.options(known))
            typer.echo(f"{known:<18} {experiments.question(known)}" + (f"  [--set {takes}]" if takes else ""))
        return
    if not name:
        raise InputError("name an experiment: visitlens experiment NAME; --list shows them")
    experiments.find(name)
    if task and (dyck or text is not None):
        raise InputError("expected one of --text, --dyck and --task, got several")
    if task:
        from visitlens.probe.model.bundled import task_file

        task_file(task)
    if dyck < 0:
        raise InputError(f"expected --dyck 1 or more prompts, got {dyck}")
    chosen = dict(_option(name, text) for text in set_ or [])
    with loading("the model"):
        loaded = load(folder, run_on.dtype, run_on.device, **read.given())
        if dyck:
            sample = loaded.dyck(dyck, [_value(part) for part in comma_separated(shots)])
        elif task:
            sample = loaded.task(task, examples)
        else:
            from visitlens.probe.model.bundled import SAMPLE

            sample = loaded.sample(text or SAMPLE, max_tokens)
    with progress_shown() as show, warnings_once():
        results = experiments.run_experiment(name, loaded.native, sample, **chosen, on_progress=partial(show, name))
    if out is not None:
        out.write_text(json.dumps(results.to_dict(), indent=1) + "\n", encoding="utf-8")
        typer.echo(out)
    if json_:
        typer.echo(json.dumps(results.to_dict()))
    elif out is None:
        typer.echo(repr(sample))
        for stat in results.values():
            typer.echo(as_text(stat))


def _option(name: str, text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"expected --set name=value, got {text!r}")
    return key.strip(), _value(value.strip())


def _value(text: str) -> Any:
    """A number, several (`1,2,4`), or the text."""
    parts = comma_separated(text)
    if len(parts) > 1:
        return tuple(_value(part) for part in parts)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

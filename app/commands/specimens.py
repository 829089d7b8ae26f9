"""`visitlens specimens`: small models in which there is something to see; builds those that aren't bundled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from visitlens.errors import InputError


def specimens(
    name: Annotated[str, typer.Argument(help="Train this one; without a name they are listed.")] = "",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the training run; it is resumable.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="The list as JSON.")] = False,
) -> None:
    """List the specimens, or train one by its recipe.

    A specimen that is bundled opens by its name: `vl.load("hops")`, `--model hops`.
    """
    from visitlens.probe.ladder.specimens import SPECIMENS, build, specimen

    if not name:
        if out is not None:
            raise InputError("--out is for training: name a specimen")
        rows = [_row(known) for known in SPECIMENS.values()]
        typer.echo(json.dumps(rows, indent=1) if json_ else _table(rows))
        return
    chosen = specimen(name)
    if json_:
        raise InputError("--json is for the list; training writes training.json")
    if out is None:
        raise InputError(f"training {name} needs a folder: visitlens specimens {name} --out FOLDER")
    typer.echo(build(chosen, out, _show))


def _row(known: Any) -> dict[str, Any]:
    report = known.report()
    intact = report.get("accuracy", {}).get("intact", {})
    return {
        "name": known.name,
        "bundled": known.folder is not None,
        "tokens": report.get("tokens"),
        "accuracy": {hops: value for hops, (value, *_) in intact.items()},
        "purpose": known.purpose,
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'name':<16} {'bundled':<8} {'tokens':>11}  {'accuracy at 1, 2, 3 hops':<25} what"]
    for row in rows:
        tokens = "-" if row["tokens"] is None else f"{row['tokens']:,}"
        reached = " ".join(f"{value:.2f}" for value in row["accuracy"].values()) or "-"
        there = "yes" if row["bundled"] else "no"
        lines.append(f"{row['name']:<16} {there:<8} {tokens:>11}  {reached:<25} {row['purpose']}")
    lines.append("\nvl.load(NAME) opens a bundled one; visitlens specimens NAME --out FOLDER trains any of them.")
    return "\n".join(lines)


def _show(row: dict[str, Any]) -> None:
    reached = " ".join(f"{value}: {share:.2f}" for value, share in row["accuracy"].items())
    typer.echo(f"{row['tokens'] / 1e6:.2f}M tokens  stage {row['stage']}  loss {row['loss']:.3f}  {reached}", err=True)

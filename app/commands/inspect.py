"""`visitlens inspect`: how a model runs its layers, what its visits share, and whether it can be recorded."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from visitlens.app.terminal.console import loading
from visitlens.app.terminal.option_groups import ReadOptions, grouped


@grouped
def inspect(
    model: Annotated[str, typer.Argument(help="Checkpoint folder (native or transformers), or a hub name.")],
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON on stdout.")] = False,
    tokens: Annotated[int, typer.Option(help="Length of the random token sequence that is run.", min=8)] = 24,
    checks: Annotated[bool, typer.Option(help="Run the guards: about ten short forwards.")] = True,
    read: ReadOptions = ReadOptions(),  # noqa: B008 (frozen)
    bos: Annotated[str, typer.Option(help="The token that leads a text: none, an id, or a token by name.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
) -> None:
    """Say how a model runs its layers (the step ledger), what its visits share, and whether it can be recorded."""
    from visitlens.probe.model.load import checkpoint

    folder = checkpoint(model)
    with loading("torch and the model"):
        from visitlens.hooks.loading.inspect_model import inspect_model

        found = inspect_model(
            folder,
            tokens,
            checks=checks,
            dtype=dtype,
            bos=bos or None,
            **read.given(),
        )
    typer.echo(json.dumps(found, indent=1) if as_json else _text(found))


def _text(found: dict[str, Any]) -> str:
    looped = sorted({step["layer"] for step in found["steps"] if step["visit"] > 1})
    visits = {layer: max(s["visit"] for s in found["steps"] if s["layer"] == layer) for layer in looped}
    lines = [
        f"{found['model']}: {found['family']}, {found['layers']} physical layers, {len(found['steps'])} steps",
        f"adapter    {found['adapter']}",
        "loop       "
        + (", ".join(f"layer {n} runs {r} times" for n, r in visits.items()) or "none: each layer runs once"),
        *([f"documents  {found['documents']}"] if found.get("documents") else []),
        "",
        "step  layer  visit  module",
        *(f"{s['index']:>4}  {s['layer']:>5}  {s['visit']:>5}  {s['module']}" for s in found["steps"]),
    ]
    sections = {
        "ties": [
            f"layer {t['layer']}  {t['component']:<28} {t['status']:<12} {t['detail']}".rstrip() for t in found["ties"]
        ],
        "not measured": [f"{name}: {why}" for name, why in found["missing"].items()],
        "notes": found["notes"],
        "false loops": found["flags"],
        "guards": [f"{_MARK[g['ok']]} {g['name']}: {g['detail']}" for g in found["guards"]],
    }
    for title, rows in sections.items():
        if rows:
            lines += ["", title, *(f"  {row}" for row in rows)]
    return "\n".join(lines)


_MARK = {True: "ok  ", False: "FAIL", None: "    "}

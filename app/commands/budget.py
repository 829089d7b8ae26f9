"""`visitlens budget`: parameters, FLOPs, KV cache and sparsity of a configuration or a grid."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from visitlens.errors import InputError


class GridName(StrEnum):
    paper = "paper"
    mini = "mini"
    nano = "nano"


def budget(
    config: Annotated[Path | None, typer.Argument(help="A checkpoint folder or a config.json.")] = None,
    baseline: Annotated[Path | None, typer.Option(help="Another one, to be compared with.")] = None,
    grid: Annotated[GridName | None, typer.Option(help="A whole grid instead.")] = None,
    mean_document: Annotated[
        float, typer.Option(help="Tokens a document has on average: a query sees half of them. The paper's by default.")
    ] = 780,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Count parameters, FLOPs per token, KV cache and sparsity of a configuration or a grid."""
    from visitlens.probe.ladder import tables
    from visitlens.probe.ladder.mini_grid import plan_named

    if (config is None) == (grid is None):
        raise InputError("give either a checkpoint (or its config.json) or --grid")
    if config is not None:
        other = None if baseline is None else tables.read_config(baseline)
        row = tables.config_budget(tables.read_config(config), mean_document, other)
        typer.echo(json.dumps(row, indent=1) if as_json else tables.config_table(row))
        return
    rows = tables.paper_budgets() if grid == GridName.paper else tables.plan_budgets(plan_named(str(grid)))
    typer.echo(json.dumps(rows, indent=1) if as_json else tables.grid_table(rows))

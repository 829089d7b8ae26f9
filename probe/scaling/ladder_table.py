"""Rows of a table of runs from a trained ladder's folder: every finished horizon of every cell. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from visitlens.errors import InputError
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.probe.ladder.budget import Budget, dense_control, sparsity
from visitlens.probe.ladder.mini_grid import PLANS
from visitlens.probe.ladder.sweep import SWEEP_FILE
from visitlens.probe.ladder.tables import read_config
from visitlens.probe.reading.grid import SIDES, Grid

NAMES = {"baseline": "Baseline", "looped": "looped"}
_MEAN_DOCUMENT = 350
"""Of a grid that isn't among the plans, as in `ladder table`."""


def ladder_rows(folder: Path) -> list[dict[str, Any]]:
    """One row an endpoint (loss: mean over the text's categories or sources), and rows by source, category, length bucket and Dyck shots.

    S has the Baseline's dense control (Eq. 1). The bucket of the longest documents, which is open, stands as four times its lower bound.

    Raises:
        InputError: no grid there, or no finished model.
    """
    if (folder / SWEEP_FILE).is_file():
        return sweep_table(folder)
    grid = Grid.read(folder)
    document = PLANS[grid.name].mean_document if grid.name in PLANS else _MEAN_DOCUMENT
    rows: list[dict[str, Any]] = []
    for cell in grid.cells:
        folders = {side: path for side in SIDES if (path := getattr(cell, side)) is not None}
        if "baseline" not in folders:
            continue
        control = Budget.of(dense_control(read_config(folders["baseline"])), document)
        for side, last in folders.items():
            for run in horizons_of(last):
                place = {"arch": NAMES[side], "scale": cell.scale, "level": cell.level}
                rows += _rows(place, read_config(run), _report(run), control, document)
    if not rows:
        raise InputError(f"{folder}: no finished model yet; go on with `visitlens ladder train`")
    return rows


def sweep_table(folder: Path) -> list[dict[str, Any]]:
    """Rows of a trained sweep, with its axis and each point's layers, looped layers and visits; points without a finished model are left out.

    Raises:
        InputError: `sweep.json` isn't one, or no point is trained yet.
    """
    try:
        found = json.loads((folder / SWEEP_FILE).read_text(encoding="utf-8"))
        points, document = found["points"], found["mean_document"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / SWEEP_FILE}: not the list of a sweep ({error}); write it again") from error
    rows: list[dict[str, Any]] = []
    for point in points:
        runs = sorted((folder / point["name"]).glob("tokens-*/training.json"))
        for run in (file.parent for file in runs):
            config = read_config(run)
            control = Budget.of(dense_control(config), document)
            place = {
                "arch": "looped" if point["looped"] else "Baseline",
                "scale": folder.name,
                "level": f"{config.num_experts} experts",
            }
            own = {key: point[key] for key in ("axis", "layers", "looped", "visits")}
            rows += [{**row, **own} for row in _rows(place, config, _report(run), control, document)]
    if not rows:
        raise InputError(f"{folder}: no point of the sweep is trained yet; `visitlens ladder run` trains one")
    return rows


def horizons_of(last: Path) -> list[Path]:
    """A run's finished horizons by tokens, where `last` is one of them; else `last` alone (an exported model)."""
    found = sorted(last.parent.glob("tokens-*/training.json"), key=lambda f: int(f.parent.name.removeprefix("tokens-")))
    if last.name.startswith("tokens-"):
        return [file.parent for file in found]
    return [last] if (last / "training.json").is_file() else []


def _report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "training.json").read_text(encoding="utf-8"))


def _rows(
    place: Mapping[str, Any], config: LoopedMoEConfig, report: Mapping[str, Any], control: Budget, document: int
) -> Iterator[dict[str, Any]]:
    budget = Budget.of(config, document)
    end = {
        **place,
        "F": budget.flops_per_token,
        "S": max(sparsity(budget, control), 0.0),
        "D": report["tokens"],
        "seed": report["recipe"]["seed"],
    }
    by_source = report.get("loss_by_source", {})
    losses = by_source or report["validation_loss"]
    yield {**end, "loss": sum(_loss(v) for v in losses.values()) / len(losses)}
    for category, loss in report["validation_loss"].items():
        yield {**end, "category": category, "loss": loss}
    for source, found in by_source.items():
        yield {**end, "source": source, "category": found["category"], "loss": found["loss"], "tokens": found["tokens"]}
    for name, found in report.get("loss_by_length", {}).items():
        yield {**end, "bucket": _upper(name), "loss": found["loss"], "tokens": found["tokens"]}
    for shots, found in report.get("dyck", {}).items():
        yield {**end, "task": "dyck_completion", "k": int(shots), "score": found["exact_match"], "chance": 0.0}


def _loss(value: Any) -> float:
    return float(value["loss"] if isinstance(value, Mapping) else value)


def _upper(bucket: str) -> int:
    """`<64`, `64-255`, `>=1024`."""
    if bucket.startswith("<"):
        return int(bucket[1:])
    return 4 * int(bucket[2:]) if bucket.startswith(">=") else int(bucket.partition("-")[2]) + 1

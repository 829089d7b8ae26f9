"""What a trained grid learnt, as tables: losses, budgets, ratios, Dyck completion, by cell. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visitlens.errors import InputError
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.probe.ladder.budget import Budget, Ratios, dense_control, sparsity
from visitlens.probe.ladder.mini_grid import PLANS
from visitlens.probe.ladder.tables import read_config, short, table
from visitlens.probe.reading.grid import SIDES, Grid


@dataclass(frozen=True)
class Trained:
    """One finished model: its configuration and its `training.json`."""

    config: LoopedMoEConfig
    report: dict[str, Any]

    @property
    def loss(self) -> float:
        """Mean of the categories' validation losses: no category counts for its size."""
        losses = self.report["validation_loss"].values()
        return sum(losses) / len(losses)


@dataclass(frozen=True)
class TrainedCell:
    """A pair by seed: `runs[seed][side]`."""

    name: str
    runs: dict[int, dict[str, Trained]]

    @property
    def first(self) -> dict[str, Trained]:
        return self.runs[min(self.runs)]

    @property
    def differences(self) -> list[float]:
        """Looped minus Baseline loss in nats, by seed: negative where the looped model is better."""
        return [run["looped"].loss - run["baseline"].loss for run in self.runs.values()]


def trained_cells(folders: Sequence[Path]) -> tuple[str, list[TrainedCell]]:
    """The grid's name and its cells in reading order, from one folder a seed.

    Raises:
        InputError: no grid there, grids of different names, a seed twice, or no cell of which both models are finished.
    """
    grids = [Grid.read(folder) for folder in folders]
    if len({g.name for g in grids}) != 1:
        raise InputError(f"expected folders of one grid, got {', '.join(g.name for g in grids)}")
    cells = []
    for scale in grids[0].scales:
        for level in grids[0].levels:
            runs: dict[int, dict[str, Trained]] = {}
            for grid in grids:
                pair = {side: getattr(grid.cell(scale, level), side) for side in SIDES}
                if all(path is not None and (path / "training.json").is_file() for path in pair.values()):
                    run = {side: _trained(path) for side, path in pair.items() if path is not None}
                    seed = run["looped"].report["recipe"]["seed"]
                    if seed in runs:
                        raise InputError(f"seed {seed} of cell {scale}-S{level} is in two of the folders")
                    runs[seed] = run
            if runs:
                cells.append(TrainedCell(f"{scale}-S{level}", runs))
    if not cells:
        raise InputError(f"{folders[0]}: no cell has both its models finished yet; go on with `visitlens ladder train`")
    return grids[0].name, cells


def _trained(folder: Path) -> Trained:
    return Trained(read_config(folder), json.loads((folder / "training.json").read_text(encoding="utf-8")))


def results_tables(folders: Sequence[Path]) -> str:
    """Four Markdown tables: the pairs; then each model's loss by category, by document length, and Dyck by shots."""
    name, cells = trained_cells(folders)
    mean_document = PLANS[name].mean_document if name in PLANS else 350
    models = [(f"{cell.name} {side}", cell.first[side].report) for cell in cells for side in ("baseline", "looped")]
    return "\n\n".join(
        [
            _pairs(cells, mean_document),
            "Validation loss in nats per token, by category:",
            _columns(models, lambda report: {k: f"{v:.3f}" for k, v in report["validation_loss"].items()}),
            "By length of the whole document, in tokens:",
            _columns(
                models, lambda report: {k: f"{v['loss']:.3f}" for k, v in report.get("loss_by_length", {}).items()}
            ),
            "Dyck completion by shots, exact match / accuracy on closing brackets, in percent:",
            _columns(models, lambda report: {f"{k} shots": _dyck(v) for k, v in report["dyck"].items()}),
        ]
    )


def _pairs(cells: Sequence[TrainedCell], mean_document: int) -> str:
    header = (
        "cell",
        "tokens",
        "S %",
        "total",
        "FLOPs/token",
        "FLOPs x",
        "total x",
        "KV x",
        "Baseline",
        "looped",
        "difference",
    )
    rows = []
    for cell in cells:
        baseline, looped = (cell.first[side] for side in ("baseline", "looped"))
        a, b = (Budget.of(model.config, mean_document) for model in (baseline, looped))
        control = Budget.of(dense_control(baseline.config), mean_document)
        rows.append(
            (
                cell.name,
                f"{looped.report['tokens']:,}",
                f"{100 * sparsity(a, control):.1f}",
                short(a.total),
                short(a.flops_per_token),
                *(f"{ratio:.3f}" for ratio in Ratios.of(b, a)),
                f"{baseline.loss:.3f}",
                f"{looped.loss:.3f}",
                _spread(cell.differences),
            )
        )
    return table(header, rows)


def _spread(differences: Sequence[float]) -> str:
    mean = sum(differences) / len(differences)
    if len(differences) == 1:
        return f"{mean:+.3f}"
    return f"{mean:+.3f} ({min(differences):+.3f} to {max(differences):+.3f}, {len(differences)} seeds)"


def _columns(models: Sequence[tuple[str, dict[str, Any]]], values: Any) -> str:
    """A row a model; columns are whatever any of them has."""
    rows = [(name, values(report)) for name, report in models]
    names = list(dict.fromkeys(key for _, row in rows for key in row))
    return table(("model", *names), [(name, *(row.get(key) for key in names)) for name, row in rows])


def _dyck(score: dict[str, float]) -> str:
    return f"{100 * score['exact_match']:.0f} / {100 * score['closer_accuracy']:.0f}"

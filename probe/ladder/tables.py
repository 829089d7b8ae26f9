"""Budgets and results of grids as tables: Markdown that reads well in a terminal too. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from visitlens.errors import CheckpointError
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.probe.ladder.budget import Budget, Ratios, dense_control, sparsity
from visitlens.probe.ladder.match import Candidate
from visitlens.probe.ladder.mini_grid import GridPlan
from visitlens.probe.ladder.paper_grid import budget_row, paper_grid

PARTS = ("attention", "router", "experts", "norms", "embeddings")


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with aligned columns: the first to the left, the others to the right; None is a dash."""
    cells = [list(header), *([("-" if v is None else str(v)) for v in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        first, *rest = (
            text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        return "| " + " | ".join([first, *rest]) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])


def read_config(path: Path) -> LoopedMoEConfig:
    """From a checkpoint folder or a config.json.

    Raises:
        CheckpointError: nothing there, or no configuration of the native looped MoE.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        return LoopedMoEConfig.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"expected {path} to be a checkpoint folder or a config.json; {error}") from error


def config_budget(config: LoopedMoEConfig, mean_document: float, baseline: LoopedMoEConfig | None) -> dict[str, Any]:
    """Every count of one configuration. S takes the configuration itself with only its k experts as control; with a
    Baseline there are also the ratios to it, and S with the Baseline's k experts as control."""
    budget = Budget.of(config, mean_document)
    row: dict[str, Any] = {part: getattr(budget, part) for part in PARTS}
    row |= {
        "total_params": budget.total,
        "active_params": budget.active,
        "executed_params": budget.executed,
        "flops_per_token": budget.flops_per_token,
        "mean_document": mean_document,
        "kv_bytes_per_token": budget.kv_bytes_per_token(),
        "S_percent": 100 * sparsity(budget, Budget.of(dense_control(config), mean_document)),
    }
    if baseline is not None:
        ratios = Ratios.of(budget, Budget.of(baseline, mean_document))
        control = Budget.of(dense_control(baseline), mean_document)
        row |= {f"{name}_ratio": value for name, value in ratios._asdict().items()}
        row["S_percent_baseline_control"] = 100 * sparsity(budget, control)
    return row


def plan_budgets(plan: GridPlan) -> list[dict[str, Any]]:
    """Both models of each cell of a trainable grid, Baseline first; S as in the paper's grid (own S = 0 row)."""
    rows = []
    for cell in (plan.cell(scale, level) for scale in plan.scales for level in plan.levels):
        dense = plan.cell(cell.scale, plan.levels[0])
        budgets = {side: Budget.of(getattr(cell, side), plan.mean_document) for side in ("baseline", "looped")}
        for side, budget in budgets.items():
            own = Budget.of(getattr(dense, side), plan.mean_document)
            ratios = Ratios.of(budget, budgets["baseline"]) if side == "looped" else None
            rows.append(
                {
                    "arch": side,
                    "scale": cell.scale.name,
                    "level": f"{cell.level}%",
                    "active_params": budget.active,
                    "total_params": budget.total,
                    "executed_params": budget.executed,
                    "S_percent": 100 * sparsity(budget, own),
                    "S_percent_baseline_control": 100 * sparsity(budget, Budget.of(dense.baseline, plan.mean_document)),
                    "flops_per_token": budget.flops_per_token,
                    "kv_bytes_per_token": budget.kv_bytes_per_token(),
                    "flops_ratio": ratios and ratios.flops,
                    "total_ratio": ratios and ratios.total,
                    "kv_ratio": ratios and ratios.kv,
                }
            )
    return rows


def paper_budgets() -> list[dict[str, Any]]:
    """The paper's 32 rows."""
    return [budget_row(cell) for cell in paper_grid()]


def grid_table(rows: Sequence[dict[str, Any]]) -> str:
    """Of `paper_budgets` or `plan_budgets`."""
    header = (
        "model",
        "active",
        "total",
        "executed",
        "S %",
        "S % (Baseline)",
        "FLOPs/token",
        "KV B/token",
        "FLOPs x",
        "total x",
        "KV x",
    )

    def ratio(value: float | None) -> str | None:
        return None if value is None else f"{value:.3f}"

    return table(
        header,
        [
            (
                f"{r['arch']} {r['scale']} {r['level']}",
                short(r["active_params"]),
                short(r["total_params"]),
                short(r["executed_params"]),
                f"{r['S_percent']:.1f}",
                f"{r['S_percent_baseline_control']:.1f}",
                short(r["flops_per_token"]),
                r["kv_bytes_per_token"],
                *(ratio(r[name]) for name in ("flops_ratio", "total_ratio", "kv_ratio")),
            )
            for r in rows
        ],
    )


def config_table(row: dict[str, Any]) -> str:
    """Of `config_budget`."""
    names = {
        "attention": "parameters: attention",
        "router": "parameters: router",
        "experts": "parameters: experts",
        "norms": "parameters: norms",
        "total_params": "parameters, stored (the sum)",
        "embeddings": "embeddings, not counted",
        "active_params": "active, one traversal",
        "executed_params": "executed, each visit counted",
        "flops_per_token": f"training FLOPs per token, mean document {row['mean_document']:g}",
        "kv_bytes_per_token": "KV cache, bytes per token (bfloat16)",
        "S_percent": "S %, control: itself with only its k experts",
        "S_percent_baseline_control": "S %, control: the Baseline with only its k experts",
        "flops_ratio": "FLOPs over the Baseline's",
        "total_ratio": "parameters over the Baseline's",
        "kv_ratio": "KV cache over the Baseline's",
    }

    def text(name: str) -> str:
        value = row[name]
        return (
            f"{value:.1f}" if name.startswith("S_") else f"{value:.3f}" if name.endswith("ratio") else f"{value:,.0f}"
        )

    return table(("budget", "value"), [(title, text(name)) for name, title in names.items() if name in row])


def candidates_table(candidates: Sequence[Candidate]) -> str:
    """Of `match`: sizes, the three ratios, and the largest deviation in units of its tolerance."""
    header = (
        "hidden",
        "heads",
        "KV heads",
        "head dim",
        "experts",
        "expert dim",
        "FLOPs x",
        "total x",
        "KV x",
        "residual",
    )
    rows = []
    for found in candidates:
        c = found.config
        sizes = (c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.num_experts, c.expert_dim)
        rows.append((*sizes, *(f"{r:.3f}" for r in found.ratios), f"{found.residual:.2f}"))
    return table(header, rows)


def short(value: float) -> str:
    """Four figures and K, M, B (1e9) or T: 3.891B."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:g}"

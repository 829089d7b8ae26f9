"""Tables of runs with planted effects: everything that the instruments of `probe/scaling` read."""

from __future__ import annotations

from typing import Any

import numpy as np

from visitlens.probe.scaling.paper import synthetic_runs
from visitlens.probe.scaling.table import RunTable, table_of

SOURCES = {f"s{i:02}": ("Code", "Web", "Math")[i % 3] for i in range(9)}
BUCKETS = (32, 64, 128, 256, 512, 1024)
TASKS = {"arc_easy": (0.25, "Knowledge"), "copa": (0.5, "Reasoning"), "answers": (0.0, "Symbols")}
"""Task -> chance accuracy and category."""
EXCESS = 0.02
"""What SMELT scores beyond the Baseline's curve."""


def rows_of(table: RunTable) -> list[dict[str, Any]]:
    """A table as rows."""
    names = list(table.columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*(table[n].tolist() for n in names), strict=True)]


def sigmoid(loss: float, chance: float) -> float:
    """The planted accuracy at a validation loss."""
    return chance + (0.95 - chance) / (1 + np.exp(6 * (loss - 1.8)))


def full_rows(seeds: int = 2) -> list[dict[str, Any]]:
    """Endpoints at the paper's sparse grid, their losses by source, category and length, and scores by task and shots."""
    rows: list[dict[str, Any]] = []
    for end in rows_of(synthetic_runs()):
        looped = end["arch"] == "SMELT"
        rows.append(end)
        for i, (source, category) in enumerate(SOURCES.items()):
            rows.append({**end, "source": source, "category": category, "loss": end["loss"] * (0.8 + 0.05 * i)})
        for i, bucket in enumerate(BUCKETS):
            rows.append({**end, "bucket": bucket, "loss": end["loss"] + 0.5 - 0.05 * i - 0.02 * i * looped})
        for task, (chance, category) in TASKS.items():
            for seed in range(seeds):
                score = sigmoid(end["loss"], chance) + EXCESS * looped
                rows.append(
                    {
                        **end,
                        "task": task,
                        "category": category,
                        "seed": seed,
                        "score": score,
                        "loss": None,
                        "chance": chance,
                    }
                )
    return rows


def full_table() -> RunTable:
    return table_of(full_rows(), "full.csv")


def shots_rows(gaps: dict[int, float], seeds: int = 10) -> list[dict[str, Any]]:
    """Two tasks above chance and one at chance, by shots and few-shot seed; SMELT's gap is `gaps[k]`."""
    rows = []
    for task, base, chance in (("arc_easy", 0.5, 0.25), ("answers", 0.2, 0.0), ("copa", 0.4, 0.5)):
        for k, gap in gaps.items():
            for seed in range(seeds):
                for arch in ("Baseline", "SMELT"):
                    score = base + 0.01 * k + (gap + 0.001 * seed if arch == "SMELT" and task != "copa" else 0)
                    rows.append({"arch": arch, "task": task, "k": k, "seed": seed, "score": score, "chance": chance})
    return rows

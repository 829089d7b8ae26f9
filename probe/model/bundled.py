"""What ships with visitlens: a trained pair of tiny models, held-out text, and specimens with their task. No torch."""

from __future__ import annotations

from pathlib import Path

import visitlens
from visitlens.errors import InputError

ASSETS = Path(visitlens.__file__).resolve().parent / "assets"
SAMPLE = ASSETS / "sample" / "heldout.jsonl.xz"
LADDER = ASSETS / "ladder"
"""A folder with `grid.json`: one row and one column of the mini grid."""
PAIR = {"looped": ASSETS / "models" / "smelt", "baseline": ASSETS / "models" / "baseline"}
SPECIMENS = {name: ASSETS / "models" / name for name in ("hops", "hops-fixed")}
"""Models trained on a task (`visitlens specimens`)."""
TASKS = {name: ASSETS / "tasks" / f"{name}.jsonl" for name in ("hops",)}
"""Held-out examples of the tasks that come with models of their own."""


def task_file(source: str | Path) -> Path:
    """The file of a bundled task's name or a path.

    Raises:
        InputError: neither, with the names that there are.
    """
    file = Path(TASKS.get(str(source), source))
    if not file.is_file():
        raise InputError(
            f"{source}: no such task; bundled are {', '.join(TASKS)}, or give a file of JSON lines with prompt and answer"
        )
    return file


def check_assets() -> None:
    """Raises InputError where the bundled files are missing (a partial checkout)."""
    for path in (SAMPLE, *(folder / "model.safetensors" for folder in PAIR.values())):
        if not path.is_file():
            raise InputError(f"{path} is missing: this copy of visitlens is incomplete; clone the repository again")

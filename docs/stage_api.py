"""Stages the package for the API reference: static discovery wants `__init__.py` in every folder, the four root folders hold none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STAGED = ROOT / "dist" / "api-source"


def on_startup(**_: Any) -> None:
    """MkDocs calls this first, before its plugins look for the sources."""
    shutil.rmtree(STAGED, ignore_errors=True)
    package = STAGED / "visitlens"
    package.mkdir(parents=True)
    for file in (ROOT / "src" / "visitlens").glob("*.py"):
        shutil.copy(file, package)
    for folder in ("kernels", "hooks", "probe", "app"):
        shutil.copytree(ROOT / folder, package / folder, ignore=shutil.ignore_patterns("__pycache__"))
        (package / folder / "__init__.py").touch()

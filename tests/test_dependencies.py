"""What is installed is pinned and explained."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def refresh() -> ModuleType:
    pytest.importorskip("packaging")
    spec = importlib.util.spec_from_file_location("refresh", ROOT / ".ci" / "refresh_constraints.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_package_that_any_extra_installs_here_is_pinned(refresh: ModuleType) -> None:
    pinned = refresh.before()
    needed = refresh.closure(r for wanted in refresh.extras().values() for r in wanted)
    assert len(needed) > 20 and not needed.keys() - pinned.keys()
    assert {"pip", "setuptools"} <= pinned.keys()


def test_every_package_that_is_asked_for_has_its_reason_and_its_row(refresh: ModuleType) -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    for extra, wanted in refresh.extras().items():
        for requirement in wanted:
            assert f"| {extra or '(none)'} | {requirement.name} | {refresh.WHY[requirement.name]} |" in page


def test_tests_that_the_security_page_names_are_there() -> None:
    import re

    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+\.py)`", page))
    assert len(named) > 7 and named <= {file.name for file in (ROOT / "tests").rglob("test_*.py")}

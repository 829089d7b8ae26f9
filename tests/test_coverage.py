"""The benchmark of coverage, small: what docs/uncertainty.md says of the intervals still holds, and the page is what the results make."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def coverage() -> ModuleType:
    """benchmarks/coverage.py, which finds its neighbours as a script does."""
    spec = spec_from_file_location("coverage_benchmark", ROOT / "benchmarks" / "coverage.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def test_the_page_is_what_the_results_make(coverage: ModuleType) -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "coverage.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "uncertainty.md").read_text(encoding="utf-8")
    assert page == coverage.page(results), "run: python benchmarks/coverage.py --only claims"


@pytest.mark.parametrize("documents", [30, 94])
def test_intervals_cover_what_they_promise(coverage: ModuleType, documents: int) -> None:
    """1,000 draws: three standard errors are 0.02 at 0.95. Means of values with long tails and uneven lengths promise less."""
    for name, case in coverage.CASES.items():
        found = coverage.coverage(case, documents, 1000, seed=1)
        low, high = (0.86 if documents == 30 else 0.88, 0.98) if case.heavy else (0.92, 0.98)
        assert low <= found["coverage"] <= high, (name, found)
        assert found["before"] < found["coverage"] + 0.005, (name, found)


def test_ten_documents_of_uneven_length_have_no_interval(coverage: ModuleType) -> None:
    for name, case in coverage.CASES.items():
        found = coverage.coverage(case, 10, 500)
        assert found["reported"] < 0.12 if case.heavy else found["reported"] == 1, (name, found)


def test_load_aware_chance_has_no_bias_and_is_covered(coverage: ModuleType) -> None:
    for name, row in coverage.squares(100, sizes=(30,)).items():
        assert row[30]["coverage"] >= 0.9 and abs(row[30]["bias"]) < 0.03 < row[30]["plug-in"], name


def test_a_search_among_heads_without_an_effect_finds_one_as_seldom_as_it_says(coverage: ModuleType) -> None:
    """100 searches on 8 prompts: 0.05, and three standard errors above it."""
    own = np.random.default_rng(0).normal(size=(40, 30))
    normal = {"normal": coverage.nulls(own)["normal"]}
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patched:
        patched.setattr(coverage, "nulls", lambda own: normal)
        patched.setattr(coverage, "PROMPTS", (8,))
        found = coverage.tests(own, 100)["normal"]["sizes"][8]
    assert found["family"] <= 0.12 < found["family before"]

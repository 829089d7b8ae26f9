"""Generated pages are what the code says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from visitlens.hooks.recording.format.format_page import format_page
from visitlens.probe.measures.measures_page import measures_page

ROOT = Path(__file__).resolve().parents[1]


def test_the_measures_page_is_generated_from_the_measures() -> None:
    page = (ROOT / "docs" / "measures.md").read_text(encoding="utf-8")
    assert page == measures_page(), "run: python -m visitlens.probe.measures.measures_page > docs/measures.md"


def test_the_page_of_the_recording_format_is_generated_from_schema_and_gate() -> None:
    page = (ROOT / "docs" / "recording.md").read_text(encoding="utf-8")
    assert page == format_page(), "run: python -m visitlens.hooks.recording.format.format_page > docs/recording.md"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built as `make docs` does: a broken link or reference is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder),
    ]  # --quiet hides warnings from --strict
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_the_api_reference_lists_what_the_package_exports(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    for name in ("RecordedRun", "StatArray", "capture", "LoopSpec", "expert_overlap"):
        assert re.search(rf'id="visitlens\.[\w.]*{name}"', page), name


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 5
    for page in pages:
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text("utf-8"))
        assert not loaded, f"{page.name} loads {loaded}"

"""Generated pages are what the code says."""

from __future__ import annotations

from pathlib import Path

from visitlens.hooks.describe import format_page
from visitlens.probe.describe import measures_page

ROOT = Path(__file__).resolve().parents[1]


def test_the_measures_page_is_generated_from_the_measures() -> None:
    page = (ROOT / "docs" / "measures.md").read_text(encoding="utf-8")
    assert page == measures_page(), "run: python -m visitlens.probe.describe > docs/measures.md"


def test_the_page_of_the_recording_format_is_generated_from_schema_and_gate() -> None:
    page = (ROOT / "docs" / "recording.md").read_text(encoding="utf-8")
    assert page == format_page(), "run: python -m visitlens.hooks.describe > docs/recording.md"

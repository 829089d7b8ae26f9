"""The files: figures written in every format, the report, and the findings in it. Offline, whole, and without torch."""

from __future__ import annotations

import csv
import html.parser
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import plotly.graph_objects as go
import pytest

from visitlens.errors import InputError, RecordingError, StorageError, UnavailableError
from visitlens.probe.drawing.images import find_browser, render
from visitlens.probe.drawing.page import CONFIG
from visitlens.probe.gallery.figure import find, registered
from visitlens.probe.gallery.write_figures import write_figures, write_file
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.pair_grid import PairGrid
from visitlens.probe.reading.recorded_run import RecordedRun, open_recording
from visitlens.probe.report.finding import FAILS, HOLDS, OPEN, UNMEASURED
from visitlens.probe.report.findings import (
    CLAIMS,
    findings,
    findings_data,
    grid_findings,
)
from visitlens.probe.report.report import write_report

SLUGS = [figure.slug for figure in registered()]
needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def pair(looped_recording: RecordedRun, baseline_recording: RecordedRun) -> Pair:
    return Pair(looped_recording, baseline_recording)


@pytest.fixture(autouse=True)
def nothing_half_written(tmp_path: Path) -> Iterator[None]:
    """No test here leaves a file that was begun and not moved to its place."""
    yield
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


# Files


def test_html_loads_nothing_from_elsewhere_and_offers_no_upload(pair: Pair, tmp_path: Path) -> None:
    written = write_figures(pair, tmp_path, ["expert-overlap", "html:24"], ["html"])
    assert [path.name for path in written] == ["expert-overlap.html", "update-cosine.html"]
    assert (tmp_path / "plotly.min.js").stat().st_size > 1_000_000
    assert CONFIG["showSendToCloud"] is False and CONFIG["displaylogo"] is False
    for path in written:
        check_offline(path)


def check_offline(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    loads = re.findall(r"""(?:src|href|action|data)\s*=\s*["']([^"'#][^"']*)""", text)
    assert not [load for load in loads if "//" in load]
    assert not re.search(r"url\(|@import|https?://(?!arxiv)", text)
    assert '"showSendToCloud": false' in text and "default-src 'none'" in text
    assert '<html lang="en">' in text and "aria-label=" in text


def test_json_and_csv_hold_what_is_drawn(pair: Pair, tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    written = write_figures(
        pair, tmp_path, ["sink-profile"], ["json", "csv"], on_progress=lambda *args: done.append(args)
    )
    assert done == [(1, 2), (2, 2)] and len(written) == 2
    data = json.loads(written[0].read_text(encoding="utf-8"))
    assert data == json.loads(json.dumps(find("sink-profile").data(pair)))
    with written[1].open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 + 4
    second = next(row for row in rows if row["series"] == "visit_2")
    assert (second["step"], second["layer"], second["visit"]) == ("3", "1", "2")
    assert float(second["value"]) == data["series"]["visit_2"]["values"][0]
    assert float(second["low"]) <= float(second["value"]) <= float(second["high"])
    assert second["recording"] == data["models"]["looped"]["recording"]


@needs_browser
def test_pictures_are_valid_and_the_report_offers_them(pair: Pair, tmp_path: Path) -> None:
    page = write_report(pair, tmp_path, ["sink-heads"], formats=["png", "svg", "pdf"])
    png, svg, pdf = ((tmp_path / f"sink-heads.{format_}").read_bytes() for format_ in ("png", "svg", "pdf"))
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert pdf.startswith(b"%PDF")
    elements = Elements(page.read_text(encoding="utf-8")).found
    links = {a.get("href") for tag, a in elements if tag == "a"}
    assert {"sink-heads.png", "sink-heads.svg", "sink-heads.pdf"} <= links
    (image,) = (a for tag, a in elements if tag == "img")
    assert image["src"] == "sink-heads.png" and image["alt"]


@pytest.mark.parametrize("hidden", ["browser", "kaleido"])
def test_without_a_chromium_or_kaleido_one_warning_and_the_other_files(
    hidden: str, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hidden == "browser":
        monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "no-such-browser"))
    else:
        monkeypatch.setitem(sys.modules, "kaleido", None)
    said: list[str] = []
    written = write_figures(
        pair, tmp_path / "out", ["sink-heads", "sink-profile"], ["html", "png", "svg", "json"], on_warning=said.append
    )
    assert sorted(path.name for path in written) == [
        f"sink-{name}.{format_}" for name in ("heads", "profile") for format_ in ("html", "json")
    ]
    assert len(said) == 1
    assert ("BROWSER_PATH" if hidden == "browser" else "pip install 'visitlens[images]'") in said[0]


def test_a_chromium_that_fails_is_told_from_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(program))
    with pytest.raises(UnavailableError, match="couldn't draw"):
        next(render([(go.Figure(), "png")]))


def test_warnings_go_to_python_where_the_caller_says_nothing(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "no-such-browser"))
    with pytest.warns(UserWarning, match="pictures are left out"):
        write_figures(pair, tmp_path, ["sink-heads"], ["png"])


def test_what_a_recording_does_not_hold_is_left_out_unless_asked_for(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pair.looped is not None
    monkeypatch.delitem(pair.looped.recording.totals, "sink_mass")
    said: list[str] = []
    written = write_figures(pair, tmp_path, formats=["json"], on_warning=said.append)
    assert [path.stem for path in written] == [slug for slug in SLUGS if not slug.startswith("sink")]
    assert len(said) == 3 and "sink-heads is left out" in said[0]
    with pytest.raises(RecordingError, match="sink_mass"):
        write_figures(pair, tmp_path, ["sink-heads"], ["json"])


def test_an_unknown_format_or_theme_is_refused_before_anything_is_written(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'gif'"):
        write_figures(pair, tmp_path / "out", formats=["json", "gif"])
    with pytest.raises(InputError, match="'sepia'"):
        write_figures(pair, tmp_path / "out", theme="sepia")
    assert not (tmp_path / "out").exists()


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(StorageError, match="taken"):
        write_file(tmp_path / "taken", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="can't be written"):
        write_file(tmp_path / "file" / "below", "text")


def test_drawing_imports_neither_torch_nor_pandas(pair: Pair, tmp_path: Path) -> None:
    assert pair.looped is not None and pair.baseline is not None
    code = f"""
import sys
from visitlens.probe.reading.recorded_run import open_recording
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.pair_grid import PairGrid
from visitlens.probe.report.report import write_report
pair = Pair(*map(open_recording, [{str(pair.looped.recording.path)!r}, {str(pair.baseline.recording.path)!r}]))
write_report(pair, {str(tmp_path)!r}, formats=["html", "csv"])
pair.looped.sink_mass().plot().to_json()
print(sorted({{"torch", "pandas", "transformer_lens", "kaleido"}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stdout.strip() == "[]"


# The report


@pytest.fixture(scope="module")
def page(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(pair, tmp_path_factory.mktemp("report"), formats=["json", "csv"])


class Elements(html.parser.HTMLParser):
    """Every start tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_report_is_one_folder_that_needs_nothing_else(page: Path) -> None:
    check_offline(page)
    text = page.read_text(encoding="utf-8")
    elements = Elements(text).found
    links = [a["href"] for tag, a in elements if tag == "a" and a.get("href")]
    sources = [a["src"] for tag, a in elements if tag in ("script", "img") and a.get("src")]
    targets = {a["id"] for _, a in elements if a.get("id")}
    for link in [*links, *sources]:
        assert link is not None
        assert link[1:] in targets if link.startswith("#") else (page.parent / link).is_file()
    assert sources.count("plotly.min.js") == 1
    assert len(list(page.parent.glob("*.js"))) == 1


def test_report_shows_every_figure_in_a_light_and_a_dark_version(page: Path) -> None:
    ids = [a.get("id") for _, a in Elements(page.read_text(encoding="utf-8")).found]
    for slug in SLUGS:
        assert {slug, f"{slug}-light", f"{slug}-dark", f"section-{slug}"} <= set(ids)
    assert len(ids) - ids.count(None) == len(set(ids) - {None})


def test_report_says_what_it_is_of(page: Path, pair: Pair) -> None:
    text = page.read_text(encoding="utf-8")
    assert pair.looped is not None and pair.baseline is not None
    for run in (pair.looped, pair.baseline):
        for value in run.provenance.values():
            assert value in text
        assert f"{run.recording.tokens:,}" in text
    assert "layers 1 to 2 run 2 times" in text
    assert "weights are random" in text


def test_report_is_accessible(page: Path) -> None:
    elements = Elements(page.read_text(encoding="utf-8")).found
    assert ("html", {"lang": "en"}) in elements
    assert all(a.get("scope") in ("col", "row") for tag, a in elements if tag == "th")
    charts = [a for _, a in elements if a.get("class") == "chart"]
    assert len(charts) == len(SLUGS) and all(a["role"] == "img" and a["aria-label"] for a in charts)
    headings = [int(tag[1]) for tag, _ in elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1 and headings.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(headings))


def test_report_without_a_chromium_says_so_on_the_page(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "no-such-browser"))
    said: list[str] = []
    page = write_report(pair, tmp_path / "out", ["sink-heads"], on_warning=said.append)
    assert len(said) == 1 and "Pictures are left out" in page.read_text(encoding="utf-8")
    assert sorted(p.name for p in page.parent.iterdir()) == [
        "findings.json", "plotly.min.js", "report.html", "sink-heads.csv", "sink-heads.json",
    ]  # fmt: skip


def test_report_with_three_visits_and_no_baseline(three_visit_recording: RecordedRun, tmp_path: Path) -> None:
    page = write_report(Pair(three_visit_recording), tmp_path, formats=["json"], theme="paper")
    text = page.read_text(encoding="utf-8")
    assert "layers 1 to 2 run 3 times" in text
    assert "No Baseline&#x27;s recording was given" in text
    assert text.count(UNMEASURED) >= 1


def test_report_of_an_unlooped_recording_is_refused(baseline_recording: RecordedRun, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs a looped model"):
        write_report(Pair(None, baseline_recording), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_report_escapes_a_runs_name(looped_recording: RecordedRun, tmp_path: Path) -> None:
    path = tmp_path / "<script>alert(1)<b>&.vlens"
    shutil.copytree(looped_recording.recording.path, path)
    page = write_report(Pair(open_recording(path)), tmp_path / "out", ["sink-heads"], formats=["json"])
    text = page.read_text(encoding="utf-8")
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text


def test_report_of_a_grid_has_every_cells_findings(
    pair: Pair, three_visit_recording: RecordedRun, tmp_path: Path
) -> None:
    pairs = {("small", "85"): pair, ("<large>", "85"): Pair(three_visit_recording)}
    grid = PairGrid("tiny", ("small", "<large>"), ("0", "85"), pairs, {("small", "0"): "no <room>"})
    page = write_report(grid, tmp_path, ["grid-diagnostics", "sink-profile-all"], formats=["json"])
    check_offline(page)
    text = page.read_text(encoding="utf-8")
    assert "<large>" not in text and "no <room>" not in text and "small, S = 0% is missing: no &lt;room&gt;" in text
    saved = json.loads((tmp_path / "findings.json").read_text(encoding="utf-8"))
    assert list(saved["findings"]) == ["small, S = 85%", "<large>, S = 85%", "tiny"]
    assert [len(found) for found in saved["findings"].values()] == [len(CLAIMS), len(CLAIMS), 1]
    elements = Elements(text).found
    assert all(a.get("scope") in ("col", "row") for tag, a in elements if tag == "th")
    assert text.count(" of 2</td>") + text.count(" of 1</td>") == len(CLAIMS)  # in how many cells each holds


def test_overlap_is_claimed_to_fall_with_the_pool(pair: Pair) -> None:
    grid = PairGrid("tiny", ("a",), ("0", "85"), {("a", "0"): pair, ("a", "85"): pair})
    (finding,) = grid_findings(grid)["tiny"]
    assert finding.verdict == UNMEASURED and "two sizes" in finding.reason


@needs_browser
def test_report_draws_every_chart_and_offers_no_upload(page: Path) -> None:
    browser = find_browser()
    assert browser is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    result = subprocess.run([browser, *options, page.as_uri()], capture_output=True, text=True, timeout=300)
    dom = result.stdout
    drawn = {a["id"] for _, a in Elements(dom).found if "js-plotly-plot" in (a.get("class") or "")}
    assert drawn == set(SLUGS)
    assert "modebar-btn" in dom and "Share chart" not in dom and "sendChartToCloud" not in dom


def test_findings_json_is_complete_and_strict(pair: Pair, page: Path) -> None:
    saved = json.loads((page.parent / "findings.json").read_text(encoding="utf-8"))
    assert saved == json.loads(json.dumps(findings_data(pair, findings(pair)), allow_nan=False))
    assert len(saved["findings"]) == len(CLAIMS)
    for finding in saved["findings"]:
        assert finding["verdict"] in (HOLDS, FAILS, OPEN, UNMEASURED) and finding["reason"]
        assert finding["paper"] and finding["ours"]["low"] <= finding["ours"]["high"]

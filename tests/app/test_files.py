"""What leaves the dashboard: files of every format, the snapshot, the command and the notebook's frame."""

from __future__ import annotations

import csv
import json
import re
import socket
import subprocess
import sys
import threading
import urllib.request
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import visitlens as vl
from visitlens.errors import InputError
from visitlens.hooks.recording.store.fetch_cache import cache_folder
from visitlens.probe.reading.pair import Pair
from visitlens.probe.report.report import write_report


@pytest.mark.parametrize("format_", ["png", "svg", "pdf", "csv", "json"])
def test_each_format_is_saved_from_the_menu_and_opens(visit, tmp_path: Path, format_: str) -> None:
    visit.open("heads?run=looped&layer=1&head=2")
    visit.charted("map")
    visit.page.click("#panel-map .dropdown summary")
    with visit.page.expect_download() as waiting:
        visit.page.click(f"#panel-map [data-export={format_}]")
    file = tmp_path / waiting.value.suggested_filename
    waiting.value.save_as(file)
    assert file.suffix == f".{format_}"
    data = file.read_bytes()
    if format_ == "png":
        assert data.startswith(b"\x89PNG") and int.from_bytes(data[16:20], "big") == 1800
    elif format_ == "svg":
        assert data.lstrip().startswith(b"<svg") and b"Attention on the segment start" in data
        assert visit.site.context.registry["looped"].run.provenance["recording"][:8].encode() in data
    elif format_ == "pdf":
        assert data.startswith(b"%PDF") and b"%%EOF" in data[-64:] and len(data) > 5000
        streams = re.findall(rb"stream\r?\n(x.*?)endstream", data, re.DOTALL)
        drawn = [zlib.decompressobj().decompress(stream)[:120] for stream in streams]
        assert any(b"3.125 0 0 3.125 0 0 cm" in start for start in drawn), "the page is the picture, without a margin"
    elif format_ == "csv":
        assert data.startswith(b"# panel: Attention on the segment start") and b"visit 1,1,0," in data
    else:
        assert json.loads(data)["selection"]["head"] == "2"


def test_a_png_of_the_server(site) -> None:
    url = f"{site.url}export/layers/by-layer.png?run=looped&theme=dark"
    with urllib.request.urlopen(url, timeout=300) as answer:
        assert answer.read().startswith(b"\x89PNG")
        assert "by-layer-looped.png" in answer.headers["Content-Disposition"]


def test_tables_are_saved_as_they_are_shown(visit, tmp_path: Path) -> None:
    def saved(label: str) -> list[list[str]]:
        with visit.page.expect_download() as waiting:
            visit.page.get_by_role("button", name=f"Save {label} as CSV").click()
        waiting.value.save_as(tmp_path / "table.csv")
        assert waiting.value.suggested_filename.endswith(".csv")
        lines = (tmp_path / "table.csv").read_text("utf-8-sig").splitlines()
        return list(csv.reader(line for line in lines if not line.startswith("#")))

    visit.open("layers?run=looped")
    rows = saved("All measures, mean over looped layers")
    run = visit.site.context.registry["looped"].run
    earlier = run.both_visits("sink_mass")[0].values.mean()
    row = next(row for row in rows if row[0] == "Attention on the segment start")
    assert rows[0][:4] == ["measure", "visit 1", "visit 2", "difference"] and float(row[1]) == pytest.approx(
        earlier, abs=1e-3
    )
    visit.open("heads?run=looped")
    visit.page.locator("#heads-table [row-index='0']").first.wait_for()
    rows = saved("All heads")
    assert rows[0][:2] == ["layer", "head"] and len(rows) == 1 + 2 * 4


def test_python_is_copied_and_a_snapshot_opens_without_the_server(visit, meet, site, tmp_path: Path) -> None:
    visit.open("layers?run=looped&metric=update_rms")
    visit.page.click("#panel-by-layer .dropdown summary")
    visit.page.click("#panel-by-layer [data-action=copy]")
    code = visit.page.evaluate("navigator.clipboard.readText()")
    assert "vl.open(" in code and "update_rms" in code
    with visit.page.expect_download() as waiting:
        visit.page.click("text=Snapshot")
    file = tmp_path / "layers.html"
    waiting.value.save_as(file)
    person = meet(site)
    person.page.goto(f"file://{file}")
    person.page.locator(".main-svg").first.wait_for()
    assert person.page.locator(".chart .main-svg").count() >= 3
    assert "update_rms" in person.page.inner_text("dl") and not person.errors


def test_a_report_that_was_sent_without_plotly_says_what_its_charts_need(
    meet, site, looped_recording, tmp_path: Path
) -> None:
    page = write_report(Pair(looped_recording), tmp_path, ["sink-heads"], formats=[])
    (tmp_path / "plotly.min.js").unlink()
    person = meet(site)
    person.page.goto(f"file://{page}")
    assert "plotly.min.js" in person.page.inner_text(".chart") and "whole folder" in person.page.inner_text(".chart")


def test_the_command_serves_says_where_and_ends(folder: Path) -> None:
    command = [sys.executable, "-m", "visitlens", "app", folder, "--port", "0", "--no-browser", "--token", "auto"]
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            found = re.fullmatch(r"(http://127\.0\.0\.1:\d+/)\?access=(\S{20,})", address)
            assert found, address
            with urllib.request.urlopen(found[1] + "health", timeout=60) as answer:
                assert json.load(answer)["recordings"] == 6
        finally:  # left running, it would be waited for without end
            process.terminate()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.vlens"], "no such file"),
        (["--host", "0.0.0.0"], "--token"),
        (["--prefix", "/a b/"], "prefix"),
        (["--model", "nowhere"], "no such checkpoint folder"),
    ],
)
def test_bad_options_are_one_clear_error(run, arguments: list[str], said: str) -> None:
    code, _, err = run("app", "--no-browser", *arguments)
    assert code == 1 and said in err
    assert err.count("error:") == 1 and "Traceback" not in err


def test_a_notebook_shows_it_in_a_frame(looped_recording) -> None:
    shown = vl.dashboard(looped_recording, height=500)
    try:
        assert f'src="{shown.url}"' in shown._repr_html_() and 'height="500"' in shown._repr_html_()
        with urllib.request.urlopen(shown.url, timeout=60) as answer:
            assert "http://localhost:*" in answer.headers["Content-Security-Policy"]
        with urllib.request.urlopen(shown.url + "health", timeout=60) as answer:
            assert json.load(answer)["recordings"] == 1
    finally:
        shown.stop()
    with pytest.raises(InputError, match="can't be used"), socket.create_server(("127.0.0.1", 0)) as other:
        vl.dashboard(looped_recording.recording.path, port=other.getsockname()[1])
    with pytest.raises(InputError, match="port 99999 of 127"):
        vl.dashboard(looped_recording.recording.path, port=99999)
    port = int(shown.url.rsplit(":")[-1].strip("/"))
    with pytest.raises(InputError, match="expected a proxy path") as kept:
        vl.dashboard(looped_recording.recording.path, port=port, proxy="/proxy/{prot}/")
    with socket.create_server(("127.0.0.1", port)):
        assert kept.traceback, "who keeps the error doesn't keep the port"
    behind = vl.dashboard(looped_recording.recording.path, proxy="/user/me/proxy/{port}/")
    found = re.fullmatch(r"/user/me/proxy/(\d+)/", behind.url)
    assert found
    for path in (behind.url, "/"):  # whether or not the proxy takes the prefix away
        with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}{path}health", timeout=60) as answer:
            assert answer.status == 200
    behind.stop()


def test_the_frame_of_a_notebook_works_in_the_browser(looped_recording, browser, tmp_path: Path) -> None:
    """The page around it comes from another port of this machine, as a notebook's does."""
    shown = vl.dashboard(looped_recording)
    (tmp_path / "index.html").write_text(f"<!DOCTYPE html><title>notebook</title>{shown._repr_html_()}")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as notebook:
        threading.Thread(target=notebook.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.set_default_timeout(60_000)
        try:
            page.goto(f"http://localhost:{notebook.server_port}/index.html")
            inside = page.frame_locator("iframe[title=visitlens]")
            inside.locator(".number-card").first.wait_for(timeout=60_000)
            inside.locator("nav[aria-label=Pages] >> text=Layers").click()
            inside.locator("#panel-by-layer .graph[data-drawn]").wait_for(state="attached", timeout=60_000)
        finally:
            page.close()
            notebook.shutdown()
            shown.stop()


def test_the_demo_keeps_its_recordings_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "visitlens"
    from visitlens.app.server import demo

    monkeypatch.setattr(demo, "TOKENS", 64)
    monkeypatch.setattr(demo, "MAP_TOKENS", 64)
    monkeypatch.setattr(demo, "PROMPTS", 1)
    said: list[str] = []
    paths = demo.demo_recordings(said.append)
    assert [vl.open(path).recording.complete for path in paths] == [True] * 3
    assert vl.open(paths[2]).recording.level == "maps" and len(said) == 5
    assert "dyck-zero" in vl.open(paths[0]).ablations()
    assert demo.demo_recordings(said.append) == paths and len(said) == 5  # made once

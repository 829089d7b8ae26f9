"""The dashboard as it is used: first paint, click-through, a map of 4,096 tokens, the server's memory over 500 interactions.

python benchmarks/dashboard.py --tokens 1000000 --out benchmarks/results/dashboard.json
python benchmarks/dashboard.py --recording run.vlens

The real command serves, a real Chromium looks. Milliseconds are the browser's own, from the navigation or the click: until
the page is shown, and until the charts in sight are drawn. `browser` and `server` are what the page's main thread and the server's
process computed meanwhile: their sum is what a quiet machine would take. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe
from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.recording.write.record import RecordingOptions, record
from visitlens.hooks.text.documents import pack
from visitlens.probe.drawing.images import find_browser
from visitlens.probe.measures.collector import StatisticsCollector
from visitlens.probe.measures.statistic import Geometry

CLICKS = {
    "Overview to Layers": "layers?metric=sink_mass",
    "a layer": "heads?layer={layer}",
    "a head": "attention?layer={layer}&head=1",
    "Tokens": "tokens?layer={layer}&head=1",
    "a token": "tokens?layer={layer}&head=1&token=41",
    "a token far away": "tokens?layer={layer}&head=1&token={far}",
    "Routing": "routing?layer={layer}",
    "Residual": "residual?layer={layer}",
    "another measure": "layers?metric=update_rms",
    "Figures": "figures",
    "Provenance": "provenance",
    "back to the Overview": "",
}
MAP = "attention?layer=1&head=1&segment=0"
WATCH = """
window.until = (clicked) => new Promise((done) => {
  const times = {};
  const look = () => {
    const page = document.querySelector("body:not([data-busy]) main .panels");
    if (page && !times.shown) times.shown = performance.now();
    const charts = [...document.querySelectorAll("main .chart")].filter((c) => {
      const at = c.getBoundingClientRect();
      return at.bottom > 0 && at.top < window.innerHeight;
    });
    if (page && charts.every((c) => c.querySelector(".graph[data-drawn]")))
      { times.drawn = performance.now(); done(times); return; }
    setTimeout(look, 5);
  };
  clicked ? setTimeout(look, 30) : look();
});
"""
SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2}
SIZES |= {"head_dim": 8, "num_experts": 16, "expert_dim": 8, "experts_per_token": 4}
SIZES |= {"loop_start": 1, "loop_stop": 3, "visits": 2}


def make_recording(path: Path, tokens: int, document: int, options: RecordingOptions) -> None:
    """A tiny looped model with random weights over random documents of one length."""
    torch.set_num_threads(1)
    model = LoopedMoE(LoopedMoEConfig(**SIZES, context_length=max(document, 512)))
    model.init_weights(1)
    rng = np.random.default_rng(0)
    documents = [np.array([0, *rng.integers(3, 61, document - 1)], np.int32) for _ in range(-(-tokens // document))]
    text = pack(documents, max(document, 512), 0, 2)
    groups = int(text.document_groups(128).max()) + 1
    collector = StatisticsCollector(Geometry.of(model.plan, model.config.to_dict()), groups)
    made_of = {"text": "random", "note": "random weights"}
    record(model.eval().requires_grad_(False), text, path, collector, options, provenance=made_of)


class Server:
    """`visitlens app` over some recordings, as a process of its own."""

    def __init__(self, *paths: Path) -> None:
        command = [sys.executable, "-m", "visitlens", "app", *map(str, paths), "--port", "0", "--no-browser"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def cpu(self) -> float:
        """Milliseconds that it computed, start included."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")

    def resident(self) -> float:
        """Megabytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def render(self, query: str, theme: str) -> None:
        """One answer of the page callback, as a browser asks for it."""
        names = ("page-links.data", "bar.children", "main.children", "palette-entries.data", "title.data")
        names += ("watch.disabled", "main.data-version")
        body = {
            "output": f"..{'...'.join(names)}..",
            "outputs": [dict(zip(("id", "property"), name.split("."), strict=True)) for name in names],
            "inputs": [{"id": "request", "property": "data", "value": {"href": self.url + query, "theme": theme}}],
            "changedPropIds": ["request.data"],
        }
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + "_dash-update-component", json.dumps(body).encode(), kind)
        with urllib.request.urlopen(request) as answer:
            answer.read()


@contextmanager
def serving(*paths: Path) -> Iterator[Server]:
    server = Server(*paths)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(60)


@contextmanager
def looking(chromium: Browser) -> Iterator[Page]:
    """A page of a fresh profile."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    context.add_init_script(WATCH)
    yield context.new_page()
    context.close()


def busy(session: CDPSession) -> float:
    """Milliseconds that the page's main thread computed since it was loaded."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(m["value"] for m in metrics if m["name"] == "TaskDuration") * 1000


def opened(page: Page, server: Server, path: str = "") -> dict[str, float]:
    """Loads an address; times count from the navigation."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    before, idle = server.cpu(), busy(session)
    page.goto(server.url + path)
    found = page.evaluate("until(false)")
    after = busy(session)
    return {**found, "browser": after - idle if after >= idle else after, "server": server.cpu() - before}


def clicked(page: Page, server: Server, path: str) -> dict[str, float]:
    """Follows a link within the page; times count from the click."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    before, idle = server.cpu(), busy(session)
    go = "async (href) => { const at = performance.now(); window.visitlens.go(href); const t = await until(true);"
    found = page.evaluate(go + " return { shown: t.shown - at, drawn: t.drawn - at }; }", server.url + path)
    return {**found, "browser": busy(session) - idle, "server": server.cpu() - before}


def medians(runs: list[dict[str, float]]) -> dict[str, int]:
    return {f"{key} ms": round(statistics.median(run[key] for run in runs)) for key in runs[0]}


def first_paint(chromium: Browser, server: Server, repeats: int) -> dict[str, Any]:
    """Of the Overview: nothing cached (the server's first answer apart), then with scripts cached."""
    cold, warm = [], []
    for _ in range(repeats + 1):
        with looking(chromium) as page:
            cold.append(opened(page, server))
            warm += [opened(page, server) for _ in range(2)]
    found = {"server's first answer": medians(cold[:1]), "nothing cached": medians(cold[1:])}
    return found | {"scripts cached": medians(warm)}


def click_through(chromium: Browser, server: Server, repeats: int, places: dict[str, int]) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CLICKS}
    with looking(chromium) as page:
        opened(page, server)
        for round_ in range(repeats + 1):
            for name, path in CLICKS.items():
                found = clicked(page, server, path.format(**places))
                runs[name].append(found)
                page.wait_for_timeout(150)
                if not round_:
                    print(f"{name:24s} {found}", file=sys.stderr)
    return {name: {"first": medians(found[:1]), "then": medians(found[1:])} for name, found in runs.items()}


def pooled_map(chromium: Browser, folder: Path, repeats: int) -> dict[str, Any]:
    """A head's maps of a 4,096-token document, made from Q and K, pooled: opened as a link, and by a click on another head."""
    path = folder / "map.vlens"
    make_recording(path, 4096, 4096, RecordingOptions(level="activations", sites=("Q", "K")))
    with serving(path) as server, looking(chromium) as page:
        opened(page, server, MAP)
        shown = [opened(page, server, MAP) for _ in range(repeats)]
        caption = page.inner_text("#panel-map .caption")
        assert "Pooled 8x" in caption, caption
        heads = [clicked(page, server, MAP.replace("head=1", f"head={n % 4}")) for n in range(2, 2 + repeats)]
    return {"loaded": medians(shown), "another head": medians(heads)}


def memory(server: Server, interactions: int, places: dict[str, int]) -> dict[str, float]:
    """Resident megabytes; each interaction asks for another selection."""
    paths = ("", "layers", "heads", "tokens", "routing", "residual", "attention", "figures", "provenance")
    found: dict[str, float] = {"before": server.resident()}
    for i in range(interactions):
        metric = ("sink_mass", "update_rms", "top8_overlap")[i % 3]
        layer, token = places["layer"] + i % 2, i * 37 % places["far"]
        query = f"{paths[i % len(paths)]}?layer={layer}&head={i % 4}&token={token}&metric={metric}"
        server.render(query, ("light", "dark")[i % 2])
        for share in (5, 2):
            if i == interactions // share:
                found[f"after {i}"] = server.resident()
    found[f"after {interactions}"] = server.resident()
    return {key: round(value) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--recording", type=Path, help="one that exists, instead of making one")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--interactions", type=int, default=500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = Path(temporary)
        path = options.recording or folder / "large.vlens"
        if options.recording is None:
            make_recording(path, options.tokens, 256, RecordingOptions(level="tokens", batch=8))
        manifest = json.loads((path / "manifest.json").read_text())
        layers = manifest["run"]["layers"]
        tokens = sum(shard["token_count"] for shard in manifest["shards"])
        places = {"layer": next(n for n in layers if layers.count(n) > 1), "far": tokens * 7 // 10}
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = playwright.chromium.launch(executable_path=find_browser(), args=arguments)
        with serving(path) as server:
            result = {
                "recording": {"tokens": tokens, "level": manifest["run"]["config"]["options"]["level"]},
                "machine": describe(),
                "browser": f"Chromium {re.sub(r'[.].*', '', chromium.version)}",
                "overview": first_paint(chromium, server, options.repeats),
                "click-through": click_through(chromium, server, options.repeats, places),
                "server's megabytes": memory(server, options.interactions, places),
            }
        result["4096-token map, pooled"] = pooled_map(chromium, folder, options.repeats)
        chromium.close()
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

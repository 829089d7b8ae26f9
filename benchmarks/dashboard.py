"""The dashboard's times and memory: first paint, click-through, a pooled attention map, 500 interactions.

python benchmarks/dashboard.py --tokens 1000000 --out benchmarks/results/dashboard.json

Each time is a median, by the wall and by the CPU: of the browser's main thread and of the server's process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from playwright.sync_api import CDPSession, Page, sync_playwright
from waitress.server import create_server

from visitlens.app.attention import pooled_difference
from visitlens.app.context import Context
from visitlens.app.layout import render
from visitlens.app.plots import visit_maps
from visitlens.app.registry import Registry
from visitlens.app.server import build
from visitlens.hooks.contexts import PackedTokens
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.recorder import RecordingOptions, record
from visitlens.probe.collect import StatisticsCollector
from visitlens.probe.figures.images import find_browser
from visitlens.probe.figures.theme import LIGHT
from visitlens.probe.ladder.documents import pack
from visitlens.probe.statistics.base import Geometry

SHOWN = "body:not([data-busy]) main .panels"
STEPS = (
    "layers?layer=1",
    "heads?layer=1",
    "attention?layer=1&head=2",
    "tokens?layer=1&head=2&token=40",
    "layers?visits=1-2",
)
PAGES = ("/", "/layers", "/heads", "/tokens", "/routing", "/residual", "/attention", "/figures", "/provenance")


def make_recording(path: Path, tokens: int) -> None:
    """A tiny looped model with random weights over random text, at level `tokens`."""
    torch.set_num_threads(1)
    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 16,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
    }
    sizes |= {
        "num_experts": 16,
        "expert_dim": 8,
        "experts_per_token": 4,
        "context_length": 512,
        "loop_start": 1,
        "loop_stop": 3,
        "visits": 2,
    }
    model = LoopedMoE(LoopedMoEConfig(**sizes))
    model.init_weights(1)
    rng = np.random.default_rng(0)
    documents = [np.array([0, *rng.integers(3, 61, 255)], dtype=np.int32) for _ in range(-(-tokens // 256))]
    text: PackedTokens = pack(documents, 512, 0, 2)
    collector = StatisticsCollector(
        Geometry.of(model.plan, model.config.to_dict()), int(text.document_groups(128).max()) + 1
    )
    options = RecordingOptions(level="tokens", batch=8)
    record(
        model.eval().requires_grad_(False),
        text,
        path,
        collector,
        options,
        provenance={"text": "random", "note": "random weights"},
    )


def timed(page: Page, session: CDPSession, act: Callable[[], Any]) -> dict[str, float]:
    """Seconds by the wall, of the browser's main thread, of this process (which serves)."""

    def busy() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(m["value"] for m in metrics if m["name"] == "TaskDuration")

    wall, browser, server = time.perf_counter(), busy(), time.process_time()
    act()
    page.locator(SHOWN).first.wait_for(timeout=120_000)
    found = {"wall": time.perf_counter() - wall, "server": time.process_time() - server}
    after = busy()
    return found | {"browser": after - browser if after >= browser else after}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}


def in_browser(url: str, repeats: int) -> dict[str, Any]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        page = chromium.new_page(viewport={"width": 1280, "height": 800})
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        cold = timed(page, session, lambda: page.goto(url))
        first = [timed(page, session, lambda: page.goto(url)) for _ in range(repeats)]
        clicks: dict[str, list[dict[str, float]]] = {step: [] for step in STEPS}
        for step in STEPS * repeats:
            clicks[step].append(
                timed(page, session, lambda step=step: page.evaluate("(href) => window.visitlens.go(href)", url + step))
            )
            page.wait_for_timeout(200)
        chromium.close()
    return {
        "overview, nothing cached": {k: round(v, 3) for k, v in cold.items()},
        "overview, scripts cached": medians(first),
        "click-through": {step: medians(runs) for step, runs in clicks.items()},
    }


def pooled(repeats: int) -> dict[str, float]:
    """A 4096-token map at two visits: pooled, drawn, as JSON."""
    rng = np.random.default_rng(0)
    earlier, later = (np.tril(rng.random((4096, 4096), dtype=np.float32)).astype(np.float16) for _ in range(2))
    seconds, size = [], 0
    for _ in range(repeats):
        start = time.process_time()
        first, second, _ = pooled_difference(earlier, later)
        names = [str(i) for i in first.row_starts]
        maps = first.values.astype(np.float32), second.values.astype(np.float32)
        figure = visit_maps(
            LIGHT,
            *maps,
            titles=("a", "b", "c"),
            rows=names,
            columns=names,
            row_title="query",
            column_title="key",
            unit="share of mass",
        )
        size = len(str(figure.to_json()))
        seconds.append(time.process_time() - start)
    return {"cpu": round(statistics.median(seconds), 3), "megabytes": round(size / 1e6, 2)}


def memory(context: Context, interactions: int) -> dict[str, float]:
    """Resident megabytes after a fifth of the interactions and at their end; each asks for another selection."""

    def resident() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    early = 0.0
    for i in range(interactions):
        query = f"?layer={1 + i % 2}&head={i % 4}&token={(i * 37) % 4000}&metric={('sink_mass', 'update_rms', 'top8_overlap')[i % 3]}"
        render(context, f"http://localhost{PAGES[i % len(PAGES)]}{query}", ("light", "dark")[i % 2])
        if i == interactions // 5:
            early = resident()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"after a fifth": round(early, 1), "at the end": round(resident(), 1), "peak": round(peak, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--interactions", type=int, default=500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.vlens"
        make_recording(path, options.tokens)
        context = Context(Registry([path]))
        server: Any = create_server(build(context).server, host="127.0.0.1", port=0, threads=4)
        threading.Thread(target=server.run, daemon=True).start()
        result = {
            "tokens": options.tokens,
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
            **in_browser(f"http://127.0.0.1:{server.effective_port}/", options.repeats),
            "4096-token map, pooled": pooled(options.repeats),
            f"megabytes over {options.interactions} interactions": memory(context, options.interactions),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

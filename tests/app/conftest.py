"""A served dashboard over small recordings, and one Chromium for all tests: `serve(...)` -> Site, `visit` -> a person at it."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Locator, Page, sync_playwright
from tests.support.answers import Answers
from tokenizers import Tokenizer, models, pre_tokenizers
from waitress.server import create_server

import visitlens as vl
from visitlens.app.server.server import Access, behind_prefix, build
from visitlens.app.view.registry import Registry
from visitlens.app.view.view import Context
from visitlens.probe.drawing.images import find_browser
from visitlens.probe.reading.recorded_run import RecordedRun

SHOWN = "body:not([data-busy]) main :is(.panels, .state)"
"""What is there once a page is drawn."""
UNDRAWN = "main .graph:not([data-drawn]), #heads-table:not(:has(.ag-row))"
LEAVE = "localStorage.clear(); document.getElementById('tray').replaceChildren(); document.getElementById('palette').close()"
"""What a person does who leaves a tab to the next one."""


@dataclass
class Site:
    """A running dashboard; `url` ends with its prefix, `answers` can be kept back."""

    url: str
    context: Context
    answers: Answers


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[..., Site]]:
    """Factory: `serve(path, ..., checkpoint=None, prefix="/", access=None)`, in a thread of this process."""
    running: list[tuple[Any, threading.Thread]] = []

    def start(*paths: Path, checkpoint: Path | None = None, prefix: str = "/", access: Access | None = None) -> Site:
        context = Context(Registry(paths), checkpoint, prefix)
        answers = Answers(behind_prefix(build(context, access).server, prefix))
        server: Any = create_server(answers, host="127.0.0.1", port=0, threads=8, clear_untrusted_proxy_headers=True)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        return Site(f"http://127.0.0.1:{server.effective_port}{prefix}", context, answers)

    yield start
    for server, _ in running:
        server.close()


@pytest.fixture(scope="session")
def folder(
    recordings: dict[str, RecordedRun],
    make_model: Callable[..., Any],
    make_text: Callable[..., Any],
    make_recording: Callable[..., RecordedRun],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Two visits (`looped`), none (`baseline`), three (`three`), attention maps (`maps`), statistics only (`summary`),
    and one with a damaged summary (`corrupt`)."""
    root = tmp_path_factory.mktemp("shown")
    for name, run in recordings.items():
        shutil.copytree(run.recording.path, root / f"{name}.vlens")
    model, text = make_model(2), make_text(seed=5, lengths=(20, 12, 40, 9, 30), context=32)
    make_recording(model, text, root / "maps.vlens", level="maps")
    make_recording(model, text, root / "summary.vlens", level="summary")
    shutil.copytree(root / "summary.vlens", root / "corrupt.vlens")
    (root / "corrupt.vlens" / "summary.h5").write_bytes(b"not HDF5")
    return root


@pytest.fixture(scope="session")
def long(
    make_model: Callable[..., Any],
    make_text: Callable[..., Any],
    make_recording: Callable[..., RecordedRun],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Q and K of a document of 700 tokens between two short ones."""
    path = tmp_path_factory.mktemp("long") / "long.vlens"
    model, text = make_model(2, context_length=1024), make_text(seed=5, lengths=(20, 700, 9), context=729)
    make_recording(model, text, path, level="activations", sites=("Q", "K"))
    return path


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A looped model of transformers with dense feed-forward layers (ALBERT, 2 layers three times each), by `visitlens.record`."""
    transformers = pytest.importorskip("transformers", reason="the extra visitlens[sources] is optional")
    folder = tmp_path_factory.mktemp("dense")
    sizes = {
        "vocab_size": 61,
        "hidden_size": 16,
        "embedding_size": 8,
        "intermediate_size": 24,
        "num_attention_heads": 4,
    }
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    layers = {"num_hidden_layers": 6, "num_hidden_groups": 2, "inner_group_num": 1, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = transformers.AlbertForMaskedLM(transformers.AlbertConfig(**sizes, **tokens, **layers))
    model.eval().save_pretrained(folder / "model")
    words = {"<bos>": 0, "<eos>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, 61)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    (folder / "text.txt").write_text(" ".join(f"w{3 + i * 7 % 58}" for i in range(40)))
    options = {"context_length": 48, "attention": "torch"}
    vl.record(folder / "model", folder / "text.txt", folder / "dense.vlens", level="tokens", **options)
    return folder / "dense.vlens"


@pytest.fixture(scope="session")
def site(serve: Callable[..., Site], folder: Path) -> Site:
    """All recordings of `folder`."""
    return serve(folder)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium is installed (.ci/install-chromium)")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=arguments, timeout=300_000)
        yield chromium
        chromium.close()


@dataclass
class Visitor:
    """A person at the dashboard. `outside` are requests to other machines, `errors` what the page complained about."""

    page: Page
    site: Site
    outside: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, path: str = "", *, load: bool = False) -> None:
        """As a link does where a page of the site is shown already, else (or with `load`) by its address."""
        address = self.site.url + path.lstrip("/")
        if load or not self.page.url.startswith(self.site.url) or self.page.url == address:
            self.page.goto(address)
        else:
            self.page.evaluate("(href) => window.visitlens.go(href)", address)
        self.settled()

    def settled(self) -> None:
        """Waits until the page that was asked for is drawn."""
        self.page.locator(SHOWN).first.wait_for(timeout=60_000)

    def charted(self, key: str) -> Locator:
        """A panel's chart, once Plotly has drawn it and the keyboard reaches it."""
        chart = self.page.locator(f"#panel-{key} .chart")
        chart.locator(".graph[data-drawn]").wait_for(state="attached", timeout=60_000)
        return chart

    def all_charted(self) -> None:
        """Waits until all of the page is there: its charts, and its table that comes when the page rests."""
        self.page.wait_for_function(f"() => !document.querySelector('{UNDRAWN}')")

    def choose(self, selector: str, value: str) -> None:
        self.page.select_option(f"select[name={selector}]", value)
        self.settled()

    def value(self, selector: str) -> str:
        return self.page.input_value(f"select[name={selector}]")

    def click_cell(self, key: str, trace: int, row: int, column: int) -> None:
        """The middle of a cell of a panel's heat map."""
        chart = self.charted(key)
        chart.scroll_into_view_if_needed()
        x, y = chart.evaluate(
            """(chart, [t, row, column]) => {
                const plot = chart.querySelector('.js-plotly-plot'), trace = plot._fullData[t];
                const axis = (id) => plot._fullLayout[id.replace(/^([xy])/, '$1axis')];
                const box = plot.getBoundingClientRect(), x = axis(trace.xaxis), y = axis(trace.yaxis);
                return [box.left + x._offset + x.c2p(column), box.top + y._offset + y.c2p(row)];
            }""",
            [trace, row, column],
        )
        self.page.mouse.move(x - 1, y - 1)
        self.page.mouse.click(x, y)
        self.settled()

    def click_point(self, key: str, trace: int, at: int) -> None:
        """A point of a panel's line, where the page's own cursor marks it."""
        chart = self.charted(key)
        chart.scroll_into_view_if_needed()
        x, y = chart.evaluate(
            """(chart, [t, i]) => {
                const plot = chart.querySelector('.js-plotly-plot'), point = plot.calcdata[t][i];
                const { xaxis, yaxis } = plot._fullLayout, box = plot.getBoundingClientRect();
                return [box.left + xaxis._offset + xaxis.c2p(point.x), box.top + yaxis._offset + yaxis.c2p(point.y)];
            }""",
            [trace, at],
        )
        for step in range(1200):
            self.page.mouse.move(x - 3 * (step % 2), y)
            self.page.wait_for_timeout(50)
            boxes = [box for cursor in chart.locator(".cell-cursor").all() if (box := cursor.bounding_box())]
            if any(abs(b["x"] + b["width"] / 2 - x) < 2 and abs(b["y"] + b["height"] / 2 - y) < 2 for b in boxes):
                break
        else:
            pytest.fail(f"no cursor at point {at} of {key}")
        self.page.mouse.click(x, y)
        self.settled()

    @property
    def query(self) -> dict[str, str]:
        _, _, query = self.page.url.partition("?")
        return dict(part.split("=") for part in query.split("&") if part)

    @property
    def path(self) -> str:
        return self.page.url.removeprefix(self.site.url).partition("?")[0]

    def said(self) -> str:
        return self.page.inner_text("#announce")

    def grave_violations(self) -> list[str]:
        """What axe finds critical or serious, in both themes: all rules in the one that is shown, contrast in the other,
        which differs in colours alone. Plotly's drawings are of the theme that is shown, and left out in the other."""
        found = self._axe({"resultTypes": ["violations"]})
        shown = self.page.evaluate("document.documentElement.dataset.theme")
        paint = "(theme) => { for (const e of document.querySelectorAll('[data-theme]')) e.dataset.theme = theme;"
        paint += " for (const e of document.querySelectorAll('[data-ag-theme-mode]')) e.dataset.agThemeMode = theme; }"
        self.page.evaluate(paint, "light" if shown == "dark" else "dark")
        found += self._axe(
            {"resultTypes": ["violations"], "runOnly": ["color-contrast"]}, {"exclude": [[".plot-container"]]}
        )
        self.page.evaluate(paint, shown)
        return found

    def _axe(self, options: dict[str, Any], context: dict[str, Any] | None = None) -> list[str]:
        theme = self.page.evaluate("document.documentElement.dataset.theme")
        return [
            f"{v['id']} ({v['impact']}, {theme}): {[node['html'][:160] for node in v['nodes'][:3]]}"
            for v in Axe().run(self.page, context=context, options=options).response["violations"]
            if v["impact"] in ("critical", "serious")
        ]


@pytest.fixture(scope="session")
def profile(browser: Browser) -> Callable[[str], BrowserContext]:
    """Factory: a fresh browser profile at 1280 x 800 that prefers a theme."""

    def make(theme: str = "light") -> BrowserContext:
        context = browser.new_context(
            viewport={"width": 1280, "height": 800},
            color_scheme=theme,  # type: ignore[arg-type]  (a literal)
            permissions=["clipboard-read", "clipboard-write"],
        )
        context.set_default_timeout(60_000)
        return context

    return make


@pytest.fixture(scope="session")
def shared_profiles(profile: Callable[[str], BrowserContext]) -> dict[str, BrowserContext]:
    """One a theme, so that scripts are compiled once; what a page stored is removed after each test."""
    return {theme: profile(theme) for theme in ("light", "dark")}


@pytest.fixture(scope="session")
def open_tabs() -> dict[tuple[str, str], Page]:
    """By site and theme: tabs that go from test to test, with the dashboard loaded."""
    return {}


@pytest.fixture
def meet(
    profile: Callable[[str], BrowserContext],
    shared_profiles: dict[str, BrowserContext],
    open_tabs: dict[tuple[str, str], Page],
) -> Iterator[Callable[..., Visitor]]:
    """Factory: `meet(site, theme="light", fresh=False, stay=False)` is a person; `fresh` with a browser profile of their
    own, `stay` in the tab that the last one left open."""
    contexts, visitors, staying, heard = [], [], [], []

    def make(site: Site, theme: str = "light", *, fresh: bool = False, stay: bool = False) -> Visitor:
        context = profile(theme) if fresh else shared_profiles[theme]
        if fresh:
            contexts.append(context)
        tab = open_tabs.pop((site.url, theme), None) if stay else None
        visitor = Visitor(tab or context.new_page(), site)
        visitors.append(visitor)
        if stay:
            staying.append((visitor, theme))
        origin = re.match(r"http://[^/]+", site.url)
        assert origin is not None

        def request(asked: Any) -> None:
            visitor.requests.append(asked.url)
            if not asked.url.startswith((origin[0], "data:", "blob:")):
                visitor.outside.append(asked.url)

        listeners = {
            "request": request,
            "pageerror": lambda error: visitor.errors.append(str(error)),
            "console": lambda m: m.type == "error" and visitor.errors.append(m.text),
        }
        for event, listener in listeners.items():
            visitor.page.on(event, listener)  # type: ignore[call-overload]  (literal names)
        heard.append((visitor.page, listeners))
        return visitor

    yield make
    for page, listeners in heard:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
    for visitor, theme in staying:
        if visitor.page.url.startswith(visitor.site.url):
            visitor.page.evaluate(LEAVE)
            open_tabs[visitor.site.url, theme] = visitor.page
            visitors.remove(visitor)
    for visitor in visitors:
        visitor.page.evaluate("localStorage.clear()")
        visitor.page.close()
    for context in contexts:
        context.close()


@pytest.fixture
def visit(meet: Callable[..., Visitor], site: Site) -> Iterator[Visitor]:
    """A person at `site`; at the end nothing left the machine and nothing went wrong in the browser."""
    visitor = meet(site, stay=True)
    yield visitor
    assert not visitor.outside
    assert not visitor.errors


@pytest.fixture
def shard_by_shard(folder: Path, tmp_path: Path) -> Callable[[], None]:
    """A recording at `tmp_path/growing.vlens` that says to be half done; calling it writes the rest."""
    source, target = folder / "looped.vlens", tmp_path / "growing.vlens"
    shutil.copytree(source, target)
    manifest = json.loads((source / "manifest.json").read_text())
    whole = manifest["run"]["tokens"]
    manifest["run"]["tokens"] = 2 * whole
    (target / "manifest.json").write_text(json.dumps(manifest))

    def finish() -> None:
        (target / "manifest.json.tmp").write_text((source / "manifest.json").read_text())
        (target / "manifest.json.tmp").replace(target / "manifest.json")

    return finish

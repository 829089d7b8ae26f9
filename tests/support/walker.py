"""A person who does anything: a seeded walk over links, selectors, charts, buttons, keys, sizes and prompts, with what must hold at every rest."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from playwright.sync_api import TimeoutError

KEYS = (
    "Tab",
    "Shift+Tab",
    "ArrowLeft",
    "ArrowRight",
    "ArrowUp",
    "ArrowDown",
    "Enter",
    "Escape",
    "Home",
    "End",
    "PageDown",
    "/",
)
SIZES = ((1280, 800), (1600, 900), (900, 700), (400, 800))
WORDS = ("", "lay", "head", "sur", "sink", "over", "zzz", "<b>", "live", "rout")
PROMPTS = ("", "Two visits.", "a <b>b</b> {[(", "é\n\n\u2028 x" * 9, "x" * 5000)
POOLS = {
    "link": "#app a[href]:not([download])",
    "button": "button:not([hidden]), summary",
    "chart": "main .chart",
    "token": "main a.token",
    "select": "select",
}
"""What there is to choose from, by action."""
AT = """([pool, draw]) => {
  const all = [...document.querySelectorAll(pool)].filter((e) => e.checkVisibility() && e.closest("dialog:modal, #app") && !(document.querySelector("dialog:modal") && e.closest("#app")));
  const one = all[Math.floor(draw * all.length)];
  if (!one) return null;
  one.scrollIntoView({ block: "center", behavior: "instant" });
  const box = one.getBoundingClientRect();
  return { x: box.left, y: box.top, w: box.width, h: box.height, options: one.options ? [...one.options].map((o) => o.value) : [], name: one.name || "",
    said: (one.getAttribute("aria-label") || one.textContent).slice(0, 40) };
}"""
REST = """() => {
  const wrong = [], look = (s) => [...document.querySelectorAll(s)];
  const here = look("#navigation a").find((a) => a.pathname === location.pathname);
  const title = document.querySelector("h1").textContent;
  if (title !== (here ? here.textContent : "Not found")) wrong.push(`${location.pathname} shows ${title}`);
  if (here && here.getAttribute("aria-current") !== "page") wrong.push("the navigation marks another page");
  const run = new URLSearchParams(location.search).get("run"), chosen = document.querySelector("select[name=run]");
  if (run && chosen && chosen.value !== run) wrong.push(`run ${run} in the address, ${chosen.value} in the selector`);
  for (const s of look("select[data-value]")) if (s.value !== s.dataset.value) wrong.push(`${s.name} shows ${s.value} for ${s.dataset.value}`);
  const ids = look("[id]").filter((e) => !e.closest("svg")).map((e) => e.id);
  const twice = ids.filter((id, i) => ids.indexOf(id) !== i);
  if (twice.length) wrong.push(`ids twice: ${[...new Set(twice)]}`);
  if (look("main .plot-container").some((e) => !e.closest(".graph"))) wrong.push("a drawing outside its box");
  if (getComputedStyle(document.body).overflow === "hidden" && !look("[data-maximised]").length) wrong.push("the page doesn't scroll");
  return wrong;
}"""


class Walker:
    """`visitor` (see conftest) at a dashboard; `steps` is what was done, the last thing last."""

    def __init__(self, visitor: Any, seed: int) -> None:
        self.visitor, self.page, self.random = visitor, visitor.page, random.Random(seed)
        self.steps: list[str] = []
        self.actions: dict[str, tuple[int, Callable[[], str]]] = {
            "link": (6, lambda: self.click("link")),
            "select": (5, self.choose),
            "chart": (4, lambda: self.click("chart")),
            "button": (4, lambda: self.click("button")),
            "token": (2, lambda: self.click("token")),
            "key": (6, self.key),
            "back": (3, lambda: self.history("back")),
            "forward": (1, lambda: self.history("forward")),
            "size": (1, self.size),
            "theme": (1, self.theme),
            "palette": (2, self.palette),
            "prompt": (2, self.prompt),
        }

    def walk(self, steps: int) -> None:
        """So many actions; two of three wait until the page rests, and then all must be right."""
        names, weights = list(self.actions), [weight for weight, _ in self.actions.values()]
        for _ in range(steps):
            name = self.random.choices(names, weights)[0]
            self.steps.append(f"{name} {self.actions[name][1]()}")
            if self.random.random() < 0.67:
                self.rest()
        self.rest()

    def rest(self) -> None:
        said = f"after {self.steps[-12:]} at {self.page.url}"
        try:
            self.page.wait_for_function("() => !('busy' in document.body.dataset)", timeout=60_000)
        except Exception as error:
            raise AssertionError(f"busy {said}") from error
        assert not (wrong := self.page.evaluate(REST)), f"{wrong} {said}"
        assert not self.visitor.errors, f"{self.visitor.errors} {said}"
        assert not self.visitor.outside, f"{self.visitor.outside} {said}"

    def pick(self, pool: str) -> dict[str, Any] | None:
        return self.page.evaluate(AT, [POOLS[pool], self.random.random()])

    def click(self, pool: str) -> str:
        found = self.pick(pool)
        if found is None:
            return "none"
        across, down = (self.random.random(), self.random.random()) if pool == "chart" else (0.5, 0.5)
        x, y = found["x"] + across * found["w"], found["y"] + down * found["h"]
        self.page.mouse.move(x - 1, y)
        self.page.mouse.click(x, y)
        return found["said"]

    def choose(self) -> str:
        found = self.pick("select")
        if not found or not found["options"]:
            return "none"
        value = self.random.choice(found["options"])
        change = "([n, v]) => { const s = document.querySelector(`select[name='${n}']`); if (!s) return; s.focus(); s.value = v; "
        change += "s.dispatchEvent(new Event('change', { bubbles: true })); }"
        self.page.evaluate(change, [found["name"], value])
        return f"{found['name']} = {value}"

    def key(self) -> str:
        key = self.random.choice(KEYS)
        self.page.keyboard.press(key)
        return key

    def history(self, way: str) -> str:
        self.page.evaluate(f"() => navigation.canGo{way.title()} && history.{way}()")  # not out of the dashboard
        return ""

    def size(self) -> str:
        width, height = self.random.choice(SIZES)
        self.page.set_viewport_size({"width": width, "height": height})
        return f"{width} x {height}"

    def theme(self) -> str:
        self.page.evaluate("document.getElementById('theme').click()")
        return ""

    def palette(self) -> str:
        self.page.keyboard.press("Control+k")
        word, key = self.random.choice(WORDS), self.random.choice(("Enter", "Escape", "ArrowDown"))
        self.page.keyboard.type(word)
        self.page.keyboard.press(key)
        return f"{word} {key}"

    def prompt(self) -> str:
        box = self.page.locator("#live-prompt")
        if not box.count():
            self.page.evaluate("window.visitlens.go(window.visitlens.here({}, '/live'))")
            return "to the Live probe"
        text = self.random.choice(PROMPTS)
        self.page.evaluate("document.getElementById('palette').close()")
        with suppress(TimeoutError):  # the page that was on its way has come
            box.fill(text, timeout=2000)
            box.press("Control+Enter", timeout=2000)
        return text[:12]

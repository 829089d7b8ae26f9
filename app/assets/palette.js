// The command palette (Ctrl K, or /) and the keys that work everywhere.
(function () {
  "use strict";
  const vl = (window.visitlens = window.visitlens || {});
  let shown = [], at = 0, before = null;

  const dialog = () => document.getElementById("palette");
  const input = () => document.getElementById("palette-query");
  const list = () => document.getElementById("palette-list");

  vl.openPalette = function () {
    before = document.activeElement;
    input().value = "";
    update();
    dialog().showModal();
    input().focus();
  };

  function score(entry, words) {
    const text = `${entry.text} ${entry.kind}`.toLowerCase();
    let total = 0;
    for (const word of words) {
      const found = text.indexOf(word);
      if (found < 0) return -1;
      total += found === 0 ? 3 : text[found - 1] === " " ? 2 : 1;
    }
    return total;
  }

  function update() {
    const words = input().value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = [...vl.get("kept", []), ...(vl.entries || [])];
    shown = all
      .map((entry, order) => ({ entry, order, score: score(entry, words) }))
      .filter((found) => found.score >= 0)
      .sort((a, b) => b.score - a.score || a.order - b.order)
      .slice(0, 60)
      .map((found) => found.entry);
    at = 0;
    list().replaceChildren(...shown.map((entry, i) => {
      const item = document.createElement("li");
      item.id = `palette-${i}`;
      item.setAttribute("role", "option");
      const kind = Object.assign(document.createElement("span"), { className: "kind", textContent: entry.kind });
      item.append(entry.text, kind);
      item.addEventListener("click", () => open(i));
      return item;
    }));
    mark();
  }

  function mark() {
    [...list().children].forEach((item, i) => item.setAttribute("aria-selected", String(i === at)));
    const item = list().children[at];
    input().setAttribute("aria-activedescendant", item ? item.id : "");
    if (item) item.scrollIntoView({ block: "nearest" });
  }

  function open(i) {
    dialog().close();
    if (shown[i]) vl.go(shown[i].href);
  }

  document.addEventListener("DOMContentLoaded", ready);
  if (document.readyState !== "loading") ready();
  function ready() {
    if (!dialog() || dialog().dataset.ready) return;
    dialog().dataset.ready = "1";
    input().addEventListener("input", update);
    input().addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "ArrowUp") {
        at = (at + (event.key === "ArrowDown" ? 1 : shown.length - 1)) % Math.max(shown.length, 1);
        mark();
      } else if (event.key === "Enter") open(at);
      else return;
      event.preventDefault();
    });
    dialog().addEventListener("click", (event) => event.target === dialog() && dialog().close());
    dialog().addEventListener("close", () => before && before.focus && before.focus());
  }

  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) || event.target.isContentEditable;
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
      event.preventDefault();
      vl.openPalette();
    } else if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      vl.openPalette();
    } else if (event.key === "Escape" && !dialog().open) {
      const menu = document.querySelector("details.dropdown[open]");
      if (menu) { menu.open = false; menu.querySelector("summary").focus(); }
      else vl.restore();
    } else if (event.target.classList && event.target.classList.contains("token") && /^Arrow(Left|Right)$|^Home$|^End$/.test(event.key)) {
      const tokens = [...event.target.parentElement.querySelectorAll("a.token")];
      const here = tokens.indexOf(event.target);
      const next = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: tokens.length - 1 }[event.key];
      if (tokens[next]) {
        event.preventDefault();
        event.target.tabIndex = -1;
        tokens[next].tabIndex = 0;
        tokens[next].focus();
        vl.announce(tokens[next].title);
      }
    }
  });
})();

// The frame: links and selectors change the URL, the URL changes the page; theme, palette, copying, pins, tables.
(function () {
  "use strict";
  const vl = (window.visitlens = window.visitlens || {});
  const config = () => JSON.parse(document.getElementById("_dash-config").textContent);
  const prefix = () => config().requests_pathname_prefix || "/";
  const outside = ["export/", "snapshot/", "health", "assets/", "plotly.min.js"];

  vl.get = function (key, otherwise) {
    try { return JSON.parse(window.localStorage.getItem("visitlens:" + key)) ?? otherwise; } catch { return otherwise; }
  };
  vl.set = function (key, value) {
    try { window.localStorage.setItem("visitlens:" + key, JSON.stringify(value)); } catch { /* private window */ }
  };

  // This tab's name, also after it was loaded anew: what it started it may end.
  const named = () => [...window.crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  try { vl.tab = window.sessionStorage.getItem("visitlens:tab") || named(); window.sessionStorage.setItem("visitlens:tab", vl.tab); } catch { vl.tab = named(); }
  // A duplicated tab comes with the name of the other, which says so: it takes one of its own.
  let others = null;
  try { others = new BroadcastChannel("visitlens:tab"); } catch { /* sandboxed */ }
  if (others) {
    others.onmessage = ({ data }) => {
      if (data.name !== vl.tab) return;
      if (!data.taken) { others.postMessage({ name: vl.tab, taken: true }); return; }
      vl.tab = named();
      try { window.sessionStorage.setItem("visitlens:tab", vl.tab); } catch { /* private window */ }
      if (asked) vl.moved();
    };
    others.postMessage({ name: vl.tab });
  }

  vl.go = function (href) {
    const url = new URL(href, window.location.href);
    if (url.href === window.location.href) return;
    window.history.pushState(null, "", url.href);
    vl.moved();
  };

  // After the URL changed: the page follows. `request` reads the URL of its moment, so a late call asks for nothing old.
  let moves = 0, wanted = 0, awaited = 0; // pages that were wanted, and which of them is asked for
  const busy = () => { wanted += 1; document.body.dataset.busy = "1"; };
  vl.moved = function () {
    busy();
    window.dash_clientside.set_props("moves", { data: ++moves });
  };

  // The current URL with some parameters changed; null takes one away. A page's own parameters stay on it.
  const shared = ["run", "other", "layer", "visits", "head", "token", "segment", "metric", "agg"];
  vl.here = function (changes, path) {
    const url = new URL(window.location.href);
    const there = path ? prefix() + path.replace(/^\//, "") : url.pathname;
    if (there !== url.pathname) {
      for (const name of [...url.searchParams.keys()]) if (!shared.includes(name)) url.searchParams.delete(name);
      url.pathname = there;
    }
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === "") url.searchParams.delete(name);
      else url.searchParams.set(name, value);
    }
    url.search = url.searchParams.toString().replace(/\+/g, "%20");
    return url.href;
  };

  vl.announce = function (text) {
    const live = document.getElementById("announce");
    if (live && live.textContent !== text) live.textContent = text;
  };
  vl.toast = function (text) {
    const box = document.getElementById("toast");
    box.textContent = text;
    box.className = "shown";
    window.clearTimeout(vl.toasting);
    vl.toasting = window.setTimeout(() => { box.className = ""; }, 2200);
    vl.announce(text);
  };

  // Theme: what was chosen, else what the system prefers.
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = () => vl.get("theme", null) || (system.matches ? "dark" : "light");
  const paint = () => { document.documentElement.dataset.theme = theme(); };
  paint();

  let clicks = 0, last = "", asked = "";
  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    visitlens: {
      request: function (moves, n, seen) {
        if (n && n > clicks) { clicks = n; vl.set("theme", theme() === "dark" ? "light" : "dark"); }
        paint();
        busy();
        awaited = wanted;
        asked = window.location.href.split("#")[0];
        return { href: asked, theme: theme(), seen: (seen && seen.version) || "", tab: vl.tab };
      },
      shown: function (children, title, entries, links) {
        if (!children) return "";
        vl.entries = entries || [];
        navigate(links || []);
        if (title) document.title = title;
        const mine = awaited; // not this page's turn any more if the next was wanted before it could be seen
        window.requestAnimationFrame(() => { if (mine === wanted) settle(title); });
        return String(Date.now());
      },
      openRow: function (cell) {
        if (cell && cell.rowId !== undefined) {
          const row = vl.rowOf(cell);
          if (row) vl.go(vl.here({ layer: row.layer, head: row.head }, "/attention"));
        }
        return window.dash_clientside.no_update;
      },
    },
  });
  system.addEventListener("change", () => document.getElementById("theme") && !vl.get("theme", null) && window.location.reload());

  vl.rowOf = function (cell) {
    const api = window.dash_ag_grid.getApi("heads-table");
    const node = api.getRowNode(cell.rowId);
    return node && node.data;
  };

  function navigate(links) {
    const all = document.querySelectorAll("#navigation a");
    links.forEach(({ href, current, pale }, i) => {
      Object.assign(all[i], { href, className: pale ? "pale" : "", title: pale });
      if (current) all[i].setAttribute("aria-current", "page"); else all[i].removeAttribute("aria-current");
    });
  }

  function settle(title) {
    for (const select of document.querySelectorAll("select[data-value]")) {
      if (select.value !== select.dataset.value) select.value = select.dataset.value;
    }
    const page = window.location.pathname;
    if (last && last !== page) {
      window.scrollTo(0, 0);
      document.getElementById("main").focus({ preventScroll: true });
      vl.announce(title);
    }
    last = page;
    for (const twin of document.querySelectorAll(".table-twin[open] .twin")) fill(twin);
    vl.text();
    const current = document.querySelector(".text .token[aria-current]");
    if (current && document.activeElement === document.body) current.focus({ preventScroll: true });
    vl.draw();
    delete document.body.dataset.busy;
  }

  window.addEventListener("popstate", () => {
    if (window.location.href.split("#")[0] !== asked) vl.moved();
    document.getElementById("palette").close();
  });

  // Links stay real links: a middle click opens a tab, a plain click changes the page without loading it.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href]");
    if (!link || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (link.dataset.export === "png" || link.dataset.export === "svg") { vl.picture(event, link); return; }
    if (link.hasAttribute("download") || link.target || link.getAttribute("href").startsWith("#")) return;
    const url = new URL(link.href);
    const rest = url.pathname.slice(prefix().length);
    if (url.origin !== window.location.origin || !url.pathname.startsWith(prefix().replace(/\/$/, ""))) return;
    if (outside.some((start) => rest.startsWith(start))) return;
    event.preventDefault();
    vl.go(link.href);
  });

  document.addEventListener("change", (event) => {
    const name = event.target.dataset && event.target.dataset.parameter;
    if (!name) return;
    const changes = { [name]: event.target.value };
    if (name === "run") Object.assign(changes, { token: null, segment: null, context: null, zoom: null });
    if (name === "context" || name === "segment") Object.assign(changes, { token: null, zoom: null });
    vl.go(vl.here(changes));
  });

  // Buttons
  document.addEventListener("click", (event) => { if (event.target.closest("#theme")) busy(); });
  const actions = {
    copy: (button) => copy(button.dataset.text, "Python copied"),
    "copy-link": () => copy(window.location.href, "Link copied"),
    palette: () => vl.openPalette(),
    maximise: (button) => maximise(button.closest(".panel")),
    pin: (button) => pin(button.closest(".panel")),
    unpin: (button) => { button.closest(".pinned").remove(); vl.toast("Unpinned"); },
    "save-table": (button) => saveTable(button.closest(".panel")),
    keep: () => {
      const kept = vl.get("kept", []).filter((k) => k.href !== window.location.href);
      kept.unshift({ text: document.title.replace(" · visitlens", "") + describe(), kind: "kept", href: window.location.href });
      vl.set("kept", kept.slice(0, 50));
      vl.toast("Kept: find it in the command palette");
    },
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-action]");
    if (button && actions[button.dataset.action]) actions[button.dataset.action](button);
    for (const open of document.querySelectorAll("details.dropdown[open]")) {
      if (!open.contains(event.target) || event.target.closest(".menu")) open.open = false;
    }
  });

  function describe() {
    const names = [...new URLSearchParams(window.location.search)].filter(([k]) => k !== "run").map(([k, v]) => `${k} ${v}`);
    return names.length ? ": " + names.join(", ") : "";
  }

  // A card's table as a file: what it shows, with the address it came from.
  function saveTable(panel) {
    const title = panel.querySelector("h2").textContent;
    const fileName = title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) + ".csv";
    if (panel.querySelector("#heads-table")) { vl.grid("heads-table").then((api) => api.exportDataAsCsv({ fileName })); return; }
    const cell = (text) => {
      const plain = text.trim().replace(/^−/, "-");
      const inert = /^[=+@-]/.test(plain) && !isFinite(plain) ? "'" + plain : plain; // no formula for a spreadsheet
      return `"${inert.replace(/"/g, '""')}"`;
    };
    const rows = [...panel.querySelectorAll("table tr")].map((row) => [...row.cells].map((c) => cell(c.innerText)).join(","));
    const about = [`# panel: ${title}`, `# page: ${window.location.href}`];
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([[...about, ...rows].join("\n") + "\n"], { type: "text/csv" }));
    link.download = fileName;
    link.click();
    window.setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  async function copy(text, said) {
    try { await navigator.clipboard.writeText(text); } catch {
      const box = document.createElement("textarea");
      box.value = text;
      document.body.append(box);
      box.select();
      document.execCommand("copy");
      box.remove();
    }
    vl.toast(said);
  }

  function maximise(panel) {
    for (const other of document.querySelectorAll("[data-maximised]")) if (other !== panel) other.removeAttribute("data-maximised");
    panel.toggleAttribute("data-maximised"); // no class: React writes those anew
    window.dispatchEvent(new Event("resize"));
    const plot = panel.querySelector(".js-plotly-plot");
    if (plot) window.Plotly.Plots.resize(plot);
  }
  vl.restore = function () {
    const panel = document.querySelector("[data-maximised]");
    if (panel) maximise(panel);
  };

  // A pinned panel stays as it is while the selection changes.
  async function pin(panel) {
    const graph = panel.querySelector(".graph"), plot = graph.querySelector(".js-plotly-plot");
    const figure = JSON.parse(plot && plot.layout ? JSON.stringify({ data: plot.data, layout: plot.layout }) : graph.dataset.figure);
    const tray = document.getElementById("tray");
    const box = document.createElement("figure");
    box.className = "pinned";
    const name = panel.querySelector("h2").textContent;
    const caption = document.createElement("figcaption");
    const link = Object.assign(document.createElement("a"), { href: window.location.href, textContent: name + describe() });
    const close = Object.assign(document.createElement("button"), { type: "button", textContent: "×", className: "icon-button" });
    close.dataset.action = "unpin";
    close.setAttribute("aria-label", `Unpin ${name}`);
    caption.append(link, close);
    const chart = document.createElement("div");
    box.append(caption, chart);
    tray.prepend(box);
    vl.toast(`Pinned: ${name}`);
    await vl.plotly();
    if (chart.isConnected) window.Plotly.newPlot(chart, figure.data, { ...figure.layout, height: 230, width: undefined, autosize: true }, { displayModeBar: false, showSendToCloud: false, responsive: true });
  }

  // The table under a chart, fetched when it is opened.
  document.addEventListener("toggle", (event) => {
    if (event.target.matches && event.target.matches(".table-twin") && event.target.open) fill(event.target.querySelector(".twin"));
  }, true);

  async function fill(twin) {
    const source = twin.dataset.source;
    if (twin.dataset.filled === source) return;
    twin.dataset.filled = source;
    twin.textContent = "loading …";
    const response = await fetch(source).catch((error) => new Response(`The table can't be had: ${error.message}`, { status: 503 }));
    const answer = await response.text();
    if (twin.dataset.source !== source) return; // another table is wanted by now
    if (!response.ok) { delete twin.dataset.filled; twin.textContent = answer; return; }
    const data = JSON.parse(answer);
    const table = document.createElement("table");
    const caption = table.createCaption();
    caption.textContent = `${data.title}: ${data.total.toLocaleString("en")} rows` + (data.rows.length < data.total ? `, the first ${data.rows.length}; the CSV has all` : "");
    const head = table.createTHead().insertRow();
    for (const column of data.columns) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = column;
      head.append(cell);
    }
    const body = table.createTBody();
    for (const row of data.rows) {
      const line = body.insertRow();
      for (const value of row) {
        const cell = line.insertCell();
        cell.textContent = value === null ? "–" : typeof value === "number" && !Number.isInteger(value) ? value.toFixed(4).replace("-", "−") : value;
        if (typeof value === "number") cell.className = "number";
      }
    }
    const scroll = document.createElement("div");
    scroll.className = "scroll";
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", data.title + ", as a table");
    scroll.append(table);
    twin.replaceChildren(scroll);
  }
})();

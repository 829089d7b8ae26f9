// Charts: clicks and Enter open what a cell stands for, arrows move a cursor, hovering marks the same cell in linked maps.
(function () {
  "use strict";
  const vl = (window.visitlens = window.visitlens || {});
  const options = (chart) => JSON.parse(chart.dataset.options || "{}");
  const isMap = (trace) => trace.type === "heatmap";
  const plots = (chart) => chart.querySelector(".js-plotly-plot");

  // Drawing: one chart a turn, those in sight first, so that a click between two charts isn't kept waiting.
  const drawn = new Map(); // a chart's box -> the figure that is drawn in it
  let turn = 0;
  vl.draw = function () {
    for (const box of drawn.keys()) {
      if (box.isConnected) continue;
      if (box.firstChild) window.Plotly.purge(box.firstChild);
      drawn.delete(box);
    }
    for (const left of document.querySelectorAll("main .plot-container")) if (!left.closest(".graph")) left.remove();
    for (const box of document.querySelectorAll("main .graph[data-drawn]")) {
      if (drawn.get(box) !== box.dataset.figure) delete box.dataset.drawn;
    }
    if (document.querySelector("main .graph")) vl.plotly().then(next); else idle(vl.plotly);
  };

  function next() {
    window.clearTimeout(turn);
    const waiting = [...document.querySelectorAll("main .graph")].filter((box) => drawn.get(box) !== box.dataset.figure);
    if (!waiting.length) return;
    const box = waiting.find(inSight) || waiting[0];
    const figure = JSON.parse(box.dataset.figure);
    drawn.set(box, box.dataset.figure);
    figure.layout.uirevision = window.location.href; // a zoom stays while the same page is drawn again
    const plot = box.firstChild || box.appendChild(document.createElement("div"));
    const done = () => {
      attach(box.parentElement, plot);
      if (box.closest("[data-maximised]")) window.Plotly.Plots.resize(plot);
      resume(box.parentElement, plot);
      box.dataset.drawn = "yes";
    };
    window.Plotly.react(plot, figure.data, figure.layout, JSON.parse(box.dataset.config)).then(done).catch(console.error).then(() => {
      const more = waiting.some((other) => other !== box && inSight(other));
      if (more) turn = window.setTimeout(next, 0); else idle(next);
    });
  }

  function inSight(box) {
    const at = box.getBoundingClientRect();
    return at.bottom > 0 && at.top < window.innerHeight;
  }

  const idle = (work) => (window.requestIdleCallback || ((f) => window.setTimeout(f, 50)))(work, { timeout: 400 });

  // Plotly's script: with the first chart, or once a page without charts is shown.
  let loading = null;
  vl.plotly = function () {
    loading = loading || new Promise((resolve) => {
      const script = document.createElement("script");
      script.src = document.querySelector("meta[name=plotly]").content;
      script.onload = () => resolve(window.Plotly);
      script.onerror = () => { loading = null; vl.toast("The charts can't be drawn: plotly.min.js didn't load"); };
      document.head.append(script);
    });
    return loading;
  };
  if (document.documentElement && !/\/$/.test(window.location.pathname)) vl.plotly(); // not the Overview: there will be charts

  function attach(chart, plot) {
    hidden(chart, plot);
    if (plot.visitlens) return;
    plot.visitlens = true;
    plot.on("plotly_click", (event) => { const p = event.points[0]; if (p) open(chart, place(p)); });
    plot.on("plotly_hover", (event) => { const p = event.points[0]; if (p) show(chart, place(p), false); });
    plot.on("plotly_unhover", () => clear(chart));
    plot.on("plotly_relayout", (change) => zoomed(chart, plot, change));
    plot.on("plotly_afterplot", () => clear(chart));
  }
  // A chart inside role=application is described by its label and its table: its SVG is none of a reader's business.
  function hidden(chart, plot) {
    const box = plot.querySelector(".plot-container");
    if (box && !box.hasAttribute("aria-hidden")) box.setAttribute("aria-hidden", "true");
  }

  // A chart that is drawn anew: the keyboard's cursor says what is there now, and the scrubber stands at the earlier visit again.
  function resume(chart, plot) {
    const at = chart.visitlensAt, trace = at && plot._fullData[at.trace];
    if (trace && at.column < trace.x.length && (at.row === undefined || at.row < trace.y.length)) show(chart, at, true);
    else { chart.visitlensAt = null; clear(chart); }
    const scrubber = chart.parentElement.querySelector(".scrubber");
    if (scrubber) { scrubber.value = 0; chart.parentElement.querySelector(".scrubber-at").textContent = "earlier visit"; }
  }

  // A place is a trace with a row and column (maps) or a point.
  function place(point) {
    const trace = point.curveNumber;
    return Array.isArray(point.pointNumber)
      ? { trace, row: point.pointNumber[0], column: point.pointNumber[1] }
      : { trace, column: point.pointNumber };
  }

  function labels(plot, at) {
    const trace = plot._fullData[at.trace];
    const calc = plot.calcdata[at.trace];
    if (isMap(trace)) {
      const z = calc[0].z[at.row] ? calc[0].z[at.row][at.column] : undefined;
      return { x: String(trace.x[at.column]), y: String(trace.y[at.row]), value: z };
    }
    return { x: String(trace.x[at.column]), y: trace.name, value: trace.y[at.column] };
  }

  const plain = (text) => String(text).replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
  const digits = (value) => (typeof value === "number" && isFinite(value) ? value.toFixed(4).replace("-", "−") : "not measured");
  const leading = (label) => { const found = /\d+/.exec(plain(label)); return found ? found[0] : null; };

  function open(chart, at) {
    const links = options(chart).links;
    if (!links) return;
    if (links.hrefs) {
      const href = links.hrefs[at.row] && links.hrefs[at.row][at.column];
      if (href) vl.go(href); else vl.announce("There is no recording for this cell.");
      return;
    }
    const found = labels(plots(chart), at);
    const changes = Object.assign({}, links.keep);
    if (links.x && leading(found.x) !== null) changes[links.x] = leading(found.x);
    if (links.y && leading(found.y) !== null && at.row !== undefined) changes[links.y] = leading(found.y);
    vl.go(vl.here(changes, links.path));
  }

  // One cell in words: its value in every map of the figure, or its value in every line.
  function words(plot, at) {
    const here = labels(plot, at);
    const trace = plot._fullData[at.trace];
    const name = (axis) => plain((axis.title && axis.title.text) || "").replace(/ \(0-based\)|, as .*$/g, "");
    if (isMap(trace)) {
      const first = plot._fullData.find(isMap);
      const xa = plot._fullLayout[axisName(first.xaxis)], ya = plot._fullLayout[axisName(first.yaxis)];
      const titles = (plot._fullLayout.annotations || []).map((a) => plain(a.text));
      const values = plot._fullData.flatMap((t, i) => {
        if (!isMap(t)) return [];
        const label = titles[i] && plot._fullData.filter(isMap).length > 1 ? titles[i].split(":")[0] + " " : "";
        return [label + digits(labels(plot, { ...at, trace: i }).value)];
      });
      return `${name(ya)} ${plain(here.y)}, ${name(xa)} ${plain(here.x)}: ${values.join(" · ")}`;
    }
    const xa = plot._fullLayout[axisName(trace.xaxis)];
    const values = plot._fullData.flatMap((t, i) => {
      if (isMap(t) || !t.x || t.hoverinfo === "skip" || t.xaxis !== trace.xaxis) return [];
      const k = Array.prototype.findIndex.call(t.x, (x) => String(x) === here.x);
      return k < 0 ? [] : [(t.name && t.showlegend !== false ? plain(t.name) + " " : "") + digits(t.y[k])];
    });
    return `${name(xa)} ${plain(here.x)}: ${values.join(" · ")}`;
  }

  const axisName = (id) => id.replace(/^([xy])/, "$1axis");

  function show(chart, at, spoken) {
    const plot = plots(chart);
    const text = words(plot, at);
    const readout = chart.parentElement.querySelector(".readout");
    if (readout) readout.textContent = text;
    if (spoken) vl.announce(text);
    cursor(chart, plot, at, spoken);
  }

  function clear(chart) {
    if (chart === document.activeElement && chart.visitlensAt) return;
    for (const box of chart.querySelectorAll(".cell-cursor")) box.remove();
    const readout = chart.parentElement.querySelector(".readout");
    if (readout) readout.textContent = "\u00a0";
  }

  function cursor(chart, plot, at, strong) {
    for (const box of chart.querySelectorAll(".cell-cursor")) box.remove();
    const own = plot._fullData[at.trace];
    const all = options(chart).linked && isMap(own) ? plot._fullData.map((t, i) => i).filter((i) => isMap(plot._fullData[i])) : [at.trace];
    for (const i of all) {
      const trace = plot._fullData[i];
      const xa = plot._fullLayout[axisName(trace.xaxis)], ya = plot._fullLayout[axisName(trace.yaxis)];
      const box = document.createElement("div");
      box.className = "cell-cursor" + (strong ? " strong" : "");
      let x, y, w = 14, h = 14;
      if (isMap(trace)) {
        x = xa.c2p(at.column); y = ya.c2p(at.row);
        w = Math.max(Math.abs(xa.c2p(1) - xa.c2p(0)), 5); h = Math.max(Math.abs(ya.c2p(1) - ya.c2p(0)), 5);
      } else {
        const point = plot.calcdata[i][at.column]; // d2p takes a category "2" for the third place
        x = xa.c2p(point.x); y = ya.c2p(point.y);
        box.classList.add("round");
      }
      if (!isFinite(x) || !isFinite(y)) continue;
      Object.assign(box.style, { left: `${xa._offset + x - w / 2}px`, top: `${ya._offset + y - h / 2}px`, width: `${w}px`, height: `${h}px` });
      chart.append(box);
    }
  }

  // Keys
  document.addEventListener("keydown", (event) => {
    const chart = event.target.closest && event.target.closest(".chart");
    if (!chart || event.target !== chart) return;
    const plot = plots(chart);
    if (!plot || !plot.calcdata) return;
    const at = chart.visitlensAt ? { ...chart.visitlensAt } : start(plot);
    if (!at) return;
    if (event.key === "Enter") { event.preventDefault(); open(chart, at); return; }
    if (event.key === "Escape") { chart.visitlensAt = null; chart.blur(); clear(chart); return; }
    if (!/^(Arrow|Home$|End$|Page)/.test(event.key)) return;
    event.preventDefault();
    if (chart.visitlensAt) move(plot, at, event.key);
    chart.visitlensAt = at;
    show(chart, at, true);
  });
  document.addEventListener("focusout", (event) => {
    if (event.target.classList && event.target.classList.contains("chart")) { event.target.visitlensAt = null; clear(event.target); }
  });

  function start(plot) {
    const map = plot._fullData.findIndex(isMap);
    if (map >= 0) return { trace: map, row: 0, column: 0 };
    const line = plot._fullData.findIndex((t) => t.x && t.x.length && t.hoverinfo !== "skip");
    return line >= 0 ? { trace: line, column: 0 } : null;
  }

  function move(plot, at, key) {
    const trace = plot._fullData[at.trace];
    const within = (value, most) => Math.min(Math.max(value, 0), most - 1);
    if (isMap(trace)) {
      const [rows, columns] = [trace.y.length, trace.x.length];
      const down = plot._fullLayout[axisName(trace.yaxis)].autorange === "reversed" || plot._fullLayout[axisName(trace.yaxis)].range[0] > plot._fullLayout[axisName(trace.yaxis)].range[1] ? 1 : -1;
      at.row = within(at.row + ({ ArrowDown: down, ArrowUp: -down }[key] || 0), rows);
      at.column = { Home: 0, End: columns - 1 }[key] ?? within(at.column + ({ ArrowRight: 1, ArrowLeft: -1 }[key] || 0), columns);
      const maps = plot._fullData.map((t, i) => i).filter((i) => isMap(plot._fullData[i]));
      const next = maps.indexOf(at.trace) + ({ PageDown: 1, PageUp: -1 }[key] || 0);
      at.trace = maps[within(next, maps.length)];
      return;
    }
    at.column = { Home: 0, End: trace.x.length - 1 }[key] ?? within(at.column + ({ ArrowRight: 1, ArrowLeft: -1 }[key] || 0), trace.x.length);
    const lines = plot._fullData.map((t, i) => i).filter((i) => plot._fullData[i].x && plot._fullData[i].hoverinfo !== "skip");
    const next = lines.indexOf(at.trace) + ({ ArrowDown: 1, ArrowUp: -1 }[key] || 0);
    at.trace = lines[within(next, lines.length)];
    at.column = within(at.column, plot._fullData[at.trace].x.length);
  }

  // A pooled map is fetched again for the part that is zoomed to.
  function zoomed(chart, plot, change) {
    const zoom = options(chart).zoom;
    if (!zoom) return;
    if (zoom.part && change["xaxis.autorange"]) { vl.go(vl.here({ zoom: null })); return; } // a double click
    if (zoom.factor < 2 || !Object.keys(change).some((key) => /axis\d*\.range/.test(key))) return;
    const xs = plot.layout.xaxis.range, ys = plot.layout.yaxis.range;
    const part = (range, starts) => {
      const [low, high] = [Math.min(...range), Math.max(...range)].map(Math.round);
      const first = starts[Math.max(0, Math.min(low, starts.length - 1))];
      const next = high + 1 < starts.length ? starts[high + 1] : starts[starts.length - 1] + zoom.factor;
      return `${first}-${next}`;
    };
    vl.go(vl.here({ zoom: `${part(ys, zoom.rows)}-${part(xs, zoom.columns)}` }));
  }

  // The visit scrubber: the first map becomes the second.
  document.addEventListener("input", (event) => {
    if (!event.target.closest || !event.target.closest(".scrubber")) return;
    const panel = event.target.closest(".panel");
    const chart = panel.querySelector(".chart");
    const plot = plots(chart);
    const [from, to] = options(chart).morph || [];
    if (!plot || to === undefined) return;
    if (!plot.visitlensFirst || plot.visitlensFigure !== plot.calcdata[to][0].z) {
      plot.visitlensFirst = plot.calcdata[from][0].z.map((row) => Array.from(row));
      plot.visitlensFigure = plot.calcdata[to][0].z;
    }
    const t = event.target.value / 100;
    const second = plot.calcdata[to][0].z;
    const mixed = plot.visitlensFirst.map((row, i) => row.map((v, j) => (1 - t) * v + t * second[i][j]));
    window.cancelAnimationFrame(vl.morphing);
    vl.morphing = window.requestAnimationFrame(() => window.Plotly.restyle(plot, { z: [mixed] }, [from]));
    const at = panel.querySelector(".scrubber-at");
    if (at) at.textContent = t === 0 ? "earlier visit" : t === 1 ? "later visit" : `${Math.round(t * 100)}% towards the later`;
  });

  // PNG and SVG are drawn in the browser, with the title and hashes that the server's file would carry.
  vl.picture = async function (event, link) {
    const panel = link.closest(".panel");
    const plot = panel && plots(panel);
    if (!plot) return;
    event.preventDefault();
    const format = link.dataset.export;
    const response = await fetch(link.href.replace(/\/([\w-]+)\.(png|svg)/, "/$1.figure"));
    if (!response.ok) { window.location.href = link.href; return; }
    const figure = await response.json();
    const box = document.createElement("div");
    box.className = "unseen";
    document.body.append(box);
    try {
      await window.Plotly.newPlot(box, figure.data, figure.layout, { staticPlot: true, showSendToCloud: false });
      await window.Plotly.downloadImage(box, { format, width: figure.layout.width, height: figure.layout.height, scale: format === "png" ? 2 : 1, filename: link.getAttribute("download").replace(/\.\w+$/, "") });
    } finally {
      window.Plotly.purge(box);
      box.remove();
    }
  };
})();

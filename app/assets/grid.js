// AG Grid: its script comes with the first page that has a table of it, and a table is made when it comes in sight or the page rests.
(function () {
  "use strict";
  const vl = (window.visitlens = window.visitlens || {});
  const source = document.querySelector("meta[name=grid]").content;
  const React = window.React;
  let loading = null;

  function load() {
    loading = loading || new Promise((resolve) => {
      const script = document.createElement("script");
      script.src = source;
      script.onload = () => {
        const grid = window.dash_ag_grid;
        window.dash_ag_grid = { ...grid, AgGrid: Later };
        resolve(grid.AgGrid);
      };
      script.onerror = () => { loading = null; vl.toast("The table can't be shown: dash_ag_grid.min.js didn't load"); };
      document.head.append(script);
    });
    return loading;
  }

  // The table's API, once the table is there.
  vl.grid = (id) => load().then(() => window.dash_ag_grid.getApiAsync(id));

  // Calls once: when the box is in sight or almost, else a second later when nothing else is to do. Gives what cancels it.
  function when(box, call) {
    let idle = 0;
    const once = () => { cancel(); call(); };
    const observer = new IntersectionObserver((seen) => { if (seen.some((s) => s.isIntersecting)) once(); }, { rootMargin: "10%" });
    const timer = window.setTimeout(() => { idle = window.requestIdleCallback ? window.requestIdleCallback(once) : window.setTimeout(once); }, 1000);
    function cancel() {
      observer.disconnect();
      window.clearTimeout(timer);
      if (window.cancelIdleCallback) window.cancelIdleCallback(idle); else window.clearTimeout(idle);
    }
    observer.observe(box);
    return cancel;
  }

  // Tab leaves the table, as it leaves a list; arrows walk its cells.
  function leave(id) {
    const options = { tabToNextCell: () => false, tabToNextHeader: () => false };
    window.dash_ag_grid.getApiAsync(id).then((api) => { for (const [name, value] of Object.entries(options)) api.setGridOption(name, value); });
  }

  function Later(props) {
    const box = React.useRef(null);
    const [Grid, setGrid] = React.useState(null);
    React.useEffect(() => when(box.current, () => load().then((found) => setGrid(() => found))), []);
    React.useEffect(() => { if (Grid) leave(props.id); }, [Grid]);
    return Grid ? React.createElement(Grid, props) : React.createElement("div", { id: props.id, ref: box, style: props.style });
  }

  if (source) window.dash_ag_grid = { AgGrid: Later };
})();

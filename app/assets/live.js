// The Live probe: a finished job goes into the URL, a tab finds its last run again, Ctrl Enter runs the prompt.
(function () {
  "use strict";
  const key = "visitlens:live-job";
  const kept = { get: () => { try { return window.sessionStorage.getItem(key); } catch { return null; } },
    set: (job) => { try { window.sessionStorage.setItem(key, job); } catch { /* no storage */ } } };
  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    visitlensLive: {
      go: function (changes) {
        const vl = window.visitlens;
        if (changes) {
          if (changes.job) kept.set(changes.job);
          vl.go(vl.here(changes, "/live"));
        } else if (kept.get() && !new URL(window.location.href).searchParams.has("job")) {
          window.history.replaceState(null, "", vl.here({ job: kept.get() }));
          vl.moved();
        }
        return window.dash_clientside.no_update;
      },
    },
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || event.target.id !== "live-prompt") return;
    event.preventDefault();
    event.target.blur(); // the textarea tells its value when it is left
    window.setTimeout(() => {
      const run = [...document.querySelectorAll("button.primary")].find((button) => button.title === "Run the prompt");
      if (run) run.click();
      event.target.focus();
    }, 0);
  });
})();

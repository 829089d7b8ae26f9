// The Live probe: a finished job goes into the URL, Ctrl Enter runs the prompt.
(function () {
  "use strict";
  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    visitlensLive: {
      go: function (changes) {
        if (changes) window.visitlens.go(window.visitlens.here(changes, "/live"));
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

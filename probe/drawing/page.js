(function () {
  "use strict";
  const config = JSON.parse(document.getElementById("config").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  if (typeof Plotly === "undefined") {
    for (const chart of document.querySelectorAll(".chart")) {
      chart.style.height = "auto";
      chart.textContent =
        "This chart is drawn by plotly.min.js, a file that belongs in the same folder as this page and isn't there: " +
        "copy or send the whole folder.";
    }
    return;
  }

  function draw(scheme) {
    for (const chart of document.querySelectorAll(".chart")) {
      const source = document.getElementById(chart.id + "-" + scheme) || document.getElementById(chart.id + "-only");
      const figure = JSON.parse(source.textContent);
      Plotly.react(chart, figure.data, figure.layout, config);
    }
  }

  const current = () => (dark.matches ? "dark" : "light");
  draw(current());
  dark.addEventListener("change", () => draw(current()));
  window.addEventListener("beforeprint", () => draw("light"));
  window.addEventListener("afterprint", () => draw(current()));
})();

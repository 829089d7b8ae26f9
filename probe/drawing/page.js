(function () {
  "use strict";
  const config = JSON.parse(document.getElementById("config").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

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

// A document's tokens as links, from the list that the page brings; those that stay keep their element, and so the focus.
(function () {
  "use strict";
  const vl = (window.visitlens = window.visitlens || {});
  const drawn = new WeakMap(); // a text's box -> the list that is drawn in it

  // Before the browser paints what React has put there: what stands below a text must not jump when it is filled.
  new MutationObserver(() => {
    for (const box of document.getElementsByClassName("text")) {
      if (box.dataset.tokens && drawn.get(box) !== box.dataset.tokens) { vl.text(); return; }
    }
  }).observe(document.documentElement, { childList: true, subtree: true });

  vl.text = function () {
    for (const link of document.querySelectorAll("main a[data-at]")) if (!link.closest("[data-tokens]")) link.remove();
    for (const box of document.querySelectorAll("main [data-tokens]")) {
      if (drawn.get(box) === box.dataset.tokens && box.childElementCount) continue;
      drawn.set(box, box.dataset.tokens);
      fill(box, JSON.parse(box.dataset.tokens));
    }
  };

  function fill(box, list) {
    const chosen = list.chosen === null ? -1 : list.chosen - list.start;
    const first = chosen >= 0 && chosen < list.texts.length ? chosen : 0; // the one that Tab comes to
    const ends = new Set(list.lines);
    const more = document.createDocumentFragment();
    list.texts.forEach((text, at) => {
      const link = box.children[at] || more.appendChild(document.createElement("a"));
      const token = list.start + at, strength = list.strengths[at];
      link.dataset.at = at;
      link.textContent = text;
      link.href = list.href.replace(/([?&]token=)\d+/, `$1${token}`);
      link.className = `token ${strength >= 0 ? "up" : "down"}${ends.has(at) ? " line-end" : ""}`;
      link.style.setProperty("--strength", Math.abs(strength).toFixed(3));
      link.tabIndex = at === first ? 0 : -1;
      link.title = `token ${token}, position ${list.positions[at]}: ${list.values[at]}`;
      if (at === chosen) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    });
    while (box.childElementCount > list.texts.length) box.lastElementChild.remove();
    box.append(more);
  }
})();

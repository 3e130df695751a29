"use strict";
// Hides runs, shows the numbers under the pointer, switches light and dark. The page is complete without it.
(() => {
  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  const hidden = new Set();
  for (const button of document.querySelectorAll(".legend button[data-run]")) {
    button.addEventListener("click", (event) => {
      const run = button.dataset.run;
      const all = [...document.querySelectorAll(".legend button[data-run]")].map((other) => other.dataset.run);
      if (event.shiftKey) {  // only this one, or all again
        const alone = all.every((other) => hidden.has(other) === (other !== run));
        hidden.clear();
        if (!alone) all.filter((other) => other !== run).forEach((other) => hidden.add(other));
      } else if (!hidden.delete(run)) hidden.add(run);
      for (const other of document.querySelectorAll(".legend button[data-run]"))
        other.setAttribute("aria-pressed", String(!hidden.has(other.dataset.run)));
      for (const mark of document.querySelectorAll("svg .mark")) mark.classList.toggle("hidden", hidden.has(mark.dataset.run));
    });
  }

  const shown = (value) => (Math.abs(value) >= 1000 ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : Number(value.toPrecision(5)).toString());
  const nearest = (points, x) => points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
  const charts = JSON.parse(document.getElementById("charts").textContent);
  for (const svg of document.querySelectorAll("svg.lines")) {
    const lines = charts[svg.dataset.chart];
    const { x0, x1, left, right, top, bottom } = Object.fromEntries(Object.entries(svg.dataset).map(([k, v]) => [k, Number(v)]));
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cursor.setAttribute("class", "cursor hidden");
    cursor.setAttribute("y1", top);
    cursor.setAttribute("y2", bottom);
    svg.append(cursor);
    const tip = document.createElement("div");
    tip.className = "tip hidden";
    svg.parentElement.append(tip);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / box.width;
      const at = x0 + (((event.clientX - box.left) * scale - left) / (right - left)) * (x1 - x0);
      const visible = lines.filter((line) => !hidden.has(String(line.run)));
      if (!visible.length) return;
      const step = nearest(visible.flatMap((line) => line.points), at)[0];
      const found = visible.map((line) => ({ ...line, point: nearest(line.points, step) })).filter((line) => line.point[0] === step);
      found.sort((a, b) => b.point[1] - a.point[1]);
      const place = left + ((step - x0) / (x1 - x0 || 1)) * (right - left);
      cursor.setAttribute("x1", place);
      cursor.setAttribute("x2", place);
      tip.replaceChildren(document.createTextNode(`step ${shown(step)}`));
      for (const line of found.slice(0, 12)) {
        const row = document.createElement("div");
        row.className = `c${line.run % 8}`;
        const name = document.createElement("span");
        name.textContent = line.label;
        const value = document.createElement("b");
        value.textContent = shown(line.point[1]);
        row.append(document.createElement("i"), name, value);
        tip.append(row);
      }
      cursor.classList.remove("hidden");
      tip.classList.remove("hidden");
      const card = svg.parentElement.getBoundingClientRect();
      const x = event.clientX - card.left;
      tip.style.left = `${x > card.width / 2 ? Math.max(4, x - tip.offsetWidth - 14) : x + 14}px`;
      tip.style.top = `${event.clientY - card.top + 12}px`;
    });
    svg.addEventListener("pointerleave", () => {
      cursor.classList.add("hidden");
      tip.classList.add("hidden");
    });
  }
})();

"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

function size(bytes) {
  const [unit, of] = bytes >= 2 ** 30 ? ["GiB", 2 ** 30] : bytes >= 2 ** 20 ? ["MiB", 2 ** 20] : ["KiB", 2 ** 10];
  return (bytes / of).toFixed(unit === "GiB" ? 2 : 1) + " " + unit;
}

// A chart: its slider, or the pointer over it, chooses a moment; what lives then is told below.
for (const figure of document.querySelectorAll("[data-chart]")) {
  const chart = data.charts[figure.dataset.chart];
  const area = figure.querySelector(".area");
  const cursor = figure.querySelector(".cursor");
  const slider = figure.querySelector("input");
  const output = figure.querySelector("output");

  function show(place) {
    const moment = chart.moments[place];
    const phase = chart.phases.filter(each => each[1] <= moment).pop();
    const live = chart.live.map((values, kind) => [values[place] * 1024, chart.kinds[kind]]).filter(each => each[0] > 0);
    const total = live.reduce((sum, each) => sum + each[0], 0);
    const where = chart.modules[place];
    const parts = live.map(each => size(each[0]) + " " + each[1]).join(", ");
    const text = `${size(total)} in ${phase[0]}${where ? ", at " + where : ""}${place === chart.top ? " (the peak)" : ""}: ${parts}`;
    slider.value = place;
    slider.setAttribute("aria-valuetext", text);
    output.textContent = text;
    cursor.hidden = false;
    cursor.style.left = 100 * moment / chart.events + "%";
  }

  slider.addEventListener("input", () => show(Number(slider.value)));
  area.addEventListener("pointermove", event => {
    const box = area.getBoundingClientRect();
    const moment = (event.clientX - box.left) / box.width * chart.events;
    const after = chart.moments.findIndex(each => each > moment);
    show(after < 0 ? chart.moments.length - 1 : Math.max(after - 1, 0));
  });
  figure.querySelector(".peak").addEventListener("click", () => show(chart.top));
  show(chart.top);
  cursor.hidden = true;
}

// Escape hides the text of a marker until it is left.
for (const marker of document.querySelectorAll(".marker")) {
  marker.addEventListener("keydown", event => { if (event.key === "Escape") marker.classList.add("quiet"); });
  for (const leave of ["pointerleave", "focusout"]) marker.addEventListener(leave, () => marker.classList.remove("quiet"));
}

// Tables: a heading sorts by its column, and the other way round when it is pressed again.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const numbers = head.classList.contains("n");
    const before = head.getAttribute("aria-sort");
    const down = before ? before === "ascending" : numbers;
    const key = row => row.cells[column].dataset.sort ?? row.cells[column].textContent;
    const compare = (one, other) => {
      const [a, b] = [key(one), key(other)];
      return isFinite(a) && isFinite(b) ? a - b : a.localeCompare(b);
    };
    const rows = [...table.tBodies[0].rows].sort((one, other) => down ? compare(other, one) : compare(one, other));
    table.tBodies[0].append(...rows);
    for (const each of heads) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
  }));
}

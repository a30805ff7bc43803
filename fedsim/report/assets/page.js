"use strict";

// --- Tables: a click on a column's head sorts by it, numbers before texts, and a second click the other way round.

function compareCells(one, other) {
  const a = one.dataset.sort, b = other.dataset.sort;
  if (a !== undefined && b !== undefined) return Number(a) === Number(b) ? 0 : Number(a) - Number(b);
  if (a !== undefined || b !== undefined) return a !== undefined ? -1 : 1;
  return one.textContent.localeCompare(other.textContent, undefined, { numeric: true });
}

function sortBy(table, column) {
  const head = table.tHead.rows[0].cells[column], body = table.tBodies[0];
  const downwards = head.getAttribute("aria-sort") === "ascending";
  const rows = [...body.rows].sort((a, b) => compareCells(a.cells[column], b.cells[column]));
  body.append(...(downwards ? rows.reverse() : rows));
  for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", downwards ? "descending" : "ascending");
}

for (const table of document.querySelectorAll("table.sortable"))
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    cell.querySelector("button").addEventListener("click", () => sortBy(table, column));
  });

// --- Curves: one plot per panel; values, axes and methods are chosen for all of them together.

const byId = (id) => document.getElementById(id);

function fillSelect(select, labels) {
  for (const [name, label] of Object.entries(labels)) select.add(new Option(label, name));
}

const DASHES = { solid: "", dash: "6 4", dot: "2 3", dashdot: "6 3 2 3" };

function sample(look) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg"), line = document.createElementNS(space, "line");
  for (const [key, value] of Object.entries({ width: 28, height: 8 })) svg.setAttribute(key, value);
  const drawn = { x1: 0, x2: 28, y1: 4, y2: 4, stroke: look.color, "stroke-width": 2, "stroke-dasharray": DASHES[look.dash] };
  for (const [key, value] of Object.entries(drawn)) line.setAttribute(key, value);
  svg.append(line);
  return svg;
}

function methodBox(name, look) {
  const label = document.createElement("label"), box = document.createElement("input");
  box.type = "checkbox";
  box.checked = true;
  box.value = name;
  label.append(box, " ", sample(look), ` ${name}`);
  return label;
}

function rangeTrace(line, look, axis) {
  const x = line[axis], there = x.concat([...x].reverse()), back = line.high.concat([...line.low].reverse());
  return { x: there, y: back, fill: "toself", fillcolor: look.color, opacity: 0.12, line: { width: 0 }, mode: "lines",
           hoverinfo: "skip", showlegend: false };
}

function lineTrace(line, look, axis, value) {
  return { x: line[axis], y: line[value], name: line.name, showlegend: false,
           mode: line[axis].length > 1 ? "lines" : "markers",
           line: { color: look.color, dash: look.dash, width: 2 },
           marker: { color: look.color, symbol: look.symbol, size: 8 },
           hovertemplate: `${escapeText(line.name)} (${line.seeds} seeds): %{y:.4f}<extra></extra>` };
}

function escapeText(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll("%", "&#37;");
}

function drawAll(data, places) {
  const axis = byId("axis").value, value = byId("value").value;
  const ticks = axis in data.units ? { tickformat: "~s", ticksuffix: data.units[axis] } : {};  // 5MB
  const wanted = new Set([...document.querySelectorAll("#methods input:checked")].map((box) => box.value));
  data.panels.forEach((panel, number) => {
    const lines = panel.lines.filter((line) => wanted.has(line.name));
    const ranges = byId("range").checked && value === data.range_of ? lines.filter((line) => line.seeds > 1) : [];
    const traces = [...ranges.map((line) => rangeTrace(line, data.looks[line.name], axis)),
                    ...lines.map((line) => lineTrace(line, data.looks[line.name], axis, value))];
    const layout = { title: { text: escapeText(panel.title), font: { size: 14 }, x: 0.02 }, margin: { l: 60, r: 20, t: 40, b: 50 },
                     xaxis: { title: { text: data.axes[axis] }, type: byId("log").checked ? "log" : "linear", ...ticks },
                     yaxis: { title: { text: data.values[value] } }, hovermode: "closest" };
    // Plotly's button "Share chart" would upload the results.
    const config = { responsive: true, displaylogo: false, showSendToCloud: false, toImageButtonOptions: { format: "svg" } };
    Plotly.react(places[number], traces, layout, config);
  });
}

function startCurves() {
  const data = JSON.parse(byId("curves-data").textContent);
  fillSelect(byId("axis"), data.axes);
  fillSelect(byId("value"), data.values);
  byId("methods").append(...Object.entries(data.looks).map(([name, look]) => methodBox(name, look)));
  const places = data.panels.map(() => {
    const place = document.createElement("div");
    place.className = "panel";
    byId("panels").append(place);
    return place;
  });
  const draw = () => drawAll(data, places);
  for (const id of ["axis", "value", "log", "range", "methods"]) byId(id).addEventListener("change", draw);
  for (const [id, checked] of [["all", true], ["none", false]])
    byId(id).addEventListener("click", () => {
      for (const box of document.querySelectorAll("#methods input")) box.checked = checked;
      draw();
    });
  draw();
}

if (byId("curves-data")) startCurves();

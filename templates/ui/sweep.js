// One sweep: its points in a table, and as a scatter plot (one setting) or parallel coordinates (several).
import { BADGES, integer, svg } from "./format.js";
import { watch } from "./live.js";
import { byId, fresh } from "./text.js";

const HEIGHT = 320; // px
const NARROW = 640;
const EDGE = { left: 64, right: 64, top: 48, bottom: 44 };

const data = JSON.parse(byId("data").textContent);
const url = `/api/live/sweeps/${location.pathname.split("/").at(-1)}`;
let sort = { id: "best", down: false };
let results = null;
let width = 1000; // of the drawing, px

const figure = (v) => (v === null || v === undefined ? "" : String(Number(v.toPrecision(5))));
const written = (v) => (v === null || v === undefined ? "" : typeof v === "number" ? figure(v) : typeof v === "string" ? v : JSON.stringify(v));

function columns() {
  const keys = [...new Set(results.runs.flatMap((row) => Object.keys(row.values)))];
  const better = results.higher_is_better ? -1 : 1;
  return [
    ...keys.map((key) => ({ id: `set ${key}`, title: key, numeric: results.runs.every((r) => typeof (r.values[key] ?? 0) === "number"), value: (r) => r.values[key] ?? null, text: (r) => written(r.values[key]) })),
    { id: "best", title: `best ${results.metric}`, numeric: true, value: (r) => (r.best ? better * r.best.value : null), text: (r) => figure(r.best?.value) },
    { id: "at", title: "at step", numeric: true, value: (r) => r.best?.step ?? null, text: (r) => (r.best ? integer(r.best.step) : "") },
    { id: "last", title: "last", numeric: true, value: (r) => r.last?.value ?? null, text: (r) => figure(r.last?.value) },
    { id: "step", title: "step", numeric: true, value: (r) => r.step, text: (r) => (r.step === null ? "" : r.total_steps ? `${integer(r.step)} / ${integer(r.total_steps)}` : integer(r.step)) },
    { id: "state", title: "state", value: (r) => r.state, badge: true },
    { id: "run", title: "run", value: (r) => r.run, link: true },
  ];
}

function compareBy(column) {
  return (a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return (sort.down ? -order : order) || a.task - b.task;
  };
}

function showTable() {
  const shown = columns();
  const table = byId("points");
  const focused = document.activeElement?.closest?.("th button")?.dataset.id;
  const head = table.tHead.rows[0];
  head.replaceChildren();
  for (const column of shown) {
    const cell = fresh("th", head, undefined, column.numeric ? "n" : "");
    cell.scope = "col";
    if (sort.id === column.id) cell.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
    const button = fresh("button", cell, column.title);
    button.type = "button";
    button.dataset.id = column.id;
    button.onclick = () => {
      sort = { id: column.id, down: sort.id === column.id && !sort.down };
      showTable();
    };
    if (column.id === focused) button.focus();
  }
  const order = shown.find((column) => column.id === sort.id) ?? shown.find((column) => column.id === "best");
  const lines = [...results.runs].sort(compareBy(order)).map((row) => {
    const line = document.createElement("tr");
    line.dataset.run = row.run;
    line.classList.toggle("best", row.run === results.best);
    for (const column of shown) {
      const cell = fresh(column.link ? "th" : "td", line, undefined, column.numeric ? "n" : "");
      if (column.badge) fresh("span", cell, row.state, `badge ${BADGES[row.state] ?? ""}`);
      else if (column.link) {
        cell.scope = "row";
        const link = fresh("a", cell, row.run);
        link.href = row.url;
        if (row.run === results.best) fresh("span", cell, "best", "badge good");
        if (row.error) fresh("span", cell, row.error, "low");
      } else cell.textContent = column.text(row);
    }
    line.onmouseenter = () => light(row.run);
    line.onmouseleave = () => light(null);
    return line;
  });
  table.tBodies[0].replaceChildren(...lines);
}

function light(run) {
  for (const element of document.querySelectorAll("[data-run]")) element.classList.toggle("lit", element.dataset.run === run);
}

// ---- the drawing -------------------------------------------------------------------------------------------------

// An axis: place(value) is from 0 to 1; ticks are [value, text]. A setting has its values as ticks, a metric round numbers.
function makeScale(values, isMetric) {
  if (!values.every((v) => typeof v === "number")) {
    const distinct = [...new Set(values.map(written))].sort();
    const at = (v) => (distinct.length > 1 ? distinct.indexOf(written(v)) / (distinct.length - 1) : 0.5);
    return { place: at, ticks: distinct.map((words) => [words, words]), logarithmic: false };
  }
  let [low, high] = [Math.min(...values), Math.max(...values)];
  const logarithmic = low > 0 && high / low >= 20;
  const distinct = [...new Set(values)].sort((a, b) => a - b);
  let ticks = distinct.length <= 8 && !isMetric ? distinct : logarithmic ? powers(low, high) : rounds(low, high);
  if (isMetric && !logarithmic) [low, high] = [Math.min(low, ticks[0]), Math.max(high, ticks.at(-1))];
  ticks = ticks.filter((v) => v >= low && v <= high);
  const f = logarithmic ? Math.log : (v) => v;
  const span = f(high) - f(low);
  return { place: (v) => (span ? (f(v) - f(low)) / span : 0.5), ticks: ticks.map((v) => [v, figure(v)]), logarithmic };
}

// About five round numbers that cover the range.
function rounds(low, high) {
  if (low === high) return [low];
  const rough = (high - low) / 4;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * size).find((n) => n >= rough);
  const first = Math.floor(low / step);
  return Array.from({ length: Math.ceil(high / step) - first + 1 }, (_, i) => (first + i) * step);
}

function powers(low, high) {
  const [first, last] = [Math.ceil(Math.log10(low)), Math.floor(Math.log10(high))];
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => 10 ** (first + i));
}

function showChart() {
  const box = byId("chart");
  const points = results.runs.filter((row) => row.best);
  const keys = [...new Set(points.flatMap((row) => Object.keys(row.values)))].filter((key) => points.every((row) => key in row.values));
  box.replaceChildren();
  if (points.length < 2 || !keys.length) {
    fresh("p", box, "The chart appears when two points have a value.", "about");
    return;
  }
  const best = points.find((row) => row.run === results.best);
  const label = `${results.metric} of ${points.length} points by ${keys.join(", ")}. Best: ${figure(best.best.value)} at ${keys.map((key) => `${key} = ${written(best.values[key])}`).join(", ")}. The table below has all values.`;
  width = Math.max(300, box.clientWidth);
  const picture = svg("svg", { width, height: HEIGHT, role: "img", "aria-label": label }, box);
  const axes = [...keys.map((key) => ({ title: key, get: (row) => row.values[key] })), { title: results.metric, get: (row) => row.best.value, isMetric: true }];
  for (const axis of axes) axis.scale = makeScale(points.map(axis.get), axis.isMetric);
  // The best line is drawn last, so that it is on top.
  const ordered = [...points].sort((a, b) => (a.run === results.best) - (b.run === results.best));
  if (keys.length === 1) drawScatter(picture, ordered, axes);
  else drawParallel(picture, ordered, axes);
}

const down = (share) => HEIGHT - EDGE.bottom - share * (HEIGHT - EDGE.top - EDGE.bottom);
// On a narrow page, the last part of a key has to do.
const title = (axis) => (width < NARROW ? axis.title.split(".").at(-1) : `${axis.title}${axis.scale.logarithmic ? ", logarithmic" : ""}`);

function text(parent, x, y, content, anchor, kind) {
  const element = svg("text", { x, y, "text-anchor": anchor, class: kind }, parent);
  element.textContent = content;
  return element;
}

function mark(element, row) {
  element.dataset.run = row.run;
  const shades = results.runs.filter((r) => r.best).sort((a, b) => (results.higher_is_better ? b.best.value - a.best.value : a.best.value - b.best.value));
  const rank = shades.indexOf(row) / Math.max(1, shades.length - 1);
  element.classList.add("point", rank === 0 ? "first" : rank < 0.34 ? "good" : rank < 0.67 ? "fair" : "poor");
  svg("title", {}, element).textContent = `${row.run}: ${results.metric} ${figure(row.best.value)}, ${Object.entries(row.values).map(([k, v]) => `${k} = ${written(v)}`).join(", ")}`;
  element.onmouseenter = () => light(row.run);
  element.onmouseleave = () => light(null);
}

function drawParallel(picture, points, axes) {
  const across = (i) => EDGE.left + (i * (width - EDGE.left - EDGE.right)) / (axes.length - 1);
  for (const row of points) {
    const path = axes.map((axis, i) => `${across(i).toFixed(1)} ${down(axis.scale.place(axis.get(row))).toFixed(1)}`).join("L");
    mark(svg("path", { d: `M${path}`, fill: "none" }, picture), row);
  }
  axes.forEach((axis, i) => {
    const last = i === axes.length - 1;
    svg("line", { x1: across(i), x2: across(i), y1: EDGE.top, y2: HEIGHT - EDGE.bottom, class: "axis" }, picture);
    // On a narrow page, neighbors have their names at two heights.
    text(picture, across(i), EDGE.top - (width < NARROW && i % 2 ? 32 : 14), title(axis), i === 0 ? "start" : last ? "end" : "middle", "name");
    for (const [value, words] of axis.scale.ticks) text(picture, across(i) + (last ? 8 : -8), down(axis.scale.place(value)) + 4, words, last ? "start" : "end", "tick");
  });
}

function drawScatter(picture, points, [setting, metric]) {
  const across = (share) => EDGE.left + share * (width - EDGE.left - EDGE.right);
  for (const [value, words] of metric.scale.ticks) {
    const y = down(metric.scale.place(value));
    svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: y, y2: y, class: "grid" }, picture);
    text(picture, EDGE.left - 10, y + 4, words, "end", "tick");
  }
  for (const [value, words] of setting.scale.ticks) text(picture, across(setting.scale.place(value)), HEIGHT - EDGE.bottom + 20, words, "middle", "tick");
  text(picture, EDGE.left, EDGE.top - 16, title(metric), "start", "name");
  text(picture, width - EDGE.right, HEIGHT - 4, title(setting), "end", "name");
  for (const row of points) {
    mark(svg("circle", { cx: across(setting.scale.place(setting.get(row))), cy: down(metric.scale.place(metric.get(row))), r: row.run === results.best ? 7 : 5 }, picture), row);
  }
}

function apply(change) {
  const remarks = change.error ? [change.error] : [...change.notes, ...(change.deleted ? [`${change.deleted} runs of the sweep were deleted`] : [])];
  byId("remarks").replaceChildren(...remarks.map((words) => fresh("li", null, words)));
  if (!change.error) {
    results = change;
    const ended = results.runs.filter((row) => ["completed", "failed", "cancelled"].includes(row.state)).length;
    byId("about").textContent = `${ended} of ${results.runs.length} runs have ended; by ${results.metric}, ${results.higher_is_better ? "higher" : "lower"} is better`;
    showTable();
    showChart();
  }
  document.documentElement.dataset.ready = "";
}

addEventListener("resize", () => results && showChart());
if (data.results) apply(data.results);
watch(url, data.cursor, apply);

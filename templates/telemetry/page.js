// The one-file report: its data is embedded as JSON and as packed values, its parts come from templates/parts.
import { createAxis } from "./axis.js";
import { createChart, fillLegend } from "./chart.js";
import { fillSelector, linesFor } from "./curves.js";
import { createHeatMap } from "./heatmap.js";
import { PackedTable, unpack } from "./packed.js";
import { enhanceTable, highlightRows } from "./tables.js";
import { byId, fresh, isUtc, moment, onZone, setZone, showTimes, zoneName } from "./text.js";
import { wireTheme } from "./theme.js";
import { createTimeline } from "./timeline.js";

const GROUPS = { training: "Training", ranks: "Ranks", gpus: "GPUs", hosts: "Nodes" };

function makeAxes(data, tables) {
  const { gpus, training } = tables;
  const axes = { time: createAxis({ kind: "time", range: data.window, least: Math.max(gpus.step, training.step, 1) * 4 }) };
  if (training.has("step")) {
    const { low, high } = training.curves.step;
    axes.step = createAxis({ kind: "number", label: "step", range: [low, high] });
  }
  return axes;
}

function makeCharts(data, axes) {
  const backdrop = () => data;
  const grid = byId("charts");
  const groups = new Map();
  return data.charts.map((chart) => {
    if (!groups.has(chart.table)) {
      const details = fresh("details", grid);
      details.id = `charts-${chart.table}`;
      details.open = innerWidth >= 560 || chart.table === "training"; // all in one column are long
      fresh("h3", fresh("summary", details), GROUPS[chart.table]);
      const charts = fresh("div", details, undefined, "charts");
      fresh("i", charts, undefined, "break");
      groups.set(chart.table, charts);
    }
    const figure = fresh("figure", groups.get(chart.table));
    figure.dataset.curve = `${chart.table}.${chart.curve}`;
    return createChart(figure, { ...chart, axes, backdrop });
  });
}

function showKey(data, tables, shown) {
  const chart = ["gpus", "hosts"].map((t) => data.charts.find((c) => c.table === t)).find(Boolean) || data.charts[0];
  const { lines, band } = linesFor(data, tables, chart, shown);
  fillLegend(byId("key"), band ? [{ ...lines[1], label: "mean" }, { label: "lowest to highest", swatch: "band" }] : lines);
}

function showMarksKey({ attempts, marks }) {
  const items = [];
  if (attempts.some((a) => a.n % 2 === 0)) items.push({ label: "attempt 2, 4, …", swatch: "even" });
  for (const [lane, swatch] of [["Faults", "fault"], ["Alerts", "alert"]]) {
    if (marks.some((m) => m.prominent && m.lane === lane)) items.push({ label: swatch, swatch });
  }
  fillLegend(byId("marks-key"), items);
}

// Draw the lines that the selector names; return a function that selects a GPU.
function wireCurves(data, tables, axes) {
  const select = byId("shown");
  fillSelector(select, data);
  const charts = makeCharts(data, axes);
  const draw = () => {
    showKey(data, tables, select.value);
    charts.forEach((chart, i) => chart.setData(linesFor(data, tables, data.charts[i], select.value)));
  };
  const ofTraining = charts.filter((_, i) => data.charts[i].table === "training");
  const apply = (options) => ofTraining.forEach((chart) => chart.setOptions(options));
  byId("training-options").hidden = !ofTraining.length;
  byId("by-step").parentElement.hidden = !axes.step;
  byId("by-step").onchange = (event) => apply({ x: event.target.checked ? "step" : "time" });
  byId("logarithmic").onchange = (event) => apply({ log: event.target.checked });
  byId("smoothing").oninput = (event) => apply({ smoothing: Number(event.target.value) });
  select.onchange = draw;
  showMarksKey(data);
  draw();
  return (gpu) => {
    const row = data.chosen.indexOf(gpu);
    if (row < 0) return;
    select.value = `gpu:${row}`;
    byId("charts-gpus").open = true;
    draw();
  };
}

function wireToolbar(axis) {
  byId("in").onclick = () => axis.zoom(0.5);
  byId("out").onclick = () => axis.zoom(2);
  byId("earlier").onclick = () => axis.move(-0.5);
  byId("later").onclick = () => axis.move(0.5);
  byId("reset").onclick = () => axis.showWhole();
  const showRange = () => { byId("range").textContent = `${moment(axis.view[0])} – ${moment(axis.view[1])} ${zoneName(axis.view[1])}`; };
  axis.onView(showRange);
  onZone(showRange);
}

function wireZone(button) {
  const update = () => { button.textContent = isUtc() ? "Local time" : "UTC"; };
  button.onclick = () => {
    setZone(isUtc() ? "local" : "utc");
    update();
  };
  button.hidden = false;
  update();
  showTimes(document);
}

// Show a GPU's curves when its name is clicked, and the one that the address names.
function wireGpuLinks(show, count) {
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-gpu]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    show(Number(link.dataset.gpu));
  });
  const named = /^#gpu-(\d+)$/.exec(location.hash);
  if (named && Number(named[1]) < count) show(Number(named[1]));
}

// Zoom to the time of an attempt.
function wireSpans(axis) {
  document.querySelectorAll("a[data-from]").forEach((link) => {
    link.addEventListener("click", () => axis.show(Number(link.dataset.from), Number(link.dataset.to)));
  });
}

function wireCopying() {
  const copies = [...document.querySelectorAll(".copy")].map((b) => [b, () => b.previousElementSibling.textContent]);
  for (const [button, text] of [...copies, [byId("copy-link"), () => location.href]]) {
    const label = button.textContent;
    button.hidden = false;
    button.onclick = async () => {
      button.textContent = (await copyText(text())) ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = label; }, 1500);
    };
  }
}

// The clipboard of a page from file:// needs the older way in some browsers.
async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch { /* not allowed: the older way */ }
  }
  const field = fresh("textarea", document.body, text);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

async function main() {
  document.querySelectorAll("table.sortable").forEach(enhanceTable);
  wireTheme(byId("theme"));
  wireZone(byId("zone"));
  wireCopying();
  if (!byId("data")) return;
  const data = JSON.parse(byId("data").textContent);
  const bytes = await unpack(byId("blob").textContent);
  const tables = Object.fromEntries(Object.entries(data.tables).map(([name, t]) => [name, new PackedTable(t, bytes)]));
  byId("curves").hidden = false;
  byId("trouble").hidden = true;
  const axes = makeAxes(data, tables);
  createTimeline(byId("timeline"), { axis: axes.time }).setData(data);
  let pick = () => {};
  const heat = createHeatMap(byId("heat"), { axis: axes.time, onPick: (gpu) => pick(gpu) });
  heat.setData({
    rows: data.gpus, fields: data.charts.filter((c) => c.table === "gpus"), table: tables.heat || tables.gpus, overlay: "throttled",
  });
  const selectGpu = wireCurves(data, tables, axes);
  pick = (gpu) => {
    selectGpu(gpu);
    heat.highlight([gpu]);
    const name = `${data.gpus[gpu].label}${data.gpus[gpu].ranks ? `, rank ${data.gpus[gpu].ranks}` : ""}`;
    byId("picked").replaceChildren(`Selected: ${name}${data.chosen.includes(gpu) ? "" : ", which has no curves of its own"}. `);
    const row = fresh("a", byId("picked"), "Its row in the table");
    row.href = `#row-${gpu}`;
    if (byId("gpus")) highlightRows(byId("gpus"), [String(gpu)]);
    history.replaceState(null, "", `#gpu-${gpu}`);
  };
  wireGpuLinks((gpu) => {
    pick(gpu);
    byId(heat.figure.hidden ? "curves" : "heat").scrollIntoView({ block: "start" });
  }, data.gpus.length);
  wireSpans(axes.time);
  wireToolbar(axes.time);
  document.documentElement.dataset.ready = "yes";
}

main().catch((e) => {
  const old = typeof DecompressionStream === "undefined";
  const trouble = byId("trouble");
  if (!trouble) throw e;
  trouble.textContent = old
    ? "This browser is too old to draw the curves; use Chrome or Edge 80, Firefox 113 or Safari 16.4, or newer."
    : `The curves could not be drawn: ${e.message}`;
  trouble.hidden = false;
  if (!old) console.error(e);
});

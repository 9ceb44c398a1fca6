// The GPUs: a table with the worst first, a heat map, and curves of the whole job, a node or one GPU.
import { createAxis } from "./axis.js";
import { createChart, fillLegend } from "./chart.js";
import { fillSelector, linesFor } from "./curves.js";
import { createHeatMap } from "./heatmap.js";
import { card, el, once, problem, timeOf } from "./run_parts.js";
import { createGpuTable } from "./tables.js";

const GROUPS = { gpus: "GPUs", ranks: "Ranks", hosts: "Nodes" };

export function create(panel, run) {
  const about = el("p", "about", "The samples of all GPUs are being summarized…");
  about.setAttribute("role", "status");
  const tableBox = card("GPUs");
  const heatBox = card("Heat map");
  const curvesBox = card("Curves");
  panel.append(about, tableBox.box, heatBox.box, curvesBox.box);
  for (const { box } of [tableBox, heatBox, curvesBox]) box.hidden = true;

  const view = { parts: null, wanted: "" };
  const load = once(async () => {
    let summary;
    try {
      summary = await run.telemetry();
    } catch (error) {
      about.replaceChildren(problem(error.message, error.fix));
      return;
    }
    const { data } = summary;
    const charts = data.charts.filter((c) => c.table in GROUPS);
    about.replaceChildren(...describe(summary, charts, run));
    if (!charts.length) return;
    // A GPU or a curve that is new changes what there is to draw.
    const shape = JSON.stringify([data.gpus.map((g) => g.label), charts.map((c) => c.curve), data.nodes, data.chosen]);
    if (view.parts?.shape !== shape) {
      view.parts?.destroy();
      view.parts = build({ tableBox, heatBox, curvesBox }, summary, charts);
      view.parts.shape = shape;
    }
    view.parts.update(summary);
    if (view.wanted !== "") view.parts.pick(view.wanted);
    view.wanted = "";
  });
  return {
    show: (detail) => {
      view.wanted = detail;
      load();
    },
    onChange: (change) => {
      if (change.telemetry && run.tab === "gpus") load();
    },
  };
}

function describe({ data, source, choice, read_errors: errors }, charts, run) {
  const [, end] = data.window;
  if (!charts.length) {
    const live = run.status?.state === "running" ? " Samples appear here some seconds after the run has started." : "";
    return [`No samples of GPUs or nodes were recorded.${live}`];
  }
  const until = el("span", "", "Recorded until ", timeOf(end), ". ");
  return [until, source, " ", choice ? el("strong", "", choice) : "", ...errors.map((e) => problem(`Not read: ${e}`))].filter(Boolean);
}

function build({ tableBox, heatBox, curvesBox }, first, specs) {
  let summary = first;
  const axis = createAxis({ kind: "time", range: first.data.window });
  const hasGpus = first.data.gpus.length > 0;
  tableBox.box.hidden = !hasGpus;
  heatBox.box.hidden = !hasGpus;
  curvesBox.box.hidden = false;

  const select = el("select");
  fillSelector(select, first.data);
  const toolbar = el("div", "toolbar", el("label", "check", "Show", select), zoomButtons(axis));
  const key = el("ul", "key");
  key.setAttribute("aria-label", "Lines");
  const marksKey = el("ul", "key");
  marksKey.setAttribute("aria-label", "Marks in the charts");
  const grid = el("div", "stack");
  curvesBox.body.replaceChildren(toolbar, el("div", "keys", key, marksKey), grid);
  const charts = makeCharts(grid, specs, axis, () => summary.data);
  const draw = () => {
    const { data, tables } = summary;
    const chart = data.charts.find((c) => c.table === "gpus") || data.charts.find((c) => c.table === "hosts") || specs[0];
    const { lines, band } = linesFor(data, tables, chart, select.value);
    fillLegend(key, band ? [{ ...lines[1], label: "mean" }, { label: "lowest to highest", swatch: "band" }] : lines);
    fillLegend(marksKey, marksOf(data));
    charts.forEach(({ chart: drawn, spec }) => drawn.setData(linesFor(data, tables, spec, select.value)));
  };
  select.onchange = draw;

  const showGpu = (index) => {
    const gpu = summary.data.gpus[index];
    const row = summary.data.chosen.indexOf(index);
    heat?.highlight([index]);
    table?.highlight([keyOf(index)]);
    const name = `${gpu.label}${gpu.ranks ? `, rank ${gpu.ranks}` : ""}`;
    picked.replaceChildren("Selected: ", el("strong", "", name), row < 0 ? ", which has no curves of its own." : ". Its curves are below the heat map.");
    if (row < 0) return;
    select.value = `gpu:${row}`;
    draw();
  };
  heatBox.body.replaceChildren();
  const heat = hasGpus ? createHeatMap(heatBox.body.appendChild(el("figure")), { axis, onPick: showGpu }) : null;
  const about = "The worst come first. ✖ and ▲ mark values that an insight or a limit calls bad. Select a GPU to see its curves.";
  const picked = el("p", "about");
  picked.setAttribute("role", "status");
  tableBox.body.replaceChildren(el("p", "about", about), picked);
  const keyOf = (index) => summary.gpu_table.rows.find((r) => r.gpu === index)?.key;
  const table = hasGpus ? createGpuTable(tableBox.body.appendChild(el("div")), {
    onPick: (key) => {
      showGpu(summary.gpu_table.rows.find((r) => r.key === key).gpu);
      heatBox.box.scrollIntoView({ block: "start" });
    },
  }) : null;
  const pick = (text) => {
    const index = Number(text);
    if (summary.data.gpus[index]) showGpu(index);
  };
  return {
    pick,
    update: (next) => {
      summary = next;
      axis.setRange(next.data.window);
      heat?.setData({
        rows: next.data.gpus, fields: next.data.charts.filter((c) => c.table === "gpus"),
        table: next.tables.heat || next.tables.gpus, overlay: "throttled",
      });
      table?.setData(next.gpu_table);
      draw();
    },
    destroy: () => charts.forEach(({ chart }) => chart.destroy()),
  };
}

// What the bands and vertical lines of the charts mean.
function marksOf({ attempts, marks }) {
  const items = attempts.some((a) => a.n % 2 === 0) ? [{ label: "attempt 2, 4, …", swatch: "even" }] : [];
  for (const [lane, swatch] of [["Faults", "fault"], ["Alerts", "alert"]]) {
    if (marks.some((m) => m.prominent && m.lane === lane)) items.push({ label: swatch, swatch });
  }
  return items;
}

function makeCharts(grid, specs, axis, dataOf) {
  const groups = new Map();
  return specs.map((spec) => {
    if (!groups.has(spec.table)) {
      const charts = el("div", "charts", el("i", "break"));
      const details = el("details", "group", el("summary", "", el("h3", "", GROUPS[spec.table])), charts);
      details.open = true;
      grid.append(details);
      groups.set(spec.table, charts);
    }
    const figure = el("figure");
    figure.dataset.curve = `${spec.table}.${spec.curve}`;
    groups.get(spec.table).append(figure);
    return { spec, chart: createChart(figure, { ...spec, axes: { time: axis }, backdrop: dataOf }) };
  });
}

function zoomButtons(axis) {
  const button = (label, text, action) => {
    const b = el("button", "", text);
    b.type = "button";
    b.title = label;
    b.setAttribute("aria-label", label);
    b.onclick = action;
    return b;
  };
  return el("span", "buttons",
    button("Earlier", "◀", () => axis.move(-0.5)), button("Later", "▶", () => axis.move(0.5)),
    button("Zoom in", "+", () => axis.zoom(0.5)), button("Zoom out", "−", () => axis.zoom(2)),
    button("Show the whole run", "Whole run", () => axis.showWhole()));
}

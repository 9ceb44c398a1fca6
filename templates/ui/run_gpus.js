// The GPUs: a table with the worst first, a heat map, and curves of the whole job, a node or one GPU.
import { createAxis } from "./axis.js";
import { createChart, fillLegend } from "./chart.js";
import { fillSelector, linesFor } from "./curves.js";
import { createHeatMap } from "./heatmap.js";
import { card, el, once, problem, timeOf } from "./run_parts.js";
import { createGpuTable } from "./tables.js";

const GROUPS = { gpus: "GPUs", hosts: "Nodes" };

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
    if (view.wanted) view.parts.pick(view.wanted);
    view.wanted = "";
  });
  return {
    show: (detail) => {
      view.wanted = detail.split("/").at(-1);
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
  tableBox.box.hidden = !hasGpus || !first.gpu_table;
  heatBox.box.hidden = !hasGpus;
  curvesBox.box.hidden = false;

  const select = el("select");
  fillSelector(select, first.data);
  const toolbar = el("div", "toolbar", el("label", "check", "Show", select), zoomButtons(axis));
  const key = el("ul", "key");
  key.setAttribute("aria-label", "Lines");
  const grid = el("div", "stack");
  curvesBox.body.replaceChildren(toolbar, key, grid);
  const charts = makeCharts(grid, specs, axis, () => summary.data);
  const draw = () => {
    const { data, tables } = summary;
    const chart = data.charts.find((c) => c.table === "gpus") || specs[0];
    const { lines, band } = linesFor(data, tables, chart, select.value);
    fillLegend(key, band ? [{ ...lines[1], label: "mean" }, { label: "lowest to highest", swatch: "band" }] : lines);
    charts.forEach(({ chart: drawn, spec }) => drawn.setData(linesFor(data, tables, spec, select.value)));
  };
  select.onchange = draw;

  const showGpu = (index) => {
    const gpu = summary.data.gpus[index];
    const row = summary.data.chosen.indexOf(index);
    table?.highlight([gpu.key]);
    heat?.highlight([index]);
    if (row < 0) return;
    select.value = `gpu:${row}`;
    draw();
  };
  heatBox.body.replaceChildren();
  tableBox.body.replaceChildren();
  const heat = hasGpus ? createHeatMap(heatBox.body.appendChild(el("figure")), { axis, onPick: showGpu }) : null;
  const table = hasGpus && first.gpu_table ? createGpuTable(tableBox.body, { onPick: (id) => pick(id) }) : null;
  const pick = (id) => {
    const index = summary.data.gpus.findIndex((g) => g.key === id || g.uuid === id || g.label === id);
    if (index >= 0) showGpu(index);
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

// The curves of several runs, one chart per metric. For the page of `compare --html`, and for that of `clustertrain ui`,
// which has no button for the theme, and calls updateComparison.
import { createAxis } from "./axis.js";
import { createChart, fillLegend, line } from "./chart.js";
import { byId, extent, fresh } from "./text.js";
import { wireTheme } from "./theme.js";

const LOG_RATIO = 30; // curves whose values differ by more begin with a log scale
let drawn = null; // the charts and their axis; null without curves

// A chart needs one array of x for all lines: the union of all x, with gaps that the lines span.
function joinRuns(curves) {
  const all = [...new Set(curves.flatMap((c) => c.x))].sort((a, b) => a - b);
  const rows = curves.map((c) => {
    const at = new Map(c.x.map((x, i) => [x, c.y[i]]));
    return all.map((x) => at.get(x) ?? null);
  });
  return { all, rows };
}

function chartData(data, name) {
  const { all, rows } = joinRuns(data.runs.map((r) => r.curves[name]));
  return { times: all, lines: rows.map((values, i) => line(`${data.runs[i].letter} ${data.runs[i].run}`, values, i, { width: 1.5 })) };
}

const rangeOfX = (data, names) => extent(data.runs.flatMap((r) => names.map((name) => r.curves[name].x))) || [0, 1];

function addComparedChart(figure, data, axis) {
  const name = figure.dataset.scalar;
  const values = chartData(data, name);
  const [low, high] = extent(values.lines.map((l) => l.values)) || [0, 0];
  figure.replaceChildren();
  const chart = createChart(figure, {
    title: name, unit: "", places: 5, span: "data", axes: { time: axis }, height: 320, log: low > 0 && high / low >= LOG_RATIO,
  });
  chart.setData(values);
  return chart;
}

// The controls above the charts and, below them, which line is which run.
function wireCompared(charts, data, figures) {
  const bar = fresh("div", null, undefined, "toolbar");
  const log = fresh("input", fresh("label", bar, "log scale "));
  log.type = "checkbox";
  log.indeterminate = charts.some((c) => c.spec.log) && charts.some((c) => !c.spec.log);
  log.checked = charts.every((c) => c.spec.log);
  log.onchange = () => charts.forEach((c) => c.setOptions({ log: log.checked }));
  const smoothing = fresh("input", fresh("label", bar, "smoothing "));
  Object.assign(smoothing, { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 });
  smoothing.oninput = () => charts.forEach((c) => c.setOptions({ smoothing: Number(smoothing.value) }));
  const key = fresh("ul", null, undefined, "key");
  key.setAttribute("aria-label", "Runs");
  fillLegend(key, data.runs.map((r, i) => line(`${r.letter} ${r.run}`, [], i)));
  figures[0].before(bar, key);
}

function showComparison() {
  const data = JSON.parse(byId("data").textContent);
  const figures = [...document.querySelectorAll("figure[data-scalar]")];
  if (figures.length) {
    const range = rangeOfX(data, figures.map((f) => f.dataset.scalar));
    const axis = createAxis({ kind: "number", label: data.axis, range, digits: 2, least: (range[1] - range[0]) / 1e4 });
    drawn = { axis, charts: figures.map((f) => addComparedChart(f, data, axis)) };
    wireCompared(drawn.charts, data, figures);
  }
  if (byId("theme")) wireTheme(byId("theme"));
  document.documentElement.dataset.ready = "";
}

// Show newer curves of the same runs and metrics. The zoom, the scale and the smoothing stay.
export function updateComparison(data) {
  if (!drawn) return;
  drawn.axis.setRange(rangeOfX(data, drawn.charts.map((c) => c.spec.title)));
  drawn.charts.forEach((chart) => chart.setData(chartData(data, chart.spec.title)));
}

showComparison();

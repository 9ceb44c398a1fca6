// The training curves: by step or by time, smoothed, on log axes; what the run writes is drawn as it arrives.
import { createAxis } from "./axis.js";
import { createChart, fillLegend, line } from "./chart.js";
import { el, problem, whole } from "./run_parts.js";

// Charts of scalars that belong together, in this order. Others get a chart of their own below "More".
const KNOWN = [
  ["Loss", [
    { title: "Loss", names: ["loss", "validation_loss"], labels: ["train", "validation"], places: 4, log: true },
    { title: "Validation accuracy", names: ["validation_accuracy"], places: 4 },
    { title: "Validation minus training loss", names: ["generalization_gap"], places: 4 },
  ]],
  ["Speed", [
    { title: "Step time", names: ["step_s"], unit: "s", places: 3, span: "zero" },
    { title: "Tokens per second", names: ["tokens_per_s"], unit: "tokens/s", places: 0, span: "zero" },
    { title: "Samples per second", names: ["samples_per_s"], unit: "samples/s", places: 1, span: "zero" },
    { title: "Data wait per step", names: ["data_wait_s"], unit: "s", places: 3, span: "zero" },
  ]],
  ["Optimization", [
    { title: "Gradient norm", names: ["grad_norm"], places: 3, span: "zero", log: true },
    { title: "Learning rate", names: ["lr"], places: 8, span: "zero", log: true },
    { title: "Clipped steps, of the last 100", names: ["clip_fraction"], places: 2, span: "zero" },
    { title: "Gradient noise scale", names: ["noise_scale"], unit: "samples", places: 1, span: "zero", log: true },
  ]],
  ["Memory", [
    { title: "Allocated by rank 0", names: ["allocated_gib", "peak_allocated_gib"], labels: ["now", "peak"], unit: "GiB", places: 2, span: "zero" },
    { title: "Memory of rank 0", names: ["rss_gib"], unit: "GiB", places: 2, span: "zero" },
  ]],
];
// 0 or 1 per row: they are marks, no curves.
const HIDDEN = new Set(["clipped", "skipped", "spike"]);
// Written at some steps only, so points lie apart.
const SPARSE = /^validation_|^generalization_gap$|^noise_scale$|^peak_allocated_gib$|\//;
const MOST_UNITS = 12; // lines of a chart of layers or slices
const MOST_DOTS = 100;

// Return [[title, specs]] for the scalars of a run; those of layers and slices ("grad_norm/layers.0") are one chart.
function arrange(names) {
  const left = new Set(names.filter((name) => !HIDDEN.has(name)));
  const groups = KNOWN.map(([title, specs]) => [title, specs.flatMap((spec) => {
    const present = spec.names.filter((name) => left.has(name));
    present.forEach((name) => left.delete(name));
    const labels = present.map((name) => spec.labels?.[spec.names.indexOf(name)] ?? name);
    return present.length ? [{ ...spec, names: present, labels }] : [];
  })]);
  const families = new Map();
  for (const name of left) {
    const [family, ...unit] = name.split("/");
    if (!families.has(family)) families.set(family, []);
    families.get(family).push([name, unit.join("/") || name]);
  }
  const more = [...families].map(([family, members]) => {
    const chosen = spread(members, MOST_UNITS);
    const units = members[0][0].includes("/");
    const title = units ? `${family}, ${chosen.length < members.length ? `${chosen.length} of ${members.length}` : "by part"}` : family;
    return { title, names: chosen.map(([name]) => name), labels: chosen.map(([, unit]) => unit), places: 4 };
  });
  return [...groups, ["More", more]].filter(([, specs]) => specs.length);
}

// Return `most` of the items, evenly spaced, with the first and the last.
function spread(items, most) {
  if (items.length <= most) return items;
  return Array.from({ length: most }, (_, i) => items[Math.round((i * (items.length - 1)) / (most - 1))]);
}

export function create(panel, run) {
  const controls = makeControls();
  const about = el("p", "about");
  const key = el("ul", "key");
  key.setAttribute("aria-label", "Marks");
  const groups = el("div", "stack");
  panel.append(controls.bar, about, key, groups);
  const view = { charts: [], axes: null, shape: "" };

  const build = (names) => {
    view.charts.forEach(({ chart }) => chart?.destroy());
    view.axes = {
      time: createAxis({ kind: "time", range: [0, 1] }),
      step: createAxis({ kind: "number", label: "step", range: [0, 1] }),
    };
    view.charts = [];
    groups.replaceChildren(...arrange(names).map(([title, specs]) => group(title, specs)));
  };
  const group = (title, specs) => {
    const box = el("details", "card group", el("summary", "", el("h2", "", title)));
    const grid = el("div", "charts", el("i", "break"));
    box.append(grid);
    const own = specs.map((spec) => {
      const figure = el("figure");
      figure.dataset.scalar = spec.names[0];
      const legend = el("ul", "key");
      legend.setAttribute("aria-label", `Lines of ${spec.title}`);
      const cell = el("div", "chart-cell", figure, legend);
      grid.append(cell);
      const chart = createChart(figure, {
        title: spec.title, unit: spec.unit ?? "", places: spec.places, span: spec.span ?? "data", axes: view.axes,
        backdrop: () => backdrop(run), ...controls.options(), log: controls.options().log && Boolean(spec.log),
      });
      return { chart, spec, box, legend, cell };
    });
    view.charts.push(...own);
    box.ontoggle = () => {
      if (box.open) run.curves.want(specs.flatMap((spec) => spec.names));
    };
    box.open = title !== "More" || specs.length <= 4;
    if (box.open) run.curves.want(specs.flatMap((spec) => spec.names));
    return box;
  };
  const draw = () => {
    const { data, error, names } = run.curves;
    if (error && !data) about.replaceChildren(problem(error.message, error.fix));
    if (!data || run.tab !== "training") return;
    const shape = names.join("\n");
    if (shape !== view.shape) {
      view.shape = shape;
      build(names);
    }
    controls.bar.hidden = !data.steps.length;
    about.replaceChildren(describe(data, run), ...data.problems.map((text) => problem(`Not read: ${text}`)));
    if (!data.steps.length) return;
    const points = run.curves.points;
    view.axes.time.setRange([points.times[0], points.times.at(-1)]);
    const [first, last] = data.steps.reduce(([a, b], s) => [Math.min(a, s), Math.max(b, s)], [Infinity, -Infinity]);
    view.axes.step.setRange([first, last]);
    for (const { chart, spec, box, legend, cell } of view.charts) {
      if (!box.open || !spec.names.every((name) => data.curves[name])) continue;
      const { lines, band } = linesOf(spec, data, points.along);
      chart.setData({ times: points.times, steps: points.steps, lines, band });
      cell.classList.toggle("constant", cell.firstChild.classList.contains("constant"));
      const named = lines.filter((l) => !l.faint);
      fillLegend(legend, named.length > 1 ? named : []);
      legend.hidden = named.length < 2;
    }
    const several = backdrop(run).attempts.length > 1;
    const mark = controls.options().x === "step" ? { label: "start of an attempt", swatch: "start" } : { label: "attempt 2, 4, …", swatch: "even" };
    fillLegend(key, several ? [mark] : []);
    key.hidden = !several;
  };
  controls.onChange = () => {
    const { log, ...options } = controls.options();
    view.charts.forEach(({ chart, spec }) => chart.setOptions({ ...options, log: log && Boolean(spec.log) }));
    draw();
  };
  run.curves.onData(() => requestAnimationFrame(draw));
  return {
    show: () => {
      run.curves.want([]);
      draw();
    },
    onChange: () => {},
  };
}

function linesOf(spec, data, along) {
  const lines = spec.names.map((name, i) => {
    const known = data.curves[name].filter((v) => v !== null).length;
    return line(spec.labels[i], along(data.curves[name]), i, { width: 1.5, sparse: SPARSE.test(name), dots: SPARSE.test(name) && known <= MOST_DOTS });
  });
  const range = data.ranges[spec.names[0]];
  if (!range || spec.names.length > 2) return { lines };
  // A point stands for several rows: the band is from the lowest to the highest of them.
  const [low, high] = range.map(along);
  const faint = { width: 0.5, faint: true };
  return { lines: [line("highest", high, 0, faint), lines[0], line("lowest", low, 0, faint), ...lines.slice(1)], band: [1, 3] };
}

function backdrop(run) {
  const attempts = run.status?.attempts ?? [];
  return {
    attempts: attempts.map((a) => ({ n: a.n, start: a.start, end: a.end ?? run.now, step: a.first_step })),
    marks: [],
  };
}

function describe(data, run) {
  if (!data.steps.length) return run.status?.is_final ? "The run logged no step." : "The run has logged no step yet. Points appear here as it writes them.";
  const each = data.rows_per_point > 1 ? `; each point is the mean of ${data.rows_per_point} rows, the band spans their values` : "";
  const left = data.left_out.length ? ` ${data.left_out.length} scalars beyond the first 400 are not shown.` : "";
  return `${whole(data.rows)} rows${each}.${left} Drag over a chart to zoom, double-click to show all; on a focused chart the arrow keys move the cursor, + and − zoom, 0 resets.`;
}

function makeControls() {
  const byStep = radio("training-x", "Step", true);
  const byTime = radio("training-x", "Time", false);
  const log = el("input");
  log.type = "checkbox";
  log.id = "logarithmic";
  const smoothing = Object.assign(el("input"), { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, id: "smoothing" });
  const shown = el("output", "", "0");
  const x = el("fieldset", "segmented", el("legend", "unseen", "Horizontal axis"), byStep.label, byTime.label);
  const bar = el("div", "toolbar", x, el("label", "check", log, "Log scale"), el("label", "check", "Smoothing", smoothing, shown));
  const controls = { bar, onChange: () => {}, options: () => ({ x: byStep.input.checked ? "step" : "time", log: log.checked, smoothing: Number(smoothing.value) }) };
  for (const input of [byStep.input, byTime.input, log]) input.onchange = () => controls.onChange();
  smoothing.oninput = () => {
    shown.textContent = smoothing.value;
    controls.onChange();
  };
  return controls;
}

function radio(name, text, checked) {
  const input = Object.assign(el("input"), { type: "radio", name, checked });
  return { input, label: el("label", "", input, el("span", "", text)) };
}


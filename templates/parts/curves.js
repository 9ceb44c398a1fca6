// Which lines a chart shows for a choice of the reader: the whole job, its nodes, the GPUs of a node, or one GPU.
// Expects the data that clustertrain/report/html/page.py describes, and its tables as PackedTable of packed.js:
//
//   data: { gpus: [{ label, node, ranks }], nodes: [name], chosen: [index into gpus], charts: [{ table, curve, … }] }
//   tables: { gpus, overall, nodes, hosts, training, ranks, heat? }
//   fillSelector(select, data);  // values: "all", "nodes", "node:2", "gpu:5" (an index into `chosen`)
//   chart.setData(linesFor(data, tables, data.charts[0], select.value));
import { line } from "./chart.js";
import { fresh, isKnown, mean } from "./text.js";

const pooled = (rows, pool) => rows[0].map((_, i) => {
  const known = rows.map((r) => r[i]).filter(isKnown);
  return known.length ? pool(known) : null;
});

// Return the lines and band of "whole job": the mean, the lowest and the highest.
function rangeOf(low, middle, high) {
  const faint = { width: 0.75 };
  return { lines: [line("highest", high, 0, faint), line("mean", middle, 0, { width: 1.75 }), line("lowest", low, 0, faint)], band: [1, 3] };
}

// Return { times, steps, lines, band } for Chart.setData.
export function linesFor(data, tables, chart, shown) {
  const { training } = tables;
  const times = chart.table === "gpus" ? tables.overall.times : tables[chart.table].times;
  const steps = chart.table === "training" && training.has("step") ? training.row("step", 0) : null;
  return { times, steps, ...choose(data, tables, chart, shown) };
}

function choose(data, tables, chart, shown) {
  const [kind, number] = [shown.split(":")[0], Number(shown.split(":")[1])];
  const { curve } = chart;
  if (chart.table === "training") {
    return { lines: [line(chart.title.toLowerCase(), tables.training.row(curve, 0), 0, { width: 1.5 })] };
  }
  if (chart.table === "ranks") return rangeOf(...[1, 0, 2].map((i) => tables.ranks.row(curve, i)));
  const byNode = chart.table === "hosts" ? tables.hosts : tables.nodes;
  const nodeLine = (i, place) => line(data.nodes[i], byNode.row(curve, i), place);
  const all = data.nodes.map((_, i) => i);
  if (chart.table === "hosts") {
    const node = kind === "gpu" ? data.nodes.indexOf(data.gpus[data.chosen[number]].node) : number;
    if (kind !== "all" && kind !== "nodes" && node >= 0) return { lines: [nodeLine(node, 0)] };
    if (kind === "nodes" || all.length === 1) return { lines: all.map((i) => nodeLine(i, i)) };
    const rows = all.map((i) => byNode.row(curve, i));
    return rangeOf(pooled(rows, (v) => Math.min(...v)), pooled(rows, mean), pooled(rows, (v) => Math.max(...v)));
  }
  if (kind === "nodes") return { lines: all.map((i) => nodeLine(i, i)) };
  const gpuLine = (row, place) => line(data.gpus[data.chosen[row]].label, tables.gpus.row(curve, row), place);
  const single = tables.gpus.has(curve); // false if only GPUs without individual curves recorded it
  if (kind === "gpu" && single) {
    return { lines: [gpuLine(number, 0), line("mean of all", tables.overall.row(curve, 0), 7)] };
  }
  if (kind === "node" && single) {
    const rows = data.chosen.flatMap((gpu, row) => (data.gpus[gpu].node === data.nodes[number] ? [row] : []));
    if (rows.length) return { lines: rows.map(gpuLine) };
    return { lines: [nodeLine(number, 0)] };
  }
  return rangeOf(...[1, 0, 2].map((i) => tables.overall.row(curve, i)));
}

export function fillSelector(select, data) {
  const ofGpus = data.charts.some((c) => c.table === "gpus");
  select.add(new Option(`Whole job: mean and range of the ${ofGpus ? "GPUs" : "nodes"}`, "all"));
  if (data.nodes.length > 1) select.add(new Option(ofGpus ? "Nodes: mean of each node's GPUs" : "Nodes", "nodes"));
  const group = (label, options) => {
    const element = fresh("optgroup");
    element.label = label;
    options.forEach(([text, value]) => element.append(new Option(text, value)));
    if (options.length) select.add(element);
  };
  group(ofGpus ? "GPUs of one node" : "One node", data.nodes.map((n, i) => [n, `node:${i}`]));
  if (!ofGpus) return;
  group("One GPU", data.chosen.map((gpu, row) => {
    const g = data.gpus[gpu];
    return [`${g.label}${g.ranks ? ` (rank ${g.ranks})` : ""}`, `gpu:${row}`];
  }));
}

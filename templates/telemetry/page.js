// Set up the page: the selected lines, the toolbar, the theme, sortable tables.
const fresh = (name, parent, text) => {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
};

const pooled = (rows, pool) => rows[0].map((_, i) => {
  const known = rows.map((r) => r[i]).filter((v) => v !== null);
  return known.length ? pool(known) : null;
});
const GROUPS = { training: "Training", gpus: "GPUs", hosts: "Nodes" };
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

// Return the lines and band of "whole job": the mean, the lowest and the highest.
function range_of(low, middle, high) {
  const faint = { width: 0.75 };
  return { lines: [line("highest", high, 0, faint), line("mean", middle, 0, { width: 1.75 }), line("lowest", low, 0, faint)], band: [1, 3] };
}

// Return the lines of a chart for one choice of the selector.
function lines_for(charts, chart, shown) {
  const { data, tables } = charts;
  const [kind, number] = [shown.split(":")[0], Number(shown.split(":")[1])];
  const { curve } = chart;
  if (chart.table === "training") return { lines: [line(chart.title.toLowerCase(), tables.training.row(curve, 0), 0, { width: 1.5 })] };
  const by_node = chart.table === "hosts" ? tables.hosts : tables.nodes;
  const node_line = (i, place) => line(data.nodes[i], by_node.row(curve, i), place);
  const all = data.nodes.map((_, i) => i);
  if (chart.table === "hosts") {
    const of_gpu = kind === "gpu" ? data.nodes.indexOf(data.gpus[data.chosen[number]].node) : number;
    if (kind !== "all" && kind !== "nodes") return { lines: [node_line(of_gpu, 0)] };
    if (kind === "nodes" || all.length === 1) return { lines: all.map((i) => node_line(i, i)) };
    const rows = all.map((i) => by_node.row(curve, i));
    return range_of(pooled(rows, (v) => Math.min(...v)), pooled(rows, mean), pooled(rows, (v) => Math.max(...v)));
  }
  if (kind === "nodes") return { lines: all.map((i) => node_line(i, i)) };
  const gpu_line = (row, place) => line(data.gpus[data.chosen[row]].label, tables.gpus.row(curve, row), place);
  const single = tables.gpus.has(curve); // false if only GPUs without individual curves recorded it
  if (kind === "gpu" && single) {
    return { lines: [gpu_line(number, 0), line("mean of all", tables.overall.row(curve, 0), 7)] };
  }
  if (kind === "node" && single) {
    const rows = data.chosen.flatMap((gpu, row) => (data.gpus[gpu].node === data.nodes[number] ? [row] : []));
    if (rows.length) return { lines: rows.map(gpu_line) };
    return { lines: [node_line(number, 0)] };
  }
  return range_of(...[1, 0, 2].map((i) => tables.overall.row(curve, i)));
}

function fill_selector(select, data) {
  const of_gpus = data.charts.some((c) => c.table === "gpus");
  select.add(new Option(`Whole job: mean and range of the ${of_gpus ? "GPUs" : "nodes"}`, "all"));
  if (data.nodes.length > 1) select.add(new Option(of_gpus ? "Nodes: mean of each node's GPUs" : "Nodes", "nodes"));
  const group = (label, options) => {
    const element = fresh("optgroup");
    element.label = label;
    options.forEach(([text, value]) => element.append(new Option(text, value)));
    if (options.length) select.add(element);
  };
  group(of_gpus ? "GPUs of one node" : "One node", data.nodes.map((n, i) => [n, `node:${i}`]));
  if (!of_gpus) return;
  group("One GPU", data.chosen.map((gpu, row) => {
    const g = data.gpus[gpu];
    return [`${g.label}${g.ranks ? ` (rank ${g.ranks})` : ""}`, `gpu:${row}`];
  }));
}

function show_key(charts, shown) {
  const of_gpus = charts.data.charts.find((c) => c.table === "gpus") || charts.data.charts[0];
  const { lines, band } = lines_for(charts, of_gpus, shown);
  const key = byId("key");
  key.replaceChildren();
  for (const l of band ? [{ ...lines[1], label: "mean" }, { ...lines[0], label: "lowest and highest" }] : lines) {
    const item = fresh("li", key);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const attributes = { x1: 0, x2: 26, y1: 4, y2: 4, stroke: `var(${l.stroke})`, "stroke-width": l.width < 1 ? 1 : 2.5, "stroke-dasharray": l.dash.join(" ") };
    Object.entries(attributes).forEach(([name, value]) => path.setAttribute(name, value));
    svg.setAttribute("aria-hidden", "true");
    svg.append(path);
    item.append(svg, l.label);
  }
}

function draw_all(charts) {
  const select = byId("shown");
  const logarithmic = byId("logarithmic");
  const grid = byId("charts");
  fill_selector(select, charts.data);
  let drawn = [];
  const draw = () => {
    charts.remove(drawn);
    show_key(charts, select.value);
    drawn = charts.data.charts.map((chart, i) => {
      const figure = figures[i];
      const { lines, band } = lines_for(charts, chart, select.value);
      const times = chart.table === "gpus" ? charts.tables.overall.times : charts.tables[chart.table].times;
      figure.querySelector(".plot").setAttribute("aria-label", `${chart.title}: ${about(lines[band ? 1 : 0], chart)}`);
      return draw_chart(charts, figure, chart, times, lines, band, logarithmic.checked && chart.table === "training");
    });
  };
  const figures = charts.data.charts.map((chart, i) => {
    if (i === 0 || charts.data.charts[i - 1].table !== chart.table) fresh("h3", grid, GROUPS[chart.table]);
    const figure = fresh("figure", grid);
    figure.dataset.curve = `${chart.table}.${chart.curve}`;
    const caption = fresh("figcaption", figure, chart.title);
    if (chart.unit) fresh("span", caption, ` ${chart.unit}`).className = "unit";
    fresh("p", figure).className = "readout";
    fresh("div", figure).className = "plot";
    return figure;
  });
  select.onchange = draw;
  logarithmic.onchange = draw;
  draw();
  return (gpu) => {
    const row = charts.data.chosen.indexOf(gpu);
    if (row < 0) return;
    select.value = `gpu:${row}`;
    draw();
  };
}

function about(one, chart) {
  const known = one.values.filter((v) => v !== null);
  if (!known.length) return "no samples";
  const [low, high] = known.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  return `${one.label} ${figure_text(mean(known), chart)}, between ${figure_text(low, chart)} and ${figure_text(high, chart)}`;
}

function wire_toolbar(charts) {
  byId("in").onclick = () => charts.zoom(0.5);
  byId("out").onclick = () => charts.zoom(2);
  byId("earlier").onclick = () => charts.move(-0.5);
  byId("later").onclick = () => charts.move(0.5);
  byId("reset").onclick = () => charts.show(...charts.whole);
  const show_range = ([from, to]) => { byId("range").textContent = `${moment(from)} – ${moment(to)} UTC`; };
  charts.listeners.push(show_range);
  show_range(charts.view);
}

function wire_theme(redraw) {
  const button = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const update = () => {
    button.textContent = dark() ? "Light theme" : "Dark theme";
    redraw();
  };
  button.onclick = () => {
    root.dataset.theme = dark() ? "light" : "dark";
    update();
  };
  button.hidden = false;
  system.addEventListener("change", update);
  let screen = null; // the screen's theme while the page is printed in light colors
  addEventListener("beforeprint", () => {
    screen ??= { theme: root.dataset.theme };
    root.dataset.theme = "light";
    redraw();
  });
  addEventListener("afterprint", () => {
    if (!screen) return;
    if (screen.theme) root.dataset.theme = screen.theme;
    else delete root.dataset.theme;
    screen = null;
    redraw();
  });
  update();
}

function wire_sorting(table) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = fresh("button", null, head.textContent);
    button.type = "button";
    head.replaceChildren(button);
    button.onclick = () => {
      const way = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", way);
      const numeric = head.classList.contains("n");
      const value = (row) => (numeric ? row.cells[column].dataset.v : row.cells[column].textContent);
      const missing = (v) => v === undefined || v === "";
      const order = (a, b) => {
        const [x, y] = [value(a), value(b)];
        if (missing(x) || missing(y)) return missing(x) - missing(y); // missing values come last in both directions
        const by = numeric ? x - y : x.localeCompare(y, "en", { numeric: true });
        return way === "ascending" ? by : -by;
      };
      body.append(...[...body.rows].sort(order));
    };
  });
}

async function main() {
  document.querySelectorAll("table.sortable").forEach(wire_sorting);
  if (!byId("data")) {
    wire_theme(() => {});
    return;
  }
  const data = JSON.parse(byId("data").textContent);
  const bytes = await unpack(byId("blob").textContent);
  const tables = Object.fromEntries(Object.entries(data.tables).map(([name, t]) => [name, new Table(t, bytes)]));
  byId("curves").hidden = false;
  byId("trouble").hidden = true;
  const charts = new Charts(data, tables);
  draw_timeline(charts, byId("timeline"));
  let pick = () => {};
  if (data.gpus.length) new Heat(charts, byId("heat"), (gpu) => pick(gpu));
  else byId("heat").hidden = true;
  pick = draw_all(charts);
  wire_toolbar(charts);
  wire_theme(() => charts.redraw());
  new ResizeObserver(() => charts.resize()).observe(byId("charts"));
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

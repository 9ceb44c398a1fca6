// The table of all runs: filter, sort, selection, and rows that change while one looks at them.
import { BADGES, age, duration, integer, loss, percent, svg } from "./format.js";
import { watch } from "./live.js";
import { byId, fresh } from "./text.js";

const SPARK = { width: 72, height: 18 };
const AGE_MS = 5_000;

// title, key to sort by, class, text or content of the cell. A column without `value` does not sort.
const COLUMNS = [
  { id: "select", title: "Select", hidden: true },
  { id: "run", title: "Run", value: (r) => r.run },
  { id: "state", title: "State", value: (r) => r.state ?? "unreadable" },
  { id: "progress", title: "Progress", value: (r) => (r.total_steps ? r.step / r.total_steps : null), down: true },
  { id: "left", title: "Left", value: (r) => r.eta_s, numeric: true, text: (r) => r.eta_s === null ? "" : duration(r.eta_s) },
  { id: "goodput", title: "Goodput", value: (r) => r.goodput, numeric: true, down: true, text: (r) => (r.goodput === null || r.state === "pending" ? "" : percent(r.goodput)) },
  { id: "gpus", title: "GPU utilization", value: (r) => r.details?.utilization ?? null, down: true },
  { id: "size", title: "Size", value: (r) => r.nodes * r.gpus_per_node, numeric: true, down: true, text: (r) => (r.nodes === null ? "" : `${r.nodes} × ${r.gpus_per_node}`) },
  { id: "age", title: "Age", value: (r) => r.submitted, numeric: true, down: true, text: (r) => (r.submitted === null ? "" : age(Math.max(0, now() - r.submitted))) },
  { id: "loss", title: "Loss", value: (r) => r.loss, numeric: true, text: (r) => (r.loss === null ? "" : loss(r.loss)) },
  { id: "insights", title: "Insights", value: (r) => (r.details ? r.details.critical * 1e6 + r.details.warning * 1e3 + r.details.info : null), down: true },
];

const data = JSON.parse(byId("data").textContent);
const table = byId("runs");
const body = table.tBodies[0];
const lines = new Map(); // run → { row, element, cells, checkbox, … }
const selected = new Set();
const view = readView();
let facts = data;
let clock = 0; // seconds between the server's clock and this one

const now = () => Date.now() / 1000 + clock;

// The filter and the order are in the address, so that a reload or a link keeps them.
function readView() {
  const query = new URLSearchParams(location.search);
  const sort = query.get("sort") ?? "-age";
  const column = COLUMNS.find((c) => c.id === sort.replace("-", "") && c.value) ?? COLUMNS.find((c) => c.id === "age");
  return { text: query.get("filter") ?? "", state: query.get("state"), column, down: sort.startsWith("-") };
}

function writeView() {
  const query = new URLSearchParams();
  if (view.text) query.set("filter", view.text);
  if (view.state) query.set("state", view.state);
  const sort = `${view.down ? "-" : ""}${view.column.id}`;
  if (sort !== "-age") query.set("sort", sort);
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// ---- one row -----------------------------------------------------------------------------------------------------

function makeLine(run) {
  const element = document.createElement("tr");
  element.setAttribute("role", "row");
  const cells = {};
  for (const column of COLUMNS) {
    const cell = document.createElement(column.id === "run" ? "th" : "td");
    cell.setAttribute("role", column.id === "run" ? "rowheader" : "cell");
    if (column.id === "run") cell.scope = "row";
    cell.className = `c-${column.id}${column.numeric ? " n" : ""}`;
    cell.dataset.label = column.title;
    element.append(cell);
    cells[column.id] = cell;
  }
  const checkbox = fresh("input", cells.select);
  checkbox.type = "checkbox";
  checkbox.setAttribute("aria-label", `Select ${run}`);
  checkbox.onchange = () => {
    if (checkbox.checked) selected.add(run);
    else selected.delete(run);
    element.toggleAttribute("data-selected", checkbox.checked);
    showSelection();
  };
  const link = fresh("a", cells.run);
  const note = fresh("span", cells.run, "", "note");
  const badge = fresh("span", cells.state, "", "badge");
  const bar = svg("svg", { class: "bar-box", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" }, cells.progress);
  svg("rect", { class: "rest", width: 100, height: 6 }, bar);
  const full = svg("rect", { class: "full", width: 0, height: 6 }, bar);
  const steps = fresh("span", cells.progress, "", "steps");
  return { row: null, element, cells, checkbox, link, note, badge, bar, full, steps };
}

function fillLine(line, row) {
  const before = line.row;
  line.row = row;
  const state = row.state ?? "unreadable";
  line.element.dataset.state = state;
  line.link.href = row.url;
  setText(line.link, row.run);
  const note = row.error ?? (row.command ? `${row.reason ?? "waits"}; to continue: ${row.command}` : row.reason) ?? "";
  setText(line.note, note);
  line.note.title = note;
  setText(line.badge, state);
  line.badge.className = `badge ${BADGES[state] ?? ""}`;
  fillProgress(line, row);
  if (!before || JSON.stringify(before.details) !== JSON.stringify(row.details)) {
    fillUtilization(line.cells.gpus, row);
    fillInsights(line.cells.insights, row);
  }
  fillTexts(line);
  if (row.submitted !== null) line.cells.age.title = new Date(row.submitted * 1000).toLocaleString();
}

function fillTexts(line) {
  for (const column of COLUMNS) if (column.text) setText(line.cells[column.id], column.text(line.row));
}

function fillProgress({ bar, full, steps }, row) {
  bar.toggleAttribute("hidden", row.step === null || !row.total_steps);
  if (row.step === null) return setText(steps, "");
  if (!row.total_steps) return setText(steps, integer(row.step));
  const share = Math.min(1, row.step / row.total_steps);
  full.setAttribute("width", (100 * share).toFixed(2));
  // 100 % only if all steps are done.
  setText(steps, `${integer(row.step)} / ${integer(row.total_steps)} · ${Math.floor(100 * share)} %`);
}

function fillUtilization(cell, row) {
  cell.replaceChildren();
  const { utilization, spark } = row.details ?? {};
  if (utilization === null || utilization === undefined) return;
  if (spark.length > 1) {
    const picture = svg("svg", { class: "spark", viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, "aria-hidden": "true" }, cell);
    const place = (value, i) => `${((i * SPARK.width) / (spark.length - 1)).toFixed(1)} ${(SPARK.height - 1 - value * (SPARK.height - 2)).toFixed(1)}`;
    for (const [first, last] of pieces(spark)) {
      const points = spark.slice(first, last).map((value, i) => place(value, first + i));
      if (points.length === 1) points.push(points[0]);
      const x = (i) => ((i * SPARK.width) / (spark.length - 1)).toFixed(1);
      svg("path", { class: "ground", d: `M${x(first)} ${SPARK.height}L${points.join("L")}L${x(last - 1)} ${SPARK.height}Z` }, picture);
      svg("path", { class: "line", d: `M${points.join("L")}` }, picture);
    }
  }
  fresh("span", cell, percent(utilization), utilization < 0.5 ? "value low" : "value");
}

// The stretches [first, end) of values that are known.
function pieces(values) {
  const found = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (found.length && found.at(-1)[1] === i) found.at(-1)[1] = i + 1;
    else found.push([i, i + 1]);
  });
  return found;
}

function fillInsights(cell, row) {
  cell.replaceChildren();
  const found = row.details;
  if (!found) return;
  if (found.error) fresh("span", cell, "not readable", "low").title = found.error;
  const kinds = [["critical", "✖", found.critical], ["warning", "▲", found.warning], ["info", "i", found.info]];
  for (const [severity, sign, count] of kinds) {
    if (!count) continue;
    const mark = fresh("span", cell, "", `mark ${severity}`);
    fresh("span", mark, sign).setAttribute("aria-hidden", "true");
    mark.append(` ${count}`);
    fresh("span", mark, ` ${severity === "info" ? "remark" : severity}${count > 1 && severity !== "critical" ? "s" : ""} `, "unseen");
    mark.title = `${count} ${severity}`;
  }
}

// ---- the table ---------------------------------------------------------------------------------------------------

function compareRows(a, b) {
  const [x, y] = [view.column.value(a), view.column.value(b)];
  const missing = (v) => v === null || v === undefined || Number.isNaN(v);
  if (missing(x) || missing(y)) return missing(x) - missing(y); // unknown values come last in both directions
  const order = typeof x === "string" ? x.localeCompare(y) : x - y;
  return (view.down ? -order : order) || (b.submitted ?? 0) - (a.submitted ?? 0) || a.run.localeCompare(b.run);
}

function isShown(row) {
  const state = row.state ?? "unreadable";
  if (view.state && state !== view.state) return false;
  const text = `${row.run} ${row.name ?? ""} ${state} ${row.job_id ?? ""}`.toLowerCase();
  return view.text.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function arrange() {
  const shown = [...lines.values()].filter((line) => isShown(line.row)).sort((a, b) => compareRows(a.row, b.row));
  const focused = document.activeElement;
  // Only rows that are in another place move: a moved element loses the focus, and a reader its place.
  const wanted = new Set(shown.map((line) => line.element));
  for (const element of [...body.rows]) if (!wanted.has(element)) element.remove();
  shown.forEach((line, i) => {
    if (body.rows[i] !== line.element) body.insertBefore(line.element, body.rows[i] ?? null);
  });
  if (focused instanceof HTMLElement && focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
  showSummary(shown.length);
  showSelection();
}

function showSummary(shownCount) {
  const reading = !facts.complete && facts.total > lines.size;
  const parts = [];
  if (reading) parts.push(`reading ${integer(lines.size)} of ${integer(facts.total)}…`);
  else if (shownCount < lines.size) parts.push(`${integer(shownCount)} of ${integer(lines.size)}`);
  else if (lines.size) parts.push(integer(lines.size));
  setText(byId("about"), parts.join(" "));
  showStates();
  const remarks = [
    ...(facts.problem ? [facts.problem] : []),
    ...facts.scheduler.map((error) => `States come from the run folders, without the scheduler: ${error}`),
  ];
  byId("remarks").replaceChildren(...remarks.map((text) => fresh("li", null, text)));
  const isEmpty = facts.complete && lines.size === 0 && !facts.problem;
  const isFilteredOut = lines.size > 0 && shownCount === 0;
  table.hidden = shownCount === 0;
  const empty = byId("empty");
  empty.hidden = !isEmpty && !isFilteredOut;
  if (isEmpty && !empty.querySelector("code")) {
    empty.replaceChildren();
    fresh("p", empty, "There are no runs here yet. Start one in a terminal, and it appears here:");
    fresh("pre", empty, "clustertrain demo               # a small model on this machine\nclustertrain submit train.py    # your own script");
    const where = fresh("p", empty, "Runs in another folder? Restart with ");
    fresh("code", where, "clustertrain ui --home DIR");
  } else if (isFilteredOut) {
    empty.replaceChildren();
    fresh("p", empty, "No run matches the filter. ");
    const button = fresh("button", empty, "Show all runs");
    button.onclick = () => {
      Object.assign(view, { text: "", state: null });
      byId("filter").value = "";
      update();
      byId("filter").focus();
    };
  }
}

const STATES = ["running", "pending", "requeued", "cancelling", "failed", "unreadable", "cancelled", "completed"];

function showStates() {
  const counts = new Map();
  for (const { row } of lines.values()) counts.set(row.state ?? "unreadable", (counts.get(row.state ?? "unreadable") ?? 0) + 1);
  const group = byId("states");
  for (const state of STATES) {
    let chip = group.querySelector(`[data-state="${state}"]`);
    const count = counts.get(state) ?? 0;
    if (!chip && count) {
      chip = document.createElement("button");
      chip.type = "button";
      chip.dataset.state = state;
      chip.className = `chip ${BADGES[state]}`;
      fresh("span", chip, state);
      fresh("b", chip);
      chip.onclick = () => {
        view.state = view.state === state ? null : state;
        update();
      };
      const after = STATES.slice(STATES.indexOf(state) + 1).map((s) => group.querySelector(`[data-state="${s}"]`));
      group.insertBefore(chip, after.find(Boolean) ?? null);
    }
    if (!chip) continue;
    chip.hidden = !count && view.state !== state;
    chip.setAttribute("aria-pressed", String(view.state === state));
    setText(chip.querySelector("b"), integer(count));
  }
}

function showSelection() {
  for (const run of [...selected]) if (!lines.has(run)) selected.delete(run);
  const link = byId("compare");
  const runs = [...selected].map((run) => lines.get(run).row);
  if (runs.length >= 2) {
    link.href = `/compare?${runs.map((row) => `run=${row.url.split("/").at(-1)}`).join("&")}`;
    link.removeAttribute("aria-disabled");
    setText(link, `Compare ${runs.length} runs`);
    link.title = "";
  } else {
    link.removeAttribute("href");
    link.setAttribute("aria-disabled", "true");
    setText(link, "Compare");
    link.title = "Select two or more runs";
  }
}

function buildHead() {
  const row = table.tHead.rows[0];
  const choice = byId("sort-by");
  for (const column of COLUMNS) {
    const head = fresh("th", row, undefined, `c-${column.id}${column.numeric ? " n" : ""}`);
    head.setAttribute("role", "columnheader");
    head.scope = "col";
    if (!column.value) {
      fresh("span", head, column.title, column.hidden ? "unseen" : "");
      continue;
    }
    const button = fresh("button", head, column.title);
    button.type = "button";
    button.onclick = () => sortBy(column, view.column === column ? !view.down : Boolean(column.down));
    column.head = head;
    for (const down of column.down ? [true, false] : [false, true]) {
      const option = fresh("option", choice, `${column.title} ${down ? "▼" : "▲"}`);
      option.value = `${down ? "-" : ""}${column.id}`;
    }
  }
  choice.onchange = () => sortBy(COLUMNS.find((c) => c.id === choice.value.replace("-", "")), choice.value.startsWith("-"));
}

function sortBy(column, down) {
  Object.assign(view, { column, down });
  update();
}

// After a change of the view.
function update() {
  for (const column of COLUMNS) column.head?.removeAttribute("aria-sort");
  view.column.head.setAttribute("aria-sort", view.down ? "descending" : "ascending");
  byId("sort-by").value = `${view.down ? "-" : ""}${view.column.id}`;
  writeView();
  arrange();
}

// ---- changes -----------------------------------------------------------------------------------------------------

function apply(change) {
  facts = change;
  clock = change.now - Date.now() / 1000;
  if (change.full) {
    const known = new Set(change.rows.map((row) => row.run));
    for (const run of [...lines.keys()]) if (!known.has(run)) lines.delete(run);
  }
  const told = [];
  for (const row of change.rows) {
    const line = lines.get(row.run) ?? makeLine(row.run);
    if (line.row && line.row.state !== row.state) told.push(`${row.run} is now ${row.state ?? "unreadable"}`);
    else if (!line.row && !change.full && facts.complete) told.push(`${row.run} is new: ${row.state ?? "unreadable"}`);
    fillLine(line, row);
    lines.set(row.run, line);
  }
  for (const run of change.removed) {
    if (lines.delete(run)) told.push(`${run} was deleted`);
  }
  if (told.length) setText(byId("changes"), told.slice(0, 3).join(". "));
  arrange();
  document.documentElement.dataset.ready = "";
}

function wireKeys() {
  const filter = byId("filter");
  filter.value = view.text;
  filter.oninput = () => {
    view.text = filter.value;
    update();
  };
  addEventListener("keydown", (event) => {
    const typing = event.target instanceof HTMLElement && event.target.matches("input:not([type=checkbox]), select, textarea");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      filter.focus();
      filter.select();
    } else if (event.key === "Escape" && event.target === filter) {
      filter.value = view.text = "";
      update();
    }
  });
}

buildHead();
wireKeys();
apply(data);
update();
setInterval(() => lines.forEach(fillTexts), AGE_MS);
watch("/api/live/runs", data.cursor, apply);

// Tables that sort by a click on a column's head, and the table of GPUs. Expects parts.css.
//
// enhanceTable(table): for a table that the server wrote. Numeric columns have the class "n" on their <th>, and their
// cells the value in data-v ("" if unknown). Rows beyond data-limit of the table are hidden behind "Show all".
//
//   const gpus = createGpuTable(element, { onPick: (key) => … });   // a click on a row's GPU
//   gpus.setData({
//     columns: [{ title: "Util. mean %", numeric: true }, …],
//     rows: [{ key, severity: "critical" | "warning" | null, notes: "…",
//              cells: [{ text, value: number or null, bad: "critical" | "warning" | null, why: "…" or null }, …] }, …],
//   });                                     // see clustertrain/report/html/gpu_cells.py; the first cell is the row's head
//   gpus.highlight(["node-01 GPU-…"]);      // marks rows by key, and scrolls to the first
import { fresh } from "./text.js";

const SIGN = { critical: "✖", warning: "▲" };
const LIMIT = 64; // rows that are shown without asking

export function enhanceTable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = fresh("button", null, head.textContent);
    button.type = "button";
    head.replaceChildren(button);
    button.onclick = () => {
      const way = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", way);
      sortRows(table, column, way);
    };
  });
  limitRows(table);
}

function sortRows(table, column, way) {
  const numeric = table.tHead.rows[0].cells[column].classList.contains("n");
  const value = (row) => (numeric ? row.cells[column].dataset.v : row.cells[column].dataset.v || row.cells[column].textContent);
  const missing = (v) => v === undefined || v === "";
  const order = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (missing(x) || missing(y)) return missing(x) - missing(y); // missing values come last in both directions
    const by = numeric ? x - y : x.localeCompare(y, "en", { numeric: true });
    return way === "ascending" ? by : -by;
  };
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
  applyLimit(table);
}

function limitRows(table) {
  const limit = Number(table.dataset.limit || LIMIT);
  const total = table.tBodies[0].rows.length;
  let bar = table.parentElement.nextElementSibling;
  if (bar && bar.classList.contains("more")) bar.remove();
  if (total <= limit) {
    delete table.dataset.limited;
    applyLimit(table);
    return;
  }
  if (table.dataset.limited !== "no") table.dataset.limited = "yes";
  bar = fresh("p", null, undefined, "more");
  const text = fresh("span", bar);
  const button = fresh("button", bar);
  button.type = "button";
  const update = () => {
    const limited = table.dataset.limited === "yes";
    text.textContent = limited ? `${limit} of ${total.toLocaleString("en")} rows are shown. ` : `All ${total.toLocaleString("en")} rows are shown. `;
    button.textContent = limited ? `Show all ${total.toLocaleString("en")}` : `Show only ${limit}`;
    applyLimit(table);
  };
  button.onclick = () => {
    table.dataset.limited = table.dataset.limited === "yes" ? "no" : "yes";
    update();
  };
  table.parentElement.after(bar);
  update();
}

function applyLimit(table) {
  const limit = table.dataset.limited === "yes" ? Number(table.dataset.limit || LIMIT) : Infinity;
  [...table.tBodies[0].rows].forEach((row, i) => { row.hidden = i >= limit && !row.classList.contains("picked"); });
}

// Mark the rows with these keys (data-key), also those beyond the limit, and scroll to the first.
export function highlightRows(table, keys) {
  let first = null;
  for (const row of table.tBodies[0].rows) {
    const picked = keys.includes(row.dataset.key);
    row.classList.toggle("picked", picked);
    if (picked) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
    if (picked) first ??= row;
  }
  applyLimit(table);
  return first;
}

export const createGpuTable = (element, spec) => new GpuTable(element, spec);

class GpuTable {
  constructor(element, { onPick = null } = {}) {
    Object.assign(this, { element, onPick, picked: [] });
    this.table = fresh("table", fresh("div", element, undefined, "table-box"), undefined, "sortable gpus");
  }

  setData({ columns, rows }) {
    const sorted = this.sorting();
    const head = document.createElement("thead");
    const heads = fresh("tr", head);
    for (const c of columns) fresh("th", heads, c.title, c.numeric ? "n" : "").scope = "col";
    const body = document.createElement("tbody");
    for (const row of rows) body.append(this.row(row, columns));
    this.table.replaceChildren(head, body);
    enhanceTable(this.table);
    if (sorted && heads.cells[sorted.column]) {
      heads.cells[sorted.column].setAttribute("aria-sort", sorted.way);
      sortRows(this.table, sorted.column, sorted.way);
    }
    highlightRows(this.table, this.picked);
  }

  // The column that the reader sorted by, which stays when new data arrives.
  sorting() {
    const cells = this.table.tHead ? [...this.table.tHead.rows[0].cells] : [];
    const column = cells.findIndex((c) => c.hasAttribute("aria-sort"));
    return column < 0 ? null : { column, way: cells[column].getAttribute("aria-sort") };
  }

  row({ key, severity, notes, cells }, columns) {
    const row = document.createElement("tr");
    row.dataset.key = key;
    if (severity) row.className = severity;
    cells.forEach((cell, i) => {
      const element = fresh(i ? "td" : "th", row);
      if (!i) element.scope = "row";
      if (columns[i].numeric) element.className = "n";
      if (cell.value !== null && cell.value !== undefined) element.dataset.v = cell.value;
      if (cell.bad) element.classList.add("bad", cell.bad);
      if (cell.why) element.title = cell.why;
      if (!i && severity) {
        const sign = fresh("span", element, SIGN[severity], "sign");
        sign.setAttribute("role", "img");
        sign.setAttribute("aria-label", notes || severity);
      }
      if (!i && this.onPick) {
        const button = fresh("button", element, cell.text, "link");
        button.type = "button";
        button.onclick = () => this.onPick(key);
      } else {
        element.append(cell.bad ? `${SIGN[cell.bad]} ${cell.text}` : cell.text);
      }
    });
    return row;
  }

  highlight(keys) {
    this.picked = keys;
    const first = highlightRows(this.table, keys);
    if (first) first.scrollIntoView({ block: "nearest" });
  }
}

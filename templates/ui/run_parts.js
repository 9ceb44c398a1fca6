// What the tabs of a run's page share: the run and its data, requests, small elements. All text is inserted as text.
import { age, BADGES, svg } from "./format.js";
import { PackedTable, unpack } from "./packed.js";
import { fresh, showTimes } from "./text.js";

// Make an element. `children`: elements, texts, or nothing (null, false).
export function el(name, className = "", ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false && child !== ""));
  return element;
}

// Endings of attempts that are no failure, beside the states of a run.
const STATES = { ...BADGES, preempted: "warning", time_limit: "warning", signal: "warning", deleted: "" };

// A state is never its color alone: the badge has its word.
export function stateBadge(state) {
  const known = state in STATES ? STATES[state] : state ? "critical" : "";
  return el("span", `badge ${known}`, state ? state.replaceAll("_", " ") : "unknown");
}

export function timeOf(t) {
  if (t === null || t === undefined) return el("span", "soft", "–");
  const time = el("time");
  time.dataset.t = t;
  time.dataset.short = "";
  showTimes(el("div", "", time));
  return time;
}

export const number = (v, digits = 4) => (v === null || v === undefined ? "–" : v.toLocaleString("en", { maximumSignificantDigits: digits }));
export const whole = (v) => (v === null || v === undefined ? "–" : Math.round(v).toLocaleString("en"));
export const percent = (v, places = 0) => (v === null || v === undefined ? "–" : `${(100 * v).toFixed(places)} %`);

export function formatBytes(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = bytes;
  while (value >= 1024 && units.length > 1) {
    value /= 1024;
    units.shift();
  }
  return `${units[0] === "B" ? value : value.toFixed(1)} ${units[0]}`;
}

export function stepTime(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return seconds < 1 ? `${number(seconds * 1000, 3)} ms` : `${number(seconds, 3)} s`;
}

// The color of a part of the goodput bar.
export function swatch(part) {
  const box = svg("svg", { viewBox: "0 0 10 10", class: "swatch", "aria-hidden": "true" });
  svg("rect", { width: 10, height: 10, class: `part-${part}` }, box);
  return box;
}

// A titled box. Returns { box, body }.
export function card(title, className = "") {
  const heading = el("h2", "", title);
  const body = el("div", "card-body");
  return { box: el("section", `card ${className}`.trim(), heading, body), body, heading };
}

export function copyButton(text) {
  const button = el("button", "copy", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", `Copy: ${text.slice(0, 80)}`);
  button.onclick = async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select it and press Ctrl-C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  };
  return button;
}

export function command(text) {
  return el("div", "command", el("code", "", text), copyButton(text));
}

// A table. `columns`: [title, "n" for numbers]; `rows`: lists of texts and elements, the first of which heads its row.
export function table(caption, columns, rows) {
  const element = el("table", "", el("caption", "unseen", caption));
  const head = fresh("tr", fresh("thead", element));
  for (const [title, kind] of columns) fresh("th", head, title, kind || "").scope = "col";
  const body = fresh("tbody", element);
  for (const cells of rows) {
    const row = fresh("tr", body);
    cells.forEach((cell, i) => {
      const element_ = fresh(i ? "td" : "th", row, undefined, columns[i][1] || "");
      if (!i) element_.scope = "row";
      element_.append(cell ?? "–");
    });
  }
  const box = el("div", "table-box", element);
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", caption);
  return box;
}

export function problem(text, fix) {
  return el("p", "banner warning", text, fix ? ` To do: ${fix}` : "");
}

// The run that the page is about.
export class Run {
  constructor(id) {
    this.id = id;
    this.status = null;
    this.tab = "overview";
    this.isDeleted = false;
    this.summary = null; // a promise
    this.clockOffset = 0; // s, of the server's clock to this one
    this.curves = null; // of run_curves.js
  }

  setStatus(status) {
    this.status = status;
    this.clockOffset = status.t - Date.now() / 1000;
  }

  get now() {
    return Date.now() / 1000 + this.clockOffset;
  }

  // Ask the server. Throws an Error with its message and what to do.
  async ask(path, parameters = [], options = {}) {
    const query = new URLSearchParams(parameters).toString();
    const response = await fetch(`/api/runs/${encodeURIComponent(this.id)}${path}${query ? `?${query}` : ""}`, options);
    const document_ = await response.json().catch(() => null);
    if (response.ok) return document_;
    const error = new Error(document_?.error ?? `the server answered ${response.status}`);
    error.fix = document_?.fix;
    throw error;
  }

  // The summary of the telemetry, see clustertrain/ui/run/gpus.py, with its tables unpacked. All tabs share it.
  telemetry() {
    if (!this.summary) {
      this.summary = this.ask("/telemetry").then(async (document_) => {
        const bytes = await unpack(document_.blob);
        const tables = Object.entries(document_.data.tables).map(([name, t]) => [name, new PackedTable(t, bytes)]);
        return { ...document_, tables: Object.fromEntries(tables) };
      });
      this.summary.catch(() => { this.summary = null; });
    }
    return this.summary;
  }

  // An element with the age of a moment, which showAges() keeps up to date.
  age(t) {
    const element = el("span");
    element.dataset.ago = t;
    this.showAges(el("div", "", element));
    return element;
  }

  showAges(root) {
    for (const element of root.querySelectorAll("[data-ago]")) {
      const text = age(Math.max(0, this.now - Number(element.dataset.ago)));
      if (element.textContent !== text) element.textContent = text;
    }
  }
}

// Call `load` at most once at a time, and once more if it is asked for meanwhile.
export function once(load) {
  let running = false;
  let again = false;
  return async function start() {
    if (running) {
      again = true;
      return;
    }
    running = true;
    try {
      await load();
    } finally {
      running = false;
      if (again) {
        again = false;
        start();
      }
    }
  };
}

// Text of numbers, units and times, and helpers for the document. Expects nothing; all other parts import it.
//
// A unit is "%", "°C", "W" and so on. Values of "s", "B/s" and "GiB" are drawn with the prefix that fits them: a chart
// of 2e-3 s has an axis in ms. Times are UTC epoch seconds; they are shown in the reader's zone, or in UTC after
// setZone("utc"). Mark up a time as <time data-t="1790000000">…</time>: showTimes() fills it, with UTC in its tooltip.

export const byId = (id) => document.getElementById(id);
export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function fresh(name, parent, text, className) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  if (parent) parent.append(element);
  return element;
}

export const isKnown = (v) => v !== null && v !== undefined && !Number.isNaN(v);
export const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

// Return [lowest, highest] of all known values of the rows, or null.
export function extent(rows) {
  let low = Infinity;
  let high = -Infinity;
  for (const row of rows) {
    for (const v of row) {
      if (!isKnown(v)) continue;
      if (v < low) low = v;
      if (v > high) high = v;
    }
  }
  return low > high ? null : [low, high];
}

const PREFIXES = {
  s: [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]],
  "B/s": [[1e12, "TB/s"], [1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"], [1, "B/s"]],
  GiB: [[1024, "TiB"], [1, "GiB"], [1 / 1024, "MiB"], [1 / 1048576, "KiB"]],
};

// Return { factor, unit, scaled } for values up to `top`: value * factor is in the returned unit.
export function scaledUnit(unit, top) {
  const prefixes = PREFIXES[unit];
  if (!prefixes) return { factor: 1, unit, scaled: false };
  const [size, name] = prefixes.find(([n]) => Math.abs(top) >= n) || prefixes.at(-1);
  return { factor: 1 / size, unit: top ? name : unit, scaled: true };
}

// Format a value of a field { unit, places } with its unit, such as "87 %" or "1.24 GB/s".
export function figureText(value, field) {
  if (!isKnown(value)) return "no sample";
  const { factor, unit, scaled } = scaledUnit(field.unit, value);
  const small = Math.abs(value) < 10 && field.places === 0 && field.unit !== "%";
  const digits = scaled ? { maximumSignificantDigits: 4 } : { maximumFractionDigits: small ? 1 : field.places };
  const text = (value * factor).toLocaleString("en", digits);
  return unit ? `${text} ${unit}` : text;
}

// Format a number for an axis in at most six characters.
export function compact(value) {
  if (value === null) return "";
  const size = Math.abs(value);
  if (value && size < 1e-3) return value.toExponential(1).replace(".0", "");
  const [big, sign] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([n]) => size >= n * 10) || [1, ""];
  return (value / big).toLocaleString("en", { maximumSignificantDigits: 4 }) + sign;
}

const zone = { utc: false, listeners: [] };
export const isUtc = () => zone.utc;
const ZONE_NAMES = new Intl.DateTimeFormat("en", { timeZoneName: "short" });

// Return the name of the page's zone at a time, such as "UTC" or "GMT+2": it depends on the season.
export function zoneName(t = Date.now() / 1000) {
  const d = new Date(t * 1000);
  if (zone.utc || Number.isNaN(d.getTime())) return "UTC";
  return ZONE_NAMES.formatToParts(d).find((p) => p.type === "timeZoneName").value;
}

export function setZone(name) {
  zone.utc = name === "utc";
  showTimes(document);
  zone.listeners.forEach((listener) => listener());
}

export const onZone = (listener) => zone.listeners.push(listener);

const pad = (n) => String(n).padStart(2, "0");

function written(t, utc, seconds) {
  const d = new Date(t * 1000);
  if (Number.isNaN(d.getTime())) return `${t} s`;
  const get = (part) => (utc ? d[`getUTC${part}`]() : d[`get${part}`]());
  const day = `${get("FullYear")}-${pad(get("Month") + 1)}-${pad(get("Date"))}`;
  return `${day} ${pad(get("Hours"))}:${pad(get("Minutes"))}${seconds ? `:${pad(get("Seconds"))}` : ""}`;
}

// Format a time as "2026-01-31 12:00:05" in the zone of the page.
export const moment = (t, seconds = true) => written(t, zone.utc, seconds);

// Fill all <time data-t> below `root` in the zone of the page; the tooltip has UTC.
export function showTimes(root) {
  for (const element of root.querySelectorAll("time[data-t]")) {
    const t = Number(element.dataset.t);
    element.textContent = moment(t) + ("short" in element.dataset ? "" : ` ${zoneName(t)}`);
    element.title = `${written(t, true, true)} UTC`;
    element.dateTime = written(t, true, true).replace(" ", "T") + "Z";
  }
}

export function formatDuration(seconds) {
  if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 60) return `${Number(seconds.toFixed(1))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return hours % 24 ? `${Math.floor(hours / 24)} d ${hours % 24} h` : `${hours / 24} d`;
}

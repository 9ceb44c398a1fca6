// Texts of states, durations and numbers, in the words of the commands.

export const BADGES = {
  running: "active", pending: "warning", requeued: "warning", cancelling: "warning",
  completed: "good", failed: "critical", cancelled: "", unreadable: "critical", unknown: "critical",
};

// As clustertrain/durations.py: 45s, 12m05s, 3h07m, 2d04h.
export function duration(seconds) {
  const s = Math.round(seconds);
  const pad = (n) => String(n).padStart(2, "0");
  if (s < 60) return `${s}s`;
  if (s < 3600) return `${Math.floor(s / 60)}m${pad(s % 60)}s`;
  if (s < 86400) return `${Math.floor(s / 3600)}h${pad(Math.floor((s % 3600) / 60))}m`;
  return `${Math.floor(s / 86400)}d${pad(Math.floor((s % 86400) / 3600))}h`;
}

// Rounded to whole minutes from a minute on, so that an age does not change each second.
export const age = (seconds) => (seconds < 60 ? duration(seconds) : seconds < 3600 ? `${Math.floor(seconds / 60)}m` : duration(seconds));

export const percent = (share) => `${Math.round(share * 100)} %`;
export const integer = (n) => n.toLocaleString("en");
export const loss = (value) => (value === 0 ? "0" : Math.abs(value) >= 1e4 || Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4))));

const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent?.append(element);
  return element;
}

// The page of one run: its tabs, its head, and the stream of changes that keeps the tabs up to date.
//
// Each tab is a module with `create(panel, run)`, which returns { show(), hide()?, onChange(change) }. show() is called each
// time that the tab is opened, hide() when another one is. onChange() is called for each change of the stream, also while
// the tab is hidden.
import { watch } from "./live.js";
import { Curves } from "./run_curves.js";
import { el, Run, stateBadge } from "./run_parts.js";
import * as checkpoints from "./run_checkpoints.js";
import * as gpus from "./run_gpus.js";
import * as logs from "./run_logs.js";
import * as overview from "./run_overview.js";
import * as setup from "./run_setup.js";
import * as timeline from "./run_timeline.js";
import * as training from "./run_training.js";
import { byId, showTimes } from "./text.js";

const MODULES = { overview, training, gpus, timeline, logs, setup, checkpoints };
const AGES_MS = 5_000;

const first = JSON.parse(byId("data").textContent);
const run = new Run(first.run);
run.curves = new Curves(run);
const tabs = [...document.querySelectorAll('[role="tab"]')];
const views = new Map();

function view(key) {
  if (!views.has(key)) {
    const panel = byId(`panel-${key}`);
    const made = MODULES[key].create(panel, run);
    views.set(key, made);
    // What arrived before the tab was opened.
    if (run.status) made.onChange({ status: run.status });
  }
  return views.get(key);
}

// "#logs" or "#logs/1/rank-0": a tab, and what it shows.
function parseFragment() {
  let text = location.hash.slice(1);
  try {
    text = decodeURIComponent(text);
  } catch { /* a lone % is itself */ }
  const [key, ...rest] = text.split("/");
  return key in MODULES ? [key, rest.join("/")] : ["overview", ""];
}

function open() {
  const [key, detail] = parseFragment();
  for (const tab of tabs) {
    const selected = tab.id === `tab-${key}`;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
    if (selected) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
    byId(tab.getAttribute("aria-controls")).hidden = !selected;
  }
  if (run.tab !== key) views.get(run.tab)?.hide?.();
  run.tab = key;
  view(key).show(detail);
}

// Open a tab and keep the focus on it: following a link to the panel would move the focus there.
function go(tab) {
  history.pushState(null, "", tab.getAttribute("href"));
  open();
  tab.focus();
}

function wireTabs() {
  const list = tabs[0].parentElement;
  list.addEventListener("click", (event) => {
    const tab = event.target.closest('[role="tab"]');
    if (!tab || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    go(tab);
  });
  list.addEventListener("keydown", (event) => {
    const place = tabs.indexOf(document.activeElement);
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -place, End: tabs.length - 1 - place };
    if (event.key === " " && place >= 0) {
      event.preventDefault();
      tabs[place].click();
    }
    if (place < 0 || !(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    go(tabs[(place + steps[event.key] + tabs.length) % tabs.length]);
  });
  addEventListener("hashchange", open);
}

function showHead(status) {
  byId("run-state").replaceChildren(stateBadge(status.error ? "unreadable" : status.cancelling ? "cancelling" : status.state));
  document.title = `${status.state ?? "unreadable"} · ${run.id} · clustertrain`;
  const jobs = status.job_id ? `job ${status.job_id} (${status.backend})` : "";
  const size = status.nodes ? `${count(status.nodes, "node")} × ${count(status.gpus_per_node, status.device === "cpu" ? "rank" : "GPU")}` : "";
  const attempts = status.attempts ? count(status.attempts.length, "attempt") : "";
  const parts = [status.name && status.name !== run.id ? status.name : "", jobs, size, attempts].filter(Boolean);
  byId("run-facts").replaceChildren(...parts.map((text) => el("span", "", text)));
  const banner = byId("banner");
  banner.hidden = !status.error;
  if (status.error) {
    banner.className = "banner critical";
    banner.replaceChildren(el("strong", "", "This run cannot be read."), ` ${status.error}`, status.fix ? el("p", "", `To do: ${status.fix}`) : "");
  }
}

const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

function showDeleted() {
  const banner = byId("banner");
  banner.hidden = false;
  banner.className = "banner warning";
  banner.replaceChildren(
    el("strong", "", "This run has been deleted."),
    " The page shows what was known before; nothing more can be loaded. ",
    Object.assign(el("a", "", "All runs"), { href: "/" }),
  );
  byId("run-state").replaceChildren(stateBadge("deleted"));
  document.title = `deleted · ${run.id} · clustertrain`;
}

function receive(change) {
  if (change.deleted) {
    run.isDeleted = true;
    showDeleted();
  }
  if (change.status) {
    run.setStatus(change.status);
    showHead(change.status);
  }
  if (change.telemetry) run.summary = null;
  if (change.curves || change.rows) run.curves.receive(change);
  for (const made of views.values()) made.onChange(change);
  document.documentElement.dataset.ready = "yes";
}

wireTabs();
if (first.status) receive({ status: first.status });
open();
watch(`/api/live/runs/${encodeURIComponent(run.id)}`, null, receive);
setInterval(() => {
  if (!document.hidden) run.showAges(document);
}, AGES_MS);
showTimes(document);

// Attempts, phases and events on one time axis, and the events as a table.
import { createAxis } from "./axis.js";
import { card, el, once, problem, swatch, table, timeOf } from "./run_parts.js";
import { createTimeline } from "./timeline.js";

const MOST_EVENTS = 200;
// The parts of the goodput bar that have the colors of the phases in templates/parts/timeline.js.
const PARTS = { training: "productive", "start-up": "startup", restore: "restore", evaluation: "evaluation", checkpoint: "checkpoint_stall", shutdown: "shutdown" };

export function create(panel, run) {
  const chart = card("Timeline");
  const events = card("Events");
  const figure = el("figure");
  const about = el("p", "about");
  const key = el("ul", "parts");
  key.setAttribute("aria-label", "Phases");
  chart.body.append(about, figure, key);
  const lanes = el("select");
  lanes.id = "event-lane";
  lanes.onchange = () => showEvents();
  const list = el("div");
  events.body.append(el("div", "toolbar", el("label", "check", "Show", lanes)), list);
  panel.append(chart.box, events.box);
  const view = { axis: null, timeline: null, data: null };

  const showEvents = () => {
    const chosen = view.data.marks.filter((m) => !lanes.value || m.lane === lanes.value).reverse();
    const rows = chosen.slice(0, MOST_EVENTS).map((m) => [timeOf(m.t), `${m.attempt}`, m.kind.replaceAll("_", " "), el("span", "wrap", m.text)]);
    const left = chosen.length - rows.length;
    list.replaceChildren(
      rows.length ? table("Events, newest first", [["Time"], ["Attempt", "n"], ["Event"], ["Description"]], rows) : el("p", "soft", "No events yet."),
      left > 0 ? el("p", "soft", `${left} older events are not listed.`) : "",
    );
  };
  const load = once(async () => {
    try {
      view.data = await run.ask("/timeline");
    } catch (error) {
      about.replaceChildren(problem(error.message, error.fix));
      return;
    }
    const { attempts, marks, lanes: names, notes, problems } = view.data;
    about.replaceChildren(notes.join(" "), ...problems.map((text) => problem(`Not read: ${text}`)));
    const present = new Set(view.data.phases.map(([, , phase]) => phase));
    key.replaceChildren(...Object.keys(PARTS).filter((phase) => present.has(phase)).map((phase) => el("li", "", swatch(PARTS[phase]), phase)));
    const chosen = lanes.value;
    lanes.replaceChildren(new Option("All events", ""), ...names.map((name) => new Option(name, name)));
    lanes.value = names.includes(chosen) ? chosen : "";
    showEvents();
    const starts = [...attempts.map((a) => a.start), ...marks.map((m) => m.t)].filter((t) => t !== null);
    if (!starts.length) return;
    const ends = [...attempts.map((a) => a.end ?? run.now), ...marks.map((m) => m.end ?? m.t)];
    const range = [Math.min(...starts), Math.max(...ends)];
    if (!view.timeline) {
      view.axis = createAxis({ kind: "time", range });
      view.timeline = createTimeline(figure, { axis: view.axis, title: "" });
    }
    view.axis.setRange(range);
    view.timeline.setData(view.data);
  });
  return {
    show: load,
    onChange: (change) => {
      if (change.timeline && run.tab === "timeline") load();
    },
  };
}

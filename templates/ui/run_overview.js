// The first tab: how far the run is, whether anything is wrong, where the time went, and the attempts.
import { createAxis } from "./axis.js";
import { createChart, fillLegend, line } from "./chart.js";
import { duration, svg } from "./format.js";
import { card, command, el, number, percent, problem, stateBadge, stepTime, swatch, table, timeOf, whole } from "./run_parts.js";

const MOST_NOTES = 6; // shown without asking
const MOST_DOTS = 100;

export function create(panel, run) {
  const progress = el("section", "card progress-card");
  progress.setAttribute("aria-label", "Progress");
  const trouble = el("div", "stack");
  const notes = card("Insights");
  const time = card("Where the time went");
  const loss = card("Loss", "loss-card");
  const attempts = card("Attempts");
  panel.append(progress, trouble, el("div", "columns", notes.box, el("div", "stack", loss.box, time.box)), attempts.box);
  notes.body.append(el("p", "soft", "The samples of all GPUs are being summarized…"));
  const chart = lossChart(loss, run);

  const loadNotes = async () => {
    try {
      showNotes(notes, await run.telemetry());
    } catch (error) {
      notes.body.replaceChildren(problem(error.message, error.fix));
    }
  };
  return {
    show: () => {
      chart.want();
      loadNotes();
    },
    onChange: (change) => {
      for (const box of [progress, time.box, attempts.box]) box.hidden = Boolean(run.status?.error);
      if (change.status && !change.status.error) {
        showProgress(progress, change.status, run);
        showTrouble(trouble, change.status);
        showTime(time, change.status);
        showAttempts(attempts, change.status, run);
      }
      if (change.telemetry && run.tab === "overview") loadNotes();
    },
  };
}

function showProgress(box, status, run) {
  const { step, total_steps: total } = status;
  const share = step !== null && total ? Math.min(1, step / total) : null;
  const bar = el("progress");
  bar.max = 1;
  if (share !== null) bar.value = share;
  bar.setAttribute("aria-label", share === null ? "Progress is unknown" : `Progress: ${Math.floor(100 * share)} %`);
  const steps = step === null ? (status.is_final ? "No steps" : "No step yet") : `Step ${whole(step)}${total ? ` of ${whole(total)}` : ""}`;
  const left = status.eta_s === null || status.eta_s === undefined ? "" : `${duration(status.eta_s)} left`;
  const line_ = el("p", "progress-line", el("strong", "", steps), share === null ? "" : el("span", "", `${Math.floor(100 * share)} %`), left && el("span", "", left));
  const tiles = el("dl", "stats", ...tilesOf(status, run));
  box.replaceChildren(line_, ...(share === null ? [] : [bar]), tiles);
}

function tilesOf(status, run) {
  const { goodput } = status;
  const since = status.state === "running" && status.since_step_s !== null ? el("span", "", "last step ", run.age(status.t - status.since_step_s), " ago") : "";
  const saved = status.checkpoint_t ? el("span", "", run.age(status.checkpoint_t), " ago") : "–";
  const ended = status.is_final && status.attempts.length ? status.attempts.at(-1).end : null;
  return [
    tile("Step time", stepTime(status.step_s), since),
    tile("Tokens/s", status.tokens_per_s ? number(status.tokens_per_s) : "–", "of all ranks"),
    tile("Loss", number(status.loss), status.contract?.value ? `${status.contract.metric} ${number(status.contract.value)}` : ""),
    tile("Goodput", goodput.ratio === null ? "–" : percent(goodput.ratio), goodput.effective_ratio === null ? "no steps reported" : `${percent(goodput.effective_ratio)} of the time with nodes`),
    tile("Last checkpoint", saved, status.checkpoint_step === null ? (status.saved ?? (status.is_final ? "none" : "none yet")) : `step ${whole(status.checkpoint_step)}`),
    ended ? tile("Ended", timeOf(ended), duration(goodput.wall_s)) : tile("Submitted", status.submitted ? el("span", "", run.age(status.submitted), " ago") : "–", status.submitted ? timeOf(status.submitted) : ""),
  ];
}

const tile = (name, value, about) => el("div", "stat", el("dt", "", name), el("dd", "", el("span", "stat-value", value), el("span", "about", about || "")));

function showTrouble(box, status) {
  const lines = [];
  if (status.pending_reason) lines.push(el("p", "banner warning", "Waiting for ", status.pending_reason, status.start_estimate ? el("span", "", "; expected to start ", timeOf(status.start_estimate)) : ""));
  if (status.scheduler_error) lines.push(problem(`The scheduler did not answer: ${status.scheduler_error}`));
  if (status.cancelling) lines.push(problem("Its owner cancelled the run; the job has not ended yet."));
  const reason = status.end_reason || status.undecided_reason;
  if (reason && !status.failure) lines.push(el("p", `banner ${status.state === "cancelled" ? "warning" : "critical"}`, reason));
  if (status.failure) lines.push(failureCard(status, reason));
  if (status.continue_command) lines.push(el("div", "banner warning", "To continue the run:", command(status.continue_command)));
  if (status.skipped_steps || status.roll_backs) lines.push(problem(`${status.skipped_steps} steps were skipped, and the run rolled back ${status.roll_backs} times.`));
  for (const error of status.read_errors) lines.push(problem(`Not read: ${error}`));
  box.replaceChildren(...lines);
  box.hidden = !lines.length;
}

function failureCard(status, reason) {
  const { failure, attempts } = status;
  const { box, body } = card(`${failure.rank === null ? "torchrun" : `Rank ${failure.rank}`} failed on ${failure.node}`, "critical");
  const key = `${attempts.at(-1).n}/${failure.rank === null ? `agent-${failure.node}` : `rank-${failure.rank}`}`;
  const link = Object.assign(el("a", "", "Open its log"), { href: `#logs/${key}` });
  body.append(el("p", "", el("strong", "", failure.reason)), el("pre", "tail", failure.lines.join("\n") || "It printed nothing."), el("p", "soft", link, ` · ${failure.log}`));
  if (reason) body.append(el("p", "", reason));
  return box;
}

function showTime({ box, body }, status) {
  const parts = status.goodput_parts;
  box.hidden = !parts.length;
  const bar = svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", class: "ledger", "aria-hidden": "true" }); // the list has the same
  const list = el("ul", "parts");
  let left = 0;
  for (const { key, label, seconds, share } of parts) {
    svg("rect", { x: 100 * left, width: 100 * share, height: 10, class: `part-${key}` }, bar);
    left += share;
    list.append(el("li", "", swatch(key), label, " ", el("b", "", duration(seconds)), ` ${percent(share, share < 0.01 ? 1 : 0)}`));
  }
  body.replaceChildren(bar, list);
}

// A piece of a sentence is text, code, or the name of a GPU: clustertrain/report/html/notes.py.
function piece({ text, gpu, is_code: isCode }) {
  if (isCode) return el("code", "", text);
  return gpu === null ? text : Object.assign(el("a", "", text), { href: `#gpus/${gpu}` });
}

function noteItem({ severity, sign, text, target, advice_label: label, advice, cost }) {
  const chips = target.flatMap((t) => [" ", piece(t)]);
  return el("li", severity, el("span", "severity", `${sign} ${severity}`), el("div", "",
    el("p", "", ...text.map(piece), ...chips, cost ? el("span", "soft", ` · ${cost}`) : ""),
    advice.length ? el("p", "soft", `${label}: `, ...advice.map(piece)) : ""));
}

function showNotes({ body }, { insights, read_errors: errors }) {
  const list = el("ul", "notes", ...insights.slice(0, MOST_NOTES).map(noteItem));
  const rest = insights.slice(MOST_NOTES);
  const more = el("details", "", el("summary", "", `${rest.length} more`), el("ul", "notes", ...rest.map(noteItem)));
  const nothing = el("p", "soft", "Nothing stands out in the recorded samples.");
  body.replaceChildren(insights.length ? list : nothing, rest.length ? more : "", ...errors.map((e) => problem(`Not read: ${e}`)));
}

function showAttempts({ body }, status, run) {
  const rows = status.attempts.map((a) => [
    el("span", "", `${a.n}`),
    stateBadge(a.state),
    timeOf(a.start),
    a.start === null ? "–" : a.end === null && status.is_final ? "–" : a.end === null ? run.age(a.start) : duration(a.end - a.start),
    a.first_step === null && a.last_step === null ? "–" : `${whole(a.first_step)} – ${whole(a.last_step)}`,
    a.nodes.length > 2 ? `${a.nodes[0]} + ${a.nodes.length - 1}` : a.nodes.join(", "),
    el("span", "wrap", a.reason ?? ""),
    Object.assign(el("a", "", "Logs"), { href: `#logs/${a.n}/rank-0`, ariaLabel: `Logs of attempt ${a.n}` }),
  ]);
  const columns = [["Attempt", "n"], ["State"], ["Started"], ["Ran", "n"], ["Steps", "n"], ["Nodes"], ["Ending"], ["Logs"]];
  body.replaceChildren(rows.length ? table("Attempts", columns, rows) : el("p", "soft", "No attempt has started yet."));
}

function lossChart({ box, body }, run) {
  const figure = el("figure");
  const legend = el("ul", "key");
  legend.setAttribute("aria-label", "Lines");
  body.append(figure, legend);
  box.hidden = true;
  let chart = null;
  let axis = null;
  run.curves.onData(() => {
    const { data } = run.curves;
    if (!data || !data.curves.loss || data.steps.length < 2) return;
    box.hidden = false;
    const { times, steps, along } = run.curves.points;
    if (!chart) {
      axis = createAxis({ kind: "number", label: "step", range: [steps[0], steps.at(-1)] });
      chart = createChart(figure, { title: "", unit: "", places: 4, span: "data", axes: { time: axis, step: axis }, x: "step" });
    }
    axis.setRange([data.steps[0], data.steps.reduce((a, b) => Math.max(a, b), 0)]);
    const lines = [line("train", along(data.curves.loss), 0, { width: 1.5 })];
    const validation = data.curves.validation_loss;
    if (validation) lines.push(line("validation", along(validation), 1, { width: 1.5, sparse: true, dots: validation.filter((v) => v !== null).length <= MOST_DOTS }));
    chart.setData({ times, steps, lines });
    fillLegend(legend, lines.length > 1 ? lines : []);
    legend.hidden = lines.length < 2;
  });
  return { want: () => run.curves.want(["loss", "validation_loss"]) };
}


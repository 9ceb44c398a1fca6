// What the run was started with: command line, code, recipe, plan and its reasons, environment, nodes.
import { card, command, copyButton, el, number, problem, stepTime, table, timeOf } from "./run_parts.js";

export function create(panel, run) {
  let loaded = false;
  panel.append(el("p", "soft", "Loading…"));
  return {
    show: async () => {
      if (loaded) return;
      try {
        fill(panel, await run.ask("/setup"));
        loaded = true;
      } catch (error) {
        panel.replaceChildren(problem(error.message, error.fix));
      }
    },
    onChange: () => {},
  };
}

function fill(panel, setup) {
  const left = el("div", "stack", submission(setup), code(setup), environment(setup), nodes(setup), packages(setup));
  const right = el("div", "stack", plan(setup), recipe(setup));
  panel.replaceChildren(...setup.errors.map((e) => problem(`Not read: ${e}`)), el("div", "columns", left, right));
}

const facts = (pairs) => el("dl", "facts", ...pairs.filter(([, v]) => v !== null && v !== undefined && v !== "").map(([k, v]) => el("div", "", el("dt", "", k), el("dd", "", v))));

function submission({ submission: s, folder }) {
  const { box, body } = card("Command line");
  body.append(s.command ? command(s.command) : el("p", "soft", "It was not recorded."));
  body.append(facts([
    ["Submitted", s.time ? timeOf(s.time) : null], ["By", s.user && s.host ? `${s.user} on ${s.host}` : s.user], ["In", s.cwd],
    ["clustertrain", s.clustertrain], ["Python", s.python], ["Kernel", s.kernel], ["Folder", folder],
  ]));
  return box;
}

function code({ code: c }) {
  const { box, body } = card("Code");
  if (!c) {
    body.append(el("p", "soft", "No git commit was recorded: the code was not in a repository."));
    return box;
  }
  const badge = c.dirty ? el("span", "badge warning", "uncommitted changes") : el("span", "badge good", "clean");
  body.append(facts([["Commit", el("span", "", el("code", "", c.commit.slice(0, 12)), " ", badge)], ["Branch", c.branch], ["Repository", c.repository]]));
  if (c.diff) {
    const diff = el("pre", "code", ...c.diff.split("\n").map((text) => el("span", text.startsWith("+") ? "added" : text.startsWith("-") ? "removed" : "", `${text}\n`)));
    diff.tabIndex = 0;
    body.append(el("details", "", el("summary", "", `Changes${c.diff_truncated ? " (the first part)" : ""}`), diff));
  }
  return box;
}

function recipe({ recipe: text, recipe_title: title }) {
  const { box, body, heading } = card(title);
  if (!text) {
    body.append(el("p", "soft", "It cannot be read."));
    return box;
  }
  heading.append(" ", copyButton(text));
  const pre = el("pre", "code", text);
  pre.tabIndex = 0;
  pre.setAttribute("aria-label", title);
  body.append(pre);
  return box;
}

function plan({ plan: p }) {
  const { box, body } = card("Plan");
  if (!p) {
    body.append(el("p", "soft", "The run has no plan."));
    return box;
  }
  const { batch, memory, time } = p;
  const split = batch?.global_batch ? `${batch.global_batch} = ${batch.micro_batch} × ${batch.grad_accum} × data parallel` : null;
  body.append(facts([
    ["Layout", p.layout], ["Ranks", p.world_size ? `${p.world_size} = ${p.nodes} × ${p.gpus_per_node}` : null],
    ["Device", [p.device, p.precision].filter(Boolean).join(", ")], ["Batch", split],
    ["Memory per rank", memory?.peak_gib ? `${number(memory.peak_gib, 3)} of ${memory.capacity_gib ? number(memory.capacity_gib, 3) : "?"} GiB` : null],
    ["Predicted step", time?.step_s ? `${stepTime(time.step_s)}${time.mfu ? `, MFU ${(100 * time.mfu).toFixed(1)} %` : ""}` : null],
    ...Object.entries(p.training ?? {}),
  ]));
  p.warnings.forEach((text) => body.append(el("p", "banner warning", text)));
  if (p.reasons.length) body.append(el("h3", "", "Why"), el("ul", "reasons", ...p.reasons.map((text) => el("li", "", text))));
  const others = (p.runners_up ?? []).map((r) => [r.layout, stepTime(r.step_s), number(r.tokens_per_s_per_gpu), number(r.peak_gib, 3)]);
  if (others.length) body.append(el("h3", "", "Runners-up"), table("Runners-up", [["Layout"], ["Step", "n"], ["Tokens/s per GPU", "n"], ["GiB per rank", "n"]], others));
  const rejected = (p.rejected ?? []).map((r) => [r.strategy, el("span", "wrap", r.reason)]);
  if (rejected.length) body.append(el("details", "", el("summary", "", "Not chosen"), table("Layouts that were not chosen", [["Layout"], ["Reason"]], rejected)));
  const settings = p.environment.map((s) => [el("code", "", `${s.name}=${s.value}`), el("span", "wrap", s.reason ?? "")]);
  if (settings.length) body.append(el("details", "", el("summary", "", `Environment of the ranks: ${settings.length} chosen`), table("Environment settings of the plan", [["Setting"], ["Reason"]], settings)));
  return box;
}

function environment({ environment: names }) {
  const { box, body } = card("Environment");
  body.append(names.length ? el("p", "", ...names.flatMap((name) => [el("code", "env-name", name), " "])) : el("p", "soft", "No variables were set for this run."));
  if (names.length) body.append(el("p", "soft", "Names only: values may be secrets."));
  return box;
}

function nodes({ nodes: attempts }) {
  const { box, body } = card("Nodes");
  const rows = attempts.map((a) => [`${a.attempt}`, a.job_id || "–", `${a.nodes.length}`, el("span", "wrap", a.nodes.join(", "))]);
  body.append(rows.length ? table("Nodes of each attempt", [["Attempt", "n"], ["Job"], ["Nodes", "n"], ["Names"]], rows) : el("p", "soft", "No attempt has started yet."));
  return box;
}

function packages({ packages: versions }) {
  const { box, body } = card("Packages of the ranks");
  const pairs = Object.entries(versions ?? {});
  body.append(pairs.length ? facts(pairs) : el("p", "soft", "They were not recorded."));
  return box;
}

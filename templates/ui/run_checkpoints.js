// The checkpoints of the run: newest first, with size, age, state and the deciding metric.
import { card, command, el, formatBytes, number, once, problem, table, timeOf, whole } from "./run_parts.js";

const CLASSES = { verified: "good", committed: "good", DAMAGED: "critical", UNREADABLE: "critical", "not committed": "warning" };

export function create(panel, run) {
  const { box, body } = card("Checkpoints");
  panel.append(box);
  body.append(el("p", "soft", "Loading…"));
  const load = once(async () => {
    try {
      show(body, await run.ask("/checkpoints"), run);
    } catch (error) {
      body.replaceChildren(problem(error.message, error.fix));
    }
  });
  let newest = null;
  return {
    show: load,
    onChange: ({ status }) => {
      const changed = status && status.checkpoint_t !== newest;
      if (changed) newest = status.checkpoint_t;
      if (changed && run.tab === "checkpoints") load();
    },
  };
}

function show(body, document_, run) {
  const { rows } = document_;
  const problems = document_.damage.map((text) => problem(text));
  if (!rows.length) {
    const { saved, is_final: isFinal } = run.status ?? {};
    body.replaceChildren(el("p", "soft", saved ? `The program saves its own checkpoints; the newest is ${saved}.` : `No checkpoint ${isFinal ? "was saved" : "has been saved yet"}.`), ...problems);
    return;
  }
  const metric = rows.find((r) => r.metric)?.metric.name;
  const shared = rows.some((r) => r.new_bytes !== null && r.new_bytes !== r.bytes);
  const columns = [["Step", "n"], ["Saved"], ["Age", "n"], ["Size", "n"], ...(shared ? [["New", "n"]] : []), ["State"], ...(metric ? [[metric, "n"]] : []), ["Ranks", "n"], ["Layout"], ["Engine"]];
  const cells = rows.map((r) => [
    whole(r.step), timeOf(r.t), r.t ? run.age(r.t) : "–", formatBytes(r.bytes), ...(shared ? [formatBytes(r.new_bytes)] : []),
    el("span", "", el("span", `badge ${CLASSES[r.state] ?? ""}`, r.state.toLowerCase()), r.best ? el("span", "badge active", "best") : ""),
    ...(metric ? [r.metric?.name === metric ? number(r.metric.value, 6) : "–"] : []),
    whole(r.world_size), r.layout, r.engine ?? "–",
  ]);
  body.replaceChildren(
    table("Checkpoints, newest first", columns, cells),
    ...problems,
    el("p", "about", `${formatBytes(document_.total_bytes)} in ${document_.folder}. “Committed” means that the save is complete; this compares every byte with its checksum:`),
    command(document_.verify_command),
  );
}

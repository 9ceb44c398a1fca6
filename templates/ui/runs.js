import { watch } from "./live.js";

const data = JSON.parse(document.getElementById("data").textContent);
const body = document.querySelector("#runs tbody");
const rows = new Map();

function apply(change) {
  if (change.full) rows.clear();
  for (const row of change.rows) rows.set(row.run, row);
  for (const run of change.removed) rows.delete(run);
  body.replaceChildren(
    ...[...rows.values()].map((row) => {
      const line = document.createElement("tr");
      const link = document.createElement("a");
      link.href = row.url;
      link.textContent = row.run;
      line.insertCell().append(link);
      for (const text of [row.state, row.step, row.loss]) line.insertCell().textContent = text ?? "–";
      return line;
    }),
  );
  document.documentElement.dataset.ready = "";
}

apply(data);
watch("/api/live/runs", data.cursor, apply);

// The page that compares runs: its tables and curves follow the runs.
import { updateComparison } from "./compare.js";
import { replaceContent, watchPage } from "./reload.js";
import { byId } from "./text.js";

// All but the curves, whose charts stay.
const PARTS = ".head, .verdict, .notes, .tools, .compared > section:not(.curves)";
const partsOf = (page) => [...page.querySelectorAll(PARTS)];
const metricsOf = (page) => [...page.querySelectorAll("figure[data-scalar]")].map((figure) => figure.dataset.scalar).join("\n");
const dataOf = (page) => JSON.parse(page.getElementById("data").textContent);

watchPage(`/api/live/compare${location.search}`, dataOf(document).cursor, (next) => {
  if (metricsOf(next) !== metricsOf(document)) {
    location.reload(); // the first values of a metric: there are other charts
    return;
  }
  const replacements = partsOf(next);
  partsOf(byId("content")).forEach((part, i) => replaceContent(part, replacements[i]));
  updateComparison(dataOf(next));
});

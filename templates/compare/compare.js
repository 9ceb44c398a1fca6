// The curves of several runs, one chart per metric. Dragging zooms, a double click shows everything. For the page of
// `compare --html`, and for the page of `clustertrain ui`, which has no button for the theme.
const DASHES = [[], [7, 3], [2, 2], [9, 3, 2, 3]];
const data = JSON.parse(document.getElementById("data").textContent);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const brief = (v) => (v === null || v === undefined ? "–" : Math.abs(v) >= 1e4 ? v.toLocaleString("en", { notation: "compact", maximumFractionDigits: 2 }) : String(Number(v.toPrecision(5))));

// uPlot needs one array of x for all lines: the union of all x, with gaps that it spans.
function joined(curves) {
  const all = [...new Set(curves.flatMap((c) => c.x))].sort((a, b) => a - b);
  const rows = curves.map((c) => {
    const at = new Map(c.x.map((x, i) => [x, c.y[i]]));
    return all.map((x) => at.get(x) ?? null);
  });
  return [all, ...rows];
}

function chart(name, figure) {
  const values = joined(data.runs.map((r) => r.curves[name]));
  const known = values.slice(1).flat().filter((v) => v !== null);
  const logarithmic = Math.min(...known) > 0 && Math.max(...known) / Math.min(...known) >= 30;
  figure.querySelector("figcaption").textContent = logarithmic ? `${name}, logarithmic` : name;
  const axis = () => ({ stroke: () => colour("--soft"), grid: { stroke: () => colour("--grid"), width: 1 }, ticks: { stroke: () => colour("--line") } });
  const box = figure.querySelector(".plot");
  const plot = new uPlot(
    {
      width: Math.max(240, box.clientWidth),
      height: 320,
      cursor: { sync: { key: "runs" }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1 } },
      axes: [{ ...axis(), label: data.axis, values: (u, ticks) => ticks.map(brief) }, { ...axis(), size: 64, values: (u, ticks) => ticks.map((v) => (v === null ? "" : brief(v))) }],
      series: [
        { label: data.axis, value: (u, v) => brief(v) },
        ...data.runs.map((r, i) => ({
          label: `${r.letter} ${r.run}`,
          stroke: () => colour(`--c${i % 8}`),
          dash: DASHES[Math.floor(i / 8) % 4],
          width: 1.5,
          spanGaps: true,
          points: { show: r.curves[name].x.length < 60, fill: () => colour("--card") },
          value: (u, v) => brief(v),
        })),
      ],
    },
    values,
    box,
  );
  return { plot, box };
}

const charts = [...document.querySelectorAll("figure[data-scalar]")].map((f) => chart(f.dataset.scalar, f));
addEventListener("resize", () => charts.forEach(({ plot, box }) => plot.setSize({ width: Math.max(240, box.clientWidth), height: 320 })));

const dark = matchMedia("(prefers-color-scheme: dark)");
const redraw = () => charts.forEach(({ plot }) => plot.redraw(false, true));
const button = document.getElementById("theme");
if (button) {
  button.hidden = false;
  button.onclick = () => {
    const root = document.documentElement;
    const shown = root.dataset.theme ?? (dark.matches ? "dark" : "light");
    root.dataset.theme = shown === "dark" ? "light" : "dark";
    redraw();
  };
}
dark.addEventListener("change", redraw);
document.documentElement.dataset.ready = "";

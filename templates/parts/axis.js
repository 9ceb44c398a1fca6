// A shared x axis: charts on one axis have the same range and the same cursor; dragging over one zooms all.
// Expects the global `uPlot` (vendored/uPlot.iife.min.js as a classic script) and parts.css.
//
//   const time = createAxis({ kind: "time", range: [start, end] });  // UTC epoch seconds
//   const step = createAxis({ kind: "number", label: "step", range: [0, 1000] });  // digits: decimals of x
//   time.setRange([start, later]);  // new data arrived: a view of the whole range follows it, a zoomed one stays
//   time.show(from, to); time.showWhole(); time.zoom(0.5); time.move(-0.5); time.onView(([from, to]) => …);
//   redrawAll();  // after a change of theme or zone
import { color, compact, isUtc, moment, onZone } from "./text.js";

export const FONT = '11px system-ui, "DejaVu Sans", sans-serif';
export const PADDING = [8, 20, 0, 0]; // px; half a label stands out on the right
const NEAR = 24; // px, the distance from the cursor up to which a line is named
const axes = new Set();
let lastKey = 0;

// Return whether the user points at this chart; the other charts only follow its cursor.
export const pointedAt = (u) => u.over.matches(":hover") || u.root.parentElement === document.activeElement;

export function redrawAll() {
  axes.forEach((axis) => axis.redraw());
}

onZone(redrawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redrawAll());

export const createAxis = (spec) => new Axis(spec);

class Axis {
  constructor({ kind = "time", label = "", range, least = 4, digits = 0 }) {
    Object.assign(this, { kind, label, least, digits });
    lastKey += 1;
    this.key = `axis-${lastKey}`;
    this.plots = [];
    this.listeners = [];
    this.setRange(range);
    this.sync = uPlot.sync(this.key);
    axes.add(this);
  }

  setRange([start, end]) {
    const follows = !this.view || (this.view[0] === this.whole[0] && this.view[1] === this.whole[1]);
    this.whole = [start, end > start ? end : start + 1];
    if (follows) this.show(...this.whole);
  }

  onView(listener) {
    this.listeners.push(listener);
    listener(this.view);
  }

  // Draw a plot with the shared cursor. `figure`: the element around it, which gets data-from and data-to.
  add(box, figure, options, values, readout) {
    const plot = new uPlot(
      {
        ...options,
        width: Math.max(200, box.clientWidth),
        tzDate: (t) => (isUtc() ? uPlot.tzDate(new Date(t * 1000), "Etc/UTC") : new Date(t * 1000)),
        legend: { show: false },
        cursor: {
          y: false,
          points: { size: 6, ...options.points },
          drag: { x: true, y: false, setScale: false },
          focus: options.focus ? { prox: NEAR } : undefined,
          bind: { dblclick: () => () => this.showWhole() },
          sync: {
            key: this.key,
            setSeries: false,
            scales: ["x", null],
            filters: { pub: (type) => type === "mousemove" || type === "mouseleave" },
          },
        },
        hooks: {
          ...options.hooks,
          setCursor: [(u) => readout(u)],
          setSelect: [
            (u) => {
              const { left, width } = u.select;
              u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
              if (width > 3) this.show(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
            },
          ],
          setScale: [
            (u, key) => {
              if (key !== "x") return;
              figure.dataset.from = u.scales.x.min;
              figure.dataset.to = u.scales.x.max;
            },
          ],
        },
      },
      values,
      box,
    );
    this.redrawOne(plot);
    box.tabIndex = 0;
    box.setAttribute("role", "img");
    box.onkeydown = (event) => this.key_down(plot, options.lane, event);
    this.plots.push(plot);
    return plot;
  }

  remove(plot) {
    this.plots = this.plots.filter((other) => other !== plot);
    plot.destroy();
  }

  show(from, to) {
    const [start, end] = this.whole;
    const width = Math.min(end - start, Math.max(to - from, Math.min(this.least, end - start)));
    const low = Math.min(Math.max((from + to) / 2 - width / 2, start), end - width);
    this.view = [low, low + width];
    this.redraw();
    this.listeners.forEach((listener) => listener(this.view));
  }

  showWhole() {
    this.show(...this.whole);
  }

  zoom(factor) {
    const [low, high] = this.view;
    const middle = (low + high) / 2;
    this.show(middle - ((high - low) / 2) * factor, middle + ((high - low) / 2) * factor);
  }

  move(share) {
    const by = (this.view[1] - this.view[0]) * share;
    this.show(this.view[0] + by, this.view[1] + by);
  }

  // Handle a key. `lane`: the height of a row in px if the chart has rows.
  key_down(plot, lane, event) {
    const { clientWidth: width, clientHeight: height } = plot.over;
    const within = (at, most) => Math.min(Math.max(at, 0), most - 1);
    const point = (by, down) => {
      const { left, top } = plot.cursor;
      const from = left >= 0 ? [left, top] : [width / 2, (lane || 10) / 2];
      const place = [from[0] + by * Math.max(1, width / 200), from[1] + down * (lane || 0)];
      plot.setCursor({ left: within(place[0], width), top: within(place[1], height) }, true);
      const box = plot.root.parentElement;
      if (down) box.scrollTop = plot.cursor.top - box.clientHeight / 2;
    };
    const actions = {
      ArrowLeft: () => point(-1, 0),
      ArrowRight: () => point(1, 0),
      ...(lane && { ArrowUp: () => point(0, -1), ArrowDown: () => point(0, 1) }),
      "+": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.showWhole(),
    };
    if (!(event.key in actions) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  redraw() {
    this.plots.forEach((plot) => this.redrawOne(plot));
  }

  redrawOne(plot) {
    // uPlot's redraw() would undo a range that was set in the same turn of the event loop.
    plot.setScale("x", { min: this.view[0], max: this.view[1] });
  }

  // The x value as text, for readouts.
  text(value) {
    return this.kind === "time" ? moment(value).slice(5) : `${this.label} ${value.toLocaleString("en", { maximumFractionDigits: this.digits })}`;
  }

  // Options of uPlot for the axis below a chart.
  options() {
    if (this.kind === "time") return { ...axisStyle(), values: timeLabels };
    return { ...axisStyle(), values: (u, ticks) => ticks.map(compact), label: this.label, labelSize: 16, labelFont: FONT, labelGap: 0 };
  }
}

export const axisStyle = () => ({
  stroke: () => color("--soft"),
  font: FONT,
  grid: { stroke: () => color("--grid"), width: 1 },
  ticks: { show: false },
  size: 30,
  space: 70,
});

// Format ticks as times of day, with the date below the first tick of a day.
function timeLabels(u, moments, axis, space, step) {
  let day = "";
  return moments.map((t) => {
    const [date, clock] = moment(t).split(" ");
    if (step >= 86400) return date.slice(5);
    const text = step >= 60 ? clock.slice(0, 5) : clock;
    // A date is wider than the room right of the last tick.
    if (date === day || u.valToPos(u.scales.x.max, "x") - u.valToPos(t, "x") < 24) return text;
    day = date;
    return `${text}\n${date}`;
  });
}

// Call `draw` once the element is visible (it may be in a closed <details>), and `resize` when its width changes.
export function whenVisible(box, draw, resize) {
  let width = 0;
  const observer = new ResizeObserver(() => {
    if (!box.clientWidth || box.clientWidth === width) return;
    const first = !width;
    width = box.clientWidth;
    if (first) draw();
    else resize(Math.max(200, width));
  });
  observer.observe(box);
  return observer;
}

// A line chart. Expects a <figure> (filled by the part), an axis of axis.js for time and perhaps one for steps.
//
//   const chart = createChart(figure, {
//     title: "Loss", unit: "", places: 4,
//     height: 170,                  // px, optional
//     span: "data",                 // y axis: "percent" is 0-100, "zero" starts at 0, "data" fits the values
//     axes: { time, step },         // `step` is optional
//     x: "time", log: false, smoothing: 0,   // changed later by setOptions({ x: "step", log: true, smoothing: 0.9 })
//     backdrop: () => ({ attempts: [{ n, start, end, step }], marks: [{ t, prominent }] }),  // optional. `step`: the
//                                   // first one of the attempt
//   });
//   chart.setData({
//     times: [t, …],                // UTC epoch s, ascending
//     steps: [step or null, …],     // optional; a step that a later attempt repeated is drawn once, from that attempt
//     lines: [line("loss", values, 0), …],   // values as long as times; null is a gap. With { sparse: true },
//                                   // no gap is shown, as between evaluations; with { dots: true }, each value is a dot
//     band: [1, 3],                 // optional: fill between these lines, numbered from 1
//   });
// setData may be called as often as data arrives; the zoom stays. A curve that never changes is written as one line of
// text instead of drawn (the figure gets the class "constant").
import { axisStyle, PADDING, pointedAt, whenVisible } from "./axis.js";
import { color, compact, extent, figureText, fresh, isKnown, mean, scaledUnit } from "./text.js";

const DASHES = [[], [7, 3], [2, 2], [9, 3, 2, 3]];
const HEIGHT = 170; // px, unless `height` says otherwise
const FEW = 30; // values of a line that are drawn as points too; a single one draws no line
const MANY = 4; // lines; of more, the readout names only the nearest

// Describe a line: its color repeats after eight lines, with another dash.
export function line(label, values, number, more = {}) {
  return { label, values, stroke: `--c${number % 8}`, dash: DASHES[Math.floor(number / 8) % 4], width: 1.25, ...more };
}

export const createChart = (figure, spec) => new Chart(figure, spec);

// Return the exponential moving average with this weight of the past (0-1), corrected for its start.
export function smooth(values, weight) {
  let total = 0;
  let share = 0;
  return values.map((v) => {
    if (!isKnown(v)) return v;
    total = weight * total + (1 - weight) * v;
    share = weight * share + (1 - weight);
    return total / share;
  });
}

// Return the indices of the points to draw by step: ascending, without those that a later attempt repeated.
export function orderBySteps(steps) {
  const kept = [];
  let least = Infinity;
  for (let i = steps.length - 1; i >= 0; i--) {
    if (!isKnown(steps[i]) || steps[i] >= least) continue;
    least = steps[i];
    kept.push(i);
  }
  return kept.reverse();
}

class Chart {
  constructor(figure, spec) {
    Object.assign(this, { figure, spec: { x: "time", log: false, smoothing: 0, height: HEIGHT, backdrop: () => null, ...spec } });
    this.caption = fresh("figcaption", figure, spec.title);
    this.unit = fresh("span", this.caption, "", "unit");
    this.readout = fresh("p", figure, "", "readout");
    this.box = fresh("div", figure, undefined, "plot");
    this.plot = null;
    this.observer = whenVisible(this.box, () => this.plot || this.draw(), (width) => this.plot && this.plot.setSize({ width, height: spec.height }));
  }

  setData(data) {
    this.data = data;
    this.draw();
  }

  setOptions(options) {
    Object.assign(this.spec, options);
    this.draw();
  }

  destroy() {
    this.observer.disconnect();
    this.clear();
    this.figure.replaceChildren();
  }

  get axis() {
    const { axes, x } = this.spec;
    return x === "step" && axes.step && this.data && this.data.steps ? axes.step : axes.time;
  }

  clear() {
    if (this.plot) this.drawn.axis.remove(this.plot);
    this.plot = null;
    delete this.figure.dataset.from;
    delete this.figure.dataset.to;
  }

  // Return { x, lines, band } as drawn: by time or by step, smoothed, without what a log scale cannot show.
  prepared() {
    const { times, steps, lines, band } = this.data;
    const { log, smoothing, axes } = this.spec;
    const order = this.axis === axes.step ? orderBySteps(steps) : null;
    const along = (values) => (order ? order.map((i) => values[i]) : values);
    const seen = (values) => (log ? values.map((v) => (v > 0 ? v : null)) : values);
    const shown = lines.map((l) => ({ ...l, values: seen(along(l.values)) }));
    if (!(smoothing > 0)) return { x: along(order ? steps : times), lines: shown, band };
    const smoothed = shown.map((l) => ({ ...l, values: smooth(l.values, smoothing), width: l.faint ? l.width : 1.75 }));
    // The values themselves stay behind the smoothed line.
    const raw = band ? [] : shown.map((l) => ({ ...l, faint: true, width: 0.75 }));
    return { x: along(order ? steps : times), lines: [...smoothed, ...raw], band };
  }

  draw() {
    if (!this.data) return;
    const all = extent(this.data.lines.map((l) => l.values));
    this.field = { ...this.spec, ...scaledUnit(this.spec.unit, all ? Math.max(Math.abs(all[0]), Math.abs(all[1])) : 0) };
    this.unit.textContent = this.field.unit ? ` ${this.field.unit}` : "";
    this.box.setAttribute("aria-label", `${this.spec.title}: ${this.about()}`);
    const flat = all !== null && all[1] - all[0] <= Math.abs(all[1]) * 1e-6 && this.data.times.length > 1;
    this.figure.classList.toggle("constant", flat);
    if (flat) {
      this.clear();
      this.box.hidden = true;
      this.unit.textContent = "";
      this.readout.textContent = `${figureText(all[0], this.spec)}, constant`;
      return;
    }
    this.box.hidden = false;
    if (this.readout.textContent.endsWith(", constant")) this.readout.textContent = "";
    if (!this.box.clientWidth) return; // drawn once it is visible
    const { x, lines, band } = this.prepared();
    const shape = JSON.stringify([this.axis.key, this.spec.log, this.field.unit, band, lines.map((l) => [l.label, l.stroke, l.dash, l.width])]);
    this.lines = lines;
    this.x = x;
    const values = [x, ...lines.map((l) => l.values.map((v) => (isKnown(v) ? v * this.field.factor : null)))];
    if (this.plot && this.drawn.shape === shape) {
      this.plot.setData(values, false);
      this.drawn.axis.redrawOne(this.plot);
      return;
    }
    this.clear();
    this.drawn = { axis: this.axis, shape };
    this.nearest = null;
    this.plot = this.axis.add(this.box, this.figure, this.options(lines, band), values, (u) => this.say(u));
  }

  options(lines, band) {
    const { log } = this.spec;
    const named = lines.filter((l) => !l.faint).length > MANY;
    return {
      height: this.spec.height,
      focus: named,
      points: { show: !named },
      padding: PADDING,
      scales: { x: { time: this.axis.kind === "time" }, y: log ? { distr: 3 } : { range: valueRange(this.spec.span) } },
      series: [
        {},
        ...lines.map((l) => ({
          label: l.label,
          stroke: () => color(l.stroke) + (l.faint ? "55" : ""),
          width: l.width,
          dash: l.dash,
          points: { show: Boolean(l.dots) || (!l.faint && l.values.filter(isKnown).length <= FEW), size: 5 },
          spanGaps: Boolean(l.sparse) || this.axis.kind !== "time",
        })),
      ],
      bands: band ? [{ series: band, fill: () => color("--band") }] : [],
      axes: [
        this.axis.options(),
        { ...axisStyle(), size: labelWidth, space: 34, values: (u, ticks) => ticks.map(log ? decade : compact) },
      ],
      hooks: {
        drawClear: [(u) => this.drawBackdrop(u)],
        setSeries: [(u, i) => { this.nearest = i ? this.lines[i - 1] : null; this.say(u); }],
      },
    };
  }

  // Write the values below the cursor.
  say(u) {
    const i = u.cursor.idx;
    if (!isKnown(i) || u.cursor.left < 0) {
      this.readout.textContent = "";
      return;
    }
    const lines = this.lines.filter((l) => !l.faint);
    const at = this.axis.text(this.x[i]);
    const text = (v) => figureText(v, this.spec);
    if (lines.length > MANY && this.nearest && pointedAt(u)) {
      this.readout.textContent = `${at} · ${this.nearest.label}: ${text(this.nearest.values[i])}`;
    } else if (lines.length > MANY) {
      const known = lines.map((l) => l.values[i]).filter(isKnown);
      const range = `${text(Math.min(...known))} – ${text(Math.max(...known))}`;
      this.readout.textContent = known.length ? `${at} · ${known.length} lines: ${range}` : `${at} · no sample`;
    } else {
      this.readout.textContent = [at, ...lines.map((l) => `${l.label} ${text(l.values[i])}`)].join(" · ");
    }
  }

  // The chart in words, for a screen reader.
  about() {
    const { lines, band } = this.data;
    const one = lines[band ? 1 : 0];
    const known = one ? one.values.filter(isKnown) : [];
    if (!known.length) return "no samples";
    const [low, high] = extent([known]);
    const text = (v) => figureText(v, this.spec);
    return `${one.label} ${text(mean(known))}, between ${text(low)} and ${text(high)}`;
  }

  // By time, draw every other attempt as a band behind the lines, faults and alerts as dashed vertical lines. By step,
  // draw a vertical line where an attempt began.
  drawBackdrop(u) {
    const backdrop = this.spec.backdrop();
    if (!backdrop) return;
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    if (this.axis.kind !== "time") {
      drawStarts(u, backdrop.attempts);
      ctx.restore();
      return;
    }
    ctx.fillStyle = color("--even");
    for (const a of backdrop.attempts) {
      if (a.n % 2 || a.start === null || a.end === null) continue;
      const left = u.valToPos(a.start, "x", true);
      ctx.fillRect(left, bbox.top, u.valToPos(a.end, "x", true) - left, bbox.height);
    }
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const m of backdrop.marks) {
      if (!m.prominent) continue;
      ctx.strokeStyle = color(m.lane === "Alerts" ? "--warning" : "--critical");
      const x = Math.round(u.valToPos(m.t, "x", true)) + (devicePixelRatio % 2) / 2; // sharp
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }
}

function drawStarts(u, attempts) {
  const { ctx, bbox } = u;
  ctx.fillStyle = ctx.strokeStyle = color("--soft");
  ctx.lineWidth = devicePixelRatio;
  ctx.font = `${11 * devicePixelRatio}px system-ui, "DejaVu Sans", sans-serif`;
  ctx.textBaseline = "top";
  ctx.textAlign = "left";
  for (const { n, step } of attempts.slice(1)) {
    if (!isKnown(step)) continue;
    const x = Math.round(u.valToPos(step, "x", true)) + (devicePixelRatio % 2) / 2;
    ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillText(String(n), x + 4 * devicePixelRatio, bbox.top + 1);
  }
}

function valueRange(span) {
  if (span === "percent") return () => [0, 100];
  return (u, low, high) => {
    if (!isKnown(low)) return [0, 1];
    if (span === "zero") return [0, high > 0 ? high * 1.06 : 1];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.06 || 1;
    return [low - room, high + room];
  };
}

// Return the width of the y axis in px for its longest label, so that no label is clipped.
function labelWidth(u, labels) {
  const longest = Math.max(0, ...(labels || []).map((text) => (text ? text.length : 0)));
  return Math.max(50, 14 + Math.ceil(longest * 6.6));
}

// The axis has a line per digit; only powers of ten, and their halves, have room for a label.
function decade(value) {
  return value === null || !/^[15]e/.test(value.toExponential(0)) ? null : compact(value);
}

// Fill a list with what the lines and marks of charts mean. `items`: lines, or { label, swatch: "band" | "even" | "fault" | "alert" }.
export function fillLegend(list, items) {
  list.replaceChildren();
  for (const item of items) {
    const entry = fresh("li", list);
    if (item.swatch) fresh("i", entry, undefined, `swatch-${item.swatch}`);
    else entry.append(lineSample(item));
    entry.append(item.label);
  }
}

function lineSample(l) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const attributes = { x1: 0, x2: 26, y1: 4, y2: 4, stroke: `var(${l.stroke})`, "stroke-width": l.width < 1 ? 1 : 2.5, "stroke-dasharray": l.dash.join(" ") };
  Object.entries(attributes).forEach(([name, value]) => path.setAttribute(name, value));
  svg.setAttribute("aria-hidden", "true");
  svg.append(path);
  return svg;
}

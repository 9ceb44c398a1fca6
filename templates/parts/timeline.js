// Attempts, phases and events of a run on one time axis. Expects a <figure> and an axis of axis.js of kind "time".
//
//   const timeline = createTimeline(figure, { axis });
//   timeline.setData({
//     attempts: [{ n, start, end, ending }],      // UTC epoch s; end null while it runs
//     phases: [[start, end, "training"], …],      // see PHASE_COLORS
//     lanes: ["Faults", "Checkpoints", …],        // from top to bottom, see LANE_COLORS
//     marks: [{ t, end, kind, text, lane, sign }],  // end null for a moment; sign is a key of SIGNS
//   });
import { axisStyle, FONT, PADDING, pointedAt, whenVisible } from "./axis.js";
import { color, fresh, moment } from "./text.js";

const LANE = 24; // px

const SIGNS = {
  cross: (c, x, y, r) => { c.moveTo(x - r, y - r); c.lineTo(x + r, y + r); c.moveTo(x + r, y - r); c.lineTo(x - r, y + r); },
  diamond: (c, x, y, r) => { c.moveTo(x, y - r); c.lineTo(x + r, y); c.lineTo(x, y + r); c.lineTo(x - r, y); c.closePath(); },
  square: (c, x, y, r) => c.rect(x - r, y - r, 2 * r, 2 * r),
  up: (c, x, y, r) => { c.moveTo(x, y - r); c.lineTo(x + r, y + r); c.lineTo(x - r, y + r); c.closePath(); },
  bar: (c, x, y, r) => c.rect(x - r / 4, y - r * 1.3, r / 2, r * 2.6),
  dot: (c, x, y, r) => c.arc(x, y, r, 0, 7),
};
const LANE_COLORS = {
  Faults: "--critical", Alerts: "--warning", Stops: "--c1", Starts: "--c2", Checkpoints: "--c0",
  Evaluations: "--c3", Other: "--soft",
};
// The colors of the goodput bar. A phase is labeled if it is wide enough; the readout always names it.
const PHASE_COLORS = {
  training: "--c2", "start-up": "--c5", restore: "--c0", evaluation: "--c6", checkpoint: "--c3", shutdown: "--c7",
};

// Options of uPlot for row names left of a plot. `places`: their y values.
export function labelAxis(places, names, width) {
  return {
    stroke: () => color("--ink"),
    font: FONT,
    size: width,
    gap: 6,
    grid: { show: false },
    ticks: { show: false },
    splits: () => places,
    values: () => names,
  };
}

export const createTimeline = (figure, spec) => new Timeline(figure, spec);

class Timeline {
  constructor(figure, { axis, title = "Attempts and events" }) {
    Object.assign(this, { figure, axis });
    if (title) fresh("figcaption", figure, title);
    this.readout = fresh("p", figure, "", "readout");
    this.readout.setAttribute("aria-live", "polite");
    this.box = fresh("div", figure, undefined, "plot");
    whenVisible(this.box, () => this.plot || this.draw(), (width) => this.plot && this.plot.setSize({ width, height: this.height }));
  }

  setData(data) {
    this.data = data;
    this.draw();
  }

  get height() {
    return this.names.length * LANE + 40;
  }

  draw() {
    if (!this.data) return;
    const { attempts, phases, lanes, marks } = this.data;
    this.names = ["Attempts", ...(phases.length ? ["Phases"] : []), ...lanes];
    this.laneOf = new Map(this.names.map((n, i) => [n, i]));
    this.box.setAttribute("aria-label", `${attempts.length} attempts and ${marks.length} events on one timeline`);
    if (!this.box.clientWidth) return;
    if (this.plot && this.drawn === this.names.join()) {
      this.axis.redrawOne(this.plot);
      return;
    }
    if (this.plot) this.axis.remove(this.plot);
    this.drawn = this.names.join();
    this.plot = this.axis.add(
      this.box,
      this.figure,
      {
        height: this.height,
        lane: LANE,
        padding: PADDING,
        scales: { x: { time: true }, y: { range: () => [0, this.names.length] } },
        series: [{}, { show: false }],
        axes: [{ ...axisStyle(), ...this.axis.options() }, labelAxis(this.names.map((_, i) => this.middle(i)), this.names, 84)],
        hooks: { draw: [(u) => this.paint(u)] },
      },
      [this.axis.whole, [null, null]],
      (u) => this.say(u),
    );
  }

  middle(i) {
    return this.names.length - 0.5 - i;
  }

  paint(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.font = `${11 * devicePixelRatio}px system-ui, "DejaVu Sans", sans-serif`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    const y = (i) => u.valToPos(this.middle(i), "y", true);
    this.data.attempts.forEach((a) => drawAttempt(u, { ...a, end: a.end ?? this.axis.whole[1] }, y(0), LANE * 0.8 * devicePixelRatio));
    this.data.phases.forEach((p) => drawPhase(u, p, y(1), LANE * 0.6 * devicePixelRatio));
    this.data.marks.forEach((m) => this.laneOf.has(m.lane) && drawMark(u, m, y(this.laneOf.get(m.lane))));
    ctx.restore();
  }

  say(u) {
    const { left, top } = u.cursor;
    this.readout.textContent = "";
    if (left < 0) return;
    const t = u.posToVal(left, "x");
    const lane = pointedAt(u) && this.names[this.names.length - 1 - Math.floor(u.posToVal(top, "y"))];
    const away = (m) => (t >= m.t && m.end !== null && t <= m.end ? 0 : Math.abs(u.valToPos(m.t, "x") - left));
    const [mark] = this.data.marks.filter((m) => m.lane === lane && away(m) < 9).sort((a, b) => away(a) - away(b));
    if (mark) {
      this.readout.textContent = `${moment(mark.t)} · ${mark.kind.replaceAll("_", " ")}: ${mark.text}`;
      return;
    }
    const inside = this.data.attempts.find((a) => a.start <= t && t <= (a.end ?? Infinity));
    const phase = this.data.phases.find(([start, end]) => start <= t && t < end);
    this.readout.textContent = moment(t) + (inside ? ` · attempt ${inside.n}` : "") + (phase ? ` · ${phase[2]}` : "");
  }
}

function drawMark(u, mark, y) {
  const { ctx } = u;
  const r = 4.5 * devicePixelRatio;
  const x = u.valToPos(mark.t, "x", true);
  ctx.fillStyle = ctx.strokeStyle = color(LANE_COLORS[mark.lane] || "--soft");
  ctx.lineWidth = 2 * devicePixelRatio;
  const length = mark.end === null ? 0 : u.valToPos(mark.end, "x", true) - x;
  if (length > r) {
    ctx.fillRect(x, y - r, length, 2 * r);
    return;
  }
  ctx.beginPath();
  SIGNS[mark.sign](ctx, x, y, r);
  if (mark.sign === "cross") ctx.stroke();
  else ctx.fill();
}

// Return the visible [left, right] of an interval in canvas px, or null.
function visible(u, start, end) {
  const { bbox } = u;
  const left = Math.max(u.valToPos(start, "x", true), bbox.left);
  const right = Math.min(u.valToPos(end, "x", true), bbox.left + bbox.width);
  return right <= bbox.left || left >= bbox.left + bbox.width ? null : [left, right];
}

function drawAttempt(u, attempt, y, high) {
  if (attempt.start === null) return;
  const place = visible(u, attempt.start, attempt.end);
  if (!place) return;
  const [left, right] = place;
  const { ctx } = u;
  ctx.fillStyle = color("--attempt");
  ctx.fillRect(left, y - high / 2, right - left, high);
  ctx.fillStyle = color("--soft");
  ctx.fillRect(left, y - high / 2, devicePixelRatio, high);
  ctx.fillStyle = color("--ink");
  const labels = [`${attempt.n}${attempt.ending ? `: ${attempt.ending.replaceAll("_", " ")}` : ""}`, `${attempt.n}`];
  const fits = labels.find((l) => ctx.measureText(l).width + 10 * devicePixelRatio < right - left);
  if (fits) ctx.fillText(fits, left + 6 * devicePixelRatio, y);
}

function drawPhase(u, [start, end, phase], y, high) {
  const place = visible(u, start, end);
  if (!place) return;
  const [left, right] = place;
  const { ctx } = u;
  ctx.fillStyle = color(PHASE_COLORS[phase] || "--none");
  ctx.fillRect(left, y - high / 2, Math.max(right - left, devicePixelRatio), high);
  if (ctx.measureText(phase).width + 10 * devicePixelRatio >= right - left) return;
  ctx.fillStyle = color("--card");
  ctx.fillText(phase, left + 5 * devicePixelRatio, y);
}

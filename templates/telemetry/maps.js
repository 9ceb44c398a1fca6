// The timeline and the heat map: charts without lines that are painted directly and share the zoom.
const LANE = 24; // px
// Viridis, by Nathaniel Smith and Stéfan van der Walt (CC0): uniform in lightness and safe for color blindness.
const VIRIDIS = ["440154", "48186a", "472d7b", "424086", "3b528b", "33638d", "2c728e", "26828e", "21918c",
  "1fa088", "28ae80", "3fbc73", "5ec962", "84d44b", "addc30", "d8e219", "fde725"]
  .map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));

function heat_colour(share) {
  const place = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1);
  const i = Math.min(Math.floor(place), VIRIDIS.length - 2);
  return VIRIDIS[i].map((c, k) => c + (VIRIDIS[i + 1][k] - c) * (place - i));
}

const label_width = () => (innerWidth < 560 ? 84 : 124);

function label_axis(places, names) {
  return {
    stroke: () => colour("--ink"),
    font: FONT,
    size: label_width(),
    gap: 6,
    grid: { show: false },
    ticks: { show: false },
    splits: () => places,
    values: () => names.map((n) => {
      const most = Math.floor(label_width() / 6.6);
      return n.length > most ? `…${n.slice(1 - most)}` : n;
    }),
  };
}

const SIGNS = {
  cross: (c, x, y, r) => { c.moveTo(x - r, y - r); c.lineTo(x + r, y + r); c.moveTo(x + r, y - r); c.lineTo(x - r, y + r); },
  diamond: (c, x, y, r) => { c.moveTo(x, y - r); c.lineTo(x + r, y); c.lineTo(x, y + r); c.lineTo(x - r, y); c.closePath(); },
  square: (c, x, y, r) => c.rect(x - r, y - r, 2 * r, 2 * r),
  up: (c, x, y, r) => { c.moveTo(x, y - r); c.lineTo(x + r, y + r); c.lineTo(x - r, y + r); c.closePath(); },
  bar: (c, x, y, r) => c.rect(x - r / 4, y - r * 1.3, r / 2, r * 2.6),
  dot: (c, x, y, r) => c.arc(x, y, r, 0, 7),
};
const LANE_COLOURS = {
  Faults: "--critical", Alerts: "--warning", Stops: "--c1", Restores: "--c2", Checkpoints: "--c0",
  Evaluations: "--c3", Other: "--soft",
};

function draw_mark(u, mark, y) {
  const { ctx } = u;
  const r = 4.5 * devicePixelRatio;
  const x = u.valToPos(mark.t, "x", true);
  ctx.fillStyle = ctx.strokeStyle = colour(LANE_COLOURS[mark.lane]);
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

function draw_attempt(u, attempt, y, high) {
  if (attempt.start === null || attempt.end === null) return;
  const { ctx, bbox } = u;
  const left = Math.max(u.valToPos(attempt.start, "x", true), bbox.left);
  const right = Math.min(u.valToPos(attempt.end, "x", true), bbox.left + bbox.width);
  if (right <= bbox.left || left >= bbox.left + bbox.width) return;
  ctx.fillStyle = colour("--attempt");
  ctx.fillRect(left, y - high / 2, right - left, high);
  ctx.fillStyle = colour("--soft");
  ctx.fillRect(left, y - high / 2, devicePixelRatio, high);
  ctx.fillStyle = colour("--ink");
  const labels = [`${attempt.n}${attempt.ending ? `: ${attempt.ending.replaceAll("_", " ")}` : ""}`, `${attempt.n}`];
  const fits = labels.find((l) => ctx.measureText(l).width + 10 * devicePixelRatio < right - left);
  if (fits) ctx.fillText(fits, left + 6 * devicePixelRatio, y);
}

// The colors of the goodput bar. A phase is labeled if it is wide enough; the readout always names it.
const PHASE_COLOURS = {
  training: "--c2", "start-up": "--c5", restore: "--c0", evaluation: "--c6", checkpoint: "--c3", shutdown: "--none",
};

function draw_phase(u, [start, end, phase], y, high) {
  const { ctx, bbox } = u;
  const left = Math.max(u.valToPos(start, "x", true), bbox.left);
  const right = Math.min(u.valToPos(end, "x", true), bbox.left + bbox.width);
  if (right <= bbox.left || left >= bbox.left + bbox.width) return;
  ctx.fillStyle = colour(PHASE_COLOURS[phase]);
  ctx.fillRect(left, y - high / 2, Math.max(right - left, devicePixelRatio), high);
  if (ctx.measureText(phase).width + 10 * devicePixelRatio >= right - left) return;
  ctx.fillStyle = colour(phase === "shutdown" ? "--ink" : "--card");
  ctx.fillText(phase, left + 5 * devicePixelRatio, y);
}

function draw_timeline(charts, figure) {
  const { data } = charts;
  const names = ["Attempts", ...(data.phases.length ? ["Phases"] : []), ...data.lanes];
  const lane_of = new Map(names.map((n, i) => [n, i]));
  const middle = (i) => names.length - 0.5 - i;
  const readout = figure.querySelector(".readout");
  const paint = (u) => {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.font = `${11 * devicePixelRatio}px system-ui, "DejaVu Sans", sans-serif`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    const y = (i) => u.valToPos(middle(i), "y", true);
    data.attempts.forEach((a) => draw_attempt(u, a, y(0), LANE * 0.8 * devicePixelRatio));
    data.phases.forEach((p) => draw_phase(u, p, y(1), LANE * 0.6 * devicePixelRatio));
    data.marks.forEach((m) => draw_mark(u, m, y(lane_of.get(m.lane))));
    ctx.restore();
  };
  const say = (u) => {
    const { left, top } = u.cursor;
    readout.textContent = "";
    if (left < 0) return;
    const t = u.posToVal(left, "x");
    const lane = pointed_at(u) && names[names.length - 1 - Math.floor(u.posToVal(top, "y"))];
    const away = (m) => (t >= m.t && m.end !== null && t <= m.end ? 0 : Math.abs(u.valToPos(m.t, "x") - left));
    const [mark] = data.marks.filter((m) => m.lane === lane && away(m) < 9).sort((a, b) => away(a) - away(b));
    if (mark) {
      readout.textContent = `${moment(mark.t)} · ${mark.kind.replaceAll("_", " ")}: ${mark.text}`;
    } else {
      const inside = data.attempts.find((a) => a.start <= t && t <= a.end);
      const phase = data.phases.find(([start, end]) => start <= t && t < end);
      readout.textContent = moment(t) + (inside ? ` · attempt ${inside.n}` : "") + (phase ? ` · ${phase[2]}` : "");
    }
  };
  charts.add(
    figure,
    {
      height: names.length * LANE + 40,
      lane: LANE,
      padding: [4, 8, 0, 0],
      scales: { x: { time: true }, y: { range: () => [0, names.length] } },
      series: [{}, { show: false }],
      axes: [time_axis(), label_axis(names.map((_, i) => middle(i)), names)],
      hooks: { draw: [paint] },
    },
    [charts.whole, [null, null]],
    say,
  ).root.parentElement.setAttribute("aria-label", `${data.attempts.length} attempts and ${data.marks.length} events on one timeline; listed below the tables`);
}

// Return an image whose pixels are the mean of their samples, so that no sample is skipped.
function heat_image(table, curve, span, view, width, none) {
  const rows = table.rows(curve);
  const image = new ImageData(width, rows);
  const per_pixel = (view[1] - view[0]) / width;
  const index = (t) => Math.floor((t - table.start) / table.step);
  for (let row = 0; row < rows; row++) {
    const values = table.row(curve, row);
    for (let x = 0; x < width; x++) {
      const first = Math.max(index(view[0] + x * per_pixel), 0);
      const last = Math.min(Math.max(index(view[0] + (x + 1) * per_pixel - 1e-6), first), values.length - 1);
      let total = 0;
      let known = 0;
      for (let i = first; i <= last; i++) {
        if (values[i] !== null) {
          total += values[i];
          known += 1;
        }
      }
      const rgb = known ? heat_colour((total / known - span[0]) / (span[1] - span[0] || 1)) : none;
      image.data.set([...rgb, 255], 4 * (row * width + x));
    }
  }
  return image;
}

class Heat {
  constructor(charts, figure, pick) {
    Object.assign(this, { charts, figure, pick });
    this.table = charts.tables.heat || charts.tables.gpus;
    this.known = charts.data.charts.filter((c) => c.table === "gpus" && this.table.has(c.curve));
    this.select = byId("heat-field");
    this.known.forEach((c, i) => this.select.add(new Option(`${c.title}${c.unit ? `, ${c.unit}` : ""}`, i)));
    const first = this.known.findIndex((c) => c.curve === "utilization");
    this.select.value = Math.max(first, 0);
    this.select.onchange = () => { this.legend(); this.plot.redraw(); };
    if (!this.known.length) {
      figure.hidden = true;
      return;
    }
    this.draw();
    this.legend();
  }

  get chart() {
    return this.known[this.select.value];
  }

  get span() {
    const { low, high } = this.table.curves[this.chart.curve];
    return this.chart.span === "percent" ? [0, 100] : [low, high];
  }

  legend() {
    const canvas = byId("heat-scale");
    const ctx = canvas.getContext("2d");
    for (let x = 0; x < canvas.width; x++) {
      ctx.fillStyle = `rgb(${heat_colour(x / (canvas.width - 1)).map(Math.round).join(",")})`;
      ctx.fillRect(x, 0, 1, canvas.height);
    }
    byId("heat-low").textContent = figure_text(this.span[0], this.chart);
    byId("heat-high").textContent = figure_text(this.span[1], this.chart);
    this.figure.querySelector(".plot").setAttribute("aria-label", `Heat map of ${this.chart.title}, one row per GPU`);
  }

  // Label each GPU, or only each node's first one if rows are low; labels that would overlap are left out.
  labels(high) {
    const { gpus } = this.charts.data;
    const names = [];
    const places = [];
    let last = -Infinity;
    gpus.forEach((g, i) => {
      const text = high >= 13 ? g.label : g.node;
      if (high < 13 && i && gpus[i - 1].node === g.node) return;
      if ((i - last) * high < 13) return;
      last = i;
      names.push(text);
      places.push(gpus.length - 0.5 - i);
    });
    return label_axis(places, names);
  }

  draw() {
    const rows = this.charts.data.gpus.length;
    const high = Math.max(2, Math.min(18, Math.floor(480 / rows)));
    const readout = this.figure.querySelector(".readout");
    this.plot = this.charts.add(
      this.figure,
      {
        height: rows * high + 36,
        lane: high,
        padding: [4, 8, 0, 0],
        scales: { x: { time: true }, y: { range: () => [0, rows] } },
        series: [{}, { show: false }],
        // A tall map scrolls, and its time would be out of sight below.
        axes: [{ ...time_axis(), side: rows * high > 600 ? 0 : 2 }, this.labels(high)],
        hooks: { draw: [(u) => this.paint(u)] },
      },
      [this.charts.whole, [null, null]],
      (u) => { readout.textContent = this.describe(u); },
    );
    this.plot.over.addEventListener("click", () => {
      const at = this.under(this.plot);
      if (at) this.pick(at.row);
    });
  }

  paint(u) {
    const { ctx, bbox } = u;
    const none = colour("--none").match(/\w\w/g).map((h) => parseInt(h, 16));
    const width = Math.max(1, Math.round(bbox.width));
    const image = heat_image(this.table, this.chart.curve, this.span, this.charts.view, width, none);
    const aside = document.createElement("canvas");
    aside.width = width;
    aside.height = image.height;
    aside.getContext("2d").putImageData(image, 0, 0);
    ctx.save();
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(aside, bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.restore();
  }

  under(u) {
    const { left, top } = u.cursor;
    if (left < 0 || !pointed_at(u)) return null;
    const rows = this.charts.data.gpus.length;
    const t = u.posToVal(left, "x");
    return { t, row: Math.min(rows - 1, Math.max(0, rows - 1 - Math.floor(u.posToVal(top, "y")))) };
  }

  describe(u) {
    const at = this.under(u);
    if (!at) return "";
    const gpu = this.charts.data.gpus[at.row];
    const i = Math.floor((at.t - this.table.start) / this.table.step);
    const value = this.table.row(this.chart.curve, at.row)[i];
    const rank = gpu.ranks ? `, rank ${gpu.ranks}` : "";
    return `${gpu.label}${rank} · ${moment(at.t)} · ${figure_text(value, this.chart)}`;
  }
}

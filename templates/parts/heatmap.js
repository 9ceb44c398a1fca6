// A heat map with one row per GPU, on a time axis of axis.js. Expects a <figure>.
//
//   const heat = createHeatMap(figure, { axis, onPick: (row) => … });  // a click on a row
//   heat.setData({
//     rows: [{ label: "node-01:3", node: "node-01", ranks: "3", severity: "critical" | "warning" | null }, …],
//     fields: [{ curve, title, unit, places, span, low_limits: [15, 70] or null }, …],
//     table,                 // { start, step, has(curve), row(curve, i) → values }, such as a PackedTable
//     overlay: "throttled",  // optional: a curve in percent, drawn as a stripe where it is above 5 %
//   });
//   heat.highlight([3, 19]); // outline rows
//
// A field with `low_limits` has a scale anchored at them: red below the first (idle), yellow below the second, blue
// above. Other fields go from dark (low) to bright (high).
import { PADDING, pointedAt, whenVisible } from "./axis.js";
import { color, extent, figureText, fresh, isKnown, moment } from "./text.js";
import { labelAxis } from "./timeline.js";

const TALL = 600; // px; a higher map scrolls
const SHADES = 1024; // colors of a scale
const OVERLAY_LEAST = 5; // percent
const SIGNS_OF = { critical: "✖ ", warning: "▲ " };
const bytesOf = (hexes) => hexes.map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));
// Viridis, by Nathaniel Smith and Stéfan van der Walt (CC0): uniform in lightness and safe for color blindness.
const VIRIDIS = bytesOf(["440154", "48186a", "472d7b", "424086", "3b528b", "33638d", "2c728e", "26828e", "21918c",
  "1fa088", "28ae80", "3fbc73", "5ec962", "84d44b", "addc30", "d8e219", "fde725"]);
// From low to high within each class; red and blue differ for every kind of color vision.
const IDLE = bytesOf(["a3121c", "d9442f"]);
const LOW = bytesOf(["f08b3e", "f6d27c"]);
const FINE = bytesOf(["bcd7ea", "2f6ea8"]);
const OVERLAY = [0xc2, 0x18, 0xd6];

function between(stops, share) {
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const i = Math.min(Math.floor(place), stops.length - 2);
  return stops[i].map((c, k) => c + (stops[i + 1][k] - c) * (place - i));
}

// Return the color [r, g, b] of a value of a field that spans [low, high].
function heatColor(value, [low, high], limits) {
  if (!limits) return between(VIRIDIS, (value - low) / (high - low || 1));
  const [idle, fine] = limits;
  if (value < idle) return between(IDLE, (value - low) / (idle - low || 1));
  if (value < fine) return between(LOW, (value - idle) / (fine - idle || 1));
  return between(FINE, (value - fine) / (high - fine || 1));
}

export const createHeatMap = (figure, spec) => new HeatMap(figure, spec);

class HeatMap {
  constructor(figure, { axis, onPick = () => {} }) {
    Object.assign(this, { figure, axis, onPick, picked: [] });
    const caption = fresh("figcaption", figure);
    this.select = fresh("select", fresh("label", caption, "GPU × time: "));
    this.scale = fresh("div", figure, undefined, "scale");
    this.readout = fresh("p", figure, "", "readout");
    this.readout.setAttribute("aria-live", "polite");
    this.box = fresh("div", figure, undefined, "plot");
    this.select.onchange = () => { this.legend(); this.redraw(); };
    whenVisible(this.box, () => this.plot || this.draw(), () => this.draw());
  }

  setData(data) {
    const before = this.field && this.field.curve;
    this.data = data;
    this.known = data.fields.filter((f) => data.table.has(f.curve));
    this.figure.hidden = !this.known.length || !data.rows.length;
    this.select.replaceChildren(...this.known.map((f) => new Option(f.title, f.curve)));
    this.select.value = this.known.some((f) => f.curve === before) ? before : "utilization";
    if (!this.select.value && this.known.length) this.select.value = this.known[0].curve;
    this.spans = new Map();
    if (this.figure.hidden) return;
    this.legend();
    this.draw();
  }

  highlight(rows) {
    this.picked = rows;
    if (rows.length) this.box.scrollTop = rows[0] * this.rowHeight - this.box.clientHeight / 2;
    this.redraw();
  }

  redraw() {
    if (this.plot) this.axis.redrawOne(this.plot);
  }

  get field() {
    return this.known && this.known.find((f) => f.curve === this.select.value);
  }

  get span() {
    const { curve, span } = this.field;
    if (span === "percent") return [0, 100];
    if (!this.spans.has(curve)) {
      const { table, rows } = this.data;
      const known = table.curves && table.curves[curve];
      const found = known && "low" in known ? [known.low, known.high] : extent(rows.map((_, i) => table.row(curve, i)));
      this.spans.set(curve, found || [0, 1]);
    }
    return this.spans.get(curve);
  }

  legend() {
    const { scale, field, span } = this;
    const [low, high] = span;
    scale.replaceChildren();
    fresh("span", scale, figureText(low, field));
    const canvas = fresh("canvas", scale);
    Object.assign(canvas, { width: 200, height: 10 });
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", field.low_limits ? "Color scale from red over yellow to blue" : "Color scale, dark is low and bright is high");
    const ctx = canvas.getContext("2d");
    for (let x = 0; x < canvas.width; x++) {
      const value = low + (high - low) * (x / (canvas.width - 1));
      ctx.fillStyle = `rgb(${heatColor(value, span, field.low_limits).map(Math.round).join(",")})`;
      ctx.fillRect(x, 0, 1, canvas.height);
    }
    fresh("span", scale, figureText(high, field));
    if (field.low_limits) {
      const [idle, fine] = field.low_limits;
      fresh("span", scale, `red: below ${idle} ${field.unit}, nearly idle · yellow: below ${fine} ${field.unit}`);
    }
    if (this.overlaid) fresh("span", scale, "slowed by heat or hardware", "overlay");
    fresh("span", scale, "no sample", "none");
    const { length } = this.data.rows;
    if (length * this.rowHeight > TALL) fresh("b", scale, `${length.toLocaleString("en")} rows: scroll the map`);
    this.box.setAttribute("aria-label", `Heat map of ${field.title}, one row per GPU`);
  }

  get overlaid() {
    const { overlay, table } = this.data;
    return overlay && table.has(overlay) ? overlay : null;
  }

  get rowHeight() {
    return Math.max(2, Math.min(18, Math.floor(480 / this.data.rows.length)));
  }

  // Return the row labels: each GPU, or only each node's first one if rows are low; none overlap.
  labels(high) {
    const { rows } = this.data;
    const most = Math.max(84, Math.min(170, this.box.clientWidth * 0.28));
    const nodes = [...new Set(rows.map((r) => r.node))];
    const common = commonStart(nodes);
    const fit = (text) => {
      if (text.length * 6.6 + 16 <= most) return text;
      const short = common && text.includes(common) ? text.replace(common, "…") : text;
      const room = Math.floor((most - 16) / 6.6);
      return short.length <= room ? short : `…${short.slice(1 - room)}`;
    };
    // Rows with a finding are labeled first, then each row or each node's first one, where there is room.
    const candidates = rows.flatMap((r, i) => {
      const sign = SIGNS_OF[r.severity] || "";
      const first = i === 0 || rows[i - 1].node !== r.node;
      if (high < 13 && !first && !sign) return [];
      return [{ i, sign, text: sign + fit(high >= 13 || sign ? r.label : r.node) }];
    });
    const shown = [];
    for (const c of [...candidates.filter((x) => x.sign), ...candidates.filter((x) => !x.sign)]) {
      if (shown.every((other) => Math.abs(other.i - c.i) * high >= 13)) shown.push(c);
    }
    shown.sort((x, y) => x.i - y.i);
    const names = shown.map((c) => c.text);
    const places = shown.map((c) => rows.length - 0.5 - c.i);
    return labelAxis(places, names, Math.max(60, 14 + Math.max(0, ...names.map((n) => n.length)) * 6.6));
  }

  draw() {
    if (!this.data || this.figure.hidden || !this.box.clientWidth) return;
    const { rows } = this.data;
    const high = this.rowHeight;
    if (this.plot) this.axis.remove(this.plot);
    this.box.classList.toggle("tall", rows.length * high > TALL);
    this.plot = this.axis.add(
      this.box,
      this.figure,
      {
        height: rows.length * high + 36,
        lane: high,
        padding: PADDING,
        scales: { x: { time: true }, y: { range: () => [0, this.data.rows.length] } },
        series: [{}, { show: false }],
        // A tall map scrolls, and its time would be out of sight below.
        axes: [{ ...this.axis.options(), side: rows.length * high > TALL ? 0 : 2 }, this.labels(high)],
        hooks: { draw: [(u) => this.paint(u)] },
      },
      [this.axis.whole, [null, null]],
      (u) => { this.readout.textContent = this.describe(u); },
    );
    this.plot.over.addEventListener("click", () => {
      const at = this.under(this.plot);
      if (at) this.onPick(at.row);
    });
  }

  paint(u) {
    const { ctx, bbox } = u;
    const { rows } = this.data;
    const width = Math.max(1, Math.round(bbox.width));
    const each = bbox.height / rows.length;
    ctx.save();
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(this.picture(width, each >= 5 * devicePixelRatio), bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.fillStyle = color("--card");
    rows.forEach((r, i) => {
      if (i === 0 || r.node === rows[i - 1].node || each < 3 * devicePixelRatio) return;
      ctx.fillRect(bbox.left, bbox.top + i * each - devicePixelRatio, bbox.width, 2 * devicePixelRatio);
    });
    ctx.strokeStyle = color("--ink");
    ctx.lineWidth = 2 * devicePixelRatio;
    const around = each < 8 * devicePixelRatio ? 2 * devicePixelRatio : 0; // a low row stays visible in its outline
    for (const row of this.picked) ctx.strokeRect(bbox.left, bbox.top + row * each - around, bbox.width, each + 2 * around);
    ctx.restore();
  }

  // Return the image of the visible range, which stays until the range, the field, the data or the theme changes.
  picture(width, striped) {
    const key = JSON.stringify([this.axis.view, this.field.curve, width, striped, color("--none")]);
    if (this.drawn && this.drawn.key === key && this.drawn.data === this.data) return this.drawn.canvas;
    const image = this.image(width, striped);
    const canvas = document.createElement("canvas");
    Object.assign(canvas, { width, height: image.height });
    canvas.getContext("2d").putImageData(image, 0, 0);
    this.drawn = { key, data: this.data, canvas };
    return canvas;
  }

  // Return an image whose pixels are the mean of their samples, so that no sample is skipped. A row has three pixels
  // if `striped`: the lowest shows the overlay.
  image(width, striped) {
    const { table, rows } = this.data;
    const { field, span, overlaid } = this;
    const per = striped && overlaid ? 3 : 1;
    const image = new ImageData(width, rows.length * per);
    const pixels = new Uint32Array(image.data.buffer);
    const none = pixelOf(color("--none").match(/\w\w/g).map((h) => parseInt(h, 16)));
    const over = pixelOf(OVERLAY);
    const [low, high] = span;
    const scale = Array.from({ length: SHADES }, (_, i) => pixelOf(heatColor(low + ((high - low) * i) / (SHADES - 1), span, field.low_limits)));
    const shade = (value) => scale[Math.round((Math.min(Math.max((value - low) / (high - low || 1), 0), 1)) * (SHADES - 1))];
    rows.forEach((_, row) => {
      const values = binned(table, table.row(field.curve, row), this.axis.view, width);
      const marked = overlaid ? binned(table, table.row(overlaid, row), this.axis.view, width) : null;
      for (let x = 0; x < width; x++) {
        const first = row * per * width + x;
        const pixel = Number.isNaN(values[x]) ? none : shade(values[x]);
        for (let k = 0; k < per; k++) pixels[first + k * width] = pixel;
        if (marked && marked[x] > OVERLAY_LEAST) pixels[first + (per - 1) * width] = over;
      }
    });
    return image;
  }

  under(u) {
    const { left, top } = u.cursor;
    if (left < 0 || !pointedAt(u)) return null;
    const rows = this.data.rows.length;
    const t = u.posToVal(left, "x");
    return { t, row: Math.min(rows - 1, Math.max(0, rows - 1 - Math.floor(u.posToVal(top, "y")))) };
  }

  describe(u) {
    const at = this.under(u);
    if (!at) return "";
    const { rows, table } = this.data;
    const gpu = rows[at.row];
    const i = Math.floor((at.t - table.start) / table.step);
    const value = table.row(this.field.curve, at.row)[i];
    const over = this.overlaid && table.row(this.overlaid, at.row)[i] > OVERLAY_LEAST ? ", slowed by heat or hardware" : "";
    return `${gpu.label}${gpu.ranks ? `, rank ${gpu.ranks}` : ""} · ${moment(at.t)} · ${figureText(value, this.field)}${over}`;
  }
}

// Return the mean of the values in each of `width` equal parts of the view, NaN where none is known.
function binned(table, values, view, width) {
  const means = new Float64Array(width);
  const perPixel = (view[1] - view[0]) / width;
  const index = (t) => Math.floor((t - table.start) / table.step);
  for (let x = 0; x < width; x++) {
    const first = Math.max(index(view[0] + x * perPixel), 0);
    const last = Math.min(Math.max(index(view[0] + (x + 1) * perPixel - 1e-6), first), values.length - 1);
    let total = 0;
    let known = 0;
    for (let i = first; i <= last; i++) {
      if (!isKnown(values[i])) continue;
      total += values[i];
      known += 1;
    }
    means[x] = known ? total / known : NaN;
  }
  return means;
}

// Return a color [r, g, b] as the 32 bits of an opaque pixel, on a little-endian machine as all of today's.
const pixelOf = ([r, g, b]) => ((255 << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r)) >>> 0;

function commonStart(names) {
  let start = names[0] || "";
  for (const name of names) {
    while (!name.startsWith(start)) start = start.slice(0, -1);
  }
  return names.length > 1 ? start.replace(/\d+$/, "") : "";
}

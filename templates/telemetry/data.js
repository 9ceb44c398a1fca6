// The embedded data: names in JSON, values packed by clustertrain/report/html/pack.py.
const byId = (id) => document.getElementById(id);

async function unpack(text) {
  const packed = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Decode one row of a matrix to numbers, with null for missing values.
function decode(bytes, place, points, row) {
  const { offset, bits, rows, low, high } = place;
  const top = 2 ** bits - 2;
  const unit = (high - low) / top;
  const first = offset + row * points;
  const upper = offset + rows * points + row * points;
  const values = new Array(points);
  let level = 0;
  for (let i = 0; i < points; i++) {
    const step = bits === 16 ? bytes[first + i] + 256 * bytes[upper + i] : bytes[first + i];
    level = (level + step) % (top + 2);
    values[i] = level > top ? null : low + level * unit;
  }
  return values;
}

class Table {
  constructor(about, bytes) {
    Object.assign(this, about);
    this.bytes = bytes;
    this.decoded = new Map();
    // Each point is a mean and is drawn in the middle of its interval.
    this.times = Array.from({ length: this.points }, (_, i) => this.start + (i + 0.5) * this.step);
  }

  has(curve) {
    return curve in this.curves;
  }

  rows(curve) {
    return this.curves[curve].rows;
  }

  row(curve, number) {
    const key = `${curve} ${number}`;
    if (!this.decoded.has(key)) {
      this.decoded.set(key, decode(this.bytes, this.curves[curve], this.points, number));
    }
    return this.decoded.get(key);
  }
}

const pad = (n) => String(n).padStart(2, "0");

function moment(t, seconds = true) {
  const d = new Date(t * 1000);
  const day = `${d.getUTCFullYear()}-${pad(d.getUTCMonth() + 1)}-${pad(d.getUTCDate())}`;
  return `${day} ${pad(d.getUTCHours())}:${pad(d.getUTCMinutes())}${seconds ? `:${pad(d.getUTCSeconds())}` : ""}`;
}

function figure_text(value, chart) {
  if (value === null || value === undefined) return "no sample";
  const places = Math.abs(value) < 10 && chart.places === 0 && chart.unit !== "%" ? 1 : chart.places;
  return `${value.toLocaleString("en", { maximumFractionDigits: places })}${chart.unit ? ` ${chart.unit}` : ""}`;
}

// Values that clustertrain/report/html/pack.py packed: embedded in a page or fetched, as base64 of deflated bytes.
//
//   const bytes = await unpack(text);
//   const table = new PackedTable(description, bytes); // { start, step, points, curves: { name: place } }
//   table.times; table.has("power_w"); table.row("power_w", 3); // → array of numbers, null for a missing value

export async function unpack(text) {
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

export class PackedTable {
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

// The training curves of the run, as far as charts have asked for them, and the rows that arrive meanwhile.
import { once } from "./run_parts.js";

const MOST_POINTS = 6000; // of one curve; a page that has more reads the curves again, with fewer points

export class Curves {
  constructor(run) {
    this.run = run;
    this.wanted = new Set();
    this.listeners = new Set();
    this.names = [];
    this.data = null;
    this.error = null;
    this.load = once(() => this.read());
  }

  // Ask for scalars by name; undefined: only the list of their names.
  want(names) {
    const missing = names.filter((name) => !this.wanted.has(name));
    missing.forEach((name) => this.wanted.add(name));
    if (missing.length || !this.data) this.load();
  }

  onData(listener) {
    this.listeners.add(listener);
    if (this.data || this.error) listener();
  }

  async read() {
    try {
      const names = [...this.wanted];
      // A name that no run has: nothing is asked for yet.
      const query = names.length ? names.map((name) => ["name", name]) : [["name", ""]];
      this.data = await this.run.ask("/curves", query);
      this.names = this.data.names;
      this.error = null;
    } catch (error) {
      this.error = error;
    }
    this.tell();
  }

  tell() {
    this.listeners.forEach((listener) => listener());
  }

  // Take the rows of a change of the stream.
  receive({ curves, rows, rows_end: end, generation }) {
    if (!this.data) return;
    const { data } = this;
    if (curves || generation !== data.generation) {
      this.load();
      return;
    }
    if (data.rows >= end) return;
    const first = end - rows.length;
    if (data.rows < first || data.steps.length > MOST_POINTS || rows.some((row) => Object.keys(row.scalars).some((n) => !this.names.includes(n)))) {
      this.load();
      return;
    }
    for (const row of rows.slice(data.rows - first)) {
      data.steps.push(row.step);
      data.times.push(row.t);
      data.attempts.push(row.attempt);
      for (const name of Object.keys(data.curves)) {
        const value = row.scalars[name] ?? null;
        data.curves[name].push(value);
        if (data.ranges[name]) data.ranges[name].forEach((bound) => bound.push(value));
      }
    }
    data.rows = end;
    this.tell();
  }

  // Return { times, steps, rows } for charts: `rows(values)` gives values with a gap between two attempts.
  get points() {
    const { steps, times, attempts } = this.data;
    const at = []; // indices; null is a gap
    const x = [];
    let last = -Infinity;
    steps.forEach((_, i) => {
      if (i && attempts[i] !== attempts[i - 1]) {
        at.push(null);
        x.push(last);
      }
      last = Math.max(last, times[i]); // the clocks of two hosts may differ
      at.push(i);
      x.push(last);
    });
    const along = (values) => at.map((i) => (i === null ? null : values[i]));
    return { times: x, steps: along(steps), along };
  }
}

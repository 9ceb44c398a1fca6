// The line charts. All charts share one time range and one cursor.
const DASHES = [[], [7, 3], [2, 2], [9, 3, 2, 3]];
const FONT = '11px system-ui, "DejaVu Sans", sans-serif';
// Return whether the user points at this chart; the other charts only follow its cursor.
const pointed_at = (u) => u.over.matches(":hover") || u.root.parentElement === document.activeElement;
const NEAR = 24; // px, the distance from the cursor up to which a line is named
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Describe a line: its color repeats after eight lines, with another dash.
function line(label, values, number, more = {}) {
  return { label, values, stroke: `--c${number % 8}`, dash: DASHES[Math.floor(number / 8) % 4], width: 1.25, ...more };
}

class Charts {
  constructor(data, tables) {
    this.data = data;
    this.tables = tables;
    this.plots = [];
    const [start, end] = data.window;
    this.whole = [start, Math.max(end, start + 1)];
    this.view = this.whole;
    this.listeners = [];
    this.sync = uPlot.sync("run");
  }

  // Add a chart with the shared cursor and zoom by dragging.
  add(figure, options, values, readout) {
    const box = figure.querySelector(".plot");
    const plot = new uPlot(
      {
        ...options,
        width: Math.max(200, box.clientWidth),
        tzDate: (t) => uPlot.tzDate(new Date(t * 1000), "Etc/UTC"),
        legend: { show: false },
        cursor: {
          y: false,
          points: { size: 6, ...options.points },
          drag: { x: true, y: false, setScale: false },
          focus: options.focus ? { prox: NEAR } : undefined,
          bind: { dblclick: () => () => this.show(...this.whole) },
          sync: {
            key: "run",
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
    plot.setScale("x", { min: this.view[0], max: this.view[1] });
    box.tabIndex = 0;
    box.setAttribute("role", "img");
    box.onkeydown = (event) => this.key(plot, options.lane, event);
    this.plots.push({ plot, box, height: options.height });
    return plot;
  }

  remove(plots) {
    this.plots = this.plots.filter(({ plot }) => !plots.includes(plot));
    plots.forEach((plot) => plot.destroy());
  }

  show(from, to) {
    const [start, end] = this.whole;
    const least = Math.max(this.tables.gpus.step, this.tables.training.step, 1) * 4;
    const width = Math.min(end - start, Math.max(to - from, Math.min(least, end - start)));
    const low = Math.min(Math.max((from + to) / 2 - width / 2, start), end - width);
    this.view = [low, low + width];
    this.redraw();
    this.listeners.forEach((listener) => listener(this.view));
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
  key(plot, lane, event) {
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
      0: () => this.show(...this.whole),
    };
    if (!(event.key in actions) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  resize() {
    this.plots.forEach(({ plot, box, height }) => {
      const width = Math.max(200, box.clientWidth);
      if (width !== plot.width) plot.setSize({ width, height });
    });
  }

  redraw() {
    // uPlot's redraw() would undo a range that was set in the same turn of the event loop.
    this.plots.forEach(({ plot }) => plot.setScale("x", { min: this.view[0], max: this.view[1] }));
  }
}

// Format ticks as times of day, with the date below the first tick of a day.
function time_labels(u, moments, axis, space, step) {
  let day = "";
  return moments.map((t) => {
    const [date, clock] = moment(t).split(" ");
    if (step >= 86400) return date.slice(5);
    const text = step >= 60 ? clock.slice(0, 5) : clock;
    const label = date === day ? text : `${text}\n${date}`;
    day = date;
    return label;
  });
}

const time_axis = () => ({
  values: time_labels,
  stroke: () => colour("--soft"),
  font: FONT,
  grid: { stroke: () => colour("--grid"), width: 1 },
  ticks: { show: false },
  size: 30,
  space: 70,
});

function compact(value) {
  const [big, sign] = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([n]) => Math.abs(value) >= n * 10) || [1, ""];
  return (value / big).toLocaleString("en", { maximumSignificantDigits: 4 }) + sign;
}

function value_range(chart) {
  if (chart.span === "percent") return () => [0, 100];
  return (u, low, high) => {
    if (low === null || low === undefined) return [0, 1];
    if (chart.span === "zero") return [0, high > 0 ? high * 1.06 : 1];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.06 || 1;
    return [low - room, high + room];
  };
}

// Draw every other attempt as a band behind the lines, faults and alerts as dashed vertical lines.
function backdrop(data) {
  return (u) => {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.fillStyle = colour("--even");
    for (const a of data.attempts) {
      if (a.n % 2 || a.start === null || a.end === null) continue;
      const left = u.valToPos(a.start, "x", true);
      ctx.fillRect(left, bbox.top, u.valToPos(a.end, "x", true) - left, bbox.height);
    }
    ctx.strokeStyle = colour("--critical");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const m of data.marks) {
      if (!m.prominent) continue;
      const x = u.valToPos(m.t, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };
}

// The axis has a line per digit; only powers of ten, and their halves, have room for a label.
function decade(value) {
  if (value === null || !/^[15]e/.test(value.toExponential(0))) return null;
  return value < 0.01 ? value.toExponential(0) : compact(value);
}

function draw_chart(charts, figure, chart, times, lines, band, log) {
  const readout = figure.querySelector(".readout");
  const many = lines.length > 4;
  let nearest = null;
  const say = (u) => {
    const i = u.cursor.idx;
    if (i === null || i === undefined || u.cursor.left < 0) {
      readout.textContent = "";
      return;
    }
    const at = moment(times[i]).slice(5);
    if (many && nearest && pointed_at(u)) {
      readout.textContent = `${at} · ${nearest.label}: ${figure_of(nearest, i)}`;
    } else if (many) {
      const known = lines.map((l) => l.values[i]).filter((v) => v !== null);
      const [low, high] = [Math.min(...known), Math.max(...known)];
      readout.textContent = known.length ? `${at} · ${known.length} lines: ${text(low)} – ${text(high)}` : `${at} · no sample`;
    } else {
      readout.textContent = [at, ...lines.map((l) => `${l.label} ${figure_of(l, i)}`)].join(" · ");
    }
  };
  const text = (value) => figure_text(value, chart);
  const figure_of = (l, i) => text(l.values[i]);
  return charts.add(
    figure,
    {
      height: 170,
      focus: many,
      points: { show: !many },
      padding: [8, 8, 0, 0],
      scales: { x: { time: true }, y: log ? { distr: 3 } : { range: value_range(chart) } },
      series: [
        {},
        ...lines.map((l) => ({
          label: l.label,
          stroke: () => colour(l.stroke),
          width: l.width,
          dash: l.dash,
          points: { show: false },
        })),
      ],
      bands: band ? [{ series: band, fill: () => colour("--band") }] : [],
      axes: [
        time_axis(),
        { ...time_axis(), size: 50, space: 34, values: (u, ticks) => ticks.map(log ? decade : compact) },
      ],
      hooks: {
        drawClear: [backdrop(charts.data)],
        setSeries: [(u, i) => { nearest = i ? lines[i - 1] : null; say(u); }],
      },
    },
    [times, ...lines.map((l) => (log ? l.values.map((v) => (v > 0 ? v : null)) : l.values))],
    say,
  );
}

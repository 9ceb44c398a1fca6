// The logs: the end of one log, which follows what is written; earlier parts on demand; search over one rank or all.
import { watch } from "./live.js";
import { el, formatBytes, problem } from "./run_parts.js";

const LINES = 500; // per request
const MOST_LINES = 5000; // in the page
const NEAR_END = 40; // px
const TROUBLE = /\b(?:error|exception|traceback|fatal|critical|killed|out of memory)\b/i;
const DOUBT = /\bwarn(?:ing)?\b/i;

export function create(panel, run) {
  const view = new LogView(panel, run);
  return {
    show: (detail) => view.show(detail),
    hide: () => view.close(),
    onChange: (change) => view.onChange(change),
  };
}

class LogView {
  constructor(panel, run) {
    this.run = run;
    this.key = null;
    this.listed = null;
    this.attempt = null; // null: the newest one
    this.follow = true;
    this.stop = null; // of the stream
    this.part = { start: 0, end: 0, cursor: "", atEnd: true };
    this.build(panel);
  }

  build(panel) {
    this.failures = el("div", "stack");
    this.pick = labeled("Log", el("select"));
    this.attempts = labeled("Attempt", el("select"));
    this.text = Object.assign(el("input"), { type: "search", placeholder: "Text or regular expression", spellcheck: false });
    this.regex = check("Regular expression");
    this.scope = labeled("In", el("select"));
    this.scope.input.append(new Option("this log", "log"), new Option("all ranks of the attempt", "attempt"), new Option("all ranks, all attempts", "run"));
    this.following = check("Follow", true);
    this.wrap = check("Wrap lines", true);
    const form = el("form", "toolbar log-search", labelOf("Search for", this.text), this.scope.label, this.regex.label, submitButton());
    form.setAttribute("role", "search");
    form.onsubmit = (event) => {
      event.preventDefault();
      this.search();
    };
    this.results = el("div", "card results");
    this.results.hidden = true;
    this.about = el("p", "about");
    this.about.setAttribute("role", "status");
    this.lines = el("div", "log");
    this.lines.tabIndex = 0;
    this.lines.setAttribute("role", "log");
    this.lines.setAttribute("aria-live", "off"); // a log that follows would be read out without end
    this.lines.setAttribute("aria-label", "Lines of the log");
    this.earlier = button("Earlier lines", () => this.loadEarlier());
    this.newest = button("Newest lines", () => this.open(this.key));
    const bar = el("div", "toolbar", this.attempts.label, this.pick.label, this.following.label, this.wrap.label, this.earlier, this.newest);
    panel.append(this.failures, bar, form, this.results, this.about, this.lines);

    this.attempts.input.onchange = () => {
      this.attempt = this.attempts.input.value === "" ? null : Number(this.attempts.input.value);
      this.fillLogs();
      this.open(this.pick.input.value);
    };
    this.pick.input.onchange = () => this.open(this.pick.input.value);
    this.following.input.onchange = () => {
      this.follow = this.following.input.checked;
      if (!this.follow) return;
      if (this.part.atEnd) this.toEnd();
      else this.open(this.key);
    };
    this.wrap.input.onchange = () => this.lines.classList.toggle("nowrap", !this.wrap.input.checked);
    this.lines.onscroll = () => {
      const atBottom = this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < NEAR_END;
      // Who scrolls back wants to read, not to follow.
      if (this.part.atEnd && this.follow !== atBottom) {
        this.follow = atBottom;
        this.following.input.checked = atBottom;
      }
    };
  }

  async show(detail) {
    if (!await this.list()) return;
    const [attempt] = detail.split("/");
    if (detail && detail !== "job") {
      this.attempt = this.isNewest(Number(attempt)) ? null : Number(attempt);
      this.attempts.input.value = this.attempt ?? "";
      this.fillLogs();
    }
    this.open(detail || this.inNewest(this.key) || this.firstLog());
  }

  // The log of the same rank or node in the newest attempt, unless an attempt was chosen.
  inNewest(key) {
    const name = key?.split("/")[1];
    return name && this.attempt === null ? `${this.newestAttempt}/${name}` : key;
  }

  // End the stream: a browser opens only six connections to a server.
  close() {
    this.stop?.();
    this.stop = null;
  }

  onChange(change) {
    if (this.run.isDeleted) this.close();
    // A new attempt writes new logs: the page follows across requeues.
    const newest = change.status?.attempts?.at(-1)?.n;
    if (newest === undefined || newest === this.newestAttempt) return;
    this.newestAttempt = newest;
    if (this.run.tab === "logs" && this.listed) this.followRequeue();
  }

  async followRequeue() {
    if (!await this.list() || this.attempt !== null || !this.follow) return;
    if (this.key) this.open(this.inNewest(this.key));
  }

  get selected() {
    const { attempts } = this.listed;
    return attempts.find((a) => a.n === this.attempt) ?? attempts.at(-1);
  }

  isNewest(n) {
    return this.listed.attempts.at(-1)?.n === n;
  }

  async list() {
    try {
      this.listed = await this.run.ask("/logs");
    } catch (error) {
      this.about.replaceChildren(problem(error.message, error.fix));
      return false;
    }
    const { attempts } = this.listed;
    this.attempts.input.replaceChildren(new Option(`newest${attempts.length ? ` (${attempts.at(-1).n})` : ""}`, ""), ...attempts.slice(0, -1).reverse().map((a) => new Option(a.n, a.n)));
    this.attempts.input.value = this.attempt ?? "";
    this.attempts.label.hidden = attempts.length < 2;
    this.newestAttempt = attempts.at(-1)?.n;
    this.fillLogs();
    this.showFailures();
    return true;
  }

  // Logs of ranks that failed come first.
  fillLogs() {
    const { job, failures } = this.listed;
    const attempt = this.selected;
    const failed = new Set(failures.map((f) => f.key));
    const select = this.pick.input;
    const group = (label, options) => {
      const element = Object.assign(el("optgroup"), { label });
      element.append(...options.map(([text, key, size]) => new Option(`${text}${size === null ? "" : ` · ${formatBytes(size)}`}`, key)));
      return options.length ? [element] : [];
    };
    const ranks = attempt ? attempt.ranks : [];
    const rows = (chosen) => chosen.map((r) => [`rank ${r.rank}`, r.key, r.size]);
    select.replaceChildren(
      ...group("Failed", rows(ranks.filter((r) => failed.has(r.key)))),
      ...group("Ranks", rows(ranks.filter((r) => !failed.has(r.key)))),
      ...group("torchrun on each node", (attempt?.agents ?? []).map((a) => [a.node, a.key, a.size])),
      ...group("Job", [["batch script, srun, Slurm", job.key, job.size]]),
    );
    if (this.key) select.value = this.key;
  }

  firstLog() {
    return this.listed.failures[0]?.key ?? this.selected?.ranks[0]?.key ?? this.listed.job.key;
  }

  showFailures() {
    const { failures, failures_left_out: left } = this.listed;
    this.failures.replaceChildren();
    if (!failures.length) return;
    const items = failures.map((f) => el("li", "", Object.assign(el("a", "", f.who), { href: `#logs/${f.key}` }), `: ${f.reason}`));
    const [first, ...rest] = items;
    const more = rest.length ? el("details", "", el("summary", "", `${rest.length + left} more failed, mostly because of this one`), el("ul", "plain", ...rest)) : "";
    this.failures.append(el("div", "banner critical", el("ul", "plain", first), more));
  }

  async open(key) {
    this.close();
    this.key = key;
    this.pick.input.value = key;
    try {
      const part = await this.run.ask("/logs/lines", [["key", key], ["count", LINES]]);
      if (this.key !== key || this.stop) return; // another log was chosen meanwhile
      this.part = { ...part, atEnd: true };
      this.fill(part.lines);
      this.say(part.exists ? "" : "This log has no line yet.");
      this.toEnd();
      if (this.run.isDeleted || this.run.tab !== "logs") return;
      this.stop = watch(`/api/live/runs/${encodeURIComponent(this.run.id)}/log?key=${encodeURIComponent(key)}`, part.exists ? part.cursor : null, (change) => this.append(change));
    } catch (error) {
      this.fill([]);
      this.about.replaceChildren(problem(error.message, error.fix));
    }
  }

  fill(lines) {
    this.lines.replaceChildren(...lines.map(row));
    this.updateButtons();
  }

  append({ lines, end, restart, start, size }) {
    if (!this.part.atEnd) return;
    this.part = { ...this.part, end, size, exists: true };
    if (restart) {
      this.part.start = start;
      this.fill(lines);
      this.say("The log was replaced, or grew faster than this page can show. These are its newest lines.");
    } else {
      // The last line was unfinished: its new text replaces it.
      const first = lines[0]?.[0];
      while (first !== undefined && this.lines.lastChild && Number(this.lines.lastChild.dataset.offset) >= first) this.lines.lastChild.remove();
      this.lines.append(...lines.map(row));
      this.say("");
    }
    const excess = this.lines.childElementCount - MOST_LINES;
    if (excess > 0 && this.follow) {
      for (let i = 0; i < excess; i++) this.lines.firstChild.remove();
      this.part.start = Number(this.lines.firstChild.dataset.offset);
    }
    this.updateButtons();
    if (this.follow) this.toEnd();
  }

  async loadEarlier() {
    const { lines } = this;
    try {
      const part = await this.run.ask("/logs/lines", [["key", this.key], ["count", LINES], ["before", this.part.start]]);
      const before = lines.scrollHeight;
      lines.prepend(...part.lines.map(row));
      this.part.start = part.start;
      this.follow = this.following.input.checked = false;
      lines.scrollTop += lines.scrollHeight - before;
      this.updateButtons();
    } catch (error) {
      this.about.replaceChildren(problem(error.message, error.fix));
    }
  }

  // Show the part of a log around a match.
  async openAt({ key, offset, text }) {
    this.close();
    this.key = key;
    const attempt = Number(key.split("/")[0]);
    this.attempt = this.isNewest(attempt) ? null : attempt;
    this.attempts.input.value = this.attempt ?? "";
    this.fillLogs();
    this.pick.input.value = key;
    try {
      const [before, after] = await Promise.all([
        this.run.ask("/logs/lines", [["key", key], ["count", LINES / 2], ["before", offset]]),
        this.run.ask("/logs/lines", [["key", key], ["count", LINES / 2], ["after", offset]]),
      ]);
      this.part = { ...after, start: before.start, atEnd: false };
      this.follow = this.following.input.checked = false;
      this.fill([...before.lines, ...after.lines]);
      this.say(`Lines around “${text.trim().slice(0, 80)}”. “Newest lines” returns to the end.`);
      const match = this.lines.querySelector(`[data-offset="${offset}"]`);
      match?.classList.add("match");
      this.lines.focus({ preventScroll: true });
      match?.scrollIntoView({ block: "center" });
    } catch (error) {
      this.about.replaceChildren(problem(error.message, error.fix));
    }
  }

  async search() {
    const parameters = [["text", this.text.value]];
    if (this.regex.input.checked) parameters.push(["regex", "1"]);
    const scope = this.scope.input.value;
    if (scope === "log") parameters.push(["key", this.key]);
    if (scope === "attempt" && this.selected) parameters.push(["attempt", this.selected.n]);
    this.results.hidden = false;
    this.results.replaceChildren(el("p", "soft", "Searching…"));
    this.searching?.abort();
    this.searching = new AbortController();
    try {
      this.showResults(await this.run.ask("/logs/search", parameters, { signal: this.searching.signal }));
    } catch (error) {
      if (error.name !== "AbortError") this.results.replaceChildren(problem(error.message, error.fix));
    }
  }

  showResults({ matches, complete, searched_bytes: searched, total_bytes: total, problems }) {
    const found = `${matches.length} ${matches.length === 1 ? "match" : "matches"}`;
    const scope = complete ? "" : ` in the newest ${formatBytes(searched)} of ${formatBytes(total)}; the rest was not searched`;
    const close = button("Close", () => { this.results.hidden = true; });
    const list = el("ol", "matches", ...matches.map((match) => {
      const link = el("button", "link", match.key);
      link.type = "button";
      link.onclick = () => this.openAt(match);
      return el("li", "", link, el("code", "", match.text));
    }));
    const head = el("p", "results-head", el("strong", "", found), scope, close);
    head.setAttribute("role", "status");
    this.results.replaceChildren(head, ...problems.map((text) => problem(`Not read: ${text}`)), list);
  }

  say(text) {
    this.about.textContent = text;
  }

  updateButtons() {
    this.earlier.hidden = !(this.part.start > 0);
    this.newest.hidden = this.part.atEnd;
  }

  toEnd() {
    this.lines.scrollTop = this.lines.scrollHeight;
  }
}

function row([offset, text]) {
  const className = TROUBLE.test(text) ? "line trouble" : DOUBT.test(text) ? "line doubt" : "line";
  const element = el("div", className, text || " ");
  element.dataset.offset = offset;
  return element;
}

function button(text, action) {
  const element = el("button", "", text);
  element.type = "button";
  element.onclick = action;
  return element;
}

function submitButton() {
  const element = el("button", "", "Search");
  element.type = "submit";
  return element;
}

// A label beside its control: inside, a select's options would be part of the label.
function labelOf(text, input) {
  const label = el("label", "", text);
  input.id = label.htmlFor = `log-${text.toLowerCase().replaceAll(" ", "-")}`;
  return el("span", "check", label, input);
}
const labeled = (text, input) => ({ input, label: labelOf(text, input) });

function check(text, checked = false) {
  const input = Object.assign(el("input"), { type: "checkbox", checked });
  return { input, label: el("label", "check", input, text) };
}

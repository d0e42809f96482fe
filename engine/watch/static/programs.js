// The replicas and the programs, live: in an order, with a filter, and in pages.

import { brief, count, el, plural, seconds, write } from "./dom.js";
import * as server from "./server.js";

const ROWS = 50; // on a page
const ROWS_NARROW = 25;
const narrow = matchMedia("(max-width: 760px)"); // as in page.css
const STATES = { running: "running", waiting: "waiting", tool: "in a tool", idle: "idle" };
const STATE_ORDER = Object.keys(STATES);

const label = (program) => (["", "program"].includes(program.name.trim()) ? program.program_id : program.name);
const stateText = (program) => (program.state === "tool" ? `in ${program.tools.join(", ")}` : program.state);
const known = (value) => value ?? -1;

// The queue, under a policy with several, or else the place of the first call that waits.
function queue(program) {
  if (program.level !== null) return `Q${program.level + 1}`;
  return program.place === null ? "" : `#${program.place}`;
}

// The first replicas; the title has all.
function places(ids) {
  return ids.length > 2 ? `${ids[0]} and ${ids.length - 1} more` : ids.join(", ");
}

function column(name, title, text, order, { isText = false, isUp = isText, only = null, hint = null, full = null } = {}) {
  return { name, title, text, order, isText, isUp, only, hint, full }; // isUp: the smallest is the first
}

const COLUMNS = [
  column("program", "Program", label, (p) => label(p).toLowerCase(), { isText: true }),
  column("state", "State", stateText, (p) => (STATE_ORDER.indexOf(p.state) + 5) % 5,
    { isText: true, full: (p) => [p.state, ...p.tools].join(", ") }),
  column("ended", "Ended", (p) => `${seconds(p.ended_ago_s)} ago`, (p) => p.ended_ago_s, { isUp: true, only: "ended" }),
  column("queue", "Queue", queue, (p) => p.level ?? p.place ?? Infinity,
    { isUp: true, only: "open", hint: "The queue of its calls, or the place of its first call that waits" }),
  column("service", "Service", (p) => seconds(p.service_s), (p) => p.service_s,
    { hint: "On the model executor, along the longest chain of calls" }),
  column("wait", "Wait", (p) => seconds(p.wait_s), (p) => p.wait_s, { hint: "In queues, over all calls" }),
  column("calls", "Calls", (p) => brief(p.calls), (p) => p.calls,
    { full: (p) => `${plural(p.calls, "call")} in ${plural(p.threads, "thread")}, ${p.calls_in_flight} in flight` }),
  column("kv", "KV", (p) => (p.kv_tokens === null ? "" : brief(p.kv_tokens)), (p) => known(p.kv_tokens),
    { only: "open", hint: "Tokens whose KV it holds, on devices and in host memory" }),
  column("in", "In", (p) => brief(p.prompt_tokens), (p) => p.prompt_tokens, { hint: "Prompt tokens" }),
  column("out", "Out", (p) => brief(p.output_tokens), (p) => p.output_tokens, { hint: "Output tokens" }),
  column("age", "Age", (p) => seconds(p.age_s), (p) => p.age_s, { hint: "From its start until now, or until its end" }),
  column("tools", "Tools", (p) => seconds(p.tools_s), (p) => p.tools_s, { hint: "Between calls" }),
  column("replica", "Replica", (p) => places(p.engine_ids), (p) => p.engine_ids.join(), {
    isText: true, full: (p) => p.engine_ids.join(", ") }),
  column("preempt", "Pre.", (p) => brief(p.preemptions), (p) => p.preemptions, { hint: "Preemptions of its calls" }),
  column("tenant", "Tenant", (p) => p.tenant ?? "", (p) => p.tenant ?? "", { isText: true }),
];

// What the user has chosen. It stays while a program is looked at.
const choice = {
  kind: "open", text: "", state: null,
  open: { order: "state", isReversed: false, page: 0 }, ended: { order: "ended", isReversed: false, page: 0 },
};

function fits(program) {
  const text = choice.text.trim().toLowerCase();
  const places_ = [program.name, program.program_id, program.session_id, program.tenant ?? "", stateText(program)];
  return (choice.state === null || choice.kind === "ended" || program.state === choice.state)
    && [...places_, ...program.engine_ids].some((each) => each.toLowerCase().includes(text));
}

function compare(one, other) {
  return one < other ? -1 : one > other ? 1 : 0;
}

function ordered(programs) {
  const { order, isReversed } = choice[choice.kind];
  const { order: of, isUp } = COLUMNS.find((each) => each.name === order);
  const sign = isUp === isReversed ? -1 : 1;
  return programs.filter(fits).sort((one, other) => sign * compare(of(one), of(other)));
}

export class ProgramsView {
  constructor() {
    this.replicas = new Rows(el("ul", { class: "replicas" }), newReplica, showReplica);
    this.tables = { open: new Table("open", "Open programs"), ended: new Table("ended", "Programs that have ended") };
    for (const table of Object.values(this.tables)) table.onOrder = (name) => this.#order(name);
    this.search = el("input", {
      type: "search", class: "search", placeholder: "Filter", "aria-label": "Show only programs with this text",
      title: "A name, an id, a session, a state, a tool, a tenant or a replica (/)", autocomplete: "off",
      spellcheck: "false", oninput: () => this.#change({ text: this.search.value }),
    });
    this.search.value = choice.text;
    this.kinds = {};
    for (const kind of ["open", "ended"]) {
      this.kinds[kind] = el("button", { type: "button", onclick: () => this.#change({ kind }) });
    }
    this.order = el("select", { "aria-label": "Order", onchange: () => this.#order(this.order.value) });
    this.reverse = el("button", {
      type: "button", "aria-label": "Turn the order round", title: "Turn the order round",
      onclick: () => this.#order(choice[choice.kind].order),
    }, "⇅");
    this.states = el("div", { class: "states", role: "group", "aria-label": "Show only programs in this state" });
    this.chips = STATE_ORDER.map((state) => {
      const number = el("span", { class: "count" });
      const chip = el("button", {
        type: "button", class: "chip", "data-state": state,
        onclick: () => this.#change({ state: choice.state === state ? null : state }),
      }, el("span", { class: "state" }, STATES[state]), number);
      this.states.append(chip);
      return { state, chip, number };
    });
    this.note = el("p", { class: "note" });
    this.empty = el("p", { class: "note empty" },
      el("strong", {}, "No program is open."), " A program begins with its first call.",
      "hasModels" in document.documentElement.dataset
        ? el("code", {}, `OPENAI_BASE_URL=${new URL("v1", document.baseURI).href}`) : null);
    this.range = el("span", { role: "status" });
    this.before = el("button", { type: "button", onclick: () => this.#turn(-1) }, "Previous");
    this.after = el("button", { type: "button", onclick: () => this.#turn(1) }, "Next");
    this.pager = el("nav", { class: "pager", "aria-label": "Pages of programs" }, this.before, this.range, this.after);
    this.element = el("div", { class: "view list" },
      el("h1", {}, "Programs"),
      el("section", { "aria-label": "Replicas" }, this.replicas.body),
      el("div", { class: "tools" },
        el("div", { class: "kinds", role: "group", "aria-label": "Which programs" }, Object.values(this.kinds)),
        this.search, el("div", { class: "order" }, this.order, this.reverse), this.states),
      this.note, this.empty, this.tables.open.element, this.tables.ended.element, this.pager);
  }

  load() {
    return server.state();
  }

  show(state) {
    this.state = state;
    this.engine = `${state.model} · ${state.policy}`;
    this.replicas.show(state.replicas, (replica) => replica.engine_id);
    this.#draw();
    return this.element;
  }

  missing() {
    return el("p", { class: "note" }, "This server has no list of programs.");
  }

  #draw() {
    const { kind } = choice;
    const all = { open: this.state.programs, ended: this.state.ended };
    const shown = ordered(all[kind]);
    const rows = narrow.matches ? ROWS_NARROW : ROWS;
    const mine = choice[kind];
    mine.page = Math.max(0, Math.min(mine.page, Math.ceil(shown.length / rows) - 1));
    const first = mine.page * rows;
    const here = shown.slice(first, first + rows);
    this.tables[kind].show(here, mine);
    for (const [name, table] of Object.entries(this.tables)) table.element.hidden = name !== kind || shown.length === 0;
    for (const [name, button] of Object.entries(this.kinds)) {
      const total = name === "open" ? this.state.programs_total : all[name].length;
      write(button, `${name === "open" ? "Open" : "Ended"} ${count(total)}`);
      button.setAttribute("aria-pressed", String(name === kind));
    }
    for (const { state, chip, number } of this.chips) {
      write(number, count(all.open.filter((program) => program.state === state).length));
      chip.setAttribute("aria-pressed", String(choice.state === state));
    }
    this.states.hidden = kind !== "open" || all.open.length === 0;
    this.#drawOrder(mine, kind);
    const more = this.state.programs_total - all.open.length;
    const notes = [];
    if (kind === "open" && more > 0) notes.push(`These are the ${count(all.open.length)} programs that were used last.`);
    if (all[kind].length > 0 && shown.length === 0) notes.push("No program fits the filter.");
    if (kind === "ended" && all.ended.length === 0) notes.push("No program has ended.");
    write(this.note, notes.join(" "));
    this.note.hidden = notes.length === 0;
    this.empty.hidden = kind !== "open" || all.open.length > 0;
    write(this.range, `${count(first + 1)}–${count(first + here.length)} of ${count(shown.length)}`);
    this.pager.hidden = shown.length <= rows;
    this.before.disabled = first === 0;
    this.after.disabled = first + rows >= shown.length;
  }

  #drawOrder(mine, kind) {
    if (this.order.dataset.kind !== kind) {
      this.order.dataset.kind = kind;
      this.order.replaceChildren(...columnsOf(kind).map(({ name, title }) => el("option", { value: name }, `by ${title}`)));
    }
    if (this.order.value !== mine.order) this.order.value = mine.order;
    this.reverse.setAttribute("aria-pressed", String(mine.isReversed));
  }

  #change(changes) {
    Object.assign(choice, changes);
    choice[choice.kind].page = 0;
    this.#draw();
  }

  #order(name) {
    const mine = choice[choice.kind];
    mine.isReversed = name === mine.order && !mine.isReversed;
    mine.order = name;
    this.#change({});
  }

  #turn(step) {
    choice[choice.kind].page += step;
    this.#draw();
    this.tables[choice.kind].element.scrollIntoView({ block: "nearest" });
  }

  // As in `weft top`.
  key(event) {
    if (!this.element.isConnected || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target === this.search) {
      if (event.key === "Escape") this.#clear();
    } else if (event.key === "/") {
      event.preventDefault();
      this.search.focus();
    }
  }

  #clear() {
    this.search.value = "";
    this.#change({ text: "", state: null });
  }
}

function columnsOf(kind) {
  return COLUMNS.filter(({ only }) => only === null || only === kind);
}

class Table {
  constructor(kind, caption) {
    this.columns = columnsOf(kind);
    this.rows = new Rows(el("tbody", { role: "rowgroup" }), (program) => this.#make(program), (row, program) => this.#fill(row, program));
    this.heads = this.columns.map(({ name, title, hint, isText }) => el("th", {
      scope: "col", role: "columnheader", class: isText ? null : "number", "data-name": name, title: hint,
    }, el("button", { type: "button", onclick: () => this.onOrder(name) }, title)));
    // Roles, because a narrow window shows rows as cards, which are no table to some browsers.
    this.element = el("table", { role: "table" }, el("caption", {}, caption),
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, this.heads)), this.rows.body);
  }

  show(programs, { order, isReversed }) {
    this.columns.forEach(({ name, isUp }, number) => {
      const direction = isUp === isReversed ? "descending" : "ascending";
      this.heads[number].setAttribute("aria-sort", name === order ? direction : "none");
    });
    this.rows.show(programs, (program) => (program.ended_ago_s === null ? program.program_id : `${program.program_id} ${program.age_s}`));
  }

  #make(program) {
    const texts = {};
    const cells = this.columns.map(({ name, title, isText }) => {
      texts[name] = name === "program"
        ? el("a", { href: `#program/${encodeURIComponent(program.program_id)}` })
        : el("span", { class: name === "state" ? "state" : null });
      const inside = name === "program" ? [texts[name], el("span", { class: "id" }, program.program_id)] : [texts[name]];
      return el("td", { role: "cell", class: isText ? null : "number", "data-name": name, "data-label": title },
        el("div", { class: "cut" }, inside));
    });
    return { texts, element: el("tr", { role: "row" }, cells) };
  }

  #fill(row, program) {
    row.element.dataset.state = program.state;
    for (const { name, text, full } of this.columns) {
      write(row.texts[name], text(program));
      if (full) row.texts[name].parentElement.title = full(program);
    }
    row.texts.program.parentElement.title = `${program.name} (${program.program_id})`;
    row.texts.program.nextSibling.hidden = label(program) === program.program_id;
  }
}

// Rows that stay the same elements while their thing is there, so that focus and selection stay.
class Rows {
  constructor(body, make, show) {
    Object.assign(this, { body, make, show_: show, rows: new Map() });
  }

  show(things, keyOf) {
    const rows = new Map();
    things.forEach((thing, number) => {
      const key = keyOf(thing, number);
      const row = this.rows.get(key) ?? this.make(thing);
      this.show_(row, thing);
      rows.set(key, row);
    });
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    [...rows.values()].forEach(({ element }, number) => {
      if (this.body.children[number] !== element) this.body.insertBefore(element, this.body.children[number] ?? null);
    });
    while (this.body.children.length > rows.size) this.body.lastElementChild.remove();
    if (focused !== document.activeElement) focused?.focus({ preventScroll: true });
    this.rows = rows;
  }
}

function newReplica(replica) {
  const parts = { state: el("span", { class: "state" }), calls: el("span", {}), kv: el("span", {}), used: el("span") };
  const bar = el("span", { class: "meter", "aria-hidden": "true" }, parts.used);
  return { ...parts, element: el("li", {},
    el("strong", {}, replica.engine_id), parts.state, parts.calls, el("span", { class: "kv" }, bar, parts.kv)) };
}

function showReplica(row, replica) {
  write(row.state, replica.state);
  row.element.dataset.state = replica.state;
  row.element.title = [replica.model, plural(replica.calls, "call"), plural(replica.deaths, "death"), `${count(replica.stolen)} stolen`].join(", ");
  write(row.calls, (replica.running === null
    ? plural(replica.calls, "call")
    : `${count(replica.running)} running, ${count(replica.waiting)} waiting`) + (replica.deaths ? `, ${plural(replica.deaths, "death")}` : ""));
  write(row.kv, replica.kv_used === null ? "KV –" : `KV ${(100 * replica.kv_used).toFixed(0)} %`);
  row.used.style.width = `${100 * (replica.kv_used ?? 0)}%`;
}

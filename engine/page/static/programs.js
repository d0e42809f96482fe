// The replicas and the programs, live.

import { count, el, plural, seconds, write } from "./dom.js";
import * as server from "./server.js";

const COLUMNS = [
  ["program", "Program"], ["state", "State"], ["service", "Service"], ["wait", "Wait"], ["queue", "Queue"],
  ["calls", "Calls"], ["kv", "KV tokens"], ["replica", "Replica"], ["age", "Age"],
];
const NUMBERS = new Set(["service", "wait", "queue", "calls", "kv", "age"]);

export class ProgramsView {
  constructor() {
    this.replicas = new Rows(el("ul", { class: "replicas" }), newReplica, showReplica);
    this.open = new Rows(el("tbody"), newProgram, showProgram);
    this.ended = new Rows(el("tbody"), newProgram, showProgram);
    this.openTable = table("Open programs", this.open.body);
    this.endedTable = table("Programs that have ended", this.ended.body);
    this.count = el("span", { class: "count" });
    this.empty = el("p", { class: "note empty" },
      el("strong", {}, "No program is open."), " A program begins with its first call.",
      "hasModels" in document.documentElement.dataset
        ? el("code", {}, `OPENAI_BASE_URL=${new URL("v1", document.baseURI).href}`) : null);
    this.endedPart = el("section", {}, el("h2", {}, "Ended"), this.endedTable);
    this.element = el("div", { class: "view" },
      el("section", {}, el("h2", {}, "Replicas"), this.replicas.body),
      el("section", {}, el("h2", {}, "Programs ", this.count), this.empty, this.openTable),
      this.endedPart);
  }

  load() {
    return server.state();
  }

  show(state) {
    this.engine = `${state.model} · ${state.policy}`;
    this.replicas.show(state.replicas, (replica) => replica.engine_id);
    this.open.show(state.programs, (program) => program.program_id);
    this.ended.show(state.ended, (program) => `${program.program_id} ${program.age_s}`);
    const shown = state.programs.length;
    write(this.count, state.programs_total > shown ? `${count(shown)} of ${count(state.programs_total)}` : count(shown));
    this.empty.hidden = shown > 0;
    this.openTable.hidden = shown === 0;
    this.endedPart.hidden = state.ended.length === 0;
    return this.element;
  }

  missing() {
    return el("p", { class: "note" }, "This server has no list of programs.");
  }
}

function table(caption, body) {
  const heads = COLUMNS.map(([name, title]) => el("th", { scope: "col", class: NUMBERS.has(name) ? "number" : null }, title));
  return el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, heads)), body);
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
      if (this.body.children[number] !== row.element) this.body.insertBefore(row.element, this.body.children[number] ?? null);
    });
    while (this.body.children.length > things.length) this.body.lastElementChild.remove();
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
  write(row.calls, replica.running === null
    ? plural(replica.calls, "call")
    : `${count(replica.running)} running, ${count(replica.waiting)} waiting`);
  write(row.kv, replica.kv_used === null ? "KV –" : `KV ${(100 * replica.kv_used).toFixed(0)} %`);
  row.used.style.width = `${100 * (replica.kv_used ?? 0)}%`;
}

function newProgram(program) {
  const cells = {};
  const made = COLUMNS.map(([name, title]) => {
    cells[name] = el("td", { class: NUMBERS.has(name) ? "number" : null, "data-name": name, "data-label": title });
    return cells[name];
  });
  const link = el("a", { href: `#program/${encodeURIComponent(program.program_id)}` });
  const id = el("span", { class: "id" });
  cells.program.append(link, id);
  cells.state.append(el("span", { class: "state" }));
  return { cells, link, id, element: el("tr", {}, made) };
}

// The queue, under a policy with several, or else the place of the first call that waits.
function queue(program) {
  if (program.level !== null) return `Q${program.level + 1}`;
  return program.place === null ? "" : `#${program.place}`;
}

// The first replicas; the title has all.
function places(ids) {
  return ids.length > 2 ? `${ids[0]} and ${ids.length - 1} more` : ids.join(", ");
}

function showProgram(row, program) {
  const { cells } = row;
  write(row.link, program.name || "program");
  write(row.id, program.program_id);
  row.element.dataset.state = program.state;
  cells.state.title = program.tools.join(", ");
  write(cells.state.firstChild, program.state === "tool" ? `in ${program.tools.join(", ")}` : program.state);
  write(cells.service, seconds(program.service_s));
  write(cells.wait, seconds(program.wait_s));
  write(cells.queue, queue(program));
  write(cells.calls, program.calls_in_flight ? `${count(program.calls)} (${count(program.calls_in_flight)})` : count(program.calls));
  cells.calls.title = `${plural(program.calls, "call")}, ${program.calls_in_flight} in flight`;
  write(cells.kv, program.kv_tokens === null ? "" : count(program.kv_tokens));
  write(cells.replica, places(program.engine_ids));
  cells.replica.title = program.engine_ids.join(", ");
  write(cells.age, seconds(program.age_s));
}

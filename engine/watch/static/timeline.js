// The chart of a timeline: a lane for each thread, a bar for each call, and the tools below.

import { el, place, plural, seconds, svg, write } from "./dom.js";

const ROW = 40; // pixels, as in page.css
const AXIS = 26;
const MIDDLE = 27; // of a bar within its row
const TICK = 90; // the least distance of two ticks
const LEGIBLE = 20; // pixels of a label
const MOST_ZOOM = 256;

export class Chart {
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.zoom = 1;
    this.bars = new Map(); // of calls, by id, and of tools
    this.items = new Map(); // where each is, by the same keys
    this.selected = null;
    this.lines = svg("svg", { class: "lines", "aria-hidden": "true" });
    this.axis = el("div", { class: "axis", "aria-hidden": "true" });
    this.lanes = el("div", { class: "lanes" });
    this.inner = el("div", { class: "inner" }, this.axis, this.lanes, this.lines);
    this.element = el("div", {
      class: "chart", role: "group", "aria-label": "Timeline. Arrow keys move between calls and tools.",
      onkeydown: (event) => this.#key(event),
    }, this.inner);
    new ResizeObserver(() => this.#drawAxis()).observe(this.element);
  }

  show(timeline) {
    this.timeline = timeline;
    this.scale = Math.max(timeline.length_s, 1e-6);
    this.tops = [];
    let rows = 0;
    const lanes = timeline.lanes.map((lane, number) => {
      this.tops.push(AXIS + rows * ROW);
      rows += lane.rows;
      return this.#lane(`Thread ${number + 1}`, lane.rows, lane.thread_id);
    });
    const toolRows = timeline.tools.reduce((most, tool) => Math.max(most, tool.row + 1), 0);
    const tools = toolRows ? this.#lane("Tools", toolRows) : null;
    this.#calls(lanes);
    this.#gaps(lanes);
    if (tools) this.#tools(tools);
    if (!this.bars.has(this.selected)) this.selected = null;
    const reachable = this.selected ?? this.bars.keys().next().value;
    for (const [key, bar] of this.bars) bar.tabIndex = key === reachable ? 0 : -1;
    const focused = this.element.contains(document.activeElement) ? document.activeElement : null;
    this.lanes.replaceChildren(...[...lanes, ...(tools ? [tools] : [])].map((lane) => lane.element));
    focused?.focus({ preventScroll: true });
    this.#drawAxis();
    this.#drawLines();
  }

  // A call by its id, or a tool by its key.
  select(key) {
    this.selected = key;
    for (const [each, bar] of this.bars) {
      bar.setAttribute("aria-pressed", String(each === key));
      bar.tabIndex = each === key ? 0 : -1;
    }
    const bar = this.bars.get(key);
    bar?.focus();
    bar?.scrollIntoView({ block: "nearest", inline: "nearest" });
    this.#drawLines();
    this.onSelect(this.items.get(key) ?? null);
  }

  zoomBy(factor) {
    const middle = (this.element.scrollLeft + this.element.clientWidth / 2) / this.element.scrollWidth;
    this.zoom = factor === 0 ? 1 : Math.min(Math.max(this.zoom * factor, 1), MOST_ZOOM);
    this.inner.style.setProperty("--zoom", String(this.zoom));
    this.element.scrollLeft = middle * this.element.scrollWidth - this.element.clientWidth / 2;
    this.#drawAxis();
  }

  #lane(name, rows, title = null) {
    const track = el("div", { class: "track" });
    track.style.height = `${rows * ROW}px`;
    return { track, element: el("div", { class: "lane" }, el("div", { class: "name", title }, name), track) };
  }

  #calls(lanes) {
    const { calls } = this.timeline;
    const last = new Map(); // the call that begins after this one in its row
    const next = new Map();
    for (const call of [...calls].sort((one, other) => other.start_s - one.start_s)) {
      const row = `${call.lane} ${call.row}`;
      next.set(call.call_id, last.get(row)?.start_s ?? this.scale);
      last.set(row, call);
    }
    const before = this.bars;
    this.bars = new Map();
    this.items = new Map();
    this.before = before;
    this.labels = []; // and the share of the width that each has
    calls.forEach((call, number) => {
      const bar = before.get(call.call_id) ?? this.#bar(call.call_id);
      this.bars.set(call.call_id, bar);
      this.items.set(call.call_id, { call, lane: call.lane, start_s: call.start_s });
      this.#fill(bar, call, number);
      const label = el("span", { class: "label", "aria-hidden": "true" }, call.label || String(number + 1));
      const share = Math.max(0, next.get(call.call_id) - call.start_s) / this.scale;
      this.labels.push([label, share]);
      place(label, call.start_s / this.scale, share);
      label.style.top = bar.style.top = `${call.row * ROW}px`;
      lanes[call.lane].track.append(label, bar);
    });
  }

  #bar(key) {
    return el("button", { type: "button", "aria-pressed": "false", "data-key": key, onclick: () => this.select(key) });
  }

  #fill(bar, call, number) {
    const end = call.end_s ?? Math.max(this.scale, call.start_s);
    const length = Math.max(end - call.start_s, 1e-9);
    bar.className = ["call", call.is_critical && "critical", call.state].filter(Boolean).join(" ");
    place(bar, call.start_s / this.scale, (end - call.start_s) / this.scale);
    const piece = (kind) => ([start, stop]) => {
      const made = el("span", { class: kind });
      place(made, (start - call.start_s) / length, (stop - start) / length);
      return made;
    };
    const stops = call.is_placed ? call.waits.filter(([start]) => start > call.start_s) : [];
    bar.replaceChildren(
      ...call.waits.map(piece("wait")), ...call.services.map(piece("service")),
      ...stops.map(([start]) => piece("stop")([start, start])));
    bar.setAttribute("aria-label", [
      call.label || `call ${number + 1}`, call.state, `waited ${seconds(call.wait_s)}`, `served ${seconds(call.service_s)}`,
      call.preemptions ? `preempted ${plural(call.preemptions, "time")}` : "", call.is_critical ? "on the critical path" : "",
    ].filter(Boolean).join(", "));
    bar.title = `${call.label || `call ${number + 1}`}: wait ${seconds(call.wait_s)}, service ${seconds(call.service_s)}`;
  }

  #gaps(lanes) {
    const calls = new Map(this.timeline.calls.map((call) => [call.call_id, call]));
    for (const gap of this.timeline.gaps) {
      const call = calls.get(gap.call_id);
      const line = el("span", { class: "gap", title: gap.tools.join(", ") || null });
      place(line, gap.start_s / this.scale, (gap.end_s - gap.start_s) / this.scale);
      line.style.top = `${call.row * ROW + MIDDLE}px`;
      lanes[call.lane].track.append(line);
    }
  }

  #tools(lane) {
    for (const tool of this.timeline.tools) {
      const key = `tool ${tool.row} ${tool.start_s} ${tool.name}`;
      const bar = this.before.get(key) ?? this.#bar(key);
      const end = tool.end_s ?? this.scale;
      bar.className = tool.end_s === null ? "tool running" : "tool";
      bar.title = `${tool.name}: ${seconds(end - tool.start_s)}`;
      bar.setAttribute("aria-label", `tool ${bar.title}${tool.end_s === null ? ", running" : ""}`);
      bar.replaceChildren(el("span", {}, tool.name));
      place(bar, tool.start_s / this.scale, (end - tool.start_s) / this.scale);
      bar.style.top = `${tool.row * ROW}px`;
      this.bars.set(key, bar);
      this.items.set(key, { tool, lane: this.timeline.lanes.length, start_s: tool.start_s });
      lane.track.append(bar);
    }
  }

  #drawAxis() {
    if (!this.timeline) return;
    const width = Math.max(this.axis.clientWidth, 1);
    const rough = (this.scale * TICK) / width;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) ?? 10 * power;
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const ticks = [];
    for (let number = 0; number * step <= this.scale && number < 5000; number += 1) {
      const isLast = ((this.scale - number * step) / this.scale) * width < 40; // its text would be cut
      const tick = el("span", {}, isLast ? "" : `${(number * step).toFixed(number ? digits : 0)} s`);
      tick.style.left = `${(100 * number * step) / this.scale}%`;
      ticks.push(tick);
    }
    this.axis.replaceChildren(...ticks);
    for (const [label, share] of this.labels) label.hidden = share * width < LEGIBLE;
  }

  // The way along the critical path, and to the selected call from those before it.
  #drawLines() {
    const calls = new Map(this.timeline.calls.map((call) => [call.call_id, call]));
    const path = this.timeline.critical_path.calls.map((id) => calls.get(id)).filter(Boolean);
    const lines = path.slice(1).flatMap((call, number) => this.#line(path[number], call, "critical"));
    const chosen = calls.get(this.selected);
    for (const { call_id: id, is_exact: isExact } of chosen?.parents ?? []) {
      if (calls.has(id)) lines.unshift(...this.#line(calls.get(id), chosen, isExact ? "parent" : "parent guess"));
    }
    this.lines.replaceChildren(...lines);
  }

  #line(from, to, kind) {
    const x = (at) => `${(100 * at) / this.scale}%`;
    const y = (call) => this.tops[call.lane] + call.row * ROW + MIDDLE;
    const end = Math.min(from.end_s ?? this.scale, to.start_s);
    const [x1, x2, y1, y2] = [x(end), x(to.start_s), y(from), y(to)];
    return [svg("line", { class: kind, x1, x2, y1, y2: y1 }), svg("line", { class: kind, x1: x2, x2, y1, y2 })];
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const zoom = { "+": 2, "=": 2, "-": 0.5, 0: 0 }[event.key];
    if (zoom !== undefined) this.zoomBy(zoom);
    else if (!this.#move(event.key)) return;
    event.preventDefault();
  }

  // The tools are a lane below the threads.
  #move(key) {
    const chosen = document.activeElement?.dataset?.key;
    const order = [...this.items].sort(([, one], [, other]) => one.start_s - other.start_s);
    const here = this.items.get(chosen);
    if (here === undefined) return false;
    const inLane = order.filter(([, item]) => item.lane === here.lane);
    const place_ = inLane.findIndex(([each]) => each === chosen);
    const nearest = (step) => {
      const there = order.filter(([, item]) => item.lane === here.lane + step);
      const distance = ([, item]) => Math.abs(item.start_s - here.start_s);
      return there.sort((one, other) => distance(one) - distance(other))[0];
    };
    const found = {
      ArrowRight: () => inLane[place_ + 1], ArrowLeft: () => inLane[place_ - 1], ArrowDown: () => nearest(1),
      ArrowUp: () => nearest(-1), Home: () => order[0], End: () => order.at(-1),
    }[key];
    if (found === undefined) return false;
    const there = found();
    if (there !== undefined) this.select(there[0]);
    return true;
  }
}

export function legend() {
  const entry = (kind, text) => el("li", {}, el("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text);
  return el("ul", { class: "legend" },
    entry("wait", "wait"), entry("service", "service"), entry("rest", "on its way"), entry("critical", "critical path"),
    entry("stop", "stopped"), entry("gap", "between calls"), entry("tool", "tool"));
}

export function describe(element, timeline) {
  const { lanes, calls, calls_left_out: left, tools_left_out: tools } = timeline;
  const parts = [`${plural(calls.length, "call")} in ${plural(lanes.length, "thread")}`];
  if (left) parts.push(`${plural(left, "older call")} not shown`);
  if (tools) parts.push(`${plural(tools, "older run")} of tools not shown`);
  write(element, `${parts.join(", ")}.`);
}

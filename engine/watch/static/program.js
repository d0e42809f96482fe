// A program: its figures, its timeline, and the call that is chosen.

import { count, el, plural, seconds, write } from "./dom.js";
import * as server from "./server.js";
import { Chart, describe, legend } from "./timeline.js";

const PAUSE_MS_A_CALL = 2; // long timelines are asked for less often

export class ProgramView {
  constructor(programId) {
    this.programId = programId;
    this.name = el("h1", {});
    this.state = el("span", { class: "state" });
    this.parent = el("span", {});
    this.figures = el("dl", { class: "figures" });
    this.note = el("p", { class: "note" });
    this.said = el("span", { class: "said", role: "status" });
    this.details = el("section", { class: "details", "aria-live": "polite" });
    this.chart = new Chart((item) => this.#describe(item));
    this.endButton = el("button", { type: "button", hidden: true, onclick: () => this.#askToEnd() }, "End program");
    this.dialog = el("dialog", { "aria-label": "End program" });
    const zoom = (text, label, factor) =>
      el("button", { type: "button", "aria-label": label, title: label, onclick: () => this.chart.zoomBy(factor) }, text);
    this.element = el("div", { class: "view program" },
      el("p", { class: "back" }, el("a", { href: "#" }, "All programs")),
      el("div", { class: "title" }, this.name, this.state),
      el("p", { class: "id" }, programId, this.parent),
      this.figures,
      el("div", { class: "actions" },
        el("button", { type: "button", onclick: () => this.#copy() }, "Copy link"),
        el("button", { type: "button", onclick: () => this.#download() }, "Download Perfetto trace"),
        this.endButton,
        this.said,
        el("span", { class: "zoom", role: "group", "aria-label": "Zoom" },
          zoom("−", "Zoom out", 0.5), zoom("Fit", "Show all", 0), zoom("+", "Zoom in", 2))),
      this.chart.element, legend(), this.note, this.details, this.dialog);
    this.#describe(null);
  }

  load() {
    return server.timeline(this.programId);
  }

  show(timeline) {
    this.timeline = timeline;
    this.isFinal = !timeline.is_open;
    this.pause = PAUSE_MS_A_CALL * timeline.calls.length;
    write(this.name, timeline.name || "program");
    write(this.state, timeline.state);
    this.element.dataset.state = timeline.state;
    write(this.parent, timeline.parent_program_id ? ` inside ${timeline.parent_program_id}` : "");
    const sum = (name) => timeline.calls.reduce((total, call) => total + call[name], 0);
    const path = timeline.critical_path;
    this.#facts(this.figures, {
      Time: seconds(timeline.length_s),
      "Critical path": `${seconds(path.service_s)} of service`,
      Service: seconds(sum("service_s")),
      Wait: seconds(sum("wait_s")),
      Calls: count(timeline.calls.length + timeline.calls_left_out),
      Threads: count(timeline.lanes.length),
      Preemptions: count(sum("preemptions")),
      Tokens: `${count(sum("prompt_tokens"))} in, ${count(sum("output_tokens"))} out`,
    });
    this.chart.show(timeline);
    describe(this.note, timeline);
    if (this.chart.selected !== null) this.#describe(this.chart.items.get(this.chart.selected) ?? null);
    this.endButton.hidden = !timeline.is_open;
    return this.element;
  }

  missing() {
    return el("div", { class: "view" },
      el("p", { class: "back" }, el("a", { href: "#" }, "All programs")),
      el("p", { class: "note empty" }, el("strong", {}, "There is no such program."),
        ` ${this.programId} has not begun, has ended long ago, or belongs to another key.`));
  }

  #facts(list, facts) {
    if (list.children.length !== Object.keys(facts).length) {
      list.replaceChildren(...Object.keys(facts).map((name) => el("div", {}, el("dt", {}, name), el("dd", {}))));
    }
    Object.entries(facts).forEach(([name, value], number) => {
      write(list.children[number].firstChild, name);
      write(list.children[number].lastChild, value);
    });
  }

  #describe(item) {
    if (item === null) {
      this.details.replaceChildren(el("p", { class: "note" }, "Choose a call or a tool to see its figures."));
    } else if (item.tool) this.#describeTool(item.tool);
    else this.#describeCall(item.call);
  }

  #describeTool(tool) {
    const end = tool.end_s ?? this.timeline.length_s;
    const list = el("dl", { class: "figures" });
    this.#facts(list, {
      State: tool.end_s === null ? "running" : "ended",
      Time: `${seconds(tool.start_s)} – ${tool.end_s === null ? "now" : seconds(end)}`,
      Took: seconds(end - tool.start_s),
    });
    this.details.replaceChildren(el("h2", {}, tool.name), list);
  }

  #describeCall(call) {
    const number = this.timeline.calls.indexOf(call) + 1;
    const end = call.end_s ?? this.timeline.length_s;
    const rest = Math.max(0, end - call.start_s - call.wait_s - call.service_s);
    const facts = {
      State: call.state,
      "On the engine": `${seconds(call.start_s)} – ${call.end_s === null ? "now" : seconds(end)}`,
      Wait: seconds(call.wait_s),
      Service: seconds(call.service_s),
      "On its way": seconds(rest),
      Preemptions: count(call.preemptions),
      Prompt: `${plural(call.prompt_tokens, "token")}, ${count(call.cached_tokens)} cached`,
      Answer: plural(call.output_tokens, "token"),
      Replica: [call.replica ?? "–", ...call.earlier_replicas.map((earlier) => `before: ${earlier}`)].join(", "),
      "Critical path": call.is_critical ? "yes" : "no",
    };
    const list = el("dl", { class: "figures" });
    this.#facts(list, facts);
    this.details.replaceChildren(
      el("h2", {}, call.label || `Call ${number}`), list,
      el("p", { class: "id" }, call.call_id, ...this.#parents(call)),
      ...(call.is_placed ? [] : [el("p", { class: "note" }, "Only the sums of its waits are known; they are drawn first.")]));
  }

  #parents(call) {
    const known = new Map(this.timeline.calls.map((each, number) => [each.call_id, each.label || `call ${number + 1}`]));
    const parents = call.parents.filter((parent) => known.has(parent.call_id));
    if (parents.length === 0) return [];
    return [" after ", ...parents.flatMap(({ call_id: id, is_exact: isExact }, number) => [
      number ? ", " : "",
      el("button", { type: "button", class: "link", onclick: () => this.chart.select(id) }, known.get(id)),
      isExact ? "" : " (a guess)",
    ])];
  }

  #askToEnd() {
    const calls = this.timeline.calls.filter((call) => call.end_s === null).length;
    const answer = (text, act) => el("button", { type: "button", onclick: () => { this.dialog.close(); act(); } }, text);
    this.dialog.replaceChildren(
      el("p", {}, `End ${this.timeline.name || "program"} (${this.programId})?`,
        calls ? ` Its ${plural(calls, "call")} in flight will be aborted.` : ""),
      el("div", { class: "actions" }, answer("Leave it", () => {}), answer("End it", () => this.#end())));
    this.dialog.showModal();
  }

  async #end() {
    try {
      await server.end(this.programId);
      write(this.said, "Ended.");
    } catch (error) {
      write(this.said, error instanceof server.Unknown ? "It has ended already." : "It could not be ended.");
    }
  }

  async #copy() {
    try {
      await navigator.clipboard.writeText(location.href);
      write(this.said, "Copied.");
    } catch {
      write(this.said, "Copy the address of this page."); // browsers write to the clipboard on safe pages only
    }
  }

  async #download() {
    try {
      const { name, data } = await server.trace(this.programId);
      const url = URL.createObjectURL(data);
      el("a", { href: url, download: name }).click();
      setTimeout(() => URL.revokeObjectURL(url), 60000);
      write(this.said, "Open it on ui.perfetto.dev.");
    } catch {
      write(this.said, "The trace could not be loaded.");
    }
  }
}

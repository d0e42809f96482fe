// What the address names is shown, and asked for again every second while the page is visible.

import { el, write } from "./dom.js";
import { ProgramView } from "./program.js";
import { ProgramsView } from "./programs.js";
import * as server from "./server.js";

const POLL_MS = 1000;
const SLOWEST_MS = 8000;

const content = document.getElementById("content");
const status = document.getElementById("status");
const engine = document.getElementById("engine");

let view = null;
let timer = null;
let round = 0; // answers to earlier questions are ignored
let failures = 0;

function route() {
  const found = /^#program\/(.+)$/s.exec(location.hash);
  try {
    return found === null ? null : decodeURIComponent(found[1]);
  } catch {
    return found[1];
  }
}

function open() {
  const programId = route();
  view = programId === null ? new ProgramsView() : new ProgramView(programId);
  document.title = programId === null ? "Weft" : `${programId} – Weft`;
  content.replaceChildren(el("p", { class: "note" }, "Loading…"));
  poll();
}

async function poll() {
  clearTimeout(timer);
  const mine = ++round;
  try {
    const found = await view.load();
    if (mine !== round) return;
    failures = 0;
    say("");
    show(view.show(found));
    if (view.engine) write(engine, view.engine);
  } catch (error) {
    if (mine !== round) return;
    if (error instanceof server.KeyNeeded) return askForKey();
    if (error instanceof server.Unknown) return show(view.missing());
    failures += 1;
    say("The server does not answer. Trying again…");
    if (!content.firstElementChild?.classList.contains("view")) {
      show(el("p", { class: "note" }, "Nothing can be shown until the server answers."));
    }
  }
  const pause = Math.min(POLL_MS * 2 ** Math.min(failures, 6), SLOWEST_MS);
  if (!document.hidden && !view.isFinal) timer = setTimeout(poll, Math.max(pause, view.pause ?? 0));
}

function show(element) {
  if (content.firstElementChild !== element) content.replaceChildren(element);
}

function say(text) {
  document.body.classList.toggle("away", text !== "");
  write(status, text);
}

function askForKey() {
  const wasWrong = server.hasKey();
  server.setKey(null);
  say("");
  const input = el("input", {
    id: "key", type: "password", autocomplete: "off", spellcheck: "false", required: true,
    "aria-describedby": "key-note",
  });
  const submit = (event) => {
    event.preventDefault();
    if (!/^[\x21-\x7e]+$/.test(input.value.trim())) return input.select(); // no header carries others
    server.setKey(input.value.trim());
    poll();
  };
  const form = el("form", { class: "key", onsubmit: submit },
    el("label", { for: "key" }, "API key"),
    el("div", { class: "field" }, input, el("button", { class: "main" }, "Show my programs")),
    el("p", { id: "key-note", role: wasWrong ? "alert" : null },
      wasWrong ? "The server does not know this key. " : "",
      "You see the programs of this key. It is kept until the tab is closed, and sent to this server only."));
  show(form);
  input.focus();
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names what is shown
  content.focus();
});
document.addEventListener("keydown", (event) => view?.key?.(event));
window.addEventListener("hashchange", open);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && view !== null && !view.isFinal && content.querySelector("form.key") === null) poll();
});
open();

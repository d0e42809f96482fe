// Asks the server. The key is kept for this tab only, and goes nowhere but into a header for this server.

const STORED = "weft-api-key";
const BASE = new URL("weft/", document.baseURI);
const PATIENCE_MS = 10000;

export class KeyNeeded extends Error {}
export class Unknown extends Error {}

export function setKey(key) {
  if (key) sessionStorage.setItem(STORED, key);
  else sessionStorage.removeItem(STORED);
}

export function hasKey() {
  return sessionStorage.getItem(STORED) !== null;
}

// Whether the server has said, with the page, that it answers nobody without a key.
const needsKey = "needsKey" in document.documentElement.dataset;

async function ask(path, method = "GET") {
  const key = sessionStorage.getItem(STORED);
  if (key === null && needsKey) throw new KeyNeeded();
  const headers = key === null ? {} : { authorization: `Bearer ${key}` };
  const options = { method, headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(PATIENCE_MS) };
  const answer = await fetch(new URL(path, BASE), options);
  if (answer.status === 401) throw new KeyNeeded();
  if (answer.status === 404) throw new Unknown();
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer;
}

function path(programId, what = "") {
  return `programs/${programId.split("/").map(encodeURIComponent).join("/")}${what && `/${what}`}`;
}

export async function state() {
  return (await ask("state")).json();
}

export async function timeline(programId) {
  return (await ask(path(programId, "timeline"))).json();
}

export async function end(programId) {
  await ask(path(programId), "DELETE");
}

export async function trace(programId) {
  const answer = await ask(path(programId, "perfetto"));
  const [, name] = /filename="([^"]+)"/.exec(answer.headers.get("content-disposition") ?? "") ?? [];
  return { name: name ?? "trace.json", data: await answer.blob() };
}

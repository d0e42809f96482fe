// Elements and texts. Text is only ever set as text, so a program's name cannot become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(made, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

// Sets a text where it changed, which keeps selections and what a screen reader has said.
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function place(element, left, width) {
  element.style.left = `${100 * left}%`;
  element.style.width = `${100 * width}%`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0) return `−${seconds(-value)}`;
  if (value >= 5400) {
    const minutes = Math.round(value / 60);
    return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }
  if (value >= 100) return `${Math.floor(Math.round(value) / 60)} min ${Math.round(value) % 60} s`;
  if (value >= 10) return `${value.toFixed(1)} s`;
  if (value >= 0.1) return `${value.toFixed(2)} s`;
  return value === 0 ? "0 s" : `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
}

export function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en");
}

export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

// A number in at most five letters: "9999", "12.3k", "1.2M".
export function brief(value) {
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= Math.max(unit, 10000)) return `${(value / unit).toFixed(value < 100 * unit ? 1 : 0)}${name}`;
  }
  return String(value);
}

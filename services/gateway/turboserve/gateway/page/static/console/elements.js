// Elements, numbers and times of the console. Lists keep their rows, so that a refresh disturbs no reader.

import { counted } from "../words.js";

export function element(name, text = "", more = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  Object.assign(made, more);
  return made;
}

export function svg(name, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

/**
 * Make the children of `list` those of `items`, in their order. A row stays as long as its item: open details,
 * the keyboard's focus and a selection stay, too. `make(item)` makes a row; `update(row, item)` changes one.
 */
export function keyed(list, items, keyOf, make, update = () => {}) {
  // Two items may have the same key, and each has its row.
  const rows = new Map();
  for (const row of list.children) rows.set(row.dataset.key, [...(rows.get(row.dataset.key) ?? []), row]);
  let next = list.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let row = rows.get(key)?.shift();
    if (!row) {
      row = make(item);
      row.dataset.key = key;
    }
    update(row, item);
    if (row === next) next = next.nextElementSibling;
    else list.insertBefore(row, next);
  }
  for (const row of [...rows.values()].flat()) row.remove();
}

/** The line that says what a drawing shows. It is read aloud only while the drawing has the keyboard's focus. */
export function readoutOf(drawing) {
  const line = element("p", "", { className: "readout" });
  drawing.addEventListener("focus", () => line.setAttribute("aria-live", "polite"));
  drawing.addEventListener("blur", () => line.removeAttribute("aria-live"));
  return line;
}

/** Set a text only where it differs: a screen reader would read it again, and a selection would be lost. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A row of a table whose cells get their texts. */
export function tableRow(count) {
  const row = element("tr");
  for (let cell = 0; cell < count; cell += 1) row.append(element(cell ? "td" : "th"));
  row.firstElementChild.setAttribute("scope", "row");
  return row;
}

export function setCells(row, texts) {
  texts.forEach((text, index) => setText(row.children[index], text));
}

/** The numbers behind a decision, closed at first. */
export function numbersOf(numbers) {
  const entries = Object.entries(numbers);
  if (!entries.length) return null;
  const box = element("details", "", { className: "numbers" });
  const list = element("dl");
  for (const [name, value] of entries) {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", shortNumber(value)));
    list.append(pair);
  }
  box.append(element("summary", counted(entries.length, "number")), list);
  return box;
}

// Not `hour12: false`, which calls midnight 24:00 in some languages.
const TIME = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };

/** The local time of day, with the date unless it is today's. */
export function clock(time) {
  const at = new Date(time);
  const now = new Date();
  const text = at.toLocaleTimeString([], TIME);
  if (at.toDateString() === now.toDateString()) return text;
  const year = at.getFullYear() === now.getFullYear() ? {} : { year: "numeric" };
  return `${at.toLocaleDateString([], { day: "numeric", month: "short", ...year })} ${text}`;
}

/** An element with a time, which `setTime` fills: what was today's is yesterday's after midnight. */
export function setTime(node, time) {
  setText(node, clock(time));
  // In UTC, as services log it.
  const utc = new Date(time).toISOString();
  if (node.dateTime !== utc) node.dateTime = node.title = utc;
}

export const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

export function shortNumber(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return String(value);
  return Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}

/** Time that workers ran, on whatever device they have. */
export function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(0)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Show the explanation of an empty view. */
export function showEmpty(node, isEmpty, text) {
  node.hidden = !isEmpty;
  if (isEmpty) setText(node, text);
}

export const period = ({ since, until }) => `from ${clock(since)} to ${clock(until)}`;

// Workers as rows, their sessions as lanes in them, chunks as bars, and migrations as arrows between lanes.

import { tickText, timeTicks } from "./axis.js";
import { clock, element, readoutOf, setText, svg } from "./elements.js";
import { PADDING } from "./plot.js";
import { counted } from "../words.js";

const LANE = 14;
const BAR = 10;
const GAP = 16;
const AXIS = 20;
const LEFT = 8;
/** Classes of bars, the worst first. */
export const CLASSES = [
  ["late", "late: the viewer had nothing left"],
  ["lowered", "below the best configuration"],
  ["urgent", "urgent"],
  ["normal", "normal"],
  ["relaxed", "relaxed"],
  ["unknown", "tier unknown"],
];

export function classOf(bar) {
  if (bar.late) return "late";
  if (bar.lowered) return "lowered";
  return bar.tier ?? "unknown";
}

export class Lanes {
  constructor(box) {
    this.#svg = svg("svg", { role: "img", tabindex: "0", class: "lanes-area" });
    this.#readout = readoutOf(this.#svg);
    const legend = element("ul", "", { className: "legend" });
    for (const [name, label] of CLASSES) {
      const line = element("li", label);
      const sample = svg("svg", { width: 14, height: BAR, "aria-hidden": "true" });
      sample.append(svg("path", { d: shape(name, 1, 13, 0), class: `chunk ${name}` }));
      line.prepend(sample);
      legend.append(line);
    }
    box.replaceChildren(this.#svg, this.#readout, legend);
    this.#svg.addEventListener("pointermove", (event) => this.#point(event));
    this.#svg.addEventListener("keydown", (event) => this.#step(event));
    new ResizeObserver(() => this.#range && this.#paint()).observe(box);
  }

  #svg;
  #readout;
  #workers = [];
  #migrations = [];
  #range = null;
  /** All bars with their places, for the pointer and the arrow keys. */
  #bars = [];
  #chosen = -1;

  /** Times of `workers` and `migrations` are as the API has them. */
  draw(workers, migrations, range) {
    this.#workers = workers;
    this.#migrations = migrations;
    this.#range = range;
    this.#paint();
  }

  get #width() {
    return Math.max(this.#svg.parentElement.clientWidth - PADDING, 280);
  }

  #x(at) {
    const { since, until } = this.#range;
    const share = Math.min(Math.max((at - since) / (until - since), 0), 1);
    return LEFT + share * (this.#width - 2 * LEFT);
  }

  #paint() {
    const before = this.#bars[this.#chosen];
    const { since, until } = this.#range;
    const width = this.#width;
    const parts = [];
    const rows = new Map();
    this.#bars = [];
    let y = AXIS;
    for (const worker of this.#workers) {
      const group = svg("g", { "data-worker": worker.worker });
      group.append(svg("text", { x: LEFT, y: y + 11, class: "row-name" }, nameOf(worker)));
      y += GAP;
      rows.set(worker.worker, { top: y, sessions: new Map() });
      for (const lane of worker.sessions) {
        rows.get(worker.worker).sessions.set(lane.session, y + LANE / 2);
        group.append(this.#lane(worker, lane, y));
        y += LANE;
      }
      if (!worker.sessions.length) y += LANE;
      group.append(svg("path", { d: `M0 ${y + 3}H${width}`, class: "grid" }));
      parts.push(group);
      y += 8;
    }
    for (const at of timeTicks(since, until, width > 500 ? 8 : 4)) {
      const x = this.#x(at).toFixed(1);
      parts.unshift(svg("path", { d: `M${x} ${AXIS - 4}V${y}`, class: "grid" }));
      parts.push(svg("text", { x, y: 12, class: "tick middle" }, tickText(at, until - since)));
    }
    for (const one of this.#migrations) parts.push(...this.#arrow(one, rows));
    this.#chosen = before ? this.#bars.findIndex((bar) => bar.id === before.id) : -1;
    if (this.#chosen >= 0) parts.push(this.#mark());
    this.#svg.setAttribute("width", width);
    this.#svg.setAttribute("height", y + 2);
    this.#svg.setAttribute("viewBox", `0 0 ${width} ${y + 2}`);
    this.#svg.replaceChildren(...parts);
    const sessions = this.#workers.reduce((sum, worker) => sum + worker.sessions.length, 0);
    const chunks = this.#bars.reduce((sum, { bar }) => sum + bar.chunks, 0);
    const text = `${counted(this.#workers.length, "worker")}, ${counted(sessions, "session")}, ${counted(chunks, "chunk")}, ${counted(this.#migrations.length, "migration")}, ${clock(since)} to ${clock(until)}.`;
    this.#svg.setAttribute("aria-label", `Lanes of sessions by worker: ${text} Arrow keys read chunks.`);
    setText(this.#readout, this.#chosen >= 0 ? words(this.#bars[this.#chosen]) : text);
  }

  #lane(worker, lane, y) {
    const group = svg("g", { "data-session": lane.session });
    const drawn = new Map();
    for (const bar of lane.bars) {
      const kind = classOf(bar);
      const from = this.#x(Date.parse(bar.began_at));
      const to = Math.max(this.#x(Date.parse(bar.ended_at)), from + 1.5);
      drawn.set(kind, `${drawn.get(kind) ?? ""}${shape(kind, from, to, y + (LANE - BAR) / 2)}`);
      const id = `${worker.worker} ${lane.session} ${bar.first}`;
      this.#bars.push({ id, from, to, y, bar, lane, worker });
    }
    for (const [kind, d] of drawn) group.append(svg("path", { d, class: `chunk ${kind}` }));
    return group;
  }

  #arrow(one, rows) {
    const source = rows.get(one.source);
    const target = rows.get(one.target);
    if (!target) return [];
    const x = this.#x(Date.parse(one.ended_at ?? one.began_at)).toFixed(1);
    const to = target.sessions.get(one.session) ?? target.top;
    const from = source?.sessions.get(one.session) ?? source?.top ?? to - GAP;
    const tip = to > from ? -5 : 5;
    const d = `M${x} ${from}V${to}m-4 ${tip}l4 ${-tip}l4 ${tip}`;
    const arrow = svg("path", { d, class: `arrow ${one.outcome}`, "data-migration": `${one.session} ${one.migration}` });
    arrow.append(svg("title", {}, `${one.session}: ${one.source ?? "?"} → ${one.target}, ${one.outcome}`));
    return [arrow];
  }

  #mark() {
    const { from, to, y } = this.#bars[this.#chosen];
    return svg("rect", { x: from - 1, y: y + 1, width: to - from + 2, height: LANE - 2, class: "chosen" });
  }

  /** Read another bar. Nothing else is drawn again: there may be thousands of bars. */
  #choose(place) {
    this.#chosen = place;
    this.#svg.querySelector(".chosen")?.remove();
    if (place < 0) return;
    this.#svg.append(this.#mark());
    setText(this.#readout, words(this.#bars[place]));
  }

  #point(event) {
    const box = this.#svg.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    const found = this.#bars.findIndex((one) => y >= one.y && y < one.y + LANE && x >= one.from - 1 && x <= one.to + 1);
    if (found !== this.#chosen) this.#choose(found);
  }

  #step(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !this.#bars.length) return;
    event.preventDefault();
    const last = this.#bars.length - 1;
    const now = this.#chosen < 0 ? last + 1 : this.#chosen;
    this.#choose(Math.min(Math.max(now + moves[event.key], 0), last));
  }
}

/** Late bars are whole, and those of a relaxed session are low: the color is not the only sign. */
function shape(kind, from, to, y) {
  const height = { late: BAR, lowered: BAR * 0.8, urgent: BAR * 0.8, normal: BAR * 0.6 }[kind] ?? BAR * 0.4;
  return `M${from.toFixed(1)} ${y + BAR}v${-height}H${(to - 0.5).toFixed(1)}v${height}z`;
}

function nameOf(worker) {
  const name = worker.member ? `${worker.member} (${worker.worker})` : worker.worker;
  return worker.phase === "ready" ? name : `${name}, ${worker.phase}`;
}

function words({ bar, lane, worker }) {
  const chunks = bar.chunks === 1 ? `chunk ${bar.first}` : `${bar.chunks} chunks from ${bar.first}`;
  const more = [bar.tier, bar.late ? `${bar.late} late` : "", bar.lowered ? `${bar.lowered} below the best configuration` : ""];
  const tenant = lane.tenant ? ` of ${lane.tenant}` : "";
  return `${clock(bar.ended_at)}: ${lane.session}${tenant} on ${worker.worker}, ${[chunks, ...more].filter(Boolean).join(", ")}`;
}

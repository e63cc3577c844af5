// A plot of values over time. Arrow keys and the pointer read single points.

import { roundUp, tickText, timeTicks } from "./axis.js";
import { clock, element, readoutOf, setText, shortNumber, svg } from "./elements.js";

const HEIGHT = 170;
/** Of the box around a plot, left and right together, pixels. */
export const PADDING = 28;
const EDGE = { left: 44, right: 8, top: 8, bottom: 22 };

export class Plot {
  /**
   * @param {HTMLElement} figure Where the plot goes.
   * @param {{title: string, unit?: string, series: Array<{key: string, label: string}>}} options `unit`: of the
   *   values, for the readout. A point has a value, null for unknown, under the key of each series.
   */
  constructor(figure, { title, unit = "", series }) {
    this.#series = series;
    this.#unit = unit;
    this.#title = title;
    this.#svg = svg("svg", { role: "img", tabindex: "0", height: HEIGHT, class: "plot-area" });
    this.#svg.setAttribute("aria-label", `${title}. No data yet.`);
    const legend = element("ul", "", { className: "legend" });
    series.forEach(({ label }, index) => {
      const line = element("li", label);
      const sample = svg("svg", { width: 22, height: 8, "aria-hidden": "true" });
      sample.append(svg("path", { d: "M0 4H22", class: `line series-${index}` }));
      line.prepend(sample);
      legend.append(line);
    });
    this.#readout = readoutOf(this.#svg);
    figure.classList.add("plot");
    figure.replaceChildren(element("figcaption", title), this.#svg, legend, this.#readout);
    this.#svg.addEventListener("pointermove", (event) => this.#point(event));
    this.#svg.addEventListener("keydown", (event) => this.#step(event));
    new ResizeObserver(() => this.#range && this.#paint()).observe(figure);
  }

  #series;
  #unit;
  #title;
  #svg;
  #readout;
  #points = [];
  #range = null;
  #stepMs = 0;
  /** Time of the point that is read, which stays while new points arrive. */
  #cursor = null;

  /** `points`: with `at` in milliseconds, oldest first. `stepS`: their distance; a longer one is a gap. */
  draw(points, range, stepS) {
    this.#points = points;
    this.#range = range;
    this.#stepMs = stepS * 1_000;
    this.#svg.dataset.points = points.length;
    this.#paint();
  }

  get #width() {
    return Math.max(this.#svg.parentElement.clientWidth - PADDING, 240);
  }

  #x(at) {
    const { since, until } = this.#range;
    return EDGE.left + ((at - since) / (until - since)) * (this.#width - EDGE.left - EDGE.right);
  }

  #paint() {
    const { since, until } = this.#range;
    const width = this.#width;
    const found = this.#points.flatMap((point) => this.#series.map(({ key }) => point[key] ?? 0));
    const top = roundUp(Math.max(0, ...found));
    const y = (value) => HEIGHT - EDGE.bottom - (value / top) * (HEIGHT - EDGE.top - EDGE.bottom);
    const parts = [];
    // There is no half of a worker.
    const isWhole = found.every(Number.isInteger) && top % 2 === 1;
    for (const share of isWhole ? [0, 1] : [0, 0.5, 1]) {
      const at = y(top * share).toFixed(1);
      parts.push(svg("path", { d: `M${EDGE.left} ${at}H${width - EDGE.right}`, class: "grid" }));
      parts.push(svg("text", { x: EDGE.left - 6, y: Number(at) + 4, class: "tick end" }, shortNumber(top * share)));
    }
    for (const at of timeTicks(since, until, width > 500 ? 7 : 4)) {
      const text = tickText(at, until - since);
      parts.push(svg("text", { x: this.#x(at).toFixed(1), y: HEIGHT - 6, class: "tick middle" }, text));
    }
    this.#series.forEach(({ key }, index) => {
      parts.push(svg("path", { d: this.#line(key, y), class: `line series-${index}` }));
    });
    this.#svg.setAttribute("width", width);
    this.#svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const point = this.#read();
    if (point) parts.push(svg("path", { d: `M${this.#x(point.at).toFixed(1)} ${EDGE.top}V${HEIGHT - EDGE.bottom}`, class: "cursor" }));
    this.#svg.replaceChildren(...parts);
    const newest = this.#points.at(-1);
    const ends = `${clock(since)} to ${clock(until)}`;
    const label = newest ? `Newest, ${this.#words(newest)}.` : "No data.";
    this.#svg.setAttribute("aria-label", `${this.#title}, ${ends}. ${label} Arrow keys read points.`);
    setText(this.#readout, point ? this.#words(point) : newest ? this.#words(newest) : "No data in this time.");
  }

  #line(key, y) {
    const drawn = [];
    let before = null;
    for (const point of this.#points) {
      const value = point[key];
      if (value === null || value === undefined) {
        before = null;
        continue;
      }
      const x = this.#x(point.at).toFixed(1);
      const isGap = before === null || point.at - before > 1.5 * this.#stepMs;
      drawn.push(`${isGap ? "M" : "L"}${x} ${y(value).toFixed(1)}`);
      // A single point between gaps is a short line.
      if (isGap) drawn.push("h1");
      before = point.at;
    }
    return drawn.join("");
  }

  #words(point) {
    const values = this.#series.map(({ key, label }) => `${label} ${shortNumber(point[key])}`);
    const isOne = point[this.#series.at(-1).key] === 1;
    const unit = isOne ? this.#unit.replace(/^(\w+)s$/, "$1") : this.#unit;
    return `${clock(point.at)}: ${values.join(", ")}${unit ? ` ${unit}` : ""}`;
  }

  #read() {
    if (this.#cursor === null || !this.#points.length) return null;
    const distance = (point) => Math.abs(point.at - this.#cursor);
    return this.#points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
  }

  #point(event) {
    if (!this.#range) return;
    const { since, until } = this.#range;
    const box = this.#svg.getBoundingClientRect();
    const share = (event.clientX - box.left - EDGE.left) / (box.width - EDGE.left - EDGE.right);
    this.#cursor = since + share * (until - since);
    this.#paint();
  }

  #step(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !this.#points.length) return;
    event.preventDefault();
    const last = this.#points.length - 1;
    const now = this.#cursor === null ? last + 1 : this.#points.indexOf(this.#read());
    const place = Math.min(Math.max(now + moves[event.key], 0), last);
    this.#cursor = this.#points[place].at;
    this.#paint();
  }
}

/** Points of an answer of the API, with times in milliseconds. */
export function pointsOf(answer) {
  return answer.points.map((point) => ({ ...point, at: Date.parse(point.at) }));
}

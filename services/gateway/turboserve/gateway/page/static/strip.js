// The strip: chunks run to the left through a gate that stands where playback is. The color is that of the worker.

const PX_PER_S = 46;
const KEEP_S = 40;
const TOP = 26;
const HEIGHT = 34;
const LIGHT = ["#0b7a66", "#8a5bb5", "#b4631a", "#2f6fb3", "#a83c6b", "#66751b"];
const DARK = ["#55c7a8", "#b692e0", "#e79a4f", "#74aee8", "#ea86ad", "#b3c258"];

export class Strip {
  constructor(canvas, list) {
    this.#canvas = canvas;
    this.#list = list;
    this.#dark = matchMedia("(prefers-color-scheme: dark)");
    this.#calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.#dark.addEventListener("change", () => this.#legend());
    new ResizeObserver(() => this.draw(this.#playhead, true)).observe(canvas);
  }

  #canvas;
  #list;
  #dark;
  #calm;
  #chunks = [];
  #marks = [];
  #workers = [];
  #playhead = 0;
  #drawn = "";

  reset() {
    this.#chunks = [];
    this.#marks = [];
    this.#workers = [];
    this.#legend();
    this.draw(0, true);
  }

  chunk({ index, start_s, duration_s, worker }) {
    if (!this.#workers.includes(worker)) {
      this.#workers.push(worker);
      this.#legend();
    }
    this.#chunks.push({ index, start: start_s, end: start_s + duration_s, worker });
    while (this.#chunks.length && this.#chunks[0].end < this.#playhead - KEEP_S) this.#chunks.shift();
  }

  mark(index, text) {
    this.#marks = [...this.#marks.filter((mark) => mark.index !== index), { index, text }].slice(-12);
  }

  draw(playhead, force = false) {
    this.#playhead = playhead;
    const shown = this.#calm.matches ? Math.floor(playhead) : playhead;
    const state = `${shown.toFixed(3)} ${this.#chunks.at(-1)?.index} ${this.#marks.length}`;
    if (state === this.#drawn && !force) return;
    this.#drawn = state;
    const canvas = this.#canvas;
    const ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const pen = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    const color = (name) => style.getPropertyValue(name).trim();
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const gate = Math.round(width * 0.62);
    const x = (time) => gate + (time - shown) * PX_PER_S;
    pen.font = `10px ${color("--mono")}`;
    for (const chunk of this.#chunks) {
      const left = x(chunk.start);
      const right = x(chunk.end);
      if (right < 0 || left > width) continue;
      pen.globalAlpha = chunk.end <= shown ? 0.5 : 1;
      pen.fillStyle = this.#color(chunk.worker);
      pen.beginPath();
      pen.roundRect(left + 1, TOP, right - left - 2, HEIGHT, 3);
      pen.fill();
      pen.globalAlpha = 1;
      pen.fillStyle = color("--panel");
      if (right - left > 24) pen.fillText(String(chunk.index), left + 6, TOP + HEIGHT - 8);
    }
    this.#drawMarks(pen, x, width, color);
    pen.fillStyle = color("--gate");
    pen.fillRect(gate - 1, TOP - 6, 2, HEIGHT + 12);
  }

  #drawMarks(pen, x, width, color) {
    pen.font = `12px ${color("--text")}`;
    let free = width;
    for (const mark of [...this.#marks].reverse()) {
      const chunk = this.#chunks.find(({ index }) => index === mark.index);
      if (!chunk) continue;
      const left = x(chunk.start);
      if (left > width || left < -300) continue;
      pen.fillStyle = color("--ink");
      pen.fillRect(left, 6, 1.5, TOP + HEIGHT - 6);
      const room = free - left - 14;
      if (room > 30) pen.fillText(fitted(pen, mark.text, room), left + 6, 17);
      free = left;
    }
  }

  #color(worker) {
    const colors = this.#dark.matches ? DARK : LIGHT;
    return colors[this.#workers.indexOf(worker) % colors.length];
  }

  #legend() {
    this.#list.replaceChildren(
      ...this.#workers.slice(-6).map((worker) => {
        const item = document.createElement("li");
        const swatch = document.createElementNS("http://www.w3.org/2000/svg", "svg");
        const square = document.createElementNS("http://www.w3.org/2000/svg", "rect");
        square.setAttribute("width", "100%");
        square.setAttribute("height", "100%");
        square.setAttribute("rx", "2");
        square.setAttribute("fill", this.#color(worker));
        swatch.append(square);
        item.append(swatch, worker.length > 18 ? `${worker.slice(0, 4)}…${worker.slice(-6)}` : worker);
        item.title = worker;
        return item;
      }),
    );
  }
}

function fitted(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let length = text.length;
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > room) length -= 1;
  return `${text.slice(0, length)}…`;
}

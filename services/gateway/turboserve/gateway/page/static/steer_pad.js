// The pad that steers a figure: buttons, arrow keys and WASD. It shows only if the session's model takes `steer`.

const STEER = "steer";
/** Value → its arrow, its name, and its place in the grid: row, column. */
const PLACES = {
  "up-left": ["↖", "Up and left", 1, 1],
  up: ["↑", "Up", 1, 2],
  "up-right": ["↗", "Up and right", 1, 3],
  left: ["←", "Left", 2, 1],
  stop: ["■", "Stop", 2, 2],
  right: ["→", "Right", 2, 3],
  "down-left": ["↙", "Down and left", 3, 1],
  down: ["↓", "Down", 3, 2],
  "down-right": ["↘", "Down and right", 3, 3],
};
const KEYS = {
  ArrowUp: "up", w: "up", ArrowDown: "down", s: "down", ArrowLeft: "left", a: "left", ArrowRight: "right", d: "right",
};
const STOP_KEY = "x";
/** Where keys have another meaning. */
const TAKES_KEYS = "input, textarea, select, dialog, [contenteditable], [tabindex='0']";

export class SteerPad {
  // send(value): set the control; returns a promise. onRefused(problem).
  constructor(section, send, onRefused) {
    this.#section = section;
    this.#send = send;
    this.#onRefused = onRefused;
    addEventListener("keydown", (pressed) => this.#pressed(pressed));
    addEventListener("keyup", ({ key }) => this.#held.delete(KEYS[key] ?? KEYS[key.toLowerCase()]));
    addEventListener("blur", () => this.#held.clear());
    section.querySelector(".reset").addEventListener("click", () => this.steer(null));
  }

  #section;
  #send;
  #onRefused;
  #model = null;
  #values = [];
  #buttons = new Map();
  #held = new Set();
  #wanted;
  #isSending = false;

  // What `/v1/models` describes.
  describe(model) {
    this.#model = model.id;
    this.#values = model.controls?.find(({ name }) => name === STEER)?.schema.enum ?? [];
    const known = Object.keys(PLACES).filter((value) => this.#values.includes(value));
    this.#buttons = new Map(known.map((value) => [value, this.#button(value)]));
    this.#section.querySelector(".pad").replaceChildren(...this.#buttons.values());
  }

  // The session on the page, as `hello` describes it; null: none, or it has ended.
  show(session) {
    this.#section.hidden = !session || session.model !== this.#model || this.#buttons.size === 0;
    this.#held.clear();
    if (session) this.learn(session.controls?.[STEER] ?? null);
  }

  // The newest accepted value; null: the prompt's own motion.
  learn(value) {
    for (const [each, button] of this.#buttons) button.setAttribute("aria-pressed", String(each === value));
    this.#section.querySelector(".reset").hidden = value === null;
  }

  // The value is on screen. `seconds`: since it was sent; null: another page sent it.
  onScreen(value, seconds) {
    const name = value === null ? "As the prompt says" : (PLACES[value]?.[1] ?? value);
    const after = seconds === null ? "" : `, ${seconds.toFixed(1)} s after it was sent`;
    this.#section.querySelector("[role=status]").textContent = `On screen: ${name}${after}.`;
  }

  // Of values that are wanted while one is being sent, only the last is sent.
  async steer(value) {
    this.#wanted = value;
    if (this.#isSending) return;
    this.#isSending = true;
    try {
      while (this.#wanted !== undefined) {
        const next = this.#wanted;
        this.#wanted = undefined;
        await this.#send(next);
      }
    } catch (problem) {
      this.#wanted = undefined;
      this.#onRefused(problem);
    } finally {
      this.#isSending = false;
    }
  }

  #button(value) {
    const [arrow, name, row, column] = PLACES[value];
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = arrow;
    button.setAttribute("aria-label", name);
    button.setAttribute("aria-pressed", "false");
    button.style.gridArea = `${row} / ${column}`;
    button.addEventListener("pointerdown", () => this.steer(value));
    // A keyboard or a screen reader clicks without a pointer.
    button.addEventListener("click", ({ detail }) => detail === 0 && this.steer(value));
    return button;
  }

  #pressed(pressed) {
    if (this.#section.hidden || pressed.ctrlKey || pressed.metaKey || pressed.altKey) return;
    if (pressed.target.closest?.(TAKES_KEYS)) return;
    const direction = KEYS[pressed.key] ?? KEYS[pressed.key.toLowerCase()];
    const value = pressed.key.toLowerCase() === STOP_KEY ? "stop" : direction;
    if (!value) return;
    pressed.preventDefault();
    if (pressed.repeat) return;
    if (direction) this.#held.add(direction);
    const steered = this.#diagonal() ?? value;
    if (this.#values.includes(steered)) this.steer(steered);
  }

  // Two held keys are a diagonal, where the model takes one.
  #diagonal() {
    const vertical = ["up", "down"].filter((each) => this.#held.has(each));
    const horizontal = ["left", "right"].filter((each) => this.#held.has(each));
    if (vertical.length !== 1 || horizontal.length !== 1) return null;
    const value = `${vertical[0]}-${horizontal[0]}`;
    return this.#values.includes(value) ? value : null;
  }
}

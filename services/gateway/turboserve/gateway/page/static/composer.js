// Below the prompt: chips with what the model understands, and warnings about the rest.

import { PromptReader } from "./prompts.js";

export class Composer {
  constructor(field, chips, hint) {
    this.#field = field;
    this.#chips = chips;
    this.#hint = hint;
    field.addEventListener("input", () => this.show());
  }

  #field;
  #chips;
  #hint;
  #reader = null;
  #confirmed = "";

  // `model`: an entry of /v1/models. Null, or one that reads any text: there are no chips.
  describe(model) {
    this.#reader = model?.prompt_guide ? new PromptReader(model) : null;
    this.#chips.hidden = !this.#reader;
    this.#chips.replaceChildren(...(this.#reader?.guide.kinds ?? []).map((kind) => this.#row(kind)));
    this.show();
  }

  // Why the model shows nothing for this prompt; empty if it does, or if it is not known.
  whyNothing(text) {
    if (!this.#reader?.read(text).showsNothing) return "";
    return `Nothing to draw. ${this.#reader.warnings(text).join(" ")}`;
  }

  // Whether the prompt may be sent. One that shows nothing is sent on the second request.
  confirm(text) {
    const sendable = !text || this.#confirmed === text || !this.whyNothing(text);
    this.#confirmed = text;
    this.show();
    return sendable;
  }

  show() {
    const text = this.#field.value;
    const warnings = this.#reader?.warnings(text) ?? [];
    if (warnings.length && this.#confirmed && this.#confirmed === text.trim() && this.whyNothing(text)) {
      warnings.push("Send it again to see it nevertheless.");
    }
    this.#hint.hidden = warnings.length === 0;
    this.#hint.textContent = warnings.join(" ");
    const found = this.#reader?.read(text).found ?? [];
    for (const chip of this.#chips.querySelectorAll("button")) {
      const { kind, choice } = chip.dataset;
      const isChosen = found.some((each) => each.kind === kind && each.choice === choice);
      chip.setAttribute("aria-pressed", String(isChosen));
    }
  }

  #row({ kind, choices }) {
    const row = document.createElement("div");
    row.className = "kind";
    row.setAttribute("role", "group");
    row.setAttribute("aria-label", kind);
    const name = document.createElement("span");
    name.className = "kind-name";
    name.textContent = kind;
    const list = document.createElement("div");
    list.className = "kind-chips";
    list.append(...choices.map(({ text }) => this.#chip(kind, text)));
    row.append(name, list);
    return row;
  }

  #chip(kind, choice) {
    const chip = document.createElement("button");
    chip.type = "button";
    chip.className = "chip";
    chip.textContent = choice.replace(/^(moving|standing|a|an|the) /, "");
    chip.setAttribute("aria-label", choice);
    Object.assign(chip.dataset, { kind, choice });
    chip.addEventListener("click", () => {
      this.#field.value = this.#reader.withChoice(this.#field.value, kind, choice);
      this.show();
    });
    return chip;
  }
}

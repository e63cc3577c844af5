// The choice of the time: live, or any past hour.

import { rangeOf } from "./route.js";

const at = (id) => document.getElementById(id);

export class TimeForm {
  /** `change(part)`: called with the members of the route that the operator has changed. */
  constructor(change) {
    at("span").addEventListener("change", () => change({ span: Number(at("span").value) }));
    at("to").addEventListener("change", () => {
      const to = Date.parse(at("to").value);
      if (Number.isFinite(to)) change({ to: Math.min(to, Date.now()) });
    });
    at("live").addEventListener("click", () => change({ to: null }));
    at("earlier").addEventListener("click", () => change({ to: this.#range.until - this.#range.spanS * 1_000 }));
    at("later").addEventListener("click", () => {
      if (this.#range.live) return;
      const to = this.#range.until + this.#range.spanS * 1_000;
      change({ to: to >= Date.now() ? null : to });
    });
    at("time-form").addEventListener("submit", (event) => event.preventDefault());
  }

  #range = null;

  show(route) {
    this.#range = rangeOf(route);
    const value = String(this.#range.spanS);
    if (![...at("span").options].some((option) => option.value === value)) {
      at("span").append(new Option(`${value} s`, value));
    }
    at("span").value = value;
    at("live").setAttribute("aria-pressed", String(this.#range.live));
    // Not `disabled`: the keyboard's focus would be lost.
    at("later").setAttribute("aria-disabled", String(this.#range.live));
    // While live, the field says nothing: a time that moves could not be edited.
    at("to").value = this.#range.live ? "" : localText(this.#range.until);
  }
}

/** The time as a field of the type `datetime-local` has it. */
function localText(time) {
  const shifted = new Date(time - new Date(time).getTimezoneOffset() * 60_000);
  return shifted.toISOString().slice(0, 19);
}

// The form for an API key. A key counts once the server has accepted it; other tabs of the browser share it.

import { keyOfOtherTab, rememberKey } from "./memory.js";

export class KeyForm {
  constructor(api, form, onAccepted) {
    this.#api = api;
    this.#form = form;
    this.#onAccepted = onAccepted;
    form.addEventListener("submit", (submitted) => {
      submitted.preventDefault();
      this.#submit(this.#field.value.trim());
    });
  }

  #api;
  #form;
  #onAccepted;
  #askedTabs = false;
  #isChecking = false;

  get isOpen() {
    return !this.#form.hidden;
  }

  // The server wants a key, or refused the one that was sent. Nothing is asked again with a refused key: the
  // server limits wrong keys.
  async ask(problem) {
    if (!this.#concerns(problem)) return;
    if (this.#api.key) {
      this.#api.key = "";
      rememberKey("");
    } else if (!this.#askedTabs) {
      this.#askedTabs = true;
      const key = await keyOfOtherTab();
      if (!this.#concerns(problem)) return;
      if (key) return this.#submit(key);
    }
    this.#open(problem.message);
  }

  // A late answer to a request with another key says nothing about the present one.
  #concerns(problem) {
    return !this.isOpen && !this.#isChecking && problem.key === this.#api.key;
  }

  async #submit(key) {
    if (!key) return this.#open("Enter a key.");
    this.#api.key = key;
    this.#isChecking = true;
    try {
      await this.#api.models();
    } catch (problem) {
      this.#api.key = "";
      return this.#open(problem.message);
    } finally {
      this.#isChecking = false;
    }
    rememberKey(key);
    this.#field.value = "";
    this.#form.hidden = true;
    this.#onAccepted();
  }

  #open(text) {
    const wasOpen = this.isOpen;
    this.#form.hidden = false;
    this.#form.querySelector("[role=alert]").textContent = text;
    if (!wasOpen) this.#field.focus();
  }

  get #field() {
    return this.#form.querySelector("input");
  }
}

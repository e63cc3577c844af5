// The form for an API key. A key counts once the server has accepted it; other tabs of the browser share it.

import { keyOfOtherTab, onKeyOfOtherTab, rememberKey } from "./memory.js";
import { inWords } from "./words.js";

export class KeyForm {
  constructor(client, form, onAccepted) {
    this.#client = client;
    this.#form = form;
    this.#onAccepted = onAccepted;
    form.addEventListener("submit", (submitted) => {
      submitted.preventDefault();
      this.#submit(this.#field.value.trim());
    });
    onKeyOfOtherTab((key) => {
      if (this.isOpen && !this.#isChecking) this.#submit(key, this.#message.textContent);
    });
  }

  #client;
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
    // The user tried something else meanwhile.
    if (this.isOpen) return this.#field.focus();
    if (!this.#concerns(problem)) return;
    if (this.#client.key) {
      this.#client.key = "";
      rememberKey("");
    } else if (!this.#askedTabs) {
      this.#askedTabs = true;
      const key = await keyOfOtherTab();
      if (!this.#concerns(problem)) return;
      if (key) return this.#submit(key, inWords(problem));
    }
    this.#open(inWords(problem));
  }

  // A late answer to a request with another key proves nothing about the present one.
  #concerns(problem) {
    return !this.isOpen && !this.#isChecking && problem.wasSentWith(this.#client.key);
  }

  // `refusal`: what to say if the key is refused; by default what is wrong with it.
  async #submit(key, refusal) {
    if (!key) return this.#open("Enter a key.");
    this.#client.key = key;
    this.#isChecking = true;
    try {
      await this.#client.models();
    } catch (problem) {
      this.#client.key = "";
      return this.#open(refusal ?? inWords(problem));
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
    this.#message.textContent = text;
    if (!wasOpen) this.#field.focus();
  }

  get #message() {
    return this.#form.querySelector("[role=alert]");
  }

  get #field() {
    return this.#form.querySelector("input");
  }
}

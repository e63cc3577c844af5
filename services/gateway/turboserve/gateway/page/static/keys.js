// The form for an API key. A key counts once the server has accepted it; other tabs of the browser share it.

import { keyOfOtherTab, onKeyEntered, rememberKey, shareKey } from "./memory.js";
import { inWords } from "./words.js";

export class KeyForm {
  constructor(client, form, onAccepted) {
    this.#client = client;
    this.#form = form;
    this.#onAccepted = onAccepted;
    form.addEventListener("submit", async (submitted) => {
      submitted.preventDefault();
      const key = this.#field.value.trim();
      if (await this.#submit(key)) shareKey(key);
    });
    onKeyEntered((key) => {
      this.#entered = key;
      if (this.isOpen && !this.#isChecking) this.#submit(key, this.#message.textContent);
    });
  }

  #client;
  #form;
  #onAccepted;
  #askedTabs = false;
  #isChecking = false;
  /** How many keys were checked. */
  #checks = 0;
  /** Key that the user has entered in another tab since this tab accepted one; empty: none. */
  #entered = "";

  get isOpen() {
    return !this.#form.hidden;
  }

  // The server wants a key, or refused the one that was sent. Nothing is asked again with a refused key: the
  // server limits wrong keys.
  async ask(problem) {
    // The user tried something else meanwhile.
    if (this.isOpen) return this.#field.focus();
    if (!this.#concerns(problem)) return;
    const refused = this.#client.key;
    if (refused) {
      this.#client.key = "";
      rememberKey("");
      // This tab sent no request while the user entered a new key in another one.
      if (this.#entered && this.#entered !== refused) return this.#submit(this.#entered, inWords(problem));
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

  // Check a key, and return whether it counts. `refusal`: what to say if the key is refused; by default what is
  // wrong with it.
  async #submit(key, refusal) {
    if (!key) return this.#open("Enter a key.");
    this.#client.key = key;
    this.#isChecking = true;
    this.#checks += 1;
    const check = this.#checks;
    const problem = await this.#client.models().then(() => null, (error) => error);
    // Another key was entered meanwhile, and it decides.
    if (check !== this.#checks) return false;
    this.#isChecking = false;
    if (problem) {
      this.#client.key = "";
      return this.#open(refusal ?? inWords(problem));
    }
    rememberKey(key);
    this.#entered = "";
    this.#field.value = "";
    this.#form.hidden = true;
    this.#onAccepted();
    return true;
  }

  #open(text) {
    const wasOpen = this.isOpen;
    this.#form.hidden = false;
    this.#message.textContent = text;
    if (!wasOpen) this.#field.focus();
    return false;
  }

  get #message() {
    return this.#form.querySelector("[role=alert]");
  }

  get #field() {
    return this.#form.querySelector("input");
  }
}

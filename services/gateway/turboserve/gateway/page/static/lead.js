// How far ahead of the playhead a session is generated: a short lead shows prompts sooner, a long one hides delays.

import { rememberLead, rememberedLead } from "./memory.js";

// leadS null: the worker's own, 3 s as shipped.
const LEADS = {
  instant: { leadS: 0.75, drops: true, transport: "webrtc", text: "Prompts show at once and skip what is buffered. The video may stall." },
  balanced: { leadS: 1.5, drops: false, text: "Prompts show after about two seconds." },
  safe: { leadS: null, drops: false, text: "The longest buffer. Prompts show after three to four seconds." },
};

export class LeadSelector {
  // onChange(leadS): the user chose another lead.
  constructor(fieldset, onChange) {
    this.#fieldset = fieldset;
    fieldset.addEventListener("change", () => {
      rememberLead(this.#name);
      this.#show();
      onChange(this.leadS);
    });
    this.#choose(rememberedLead());
  }

  #fieldset;

  get leadS() {
    return LEADS[this.#name].leadS;
  }

  // How the video comes: without a player's buffer at the shortest lead.
  get transport() {
    return LEADS[this.#name].transport ?? "websocket";
  }

  // Whether viewers skip to a new prompt.
  get drops() {
    return LEADS[this.#name].drops;
  }

  // The session's lead is this one.
  learn(leadS) {
    const [name] = Object.entries(LEADS).find(([, lead]) => lead.leadS === leadS) ?? [];
    if (name) this.#choose(name);
  }

  get #name() {
    return this.#fieldset.querySelector("input:checked").value;
  }

  #choose(name) {
    this.#fieldset.querySelector(`input[value=${name in LEADS ? name : "balanced"}]`).checked = true;
    this.#show();
  }

  #show() {
    this.#fieldset.querySelector(".quiet").textContent = LEADS[this.#name].text;
  }
}

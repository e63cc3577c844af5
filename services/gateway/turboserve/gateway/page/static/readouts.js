// The measurements of a session: one field each, with the id `r-NAME`.

import { counted } from "./words.js";

const NAMES = ["buffer", "first", "delivery", "compute", "chunk", "epoch", "slack", "credit", "tier", "fidelity"];

export class Readouts {
  reset() {
    for (const name of NAMES) this.write(name, "–");
  }

  write(name, text) {
    const field = document.getElementById(`r-${name}`);
    if (field.textContent !== String(text)) field.textContent = text;
  }

  // `greetedAt`: when this connection began. What was published before it was not waited for.
  chunk(message, greetedAt) {
    const publishedAt = Date.parse(message.published_at);
    if (publishedAt >= greetedAt) this.write("delivery", `${Math.round(Date.now() - publishedAt)} ms`);
    this.write("compute", `${Math.round(message.compute_s * 1000)} ms`);
    this.write("chunk", message.index);
    this.write("epoch", message.epoch);
    this.write("slack", message.slack_s === undefined ? "–" : `${message.slack_s.toFixed(2)} s`);
    this.write("credit", message.credit_s === undefined ? "–" : `${message.credit_s.toFixed(2)} s`);
    this.write("tier", message.tier ?? "–");
    this.write("fidelity", fidelity(message.fidelity));
  }
}

function fidelity(chosen) {
  if (!chosen) return "best";
  const quality = chosen.quality === undefined ? "" : `, ${(chosen.quality * 100).toFixed(1)} %`;
  const decoder = chosen.fast_decoder ? ", fast decoder" : "";
  return `${counted(chosen.steps, "step")}, window ${chosen.window_chunks}${decoder}${quality}`;
}

// The list of what happened. A prompt has one entry: accepted, then applied or superseded.

const MOST = 60;

export class Events {
  constructor(list) {
    this.#list = list;
  }

  #list;
  #prompts = new Map();

  reset() {
    this.#prompts.clear();
    this.#list.replaceChildren();
  }

  add(message) {
    switch (message.type) {
      case "prompt.accepted":
        this.#accepted(message);
        break;
      case "prompt.applied":
        this.#applied(message);
        break;
      case "prompt.superseded":
        this.#superseded(message);
        break;
      case "control.applied":
        this.note(message.at, `${message.name}: ${message.value ?? "as the prompt says"}`, `from chunk ${message.chunk_index}`);
        break;
      case "session.created":
        this.note(message.at, "Session created");
        break;
      case "session.placed":
        this.note(message.at, placed(message), message.worker);
        break;
      case "session.migrating":
        this.note(message.at, "Migrating to another worker", `${message.target}: ${message.reason}`);
        break;
      case "session.migrated":
        this.note(message.at, "Migrated to another worker", message.worker);
        break;
      case "session.migration_abandoned":
        this.note(message.at, "Stays on its worker", message.reason);
        break;
      case "session.suspended":
        this.note(message.at, message.activity === "paused" ? "Paused" : "Suspended: no viewer was watching");
        break;
      case "session.resume_requested":
        this.note(message.at, "Resuming");
        break;
      case "session.changed":
        this.note(message.at, "Limits or recording changed");
        break;
      case "session.ended":
        this.note(message.at, message.phase === "failed" ? "Session failed" : "Session ended", message.reason);
        break;
    }
  }

  note(at, text, more = "") {
    const item = document.createElement("li");
    const time = document.createElement("time");
    time.textContent = new Date(at).toLocaleTimeString("en-GB");
    const what = document.createElement("span");
    what.textContent = text;
    item.append(time, what);
    if (more) item.append(small(more));
    this.#list.prepend(item);
    while (this.#list.children.length > MOST) this.#list.lastChild.remove();
    return item;
  }

  #accepted(message) {
    if (this.#prompts.has(message.prompt_id)) return;
    const item = this.note(message.at, `“${message.prompt}”`, "accepted, waits for the next chunk");
    this.#prompts.set(message.prompt_id, { item, at: message.at });
  }

  #applied(message) {
    const { item, at } = this.#promptOf(message);
    const late = (Date.parse(message.at) - Date.parse(at)) / 1000;
    const after = late > 0 ? `, ${late.toFixed(1)} s later` : "";
    item.querySelector(".more")?.remove();
    const more = small(`applied at chunk ${message.chunk_index}${after}`);
    more.classList.add("done");
    item.append(more);
  }

  // The prompt's first frame is on screen. seconds: since this page sent it, or null.
  onScreen(promptId, seconds) {
    const entry = this.#prompts.get(promptId);
    if (!entry || seconds === null) return;
    entry.item.querySelector(".shown")?.remove();
    const more = small(`on screen ${seconds.toFixed(1)} s after it was sent`);
    more.classList.add("done", "shown");
    entry.item.append(more);
  }

  #superseded(message) {
    const { item } = this.#promptOf(message);
    item.querySelector(".more")?.remove();
    item.append(small("replaced by a later prompt, never shown"));
  }

  #promptOf(message) {
    if (!this.#prompts.has(message.prompt_id)) this.#accepted(message);
    return this.#prompts.get(message.prompt_id);
  }
}

function placed({ kind, previous_worker }) {
  switch (kind) {
    case "resume":
      return "Resumed on a worker";
    case "recover":
      return "Recovered on another worker";
    default:
      return previous_worker ? "Placed on another worker" : "Placed on a worker";
  }
}

function small(text) {
  const more = document.createElement("span");
  more.className = "more";
  more.textContent = text;
  return more;
}

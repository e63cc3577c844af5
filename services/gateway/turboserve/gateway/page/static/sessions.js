// The caller's sessions that have not ended, with a way to open and to end each, and those that have just failed.

import { failedSessions, liveSessions } from "./page_client.js";
import { replaceRows, rowButton, rowText } from "./rows.js";
import { endInWords } from "./words.js";

const LOOK_MS = 5000;
/** How long a failed session is listed. */
const FAILED_MS = 3_600_000;

export class SessionList {
  // open(id), ended(id); refused(problem): the key was refused; attempt(action) runs an action and shows its problem.
  constructor(client, section, { open, ended, refused, attempt }) {
    this.#client = client;
    this.#section = section;
    this.#open = open;
    this.#ended = ended;
    this.#refused = refused;
    this.#attempt = attempt;
    setInterval(() => this.look(), LOOK_MS);
  }

  #client;
  #section;
  #open;
  #ended;
  #refused;
  #attempt;
  #current = null;
  #drawn = "";
  #isPaused = false;
  /** Ids of the sessions that had not ended at the last look; null: there was none. */
  #live = null;
  #failed = [];

  // `current`: the session on the page, or null.
  show(current) {
    if (current === this.#current) return;
    this.#current = current;
    this.look();
  }

  // The server refuses this page's requests until a key is entered. What a refused key had listed cannot be opened.
  pause(isPaused) {
    this.#isPaused = isPaused;
    this.#live = null;
    if (isPaused) this.#draw([]);
  }

  async look() {
    if (document.hidden || this.#isPaused) return;
    try {
      const live = await liveSessions(this.#client);
      const ids = live.map(({ id }) => id);
      // A session that is gone may have failed.
      if (!this.#live?.every((id) => ids.includes(id))) this.#failed = await failedSessions(this.#client);
      if (this.#isPaused) return;
      this.#live = ids;
      const failed = this.#failed.filter(({ updated_at }) => Date.now() - Date.parse(updated_at) < FAILED_MS);
      this.#draw([...live, ...failed]);
    } catch (problem) {
      // Not after another request was refused, and not for a key that was replaced meanwhile.
      if (problem.status === 401 && !this.#isPaused && problem.wasSentWith(this.#client.key)) this.#refused(problem);
    }
  }

  #draw(sessions) {
    const state = JSON.stringify([this.#current, sessions.map(({ id, prompt, ...one }) => [id, prompt, stateOf(one)])]);
    if (state === this.#drawn) return;
    this.#drawn = state;
    this.#section.hidden = sessions.length === 0;
    replaceRows(this.#section.querySelector("ul"), sessions.map((session) => this.#row(session)));
  }

  #row(session) {
    const row = document.createElement("li");
    const isCurrent = session.id === this.#current;
    const state = isCurrent ? `${stateOf(session)}, on this page` : stateOf(session);
    row.append(rowText("session-prompt", session.prompt), rowText("quiet", state));
    const about = { of: session.prompt, id: session.id };
    if (!isCurrent) row.append(rowButton("Open", about, () => this.#open(session.id)));
    if (session.phase === "failed") return row;
    row.append(rowButton("End", about, () => this.#attempt(async () => {
      await this.#client.session(session.id).end();
      this.#ended(session.id);
      await this.look();
    })));
    return row;
  }
}

function stateOf({ phase, activity, reason }) {
  if (phase === "failed") return endInWords({ phase, reason }).replace(/\.$/, "");
  if (activity === "paused") return "paused";
  if (phase === "suspended") return "suspended: no viewer";
  return phase === "requested" ? "waits for a worker" : "playing";
}

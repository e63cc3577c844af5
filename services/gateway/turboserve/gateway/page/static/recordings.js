// Recordings: the button that records the session, the list, and the dialogs that replay and delete one.

import { RecordingPlayback } from "./client/index.js";
import { openDialog, replaceRows, rowButton, rowText } from "./rows.js";
import { counted, inWords } from "./words.js";

const LOOK_MS = 3000;
const LISTED = 20;
const RUNS = "recording";

export class Recordings {
  // attempt(action) runs an action and shows its problem.
  constructor(client, { button, section, replay, confirm }, attempt) {
    this.#client = client;
    this.#button = button;
    this.#section = section;
    this.#replay = replay;
    this.#confirm = confirm;
    this.#attempt = attempt;
    button.addEventListener("click", () => this.#toggle());
    replay.addEventListener("close", () => this.#leave());
    confirm.addEventListener("close", () => this.#delete());
    setInterval(() => this.look(), LOOK_MS);
  }

  #client;
  #button;
  #section;
  #replay;
  #confirm;
  #attempt;
  /** Id of the session on the page; null: none, and the list has those of all sessions. */
  #session = null;
  #running = null;
  #drawn = "";
  #playback = null;
  #condemned = null;
  #isPaused = false;

  // `session`: the one on the page, or null. `isOver`: it has ended, or is not known to run.
  show(session, isOver) {
    this.#button.hidden = !session || isOver;
    if (session === this.#session) return;
    this.#session = session;
    this.#mark(null);
    this.look();
  }

  // The server refuses this page's requests until a key is entered.
  pause(isPaused) {
    this.#isPaused = isPaused;
    if (isPaused) this.#draw([]);
  }

  async look() {
    if (document.hidden || this.#isPaused) return;
    const session = this.#session;
    const found = [];
    try {
      for await (const { info } of this.#client.recordings({ session: session ?? undefined, pageSize: LISTED })) {
        found.push(info);
        if (found.length === LISTED) break;
      }
    } catch (problem) {
      // The page's other requests report that. What a revoked key or link had listed cannot be played any more.
      if (problem.status === 401 && session === this.#session) this.#draw([]);
      return;
    }
    if (session !== this.#session || this.#isPaused) return;
    this.#mark(session && found.find(({ state }) => state === RUNS));
    this.#draw(found);
  }

  #mark(running) {
    this.#running = running ?? null;
    this.#button.setAttribute("aria-pressed", String(Boolean(running)));
    this.#button.textContent = running ? "Stop recording" : "Record";
  }

  #toggle() {
    this.#attempt(async () => {
      const session = this.#client.session(this.#session);
      const { info } = await (this.#running ? session.stopRecording() : session.startRecording());
      if (info.session === this.#session) this.#mark(info.state === RUNS ? info : null);
      await this.look();
    });
  }

  #draw(recordings) {
    const state = JSON.stringify(recordings.map(({ id, prompt, ...one }) => [id, prompt, stateOf(one)]));
    if (state === this.#drawn) return;
    this.#drawn = state;
    this.#section.hidden = recordings.length === 0;
    replaceRows(this.#section.querySelector("ul"), recordings.map((info) => this.#row(info)));
  }

  #row(info) {
    const row = document.createElement("li");
    const buttons = document.createElement("div");
    buttons.className = "row-buttons";
    const about = { of: info.prompt, id: info.id };
    const remove = rowButton("Delete", about, () => this.#ask(info));
    remove.classList.add("for-owners");
    buttons.append(
      rowButton("Replay", about, () => this.#open(info)),
      rowButton("Download", about, () => this.#attempt(() => this.#download(info))),
      remove,
    );
    row.append(rowText("session-prompt", info.prompt), rowText("quiet", stateOf(info)), buttons);
    return row;
  }

  #open(info) {
    this.#leave();
    this.#part(this.#replay, "title").textContent = info.prompt;
    const message = this.#part(this.#replay, "message");
    message.hidden = true;
    const video = this.#part(this.#replay, "video");
    this.#playback = new RecordingPlayback(this.#client.recording(info.id), video, (error) => {
      message.hidden = false;
      message.textContent = inWords(error);
    });
    openDialog(this.#replay);
    video.focus();
    video.play().catch(() => {});
  }

  #leave() {
    this.#playback?.close();
    this.#playback = null;
  }

  async #download({ id, parts }) {
    const recording = this.#client.recording(id);
    for (let part = 1; part <= Math.max(1, parts); part++) {
      const link = document.createElement("a");
      link.download = parts > 1 ? `${id}.${part}.mp4` : `${id}.mp4`;
      // An address has no key. Without one, the browser writes the file as it arrives.
      const address = this.#client.key ? URL.createObjectURL(await recording.download({ part })) : null;
      link.href = address ?? `${recording.videoUrl}?part=${part}`;
      link.click();
      // The browser has begun to read the file by then.
      if (address) setTimeout(() => URL.revokeObjectURL(address), 60_000);
    }
  }

  #ask(info) {
    this.#condemned = info;
    this.#part(this.#confirm, "name").textContent = `“${info.prompt}”, ${stateOf(info)}`;
    openDialog(this.#confirm);
  }

  #delete() {
    const { returnValue } = this.#confirm;
    const condemned = this.#condemned;
    this.#confirm.returnValue = "";
    this.#condemned = null;
    if (returnValue !== "delete" || !condemned) return;
    this.#attempt(async () => {
      await this.#client.recording(condemned.id).delete();
      await this.look();
    });
  }

  #part(dialog, name) {
    return dialog.querySelector(`[data-part=${name}]`);
  }
}

function stateOf({ state, duration_s, bytes, missing_chunks, reason, session_failed }) {
  const parts = [clock(duration_s), size(bytes)];
  if (state === RUNS) parts.push("recording now");
  else if (state !== "complete") parts.push("the last chunks are being stored");
  if (missing_chunks) parts.push(counted(missing_chunks, "chunk is missing", "chunks are missing"));
  if (session_failed) parts.push(reason ? `the session failed: ${reason}` : "the session failed");
  else if (reason) parts.push(`stopped: ${reason}`);
  return parts.join(", ");
}

function clock(seconds) {
  const whole = Math.floor(seconds);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}

function size(bytes) {
  return bytes < 1e6 ? `${Math.ceil(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

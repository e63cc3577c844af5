// The page: connects prompt box, stream, playback and readouts. Modes: empty, waiting, live, paused, ended.

import { Api } from "./api.js";
import { Events } from "./events.js";
import { rememberKey, rememberSession, rememberedKey, rememberedSession } from "./memory.js";
import { MigrationForm } from "./migration.js";
import { Playback } from "./playback.js";
import { Stream } from "./stream.js";
import { Strip } from "./strip.js";
import { seconds } from "./words.js";

const EXAMPLES = [
  "a red circle moving left",
  "a blue square moving up",
  "a green triangle moving in circles",
  "a pink circle standing still on navy",
];
const REPORT_MS = 250;
const PIXELATED_BELOW = 256;

const at = (id) => document.getElementById(id);
const video = at("video");
const api = new Api();
const events = new Events(at("events"));
const strip = new Strip(at("strip"), at("workers"));
const playback = new Playback(
  video,
  () => show(),
  () => stream?.send({ type: "first_frame" }),
);
const migrationForm = new MigrationForm(api, at("migration"), at("r-worker"), (action) => attempt(action));

let stream = null;
let session = null;
let phase = "";
let activity = "watching";
let askedAt = null;
let greetedAt = 0;
let ended = "";

function begin(id) {
  session = id;
  ended = "";
  askedAt ??= performance.now();
  rememberSession(id);
  playback.reset();
  playback.play();
  clear();
  at("ffplay").textContent = `ffplay ${api.videoUrl(id)}`;
  stream?.close();
  stream = new Stream(api, id, { hello, init, skip, chunk, event, end, problem: complain, lost, gone });
  show();
}

function hello(message) {
  quiet();
  greetedAt = Date.now();
  learn(message);
  if (stream.lastIndex === null) playback.beginAt(message.start_s);
  if (message.control_seq === 0) strip.mark(0, message.prompt);
  if (!at("prompt").value) at("prompt").value = message.prompt;
}

function init(message, data) {
  video.classList.toggle("small", message.width < PIXELATED_BELOW);
  playback.init(message, data);
}

function skip(message) {
  playback.skip(message.start_s);
  document.body.dataset.skipped = message.index;
}

function chunk(message, data) {
  if (askedAt !== null) {
    write("first", `${((performance.now() - askedAt) / 1000).toFixed(2)} s`);
    askedAt = null;
  }
  playback.chunk(message, data);
  strip.chunk(message);
  // What was made before this connection was not waited for.
  const publishedAt = Date.parse(message.published_at);
  if (publishedAt >= greetedAt) write("delivery", `${Math.round(Date.now() - publishedAt)} ms`);
  write("compute", `${Math.round(message.compute_s * 1000)} ms`);
  write("chunk", message.index);
  write("epoch", message.epoch);
  write("slack", message.slack_s === undefined ? "–" : `${message.slack_s.toFixed(2)} s`);
  write("credit", message.credit_s === undefined ? "–" : `${message.credit_s.toFixed(2)} s`);
  write("tier", message.tier ?? "–");
  write("fidelity", fidelity(message.fidelity));
  Object.assign(document.body.dataset, { chunk: message.index, worker: message.worker });
  show();
}

function fidelity(chosen) {
  if (!chosen) return "best";
  const quality = chosen.quality === undefined ? "" : `, ${(chosen.quality * 100).toFixed(1)} %`;
  return `${chosen.steps} steps, window ${chosen.window_chunks}${quality}`;
}

function event(message, isNew) {
  events.add(message);
  if (message.type === "prompt.applied") {
    strip.mark(message.chunk_index, message.prompt);
    document.body.dataset.applied = message.chunk_index;
  }
  if (isNew) learn(message);
}

function learn(message) {
  ({ phase, activity } = message);
  if (message.epoch) write("epoch", message.epoch);
  migrationForm.learn(ended ? null : session, message);
  if (activity === "paused") playback.pause();
  else if (!playback.wanted) playback.play();
  show();
}

function end(message) {
  playback.finish();
  phase = message.phase;
  ended = message.phase === "failed" ? `The session failed: ${message.reason}` : "This session has ended.";
  rememberSession(null);
  migrationForm.learn(null);
  show();
}

function lost(waitMs) {
  calm(waitMs < 1000 ? "Connection lost. Connecting again…" : `Connection lost. Next try in ${seconds(waitMs / 1000)}.`);
}

function gone(problem) {
  stream = null;
  session = null;
  phase = "";
  if (problem?.status === 404) rememberSession(null);
  complain(problem);
  show();
}

function leave() {
  stream?.close();
  stream = null;
  session = null;
  phase = ended = "";
  rememberSession(null);
  playback.reset();
  clear();
  show();
}

function clear() {
  strip.reset();
  events.reset();
  for (const name of ["buffer", "first", "delivery", "compute", "chunk", "epoch", "slack", "credit", "tier", "fidelity"]) {
    write(name, "–");
  }
  migrationForm.learn(null);
  for (const name of ["chunk", "worker", "applied", "skipped"]) delete document.body.dataset[name];
}

// Buttons

at("form").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  attempt(async () => {
    useKey();
    const prompt = at("prompt").value.trim();
    if (session && !ended) {
      await api.prompt(session, prompt, at("drop").checked);
      return;
    }
    askedAt = performance.now();
    const created = await api.create(prompt, crypto.randomUUID?.() ?? String(Math.random()));
    begin(created.id);
  });
});

at("prompt").addEventListener("keydown", (pressed) => {
  if (pressed.key === "Enter" && !pressed.shiftKey && !pressed.isComposing) {
    pressed.preventDefault();
    at("form").requestSubmit();
  }
});

function togglePause() {
  attempt(async () => {
    if (activity === "paused") {
      learn(await api.resume(session));
    } else {
      playback.pause();
      learn(await api.pause(session));
    }
  });
}

at("pause").addEventListener("click", togglePause);
at("veil-resume").addEventListener("click", togglePause);
at("end").addEventListener("click", () => attempt(() => api.end(session)));
at("new").addEventListener("click", () => {
  leave();
  at("prompt").select();
});

for (const text of EXAMPLES) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", () => {
    at("prompt").value = text;
    at("form").requestSubmit();
  });
  const item = document.createElement("li");
  item.append(button);
  at("examples").append(item);
}

async function attempt(action) {
  quiet();
  at("start").disabled = at("pause").disabled = true;
  try {
    await action();
  } catch (problem) {
    complain(problem);
  } finally {
    at("start").disabled = at("pause").disabled = false;
    show();
  }
}

function useKey() {
  if (at("key").value) {
    api.key = at("key").value;
    rememberKey(api.key);
  }
}

// What is shown

function complain(problem) {
  if (problem?.status === 401) at("key-row").hidden = false;
  if (activity === "watching" && session) playback.play();
  say(problem?.message ?? "Something went wrong.", false);
}

function calm(text) {
  say(text, true);
}

function say(text, isCalm) {
  const box = at("message");
  box.textContent = text;
  box.hidden = false;
  box.classList.toggle("calm", isCalm);
}

function quiet() {
  at("message").hidden = true;
}

function write(name, text) {
  const field = at(`r-${name}`);
  if (field.textContent !== String(text)) field.textContent = text;
}

function mode() {
  if (ended) return playback.started && !video.ended ? "live" : "ended";
  if (!session) return "empty";
  if (activity === "paused") return "paused";
  return playback.started ? "live" : "waiting";
}

function veil(now) {
  switch (now) {
    case "empty":
      return "Say what you want to see. It starts while you watch.";
    case "paused":
      return "Paused";
    case "waiting":
      if (phase === "requested") return "Waiting for a worker.";
      return phase === "suspended" ? "Waking up." : "The first chunk is being made.";
    default:
      return "";
  }
}

function show() {
  const now = mode();
  document.body.dataset.mode = now;
  at("veil-text").textContent =
    now === "ended" ? ended : playback.supported ? veil(now) : "This browser cannot play live video.";
  at("veil-resume").hidden = now !== "paused";
  at("waiting").hidden = !(now === "live" && playback.stalled && !ended);
  at("phase").textContent = !session ? "no session" : activity === "paused" ? "paused" : phase;
  at("controls").hidden = at("elsewhere").hidden = !session;
  at("pause").hidden = at("end").hidden = Boolean(ended);
  at("pause").textContent = activity === "paused" ? "Resume" : "Pause";
  at("start").textContent = session && !ended ? "Change" : "Start";
  at("drop-row").hidden = !session || Boolean(ended);
  at("prompt-label").textContent = session && !ended ? "What should it show now?" : "What should the video show?";
}

function animate() {
  strip.draw(playback.playhead);
  requestAnimationFrame(animate);
}

setInterval(() => {
  if (!session) return;
  write("buffer", `${playback.ahead.toFixed(1)} s`);
  if (!ended) stream?.send({ type: "playhead", playhead_s: playback.playhead, buffered_s: playback.ahead });
}, REPORT_MS);

function restore() {
  const remembered = rememberedSession();
  if (remembered && remembered !== session) begin(remembered);
}

api.key = rememberedKey();
addEventListener("hashchange", restore);
restore();
show();
requestAnimationFrame(animate);

// The page: connects prompt box, stream, playback and readouts. Modes: empty, waiting, live, paused, ended.

import { Api } from "./api.js";
import { Composer } from "./composer.js";
import { Events } from "./events.js";
import { KeyForm } from "./keys.js";
import { LeadSelector } from "./lead.js";
import { rememberSession, rememberedKey, rememberedSession } from "./memory.js";
import { MigrationForm } from "./migration.js";
import { DefaultModel } from "./model.js";
import { OnScreen } from "./on_screen.js";
import { Playback } from "./playback.js";
import { Readouts } from "./readouts.js";
import { SessionList } from "./sessions.js";
import { Stream } from "./stream.js";
import { Strip } from "./strip.js";
import { seconds } from "./words.js";

const FIRST_PROMPT = "first";
const REPORT_MS = 250;
const PIXELATED_BELOW = 256;

const at = (id) => document.getElementById(id);
const video = at("video");
const api = new Api();
const events = new Events(at("events"));
const readouts = new Readouts();
const strip = new Strip(at("strip"), at("workers"));
const playback = new Playback(
  video,
  () => show(),
  () => stream?.send({ type: "first_frame" }),
);
const composer = new Composer(at("prompt"), at("chips"), at("hint"));
const onScreen = new OnScreen(shown);
const lead = new LeadSelector(at("lead"), (leadS) => {
  if (session && !ended) attempt(() => api.changeLead(session, leadS));
});
const model = new DefaultModel(api, at("examples"), {
  onModel: (found) => composer.describe(found),
  onRefused: (problem) => complain(problem),
  onExample: (text) => {
    at("prompt").value = text;
    composer.show();
    at("form").requestSubmit();
  },
});
const keyForm = new KeyForm(api, at("key-form"), admitted);
const sessions = new SessionList(api, at("sessions"), {
  open,
  ended: (id) => id === session && at("new").focus(),
  refused: complain,
  attempt: (action) => attempt(action),
});
const migrationForm = new MigrationForm(api, at("migration"), at("r-worker"), (action) => attempt(action));

let stream = null;
let isConnected = false;
let isBusy = false;
let session = null;
let phase = "";
let activity = "watching";
let askedAt = null;
let greetedAt = 0;
let ended = "";

// Shows a session that exists already.
function open(id) {
  begin(id, performance.now());
  api.read(id).then(({ max_lead_s }) => id === session && lead.learn(max_lead_s), () => {});
}

// `sinceMs`: when the user asked for the session.
function begin(id, sinceMs) {
  quiet();
  session = id;
  ended = phase = "";
  activity = "watching";
  askedAt = sinceMs;
  rememberSession(id);
  playback.reset();
  playback.play();
  clear();
  const header = api.key ? '-headers "Authorization: Bearer KEY" ' : "";
  at("ffplay").textContent = `ffplay ${header}${api.videoUrl(id)}`;
  at("needs-key").hidden = !api.key;
  stream?.close();
  stream = new Stream(api, id, { hello, init, skip, chunk, event, end, problem: complain, lost, gone });
  show();
}

function hello(message) {
  if (!isConnected) quiet();
  isConnected = true;
  greetedAt = Date.now();
  learn(message);
  if (stream.lastIndex === null) playback.beginAt(message.start_s);
  if (message.control_seq === 0) {
    strip.mark(0, message.prompt);
    onScreen.applied(0, message.prompt, FIRST_PROMPT);
  }
  if (!at("prompt").value) at("prompt").value = message.prompt;
  composer.show();
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
    readouts.write("first", `${((performance.now() - askedAt) / 1000).toFixed(2)} s`);
    askedAt = null;
  }
  playback.chunk(message, data);
  strip.chunk(message);
  onScreen.chunk(message.index, message.start_s);
  readouts.chunk(message, greetedAt);
  Object.assign(document.body.dataset, { chunk: message.index, worker: message.worker });
  show();
}

function event(message, isNew) {
  events.add(message);
  if (message.type === "prompt.applied") {
    strip.mark(message.chunk_index, message.prompt);
    onScreen.applied(message.chunk_index, message.prompt, message.prompt_id);
    document.body.dataset.applied = message.chunk_index;
  }
  if (!isNew) return;
  learn(message);
  sessions.look();
}

function learn(message) {
  ({ phase, activity } = message);
  if (message.epoch) readouts.write("epoch", message.epoch);
  migrationForm.learn(ended ? null : session, message);
  if (activity === "paused") playback.pause();
  else if (!playback.wanted) playback.play();
  show();
}

function end(message) {
  playback.finish();
  phase = message.phase;
  isConnected = true;
  ended = message.phase === "failed" ? `The session failed: ${message.reason}` : "This session has ended.";
  rememberSession(null);
  migrationForm.learn(null);
  sessions.look();
  show();
}

// Another prompt is on screen. The video may be black: then the page states why.
function shown({ prompt, promptId, seconds: late }) {
  events.onScreen(promptId, late);
  at("on-screen").hidden = false;
  at("on-screen").textContent = `On screen: “${prompt}”${late === null ? "" : `, ${late.toFixed(1)} s after it was sent`}`;
  const why = composer.whyNothing(prompt);
  at("nothing").hidden = !why;
  at("nothing").textContent = why;
  document.body.dataset.shown = prompt;
}

function lost(waitMs) {
  isConnected = false;
  show();
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
  quiet();
  stream?.close();
  stream = null;
  session = null;
  phase = ended = "";
  activity = "watching";
  rememberSession(null);
  playback.reset();
  clear();
  show();
}

function clear() {
  isConnected = false;
  strip.reset();
  events.reset();
  onScreen.reset();
  at("on-screen").hidden = at("nothing").hidden = true;
  readouts.reset();
  migrationForm.learn(null);
  for (const name of ["chunk", "worker", "applied", "skipped", "shown"]) delete document.body.dataset[name];
}

// Buttons

at("form").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  attempt(async () => {
    const prompt = at("prompt").value.trim();
    if (!composer.confirm(prompt)) return;
    const sentAt = performance.now();
    if (session && !ended) {
      const { prompt_id } = await api.prompt(session, prompt, lead.drops);
      onScreen.sent(prompt_id, sentAt);
      return;
    }
    const created = await api.create(prompt, lead.leadS, crypto.randomUUID?.() ?? String(Math.random()));
    begin(created.id, sentAt);
    onScreen.sent(FIRST_PROMPT, sentAt);
    sessions.look();
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
    const asked = session;
    const isPaused = activity === "paused";
    if (!isPaused) playback.pause();
    const answer = await (isPaused ? api.resume(asked) : api.pause(asked));
    // Another session may have been opened meanwhile.
    if (asked === session) learn(answer);
  });
}

at("pause").addEventListener("click", togglePause);
at("veil-resume").addEventListener("click", togglePause);
at("end").addEventListener("click", () => {
  // The button goes away with the session.
  at("new").focus();
  attempt(() => api.end(session));
});
at("new").addEventListener("click", () => {
  if (session && !ended) at("leave").showModal();
  else startOver();
});
at("leave").addEventListener("close", () => {
  const { returnValue } = at("leave");
  at("leave").returnValue = "";
  if (returnValue === "keep") startOver();
  if (returnValue !== "end") return;
  attempt(async () => {
    const asked = session;
    await api.end(asked);
    if (asked === session) startOver();
  });
});

function startOver() {
  leave();
  sessions.look();
  at("prompt").focus();
  at("prompt").select();
}

// One action at a time. Buttons are not disabled meanwhile: the keyboard's focus would be lost.
async function attempt(action) {
  if (isBusy) return;
  isBusy = true;
  quiet();
  show();
  try {
    await action();
  } catch (problem) {
    complain(problem);
  } finally {
    isBusy = false;
    show();
  }
}

// A key was accepted: what was refused before is asked for again.
function admitted() {
  quiet();
  sessions.pause(false);
  sessions.look();
  restore();
  model.find();
}

// What is shown

function complain(problem) {
  if (problem?.status === 401) {
    // Not for a late answer to a request with an earlier key.
    if (problem.key === api.key) sessions.pause(true);
    keyForm.ask(problem);
    return;
  }
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

function state() {
  if (!session) return "no session";
  if (!isConnected && !ended) return "connecting…";
  return activity === "paused" && !ended ? "paused" : phase;
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
      return phase === "suspended" ? "Resuming the session." : "Generating the first chunk.";
    default:
      return "";
  }
}

function show() {
  const now = mode();
  document.body.dataset.mode = now;
  at("veil-text").textContent =
    now === "ended" ? ended : playback.supported ? veil(now) : "This browser cannot play live video.";
  if (now !== "paused" && document.activeElement === at("veil-resume")) at("pause").focus();
  at("veil-resume").hidden = now !== "paused";
  at("waiting").hidden = !(now === "live" && playback.stalled && !ended);
  at("phase").textContent = state();
  document.body.dataset.link = session && !isConnected && !ended ? "lost" : "";
  sessions.show(session);
  for (const name of ["start", "pause", "veil-resume", "end"]) at(name).setAttribute("aria-disabled", String(isBusy));
  at("controls").hidden = at("elsewhere").hidden = !session;
  at("pause").hidden = at("end").hidden = Boolean(ended);
  at("pause").textContent = activity === "paused" ? "Resume" : "Pause";
  at("start").textContent = session && !ended ? "Change" : "Start";
  at("happened").hidden = !session;
  at("examples").hidden = Boolean(session && !ended);
  at("prompt-label").textContent = session && !ended ? "What should it show now?" : "What should the video show?";
}

function animate() {
  if (playback.started) onScreen.look(playback.playhead);
  strip.draw(playback.playhead);
  requestAnimationFrame(animate);
}

setInterval(() => {
  if (!session) return;
  readouts.write("buffer", `${playback.ahead.toFixed(1)} s`);
  if (!ended) stream?.send({ type: "playhead", playhead_s: playback.playhead, buffered_s: playback.ahead });
}, REPORT_MS);

function restore() {
  const remembered = rememberedSession();
  if (!remembered || remembered === session) return;
  open(remembered);
}

api.key = rememberedKey();
addEventListener("hashchange", restore);
restore();
model.find();
sessions.look();
show();
requestAnimationFrame(animate);

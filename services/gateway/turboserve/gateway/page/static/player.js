// The page: connects the prompt box, the player element and the readouts.

import "./client/player.js";
import { Composer } from "./composer.js";
import { Events } from "./events.js";
import { keepFocus } from "./focus.js";
import { KeyForm } from "./keys.js";
import { LeadSelector } from "./lead.js";
import { forgetSession, rememberSession, rememberedKey, rememberedSession } from "./memory.js";
import { MigrationForm } from "./migration.js";
import { ModelChoice } from "./model.js";
import { pageClient } from "./page_client.js";
import { Readouts } from "./readouts.js";
import { Recordings } from "./recordings.js";
import { SessionList } from "./sessions.js";
import { ShareDialog, sharedLink } from "./sharing.js";
import { SteerPad } from "./steer_pad.js";
import { Strip } from "./strip.js";
import { quiet, say, show as showPage, showPrompt } from "./view.js";
import { endInWords, inWords, inWordsOfLink, seconds } from "./words.js";

const BUFFER_MS = 250;
const PIXELATED_BELOW = 128;

const at = (id) => document.getElementById(id);
const player = at("player");
const client = pageClient();
player.client = client;
const events = new Events(at("events"));
const readouts = new Readouts();
const strip = new Strip(at("strip"), at("workers"));
const composer = new Composer(at("prompt"), at("chips"), at("hint"));
const lead = new LeadSelector(at("lead"), (maxLeadS) => {
  player.transport = lead.transport;
  if (session && !ended) attempt(() => client.session(session).change({ maxLeadS }));
});
const pad = new SteerPad(
  at("steer"),
  (value) => player.setControl("steer", value, { dropBuffer: lead.drops }),
  (problem) => complain(problem),
);
/** The session's first message; null: none. */
let greeting = null;
const model = new ModelChoice(client, at("model"), at("examples"), {
  onModel: (found) => {
    composer.describe(found);
    pad.describe(found);
    pad.show(greeting);
    show();
  },
  onRefused: (problem) => complain(problem),
  onServed: (found) => {
    isServed = found;
    show();
  },
  onExample: (text) => {
    at("prompt").value = text;
    composer.show();
    at("form").requestSubmit();
  },
});
const keyForm = new KeyForm(client, at("key-form"), admitted);
const sessions = new SessionList(client, at("sessions"), {
  open,
  ended: (id) => id === session && at("new").focus(),
  refused: complain,
  attempt: (action) => attempt(action),
});
const share = new ShareDialog(client, at("share-dialog"), (action) => attempt(action));
const recordings = new Recordings(
  client,
  { button: at("record"), section: at("recordings"), replay: at("replay"), confirm: at("delete-recording") },
  (action) => attempt(action),
);
/** The link with which this page was opened; null: the page is its user's own. */
const shared = sharedLink();
const migrationForm = new MigrationForm(client, at("migration"), at("r-worker"), (action) => attempt(action));

let isBusy = false;
/** Whether a worker is ready, as far as is known. */
let isServed = true;
/** The action that runs, or ran last. */
let running = Promise.resolve();
/** Id of the session on the page; null: none. */
let session = null;
/** Why the session ended; empty: it has not. */
let ended = "";
/** Why the session that was asked for is not on the page; empty: none was, or it is there. */
let failure = "";
let askedAt = null, greetedAt = 0;

// Shows a session that exists already.
function open(id) {
  player.open(id);
  begin(id, performance.now());
  client.session(id).refresh().then(({ max_lead_s }) => {
    if (id !== session) return;
    lead.learn(max_lead_s);
    player.transport = lead.transport;
  }, () => {});
}

// The player has opened the session. `sinceMs`: when the user asked for it.
function begin(id, sinceMs) {
  quiet();
  session = id;
  ended = failure = "";
  askedAt = sinceMs;
  rememberSession(id);
  clear();
  const header = client.key ? '-headers "Authorization: Bearer KEY" ' : "";
  at("ffplay").textContent = `ffplay ${header}${client.session(id).videoUrl}`;
  at("needs-key").hidden = !client.key;
  show();
}

const ON = {
  hello(message) {
    quiet();
    document.body.dataset.role = message.role;
    greetedAt = Date.now();
    greeting = message;
    if (message.activity === "ended") {
      // Its video comes before the message that it has ended.
      ended = "This session has ended.";
      // Its link replays it again.
      forgetSession();
    }
    model.play(message.model);
    pad.show(message);
    if (message.control_seq === 0) strip.mark(0, message.prompt);
    if (!at("prompt").value) at("prompt").value = message.prompt;
    composer.show();
    show();
  },
  format({ width }) {
    player.video.classList.toggle("small", width < PIXELATED_BELOW);
  },
  skip({ index }) {
    document.body.dataset.skipped = index;
  },
  chunk(message) {
    if (askedAt !== null) {
      readouts.write("first", `${((performance.now() - askedAt) / 1000).toFixed(2)} s`);
      askedAt = null;
    }
    strip.chunk(message);
    readouts.chunk(message, greetedAt);
    Object.assign(document.body.dataset, { chunk: message.index, worker: message.worker });
    show();
  },
  sessionevent({ event, isNew }) {
    events.add(event);
    if (event.type === "control.accepted" && event.name === "steer") pad.learn(event.value ?? null);
    if (isNew) sessions.look();
  },
  controlshown({ name, value, seconds }) {
    if (name !== "steer") return;
    pad.onScreen(value, seconds);
    document.body.dataset.steered = value ?? "";
  },
  promptapplied({ chunk_index, prompt }) {
    strip.mark(chunk_index, prompt);
    document.body.dataset.applied = chunk_index;
  },
  promptshown(shown) {
    events.onScreen(shown.promptId, shown.seconds);
    showPrompt(shown, composer.whyNothing(shown.prompt));
    document.body.dataset.shown = shown.prompt;
  },
  statechange(state) {
    if (state.epoch) readouts.write("epoch", state.epoch);
    migrationForm.learn(ended || shared ? null : session, state);
    show();
  },
  playback: show,
  transport({ transport }) {
    document.body.dataset.transport = transport;
  },
  end(message) {
    ended = endInWords(message);
    if (greeting?.activity !== "ended") rememberSession(null);
    greeting = null;
    pad.show(null);
    migrationForm.learn(null);
    sessions.look();
    show();
  },
  reconnecting({ waitMs }) {
    show();
    say(waitMs < 1000 ? "Connection lost. Connecting again…" : `Connection lost. Next try in ${seconds(waitMs / 1000)}.`, true);
  },
  error({ error, isFinal }) {
    if (isFinal) {
      session = null;
      if (error.status === 404) rememberSession(null);
      clear();
    }
    if (!isFinal || needsKey(error)) complain(error);
    if (isFinal) failure = needsKey(error) ? "Enter an API key to watch this session." : words(error);
    show();
  },
};
for (const [type, handle] of Object.entries(ON)) player.addEventListener(type, ({ detail }) => handle(detail));

function leave() {
  quiet();
  session = null;
  ended = failure = "";
  player.close();
  rememberSession(null);
  clear();
  show();
}

function clear() {
  greeting = null;
  model.play(null);
  pad.show(null);
  strip.reset();
  events.reset();
  showPrompt(null, "");
  readouts.reset();
  migrationForm.learn(null);
  for (const name of ["chunk", "worker", "applied", "skipped", "shown", "steered"]) delete document.body.dataset[name];
  if (!shared) delete document.body.dataset.role;
}

// Buttons

at("form").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  attempt(async () => {
    const prompt = at("prompt").value.trim();
    if (!composer.confirm(prompt)) return;
    if (session && !ended) {
      await player.prompt(prompt, { dropBuffer: lead.drops });
      return;
    }
    const askedAtMs = performance.now();
    player.transport = lead.transport;
    const created = await player.create(prompt, { maxLeadS: lead.leadS, ...model.request });
    begin(created.id, askedAtMs);
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
  attempt(() => (player.state?.activity === "paused" ? player.resume() : player.pause()));
}

at("pause").addEventListener("click", togglePause);
at("veil-resume").addEventListener("click", togglePause);
at("share").addEventListener("click", () => attempt(() => share.open(session)));
at("end").addEventListener("click", () => {
  // The button goes away with the session.
  at("new").focus();
  // Not lost while the answer to another action is missing.
  running.then(() => attempt(() => player.end()));
});
at("new").addEventListener("click", () => {
  // A session may have ended, and the last of its video be still on its way.
  const runs = session && !ended && player.state?.activity !== "ended";
  if (runs) at("leave").showModal();
  else startOver();
});
at("leave").addEventListener("close", () => {
  const { returnValue } = at("leave");
  at("leave").returnValue = "";
  if (returnValue === "keep") startOver();
  if (returnValue !== "end") return;
  attempt(async () => {
    const asked = session;
    await player.end();
    if (asked === session) startOver();
  });
});

function startOver() {
  leave();
  sessions.look();
  model.find();
  at("prompt").focus();
  at("prompt").select();
}

// One action at a time. Buttons are not disabled meanwhile: the keyboard's focus would be lost.
function attempt(action) {
  if (!isBusy) running = perform(action);
  return running;
}

async function perform(action) {
  isBusy = true;
  failure = "";
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
  recordings.pause(false);
  recordings.look();
  sessions.look();
  restore();
  model.find();
}

const words = (problem) => (shared ? inWordsOfLink(problem) : inWords(problem));
const needsKey = (problem) => problem.status === 401 && !shared;

function complain(problem) {
  if (!needsKey(problem)) return say(words(problem), false);
  // Not for a late answer to a request with an earlier key.
  if (problem.wasSentWith(client.key)) {
    sessions.pause(true);
    recordings.pause(true);
  }
  keyForm.ask(problem);
}

function show() {
  const { phase, activity } = player.state ?? {};
  const isConnected = player.connected;
  const hasSession = session !== null;
  const isShared = shared !== null;
  showPage({ player, hasSession, ended, failure, phase: phase ?? "", activity, isConnected, isBusy, isShared, isServed });
  model.show(session === null || Boolean(ended));
  sessions.show(session);
  recordings.show(session, Boolean(ended) || !phase);
}

function animate() {
  strip.draw(player.playhead);
  requestAnimationFrame(animate);
}

setInterval(() => {
  if (session) readouts.write("buffer", `${player.buffered.toFixed(1)} s`);
}, BUFFER_MS);

function restore() {
  if (sharedLink()?.token !== shared?.token) return location.reload();
  const remembered = shared?.session ?? rememberedSession();
  if (!remembered || remembered === session) return;
  open(remembered);
}

// Buttons: a field would open the keyboard of a phone. `#new` first: the next key press creates no session.
keepFocus(["#new", "#start", "#pause", "summary"]);
client.key = shared?.token ?? rememberedKey();
addEventListener("hashchange", restore);
if (shared) {
  document.body.dataset.shared = "";
  document.body.dataset.role = "viewer";
  // The link allows one session, and no list.
  sessions.pause(true);
} else {
  model.find();
}
restore();
sessions.look();
recordings.look();
show();
requestAnimationFrame(animate);

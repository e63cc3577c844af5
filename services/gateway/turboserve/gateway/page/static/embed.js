// The player for frames of other pages: /embed/SESSION#link=TOKEN. It watches, and offers no controls.

import { Client } from "./client/index.js";
import "./client/player.js";
import { endInWords, inWordsOfLink } from "./words.js";

const player = document.getElementById("player");
const state = document.getElementById("state");

function say(text) {
  // Not the same text again: it would be read aloud again.
  if (state.textContent !== text) state.textContent = text;
  state.hidden = !text;
}

const session = decodeURIComponent(location.pathname.split("/").pop());
const key = new URLSearchParams(location.hash.slice(1)).get("link") ?? "";

/** Why the session has ended; empty: it has not. */
let ended = "";
/** Why it cannot be watched; empty: it can. */
let failure = "";

function show() {
  const { started, stalled, state: session, video } = player;
  if (failure) return say(failure);
  // The rest of its video plays first.
  if (ended && (!started || video.ended)) return say(ended);
  if (session?.activity === "paused") return say("Paused");
  say(!started ? "Waiting for video." : stalled ? "Waiting for more video." : "");
}

const ON = {
  hello: show,
  playback: show,
  statechange: show,
  reconnecting: () => say("Connection lost. Connecting again…"),
  end: (message) => {
    ended = endInWords(message);
    show();
  },
  error: ({ error, isFinal }) => {
    if (!isFinal) return;
    failure = inWordsOfLink(error);
    // No video is below it.
    state.className = "final";
    show();
  },
};
for (const [type, handle] of Object.entries(ON)) player.addEventListener(type, ({ detail }) => handle(detail));

say("Connecting…");
player.client = new Client(new URL("..", document.baseURI), { key, attempts: 1 });
player.open(session);
addEventListener("hashchange", () => location.reload());

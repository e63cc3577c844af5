// The player for frames of other pages: /embed/SESSION#link=TOKEN. It watches, and offers no controls.

import { Client } from "./client/index.js";
import "./client/player.js";
import { inWordsOfLink } from "./words.js";

const player = document.getElementById("player");
const state = document.getElementById("state");

function say(text) {
  state.textContent = text;
  state.hidden = !text;
}

const session = decodeURIComponent(location.pathname.split("/").pop());
const key = new URLSearchParams(location.hash.slice(1)).get("link") ?? "";

const ON = {
  hello: () => say(""),
  playback: ({ started, stalled }) => say(!started ? "Waiting for video." : stalled ? "Waiting for more video." : ""),
  statechange: ({ activity }) => say(activity === "paused" ? "Paused" : ""),
  reconnecting: () => say("Connection lost. Connecting again…"),
  end: () => say("This session has ended."),
  error: ({ error, isFinal }) => {
    if (!isFinal) return;
    // No video is below it.
    state.className = "final";
    say(inWordsOfLink(error));
  },
};
for (const [type, handle] of Object.entries(ON)) player.addEventListener(type, ({ detail }) => handle(detail));

say("Connecting…");
player.client = new Client(new URL("..", document.baseURI), { key, attempts: 1 });
player.open(session);
addEventListener("hashchange", () => location.reload());

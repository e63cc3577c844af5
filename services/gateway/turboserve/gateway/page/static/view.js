// What the page shows of its session: veil, state, buttons. Modes: empty, waiting, live, paused, ended.

const at = (id) => document.getElementById(id);

/**
 * `page`: `player`, `hasSession`, `ended` (why the session ended; empty: it has not), `failure` (why there is none;
 * empty: none was asked for), `phase` (empty: not known yet), `activity`, `isConnected`, `isBusy`, `isShared`,
 * `isServed` (whether a worker is ready).
 */
export function show(page) {
  const { player, hasSession, ended, activity, isConnected, isBusy } = page;
  const now = mode(page);
  document.body.dataset.mode = now;
  const text = player.supported ? veil(now, page) : "This browser cannot play live video.";
  // Not the same text again: it would be read aloud again.
  if (at("veil-text").textContent !== text) at("veil-text").textContent = text;
  if (now !== "paused" && document.activeElement === at("veil-resume")) at("pause").focus();
  at("veil-resume").hidden = now !== "paused";
  at("waiting").hidden = !(now === "live" && player.stalled && !ended);
  at("phase").textContent = state(page);
  document.body.dataset.link = hasSession && !isConnected && !ended ? "lost" : "";
  // Not `disabled`: the keyboard's focus would be lost.
  for (const name of ["start", "pause", "veil-resume", "end"]) at(name).setAttribute("aria-disabled", String(isBusy));
  at("controls").hidden = at("elsewhere").hidden = !hasSession;
  // Of a session that has ended, there is nothing to control: not before the gateway has said that it has not.
  at("pause").hidden = at("end").hidden = at("share").hidden = Boolean(ended) || !page.phase;
  at("pause").textContent = activity === "paused" ? "Resume" : "Pause";
  at("start").textContent = hasSession && !ended ? "Change" : "Start";
  at("happened").hidden = !hasSession;
  at("examples").hidden = Boolean(hasSession && !ended);
  at("prompt-label").textContent =
    hasSession && !ended ? "What should it show now?" : "What should the video show?";
}

/** Show a message below the prompt. `isCalm`: it reports no refusal. */
export function say(text, isCalm) {
  const box = at("message");
  box.textContent = text;
  box.hidden = false;
  box.classList.toggle("calm", isCalm);
  // The button that was refused may be far from it.
  if (!isCalm) box.scrollIntoView({ block: "nearest" });
}

export function quiet() {
  at("message").hidden = true;
}

/** The prompt on screen, and why the video may be black. Null: none. */
export function showPrompt(shown, whyNothing) {
  at("on-screen").hidden = !shown;
  at("nothing").hidden = !whyNothing;
  at("nothing").textContent = whyNothing;
  if (!shown) return;
  const late = shown.seconds === null ? "" : `, ${shown.seconds.toFixed(1)} s after it was sent`;
  at("on-screen").textContent = `On screen: “${shown.prompt}”${late}`;
}

function state({ hasSession, ended, phase, activity, isConnected }) {
  if (!hasSession) return "no session";
  if (!isConnected && !ended) return "connecting…";
  return activity === "paused" && !ended ? "paused" : phase;
}

function mode({ player, hasSession, ended, activity }) {
  if (ended) return player.started && !player.video.ended ? "live" : "ended";
  if (!hasSession) return "empty";
  if (activity === "paused") return "paused";
  return player.started ? "live" : "waiting";
}

function veil(now, { phase, ended, failure, isShared, isServed }) {
  switch (now) {
    case "ended":
      return ended;
    case "empty":
      if (failure || isShared) return failure;
      if (!isServed) return "No worker is ready yet. This page waits for one.";
      return "Say what you want to see. It starts while you watch.";
    case "paused":
      return "Paused";
    case "waiting":
      if (!phase) return "Opening the session.";
      if (phase === "requested") return "Waiting for a worker.";
      return phase === "suspended" ? "Resuming the session." : "Generating the first chunk.";
    default:
      return "";
  }
}

// Errors of the client in plain words.

export function inWords(problem) {
  const wait = problem.retryAfterS ? ` Try again in ${seconds(problem.retryAfterS)}.` : " Try again shortly.";
  switch (problem.code) {
    case "no_capacity":
      return `All places are taken at the moment.${wait}`;
    case "tenant_limit":
      return `This is more than one tenant may have: ${problem.detail}.${wait}`;
    case "key_quota":
      return `This is more than your API key allows: ${problem.detail}.${wait}`;
    case "too_many_streams":
      return `Too many people are watching through this server.${wait}`;
    case "unauthorized":
      return problem.hadKey
        ? "The server does not accept this API key. It may be mistyped, have expired or have been revoked."
        : "This server needs an API key.";
    case "link_ended":
      return "This link has ended: it was revoked or has expired. Ask its sender for a new one.";
    case "link_role":
      return "This link does not allow that.";
    case "missing_scope":
      return `This link or key does not allow that: ${problem.detail}.`;
    case "link_limit":
      return "This session has as many links as it may have. Revoke one, or wait until one expires.";
    case "too_many_wrong_keys":
      return `Too many wrong API keys came from here.${wait}`;
    case "session_not_found":
      return "This session does not exist (any more). Start a new one.";
    case "unknown_model":
      return "No worker serves this model at the moment. Workers may still be starting.";
    case "transition_not_allowed":
      return "That is not possible now: the session has ended or is in another state.";
    case "unavailable":
    case "no_server":
    case "deadline":
      return `The server cannot answer at the moment.${wait}`;
    case "unreachable":
      return "The server cannot be reached. Is it running?";
    case "playback":
      return "This browser cannot play the video any further. Reload the page to try again.";
    case "chunk_gone":
      return "A part of the video is no longer kept.";
    case "invalid_input":
      return problem.field === "prompt" ? promptWords(problem) : problem.detail;
    default:
      if (problem.status === 401) return inWords({ code: "unauthorized", hadKey: problem.hadKey });
      return problem.detail ?? "Something went wrong.";
  }
}

/** As `inWords`, where a link takes the place of the key. Who has a link cannot start a session. */
export function inWordsOfLink(problem) {
  if (problem.code === "session_not_found") return "This session does not exist (any more).";
  return inWords(problem.status === 401 ? { code: "link_ended" } : problem);
}

/** Why a session has ended: its phase, and its reason where it has one. */
export function endInWords({ phase, reason = "" }) {
  if (phase !== "failed") return "This session has ended.";
  if (reason.startsWith("frames:")) return "This session has ended: its model makes no longer video.";
  if (reason.startsWith("poisoned:")) return "This session failed: its video could not be computed.";
  return reason ? `This session failed: ${reason}.` : "This session failed.";
}

export function seconds(value) {
  const whole = Math.max(1, Math.ceil(value));
  if (whole <= 90) return counted(whole, "second");
  const minutes = Math.ceil(whole / 60);
  return minutes <= 90 ? counted(minutes, "minute") : counted(Math.ceil(minutes / 60), "hour");
}

/** A count with its noun. `many`: the words after all numbers but 1; by default `one` with an s. */
export const counted = (number, one, many = `${one}s`) => `${number} ${number === 1 ? one : many}`;

function promptWords(problem) {
  return problem.limit && Number(problem.limit) > 1
    ? `The prompt is too long: at most ${Number(problem.limit).toLocaleString("en")} characters.`
    : "The prompt is empty. Say what the video should show.";
}

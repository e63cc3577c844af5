// The client of the gateway that served this page.

import { Client } from "./client/index.js";

// Of the sessions, the page lists the newest that have not ended, and of the failed ones.
const LISTED = 50;
const FAILED_LISTED = 10;
const LIVE_PHASES = ["requested", "active", "migrating", "suspended"];

/** One attempt for each request: the page shows a refusal at once, and asks again by itself where it should. */
export function pageClient() {
  return new Client(new URL(".", document.baseURI), { attempts: 1 });
}

export function liveSessions(client) {
  return newest(client, LIVE_PHASES, LISTED);
}

export function failedSessions(client) {
  return newest(client, ["failed"], FAILED_LISTED);
}

async function newest(client, phases, most) {
  const found = [];
  for await (const session of client.sessions({ phases, pageSize: most })) {
    found.push(session.info);
    if (found.length === most) break;
  }
  return found;
}

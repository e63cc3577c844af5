// The client of the gateway that served this page.

import { Client } from "./client/index.js";

// Of the sessions, the page lists the newest that have not ended.
const LISTED = 50;
const LIVE_PHASES = ["requested", "active", "migrating", "suspended"];

/** One attempt for each request: the page shows a refusal at once, and asks again by itself where it should. */
export function pageClient() {
  return new Client(new URL(".", document.baseURI), { attempts: 1 });
}

export async function liveSessions(client) {
  const found = [];
  for await (const session of client.sessions({ phases: LIVE_PHASES, pageSize: LISTED })) {
    found.push(session.info);
    if (found.length === LISTED) break;
  }
  return found;
}

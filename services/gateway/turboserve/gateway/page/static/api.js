// REST: every refusal becomes a Problem that knows how to say itself in plain words.

import { inWords } from "./words.js";

const LIVE_PHASES = ["requested", "active", "migrating", "suspended"];

export class Problem extends Error {
  constructor(body) {
    super(inWords(body));
    this.status = body.status ?? 0;
    this.code = body.code ?? "unreachable";
    this.limit = body.limit;
    this.retryAfterS = body.retry_after_s;
    this.key = body.key ?? "";
  }
}

export class Api {
  constructor() {
    this.key = "";
  }

  models() {
    return this.call("GET", "v1/models");
  }

  // The sessions that have not ended, newest first.
  sessions() {
    const phases = LIVE_PHASES.map((phase) => `phase=${phase}`).join("&");
    return this.call("GET", `v1/sessions?${phases}&limit=50`);
  }

  create(prompt, leadS, idempotencyKey) {
    return this.call("POST", "v1/sessions", { prompt, max_lead_s: leadS }, { "Idempotency-Key": idempotencyKey });
  }

  read(session) {
    return this.call("GET", `v1/sessions/${session}`);
  }

  changeLead(session, leadS) {
    return this.call("PATCH", `v1/sessions/${session}`, { max_lead_s: leadS });
  }

  prompt(session, prompt, dropBuffer) {
    return this.call("POST", `v1/sessions/${session}/prompts`, { prompt, drop_buffer: dropBuffer });
  }

  pause(session) {
    return this.call("POST", `v1/sessions/${session}/pause`);
  }

  resume(session) {
    return this.call("POST", `v1/sessions/${session}/resume`);
  }

  migrate(session, worker) {
    return this.call("POST", `v1/sessions/${session}/migrate`, worker ? { worker } : {});
  }

  workers() {
    return this.call("GET", "v1/workers");
  }

  end(session) {
    return this.call("DELETE", `v1/sessions/${session}`);
  }

  // A refused key and a missing one have the same code: only the sender knows whether it sent one.
  problem(body, key) {
    const code = body.code === "unauthorized" && key ? "wrong_key" : body.code;
    return new Problem({ ...body, code, key });
  }

  socketUrl(session, after, eventsAfter) {
    const url = new URL(`v1/sessions/${session}/stream`, document.baseURI);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    url.hash = url.search = "";
    if (after !== null) url.searchParams.set("after", after);
    url.searchParams.set("events_after", eventsAfter);
    if (this.key) url.searchParams.set("access_token", this.key);
    return url.href;
  }

  videoUrl(session) {
    const url = new URL(`v1/sessions/${session}/stream.mp4`, document.baseURI);
    url.hash = url.search = "";
    return url.href;
  }

  async call(method, path, body, headers = {}) {
    const request = { method, headers: { ...headers } };
    if (body !== undefined) {
      request.body = JSON.stringify(body);
      request.headers["Content-Type"] = "application/json";
    }
    const { key } = this;
    if (key) request.headers.Authorization = `Bearer ${key}`;
    let response;
    try {
      response = await fetch(path, request);
    } catch {
      throw new Problem({ code: "unreachable" });
    }
    const answer = await response.json().catch(() => ({}));
    if (!response.ok) throw this.problem({ status: response.status, ...answer }, key);
    return answer;
  }
}

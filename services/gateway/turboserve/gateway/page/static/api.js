// REST: every refusal becomes a Problem that knows how to say itself in plain words.

import { inWords } from "./words.js";

export class Problem extends Error {
  constructor(body) {
    super(inWords(body));
    this.status = body.status ?? 0;
    this.code = body.code ?? "unreachable";
    this.limit = body.limit;
    this.retryAfterS = body.retry_after_s;
  }
}

export class Api {
  constructor() {
    this.key = "";
  }

  create(prompt, idempotencyKey) {
    return this.#call("POST", "v1/sessions", { prompt }, { "Idempotency-Key": idempotencyKey });
  }

  prompt(session, prompt, dropBuffer) {
    return this.#call("POST", `v1/sessions/${session}/prompts`, { prompt, drop_buffer: dropBuffer });
  }

  pause(session) {
    return this.#call("POST", `v1/sessions/${session}/pause`);
  }

  resume(session) {
    return this.#call("POST", `v1/sessions/${session}/resume`);
  }

  migrate(session, worker) {
    return this.#call("POST", `v1/sessions/${session}/migrate`, worker ? { worker } : {});
  }

  workers() {
    return this.#call("GET", "v1/workers");
  }

  end(session) {
    return this.#call("DELETE", `v1/sessions/${session}`);
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

  async #call(method, path, body, headers = {}) {
    const request = { method, headers: { ...headers } };
    if (body) {
      request.body = JSON.stringify(body);
      request.headers["Content-Type"] = "application/json";
    }
    if (this.key) request.headers.Authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(path, request);
    } catch {
      throw new Problem({ code: "unreachable" });
    }
    const answer = await response.json().catch(() => ({}));
    if (!response.ok) throw new Problem({ status: response.status, ...answer });
    return answer;
  }
}

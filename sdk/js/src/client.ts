// The client of one deployment.

import { Gateways } from "./gateways.js";
import { Recording } from "./recording.js";
import { Session } from "./session.js";
import { request } from "./transport.js";
import type { Model, Phase, Quality, Worker } from "./models.js";

export const DEFAULT_URL = "http://127.0.0.1:8080";

export interface ClientOptions {
  /** API key, or the token of a link, which allows one session. Empty: the gateway has no keys. */
  key?: string;
  /** Attempts of a request that got no answer, or that may be repeated. 5 by default. */
  attempts?: number;
  /** Longest time for one request, seconds. 30 by default. */
  timeoutS?: number;
}

export interface CreateOptions {
  /** One of `Client.models`. By default the gateway's. */
  model?: string;
  /** Width of a frame, pixels: with `height`, one of the model's `sizes`. By default the one that is marked `default`. */
  width?: number;
  height?: number;
  /** The same model, prompt and seed give the same video where no chunk is lowered: see `quality`. Random by default. */
  seed?: number;
  metadata?: Record<string, string>;
  /** Values of the model's controls, by name, from the first chunk on. */
  controls?: Record<string, unknown>;
  quality?: Quality;
  /** Maximum seconds of video that are generated ahead of the playhead. Null: the worker's own. */
  maxLeadS?: number | null;
  /** Members of the request that a newer gateway has. */
  [member: string]: unknown;
}

export interface RequestOptions {
  body?: object;
  /** Members that are null or undefined are left out. */
  query?: Record<string, unknown>;
  /** Whether a repeat is harmless without an `Idempotency-Key`. True by default. */
  idempotent?: boolean;
}

/** A client of one deployment. */
export class Client {
  key: string;
  attempts: number;
  timeoutS: number;
  /** @internal */
  readonly gateways: Gateways;

  /**
   * `baseUrl`: address of the gateway. A path in front of `/v1` is kept. Or addresses of gateways that serve the
   * same sessions: the client leaves one that is silent. A stream learns further addresses from the gateway.
   */
  constructor(
    baseUrl: string | URL | (string | URL)[] = DEFAULT_URL,
    { key = "", attempts = 5, timeoutS = 30 }: ClientOptions = {},
  ) {
    this.gateways = new Gateways(Array.isArray(baseUrl) ? baseUrl : [baseUrl]);
    if (!(attempts >= 1)) throw new RangeError(`attempts: ${attempts} must be at least 1`);
    this.key = key;
    this.attempts = attempts;
    this.timeoutS = timeoutS;
  }

  /** Address of the gateway in use, with a slash at its end. */
  get baseUrl(): string {
    return this.gateways.current;
  }

  /** Create a session. It lasts until `Session.end`. A repeated request creates one session. */
  async create(prompt: string, { maxLeadS, ...more }: CreateOptions = {}): Promise<Session> {
    const body = { prompt, max_lead_s: maxLeadS, ...more };
    const info = await this.request("POST", "v1/sessions", { body, idempotent: false });
    return new Session(this, info.id, info);
  }

  /** Return the session of this id, without asking the gateway. */
  session(id: string): Session {
    return new Session(this, id);
  }

  /** List the caller's sessions, newest first. `phases`: only these. Empty: all. */
  async *sessions({ phases = [], pageSize = 100 }: { phases?: Phase[]; pageSize?: number } = {}): AsyncGenerator<Session, void, void> {
    let after: string | null | undefined;
    do {
      const query = { phase: phases, limit: pageSize, after };
      const page = await this.request("GET", "v1/sessions", { query });
      for (const info of page.sessions) yield new Session(this, info.id, info);
      after = page.next;
    } while (after != null);
  }

  /** Return the recording of this id, without asking the gateway. */
  recording(id: string): Recording {
    return new Recording(this, id);
  }

  /** List the caller's recordings, newest first. `session`: only those of this session. */
  async *recordings({ session, pageSize = 100 }: { session?: string; pageSize?: number } = {}): AsyncGenerator<Recording, void, void> {
    let after: string | null | undefined;
    do {
      const page = await this.request("GET", "v1/recordings", { query: { session, limit: pageSize, after } });
      for (const info of page.recordings) yield new Recording(this, info.id, info);
      after = page.next;
    } while (after != null);
  }

  /** List the models that ready workers serve, with what each understands. */
  async models(): Promise<Model[]> {
    return (await this.request("GET", "v1/models")).models;
  }

  /** List the workers. */
  async workers(): Promise<Worker[]> {
    return (await this.request("GET", "v1/workers")).workers;
  }

  /**
   * Send a request of the API that has no method of its own.
   *
   * `path`: without a slash in front, such as `v1/pools`.
   */
  request(method: string, path: string, { body, query = {}, idempotent = true }: RequestOptions = {}): Promise<any> {
    const { key, attempts, timeoutS, gateways } = this;
    const options = { method, key, body, idempotent, attempts, timeoutS, gateways };
    return request(() => this.url(path, query), options);
  }

  /** Return the address of a path. Members of `query` that are null or undefined are left out. */
  url(path: string, query: Record<string, unknown> = {}): URL {
    const url = new URL(path, this.baseUrl);
    for (const [name, value] of Object.entries(query)) {
      for (const one of Array.isArray(value) ? value : [value]) if (one != null) url.searchParams.append(name, one as string);
    }
    return url;
  }
}

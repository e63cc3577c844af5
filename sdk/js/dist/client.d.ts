import { Recording } from "./recording.js";
import { Session } from "./session.js";
import type { Model, Phase, Quality, Worker } from "./models.js";
export declare const DEFAULT_URL = "http://127.0.0.1:8080";
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
export declare class Client {
    key: string;
    attempts: number;
    timeoutS: number;
    /**
     * `baseUrl`: address of the gateway. A path in front of `/v1` is kept. Or addresses of gateways that serve the
     * same sessions: the client leaves one that is silent. A stream learns further addresses from the gateway.
     */
    constructor(baseUrl?: string | URL | (string | URL)[], { key, attempts, timeoutS }?: ClientOptions);
    /** Address of the gateway in use, with a slash at its end. */
    get baseUrl(): string;
    /** Create a session. It lasts until `Session.end`. A repeated request creates one session. */
    create(prompt: string, { maxLeadS, ...more }?: CreateOptions): Promise<Session>;
    /** Return the session of this id, without asking the gateway. */
    session(id: string): Session;
    /** List the caller's sessions, newest first. `phases`: only these. Empty: all. */
    sessions({ phases, pageSize }?: {
        phases?: Phase[];
        pageSize?: number;
    }): AsyncGenerator<Session, void, void>;
    /** Return the recording of this id, without asking the gateway. */
    recording(id: string): Recording;
    /** List the caller's recordings, newest first. `session`: only those of this session. */
    recordings({ session, pageSize }?: {
        session?: string;
        pageSize?: number;
    }): AsyncGenerator<Recording, void, void>;
    /** List the models that ready workers serve, with what each understands. */
    models(): Promise<Model[]>;
    /** List the workers. */
    workers(): Promise<Worker[]>;
    /**
     * Send a request of the API that has no method of its own.
     *
     * `path`: without a slash in front, such as `v1/pools`.
     */
    request(method: string, path: string, { body, query, idempotent }?: RequestOptions): Promise<any>;
    /** Return the address of a path. Members of `query` that are null or undefined are left out. */
    url(path: string, query?: Record<string, unknown>): URL;
}

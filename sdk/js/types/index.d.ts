import type {
  ChunkMessage, ControlReceipt, Decision, End, Hello, Init, Link, Migration, Model, NewLink, Phase, Quality, Receipt, RecordingInfo,
  Role, SessionEvent, SessionInfo, Skip, Ticket, Worker,
} from "./models.js";

export type * from "./models.js";

export const DEFAULT_URL: string;

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
  /** The same model, prompt and seed give the same video. Random by default. */
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

/** A client of one deployment. */
export class Client {
  constructor(baseUrl?: string | URL | Array<string | URL>, options?: ClientOptions);
  readonly baseUrl: string;
  key: string;
  attempts: number;
  timeoutS: number;
  create(prompt: string, options?: CreateOptions): Promise<Session>;
  session(id: string): Session;
  sessions(options?: { phases?: Phase[]; pageSize?: number }): AsyncGenerator<Session, void, void>;
  recording(id: string): Recording;
  recordings(options?: { session?: string; pageSize?: number }): AsyncGenerator<Recording, void, void>;
  models(): Promise<Model[]>;
  workers(): Promise<Worker[]>;
  request(
    method: string,
    path: string,
    options?: { body?: object; query?: Record<string, unknown>; idempotent?: boolean },
  ): Promise<any>;
  url(path: string, query?: Record<string, unknown>): URL;
}

/** One session of a client. */
export class Session {
  constructor(client: Client, id: string, info?: SessionInfo | null);
  readonly client: Client;
  readonly id: string;
  /** As the gateway last described the session; null: not read yet. */
  info: SessionInfo | null;
  readonly videoUrl: string;
  refresh(): Promise<SessionInfo>;
  prompt(prompt: string, options?: { dropBuffer?: boolean }): Promise<Receipt>;
  setControl(name: string, value: unknown, options?: { dropBuffer?: boolean }): Promise<ControlReceipt>;
  change(limits: { quality?: Quality | null; maxLeadS?: number | null }): Promise<SessionInfo>;
  pause(): Promise<SessionInfo>;
  resume(): Promise<SessionInfo>;
  end(): Promise<SessionInfo>;
  migrate(worker?: string): Promise<Migration>;
  decisions(): Promise<Decision[]>;
  ticket(options?: { role?: Role }): Promise<Ticket>;
  share(options?: { role?: Role; expiresAt?: Date; label?: string }): Promise<NewLink>;
  links(): Promise<Link[]>;
  revokeLink(link: string): Promise<Link>;
  startRecording(): Promise<Recording>;
  stopRecording(): Promise<Recording>;
  recordings(): AsyncGenerator<Recording, void, void>;
  watch(options?: WatchOptions): VideoStream;
}

/** One recording of a client. */
export class Recording {
  constructor(client: Client, id: string, info?: RecordingInfo | null);
  readonly client: Client;
  readonly id: string;
  /** As the gateway last described the recording; null: not read yet. */
  info: RecordingInfo | null;
  readonly videoUrl: string;
  refresh(): Promise<RecordingInfo>;
  delete(): Promise<null>;
  download(options?: { part?: number }): Promise<Blob>;
  poster(): Promise<Blob>;
  playlist(): Promise<string>;
  item(name: string): Promise<ArrayBuffer>;
}

/** Plays a recording in a `<video>`: fetches the segments that the playhead needs. For browsers. */
export class RecordingPlayback {
  constructor(recording: Recording, video: HTMLVideoElement, onError?: (error: TurboServeError) => void);
  close(): void;
}

export interface ConnectionOptions {
  /** Index of the last chunk that the caller has; -1: from the beginning. By default from the playhead on. */
  after?: number;
  /** Number of the last event that the caller has; 0: all that are kept. By default new ones. */
  eventsAfter?: number;
  /** Whether to continue behind chunks that are not kept any more. */
  skipLost?: boolean;
  /** Time without a connection after which it gives up, seconds. */
  reconnectWithinS?: number;
}

export interface WatchOptions extends ConnectionOptions {
  /** Gets what the stream survives, such as chunks that are not kept any more. */
  onProblem?: (error: ProblemError) => void;
}

/** A chunk with its fragment, and with the format and init segment that decode it. */
export interface Chunk extends ChunkMessage {
  data: ArrayBuffer;
  format: Init & { init: ArrayBuffer };
}

/** Chunks, skips and events of one session, in order, across broken connections. Read once. */
export class VideoStream implements AsyncIterable<Chunk | Skip | SessionEvent> {
  constructor(session: Session, options?: WatchOptions);
  readonly session: Session;
  readonly hello: Hello | null;
  readonly end: End | null;
  close(): void;
  [Symbol.asyncIterator](): AsyncGenerator<Chunk | Skip | SessionEvent, void, void>;
}

export interface ConnectionHandlers {
  hello?(message: Hello): void;
  init?(message: Init, data: ArrayBuffer): void;
  chunk?(message: ChunkMessage, data: ArrayBuffer): void;
  skip?(message: Skip): void;
  /** `isNew`: the event is none of the history that the connection began with. */
  event?(message: SessionEvent, isNew: boolean): void;
  end?(message: End): void;
  /** The stream continues. */
  problem?(error: ProblemError): void;
  /** The connection is lost. The next attempt follows after `waitMs`. */
  lost?(waitMs: number): void;
  /** The stream has ended without the session's end. */
  gone?(error: TurboServeError): void;
}

/** The WebSocket of one session, across broken connections. The caller reports the playhead. */
export class StreamConnection {
  constructor(session: Session, on: ConnectionHandlers, options?: ConnectionOptions);
  readonly session: Session;
  readonly lastIndex: number | null;
  send(message: object): void;
  report(playheadS: number, bufferedS?: number): void;
  close(): void;
}

export class TurboServeError extends Error {}

export class GatewayUnreachableError extends TurboServeError {
  readonly code: "unreachable";
  readonly status: 0;
}

export class ProtocolError extends TurboServeError {
  readonly code: "protocol";
}

/** The browser cannot play the video. `cause`: the browser's own error. */
export class PlaybackError extends TurboServeError {
  readonly code: "playback";
}

/** The gateway refused a request (RFC 9457). */
export class ProblemError extends TurboServeError {
  readonly status: number;
  /** Stable name of the problem, such as `invalid_input`. */
  readonly code: string;
  readonly detail: string;
  /** Input at fault. */
  readonly field: string | null;
  /** Bound that the input met. */
  readonly limit: unknown;
  /** All invalid inputs. */
  readonly errors: { field: string; message: string; limit?: unknown }[];
  /** Time after which a retry may succeed, seconds. Null: a retry does not help. */
  readonly retryAfterS: number | null;
  /** Id of the request in the logs of the services. Null: an earlier gateway, or a refused connection. */
  readonly requestId: string | null;
  readonly hadKey: boolean;
  wasSentWith(key: string): boolean;
}

export class UnauthorizedError extends ProblemError {}
export class NotFoundError extends ProblemError {}
export class NoCapacityError extends ProblemError {}
export class ChunkGoneError extends ProblemError {
  readonly continuesAt: number;
}

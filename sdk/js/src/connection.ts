// The WebSocket of one session: pairs JSON with the binary behind it, and reconnects after the last chunk, to
// another gateway if there is one.

import { ChunkGoneError, GatewayUnreachableError, ProblemError, ProtocolError, problemError } from "./errors.js";
import { SilenceWatch } from "./gateways.js";
import { StreamMessages } from "./stream_messages.js";
import type { TurboServeError } from "./errors.js";
import type { ChunkMessage, End, Hello, Init, SessionEvent, Skip } from "./models.js";
import type { Session } from "./session.js";
import type { StreamMessage } from "./stream_messages.js";

/** Stands for the close code of a connection whose gateway is silent. */
const SILENT = 0;
const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 2000;
const CHUNK_GONE = 4410;
const BAD_QUERY = 4422;
const CHECK_MS = 250;
const TRY_LATER = 1013;
/** Close codes after which a connection with the same parameters would end in the same way → status. */
const FINAL = new Map<number, number>([
  [4401, 401], [4403, 403], [4404, 404], [BAD_QUERY, 422], [1007, 400], [1008, 400], [1009, 413],
]);

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

/** Get the gateway's messages. Those that are left out are not called. */
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
  readonly session: Session;
  /** Index of the last chunk that came; null: none yet, and the stream begins at the playhead. */
  lastIndex: number | null;

  /** Connects at once. */
  constructor(
    session: Session,
    on: ConnectionHandlers,
    { after, eventsAfter, skipLost = false, reconnectWithinS = Infinity }: ConnectionOptions = {},
  ) {
    this.session = session;
    this.lastIndex = after ?? null;
    this.#on = on;
    this.#messages = new StreamMessages(session, on, eventsAfter);
    this.#skipLost = skipLost;
    this.#reconnectWithinMs = reconnectWithinS * 1000;
    this.#checking = setInterval(() => this.#check(), CHECK_MS);
    this.#open();
  }

  #on: ConnectionHandlers;
  #skipLost: boolean;
  #reconnectWithinMs: number;
  #socket: WebSocket | null = null;
  #announced: Init | ChunkMessage | null = null;
  #messages: StreamMessages;
  #received = false;
  #failures = 0;
  #lostAt: number | null = null;
  #timer = 0;
  #closed = false;
  #problem: TurboServeError | null = null;
  #key = "";
  #silence = new SilenceWatch();
  #checking = 0;
  /** Address of the newest connection, or of the attempt to get one. */
  #gateway = "";
  /** Number of attempts to connect. What belongs to an earlier one is ignored. */
  #attempt = 0;

  close(): void {
    this.#closed = true;
    clearTimeout(this.#timer);
    clearInterval(this.#checking);
    this.#socket?.close();
  }

  /** Send a message, if the connection is open. */
  send(message: object): void {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }

  /** Report the playhead: the worker generates only a few seconds ahead of it. */
  report(playheadS: number, bufferedS = 0): void {
    this.send({ type: "playhead", playhead_s: Math.max(0, playheadS), buffered_s: Math.max(0, bufferedS) });
  }

  #open(): void {
    const attempt = (this.#attempt += 1);
    this.#key = this.session.client.key;
    this.#announced = this.#problem = null;
    if (!this.#key) return this.#connect(null);
    // Browsers set no header here, and a key does not belong into an address.
    this.session.ticket().then(
      ({ ticket }) => this.#closed || attempt !== this.#attempt || this.#connect(ticket),
      (error) => this.#closed || attempt !== this.#attempt || this.#refused(error),
    );
  }

  // Leaves a gateway that does not answer. With one gateway, only the end of the connection tells.
  #check(): void {
    if (this.session.client.gateways.count < 2 || !this.#socket) return;
    if (this.#silence.isSilent(Date.now())) {
      const socket = this.#socket;
      this.#socket = null;
      this.#silence.left();
      this.#ended(SILENT);
      // It ends when the gateway answers or the browser gives up, and is ignored.
      socket.close();
    } else if (this.#silence.wantsPing && this.#socket.readyState === WebSocket.OPEN) {
      this.#silence.asked(Date.now());
      this.send({ type: "ping" });
    }
  }

  // There is no ticket. Nothing was received, so the stream begins where it would have begun.
  #refused(error: TurboServeError): void {
    const isFinal = error instanceof ProblemError ? error.retryAfterS === null && error.status < 500 : error instanceof ProtocolError;
    if (isFinal) return this.#giveUp(error);
    this.#problem = error;
    this.#reconnect(TRY_LATER);
  }

  #connect(ticket: string | null): void {
    const { client, id } = this.session;
    this.#gateway = client.baseUrl;
    this.#silence.asked(Date.now());
    const query = { after: this.lastIndex, events_after: this.#messages.eventsAfter, ticket };
    const url = client.url(`v1/sessions/${encodeURIComponent(id)}/stream`, query);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(url);
    socket.binaryType = "arraybuffer";
    this.#socket = socket;
    socket.onmessage = ({ data }) => {
      if (this.#closed || socket !== this.#socket) return;
      this.#silence.heard(typeof data !== "string" && this.#announced?.type === "chunk");
      if (typeof data === "string") this.#json(JSON.parse(data));
      else this.#binary(data);
    };
    socket.onclose = ({ code }) => {
      if (this.#closed || socket !== this.#socket) return;
      this.#socket = null;
      this.#ended(code);
    };
  }

  #json(message: StreamMessage): void {
    switch (message.type) {
      case "hello":
        this.#greeted(message);
        break;
      case "skip":
        this.#on.skip?.(message);
        break;
      case "init":
      case "chunk":
        this.#announced = message;
        break;
      case "error":
        this.#problem = this.#messages.problem(message, this.#key);
        break;
      case "end":
        this.#finish();
        this.#on.end?.(message);
        break;
      default:
        this.#messages.event(message);
    }
  }

  #greeted(message: Hello): void {
    const error = this.#messages.versionError(message);
    if (error) return this.#giveUp(error);
    this.#failures = 0;
    this.#lostAt = null;
    this.#messages.greet(message);
  }

  #binary(data: ArrayBuffer): void {
    const what = this.#announced;
    this.#announced = null;
    if (what?.type === "init") this.#on.init?.(what, data);
    if (what?.type !== "chunk") return;
    if (this.lastIndex !== null && what.index !== this.lastIndex + 1) {
      // Never show a gap or a repeat: ask again for what comes next.
      this.#socket!.close();
      return;
    }
    this.lastIndex = what.index;
    this.#received = true;
    this.#on.chunk?.(what, data);
  }

  #ended(code: number): void {
    if (code === BAD_QUERY && this.#received && (this.#problem as ProblemError | null)?.field === "after") {
      // Not the caller's mistake: without an index, the stream continues at the playhead.
      this.lastIndex = null;
      this.#received = false;
    } else if (FINAL.has(code)) {
      const title = `the gateway closed the stream with ${code}`;
      this.#giveUp(this.#problem ?? problemError({ title }, { status: FINAL.get(code), key: this.#key }));
      return;
    } else if (code === CHUNK_GONE && this.#problem instanceof ChunkGoneError) {
      if (!this.#skipLost) {
        this.#giveUp(this.#problem);
        return;
      }
      this.lastIndex = this.#problem.continuesAt - 1;
      this.#on.problem?.(this.#problem);
    }
    this.#reconnect(code);
  }

  #reconnect(code: number): void {
    this.#lostAt ??= Date.now();
    const { gateways } = this.session.client;
    gateways.leave(this.#gateway);
    if (Date.now() - this.#lostAt > this.#reconnectWithinMs) {
      const why = `${this.session.client.baseUrl}: no stream for ${this.#reconnectWithinMs / 1000} s`;
      this.#giveUp(this.#problem ?? new GatewayUnreachableError(why));
      return;
    }
    // Each of the other gateways is tried at once.
    const tried = Math.max(0, this.#failures - gateways.count + 1);
    const isNext = gateways.count > 1 && this.#failures < gateways.count - 1;
    const backoff = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** tried) * (0.75 + Math.random() / 2);
    this.#failures += 1;
    // What a gateway asks to wait for concerns that gateway alone.
    const askedMs = code === TRY_LATER ? ((this.#problem as ProblemError | null)?.retryAfterS ?? 0) * 1000 : 0;
    const waitMs = isNext ? 0 : Math.max(backoff, askedMs);
    this.#on.lost?.(waitMs);
    // A handler may have closed the stream.
    if (!this.#closed) this.#timer = setTimeout(() => this.#open(), waitMs);
  }

  #finish(): void {
    this.#closed = true;
    clearInterval(this.#checking);
  }

  #giveUp(error: TurboServeError): void {
    this.#finish();
    this.#socket?.close();
    this.#on.gone?.(error);
  }
}

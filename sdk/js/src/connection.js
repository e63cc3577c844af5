// The WebSocket of one session: pairs JSON with the binary behind it, and reconnects after the last chunk.

import { ChunkGoneError, GatewayUnreachableError, ProblemError, ProtocolError, problemError } from "./errors.js";

const PROTOCOL_VERSION = 1;
const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 2000;
const CHUNK_GONE = 4410;
const BAD_QUERY = 4422;
const TRY_LATER = 1013;
/** Close codes after which a connection with the same parameters would end in the same way → status. */
const FINAL = new Map([
  [4401, 401], [4403, 403], [4404, 404], [BAD_QUERY, 422], [1007, 400], [1008, 400], [1009, 413],
]);

export class StreamConnection {
  /**
   * Connects at once. Handlers get the gateway's messages; those that are left out are not called.
   *
   * @param {import("./session.js").Session} session
   * @param {object} on `hello`, `init` and `chunk` (message, data), `skip`, `event` (message, isNew), `end`;
   *   `problem` (error): the stream continues; `lost` (waitMs): it connects again after that time; `gone`
   *   (error): it has ended without the session's end.
   * @param {{after?: number, eventsAfter?: number, skipLost?: boolean, reconnectWithinS?: number}} options
   *   `after`: index of the last chunk that the caller has, -1: from the beginning; by default from the
   *   playhead on. `eventsAfter`: number of the last event that the caller has, 0: all that are kept; by
   *   default new ones. `skipLost`: whether to continue behind chunks that are not kept any more.
   *   `reconnectWithinS`: time without a connection after which it gives up.
   */
  constructor(session, on, { after, eventsAfter, skipLost = false, reconnectWithinS = Infinity } = {}) {
    this.session = session;
    /** Index of the last chunk that came; null: none yet, and the stream begins at the playhead. */
    this.lastIndex = after ?? null;
    this.#eventsAfter = eventsAfter ?? null;
    this.#on = on;
    this.#skipLost = skipLost;
    this.#reconnectWithinMs = reconnectWithinS * 1000;
    this.#open();
  }

  #on;
  #skipLost;
  #reconnectWithinMs;
  #socket = null;
  #announced = null;
  #eventsAfter;
  #newestEvent = 0;
  #received = false;
  #failures = 0;
  #lostAt = null;
  #timer = 0;
  #closed = false;
  #problem = null;
  #key = "";

  close() {
    this.#closed = true;
    clearTimeout(this.#timer);
    this.#socket?.close();
  }

  /** Send a message, if the connection is open. */
  send(message) {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }

  /** Report the playhead: the worker generates only a few seconds ahead of it. */
  report(playheadS, bufferedS = 0) {
    this.send({ type: "playhead", playhead_s: Math.max(0, playheadS), buffered_s: Math.max(0, bufferedS) });
  }

  #open() {
    this.#key = this.session.client.key;
    this.#announced = this.#problem = null;
    if (!this.#key) return this.#connect(null);
    // Browsers set no header here, and a key does not belong into an address.
    this.session.ticket().then(
      ({ ticket }) => this.#closed || this.#connect(ticket),
      (error) => this.#closed || this.#refused(error),
    );
  }

  // There is no ticket. Nothing was received, so the stream begins where it would have begun.
  #refused(error) {
    const isFinal = error instanceof ProblemError ? error.retryAfterS === null && error.status < 500 : error instanceof ProtocolError;
    if (isFinal) return this.#giveUp(error);
    this.#problem = error;
    this.#reconnect(TRY_LATER);
  }

  #connect(ticket) {
    const { client, id } = this.session;
    const query = { after: this.lastIndex, events_after: this.#eventsAfter, ticket };
    const url = client.url(`v1/sessions/${encodeURIComponent(id)}/stream`, query);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(url);
    socket.binaryType = "arraybuffer";
    this.#socket = socket;
    socket.onmessage = ({ data }) => {
      if (this.#closed || socket !== this.#socket) return;
      if (typeof data === "string") this.#json(JSON.parse(data));
      else this.#binary(data);
    };
    socket.onclose = ({ code }) => {
      if (!this.#closed && socket === this.#socket) this.#ended(code);
    };
  }

  #json(message) {
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
        this.#problem = problemError(message, { key: this.#key });
        if (message.id) this.#on.problem?.(this.#problem);
        break;
      case "end":
        this.#closed = true;
        this.#on.end?.(message);
        break;
      default:
        // Answers to messages of the client, and types of a newer gateway, have no number.
        if (message.sequence === undefined) break;
        this.#eventsAfter = message.sequence;
        this.#on.event?.(message, message.sequence > this.#newestEvent);
    }
  }

  #greeted(message) {
    if (message.protocol_version !== PROTOCOL_VERSION) {
      const versions = `the gateway has version ${message.protocol_version} of the protocol, and this client ${PROTOCOL_VERSION}`;
      this.#giveUp(new ProtocolError(versions));
      return;
    }
    this.#failures = 0;
    this.#lostAt = null;
    this.#newestEvent = message.newest_event;
    this.#eventsAfter ??= message.events_after;
    this.#on.hello?.(message);
  }

  #binary(data) {
    const what = this.#announced;
    this.#announced = null;
    if (what?.type === "init") this.#on.init?.(what, data);
    if (what?.type !== "chunk") return;
    if (this.lastIndex !== null && what.index !== this.lastIndex + 1) {
      // Never show a gap or a repeat: ask again for what comes next.
      this.#socket.close();
      return;
    }
    this.lastIndex = what.index;
    this.#received = true;
    this.#on.chunk?.(what, data);
  }

  #ended(code) {
    if (code === BAD_QUERY && this.#received && this.#problem?.field === "after") {
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

  #reconnect(code) {
    this.#lostAt ??= Date.now();
    if (Date.now() - this.#lostAt > this.#reconnectWithinMs) {
      const why = `${this.session.client.baseUrl}: no stream for ${this.#reconnectWithinMs / 1000} s`;
      this.#giveUp(this.#problem ?? new GatewayUnreachableError(why));
      return;
    }
    const backoff = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** this.#failures) * (0.75 + Math.random() / 2);
    this.#failures += 1;
    const waitMs = Math.max(backoff, code === TRY_LATER ? (this.#problem?.retryAfterS ?? 0) * 1000 : 0);
    this.#on.lost?.(waitMs);
    // A handler may have closed the stream.
    if (!this.#closed) this.#timer = setTimeout(() => this.#open(), waitMs);
  }

  #giveUp(error) {
    this.#closed = true;
    this.#socket?.close();
    this.#on.gone?.(error);
  }
}

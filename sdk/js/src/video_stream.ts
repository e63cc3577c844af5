// A session's chunks, events and skips as an asynchronous sequence.

import { StreamConnection } from "./connection.js";
import type { ConnectionHandlers, ConnectionOptions } from "./connection.js";
import type { ProblemError, TurboServeError } from "./errors.js";
import type { ChunkMessage, End, Hello, Init, SessionEvent, Skip } from "./models.js";
import type { Session } from "./session.js";

const RECONNECT_WITHIN_S = 60;

export interface WatchOptions extends ConnectionOptions {
  /** Gets what the stream survives, such as chunks that are not kept any more. */
  onProblem?: (error: ProblemError) => void;
}

/** A chunk with its fragment, and with the format and init segment that decode it. */
export interface Chunk extends ChunkMessage {
  data: ArrayBuffer;
  format: Init & { init: ArrayBuffer };
}

/**
 * Chunks of one session in order, without repetitions, and without gaps except those that it reports.
 *
 * `for await (const item of stream)` gives, by `item.type`: chunks (`chunk`: the header with `data` and
 * `format`), skips (`skip`) and events (`session.placed`, `prompt.applied` and so on). It ends with the session.
 * The playhead is at the chunk that the caller takes next, so a caller that takes no chunk stops the generation.
 */
export class VideoStream implements AsyncIterable<Chunk | Skip | SessionEvent> {
  readonly session: Session;
  /** State of the session at the newest connection; null before the first. */
  hello: Hello | null;
  /** How the session ended; null: it has not. */
  end: End | null;

  /** `reconnectWithinS` is 60 by default. */
  constructor(session: Session, options: WatchOptions = {}) {
    this.session = session;
    this.hello = null;
    this.end = null;
    this.#options = { reconnectWithinS: RECONNECT_WITHIN_S, ...options };
  }

  #options: WatchOptions;
  #connection: StreamConnection | null = null;
  #format: Chunk["format"] | null = null;
  #items: (Chunk | Skip | SessionEvent)[] = [];
  #wake: (() => void) | null = null;
  #error: TurboServeError | null = null;
  #takenS: number | null = null;
  #receivedS = 0;
  #timer = 0;
  #closed = false;

  /** Close the connection. A loop over the stream ends. */
  close(): void {
    this.#closed = true;
    this.#items.length = 0;
    this.#stop();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Chunk | Skip | SessionEvent, void, void> {
    if (this.#connection) throw new TypeError("a stream is read once: call `Session.watch` again");
    this.#connection = new StreamConnection(this.session, this.#handlers(), this.#options);
    try {
      while (true) {
        while (!this.#items.length && !this.#isOver) await new Promise<void>((resolve) => (this.#wake = resolve));
        const item = this.#items.shift();
        if (item === undefined) {
          if (this.#error) throw this.#error;
          return;
        }
        if (item.type === "skip") this.#takenS = Math.max(this.#takenS!, item.start_s);
        yield item;
        if (item.type === "chunk") this.#takenS = Math.max(this.#takenS!, item.start_s + item.duration_s);
      }
    } finally {
      this.close();
    }
  }

  get #isOver(): boolean {
    return this.#closed || this.#error !== null || this.end !== null;
  }

  #handlers(): ConnectionHandlers {
    return {
      hello: (message) => this.#greeted(message),
      init: (message, data) => {
        this.#format = { ...message, init: data };
      },
      chunk: (message, data) => {
        this.#receivedS = message.start_s + message.duration_s;
        this.#put({ ...message, data, format: this.#format! });
      },
      skip: (message) => {
        this.#items = this.#items.filter((item) => item.type !== "chunk" || item.index >= message.index);
        this.#put(message);
      },
      event: (message) => this.#put(message),
      end: (message) => {
        this.end = message;
        this.#stop();
      },
      problem: (error) => this.#options.onProblem?.(error),
      gone: (error) => {
        this.#error = error;
        this.#stop();
      },
    };
  }

  #greeted(message: Hello): void {
    this.hello = message;
    this.#takenS ??= message.start_s;
    this.#receivedS = Math.max(this.#receivedS, this.#takenS);
    clearInterval(this.#timer);
    this.#timer = setInterval(() => {
      this.#connection!.report(this.#takenS!, this.#receivedS - this.#takenS!);
    }, message.report_interval_s * 1000);
  }

  #put(item: Chunk | Skip | SessionEvent): void {
    this.#items.push(item);
    this.#wake?.();
  }

  #stop(): void {
    clearInterval(this.#timer);
    this.#connection?.close();
    this.#wake?.();
  }
}
